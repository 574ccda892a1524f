"""Recurrent networks: one `lax.scan` over time for each layer and direction.

torch's composite form unrolls time, which grows the traced program with the length of
the sequence. Layers are joined here, with dropout between them as torch draws it.
"""

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

from torchax import _torch_compat
from torchax.ops.jtorch._register import register_function
from torchax.ops.ops_registry import Kind


def _affine(input, weight, bias):
  product = lax.dot_general(input, weight, (((input.ndim - 1,), (1,)), ((), ())))
  return product if bias is None else product + bias


def _lstm_cell(projected, state, weights):
  hidden, cell = state
  gates = projected + _affine(hidden, weights["hh"], weights["b_hh"])
  enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
  cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
  hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
  if weights["hr"] is not None:
    hidden = _affine(hidden, weights["hr"], None)
  return hidden, cell


def _gru_cell(projected, state, weights):
  (hidden,) = state
  recurrent = _affine(hidden, weights["hh"], weights["b_hh"])
  reset_in, update_in, new_in = jnp.split(projected, 3, axis=-1)
  reset_h, update_h, new_h = jnp.split(recurrent, 3, axis=-1)
  reset = jax.nn.sigmoid(reset_in + reset_h)
  update = jax.nn.sigmoid(update_in + update_h)
  new = jnp.tanh(new_in + reset * new_h)
  return ((1 - update) * new + update * hidden,)


def _simple_cell(activation):
  def cell(projected, state, weights):
    (hidden,) = state
    return (activation(projected + _affine(hidden, weights["hh"], weights["b_hh"])),)

  return cell


_CELLS = {
  "lstm": _lstm_cell,
  "gru": _gru_cell,
  "tanh": _simple_cell(jnp.tanh),
  "relu": _simple_cell(jax.nn.relu),
}


def _layer(input, state, mask, weights, cell: str, reverse: bool):
  """One direction of one layer.

  Args:
    input: (time, batch, features).
    state: list of (batch, hidden) arrays.
    mask: (time, batch, 1), False where a packed sequence has ended, or None.
    weights: [w_ih, w_hh, b_ih or None, b_hh or None, w_hr or None].
    cell: key of `_CELLS`.
    reverse: run backward in time.

  Returns:
    Outputs (time, batch, hidden) and the last state.
  """
  w_ih, w_hh, b_ih, b_hh, w_hr = weights
  named = {"hh": w_hh, "b_hh": b_hh, "hr": w_hr}
  projected = _affine(input, w_ih, b_ih)

  def step(state, inputs):
    now, valid = inputs
    new = _CELLS[cell](now, state, named)
    if valid is not None:
      new = tuple(jnp.where(valid, n, old) for n, old in zip(new, state))
    return new, new[0]

  last, outputs = lax.scan(step, tuple(state), (projected, mask), reverse=reverse)
  return outputs, list(last)


def _layer_weights(flat, has_biases: bool, has_projections: bool) -> list[list]:
  """torch's flat list of weights as one [w_ih, w_hh, b_ih, b_hh, w_hr] a direction."""
  count = 2 + 2 * has_biases + has_projections
  groups = [list(flat[i : i + count]) for i in range(0, len(flat), count)]
  for group in groups:
    if not has_biases:
      group[2:2] = [None, None]
    if not has_projections:
      group.append(None)
  return groups


def _run(
  cell, env, input, states, flat, has_biases, num_layers, dropout, train, bidirectional,
  mask=None,
):  # fmt: skip
  """All layers; input (time, batch, features), states a list of (layers, batch, h)."""
  directions = 2 if bidirectional else 1
  # Only a projected LSTM has states of two sizes; its weights come in fives.
  has_projections = cell == "lstm" and states[0].shape[-1] != states[1].shape[-1]
  weights = _layer_weights(flat, has_biases, has_projections)
  finals = []
  for layer in range(num_layers):
    outputs = []
    for direction in range(directions):
      place = layer * directions + direction
      output, final = env.functions.call(
        _layer,
        input,
        [state[place] for state in states],
        mask,
        weights[place],
        cell,
        direction == 1,
      )
      outputs.append(output)
      finals.append(final)
    input = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
    if dropout and train and layer < num_layers - 1:
      input = F.dropout(input, dropout, True)
  return input, [torch.stack(parts) for parts in zip(*finals)]


def _recurrent(cell, args, env):
  """Both of torch's signatures: padded with `batch_first`, packed with batch sizes."""
  if isinstance(args[3], bool):
    input, hx, flat, biases, layers, dropout, train, bidirectional, batch_first = args
    states = list(hx) if cell == "lstm" else [hx]
    if batch_first:
      input = input.transpose(0, 1)
    output, finals = _run(
      cell, env, input, states, flat, biases, layers, dropout, train, bidirectional
    )
    return (output.transpose(0, 1) if batch_first else output, *finals)
  data, batch_sizes, hx, flat, biases, layers, dropout, train, bidirectional = args
  states = list(hx) if cell == "lstm" else [hx]
  padded, mask, rows, columns = _unpack(data, batch_sizes)
  output, finals = _run(
    cell, env, padded, states, flat, biases, layers, dropout, train, bidirectional,
    mask,
  )  # fmt: skip
  return (output[rows, columns], *finals)


def _unpack(data, batch_sizes):
  """A packed sequence as (time, batch, …), its mask, and where each row went."""
  sizes = batch_sizes.tolist()
  rows = [time for time, size in enumerate(sizes) for _ in range(size)]
  columns = [column for size in sizes for column in range(size)]
  rows, columns = torch.tensor(rows), torch.tensor(columns)
  padded = data.new_zeros((len(sizes), sizes[0], *data.shape[1:]))
  padded = torch.index_put(padded, (rows, columns), data)
  mask = torch.zeros(len(sizes), sizes[0], 1, dtype=torch.bool)
  mask[rows, columns] = True
  return padded, mask.to("jax"), rows, columns


@register_function(_torch_compat.lstm, kind=Kind.ENV_TENSORS)
def _lstm(*args, env):
  return _recurrent("lstm", args, env)


@register_function(_torch_compat.gru, kind=Kind.ENV_TENSORS)
def _gru(*args, env):
  return _recurrent("gru", args, env)


@register_function(_torch_compat.rnn_tanh, kind=Kind.ENV_TENSORS)
def _rnn_tanh(*args, env):
  return _recurrent("tanh", args, env)


@register_function(_torch_compat.rnn_relu, kind=Kind.ENV_TENSORS)
def _rnn_relu(*args, env):
  return _recurrent("relu", args, env)
