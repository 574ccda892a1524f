"""Recurrent networks, with one `lax.scan` per layer and direction; packed sequences.

torch's composite kernel unrolls time, so its traced program grows with the length of
the sequence. `network` combines the layers. Its callers are `functions/recurrent.py`
and `dynamo/recurrent_graphs.py` with tensors, and exported programs with arrays.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.ops.builtin import Kind, op
from torchax.ops.jaten.multi_head import project
from torchax.registry.names import aten


def _lstm_cell(projected, state, weights):
  hidden, cell = state
  gates = projected + project(hidden, weights["hh"], weights["b_hh"])
  enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
  cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
  hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
  if weights["hr"] is not None:
    hidden = project(hidden, weights["hr"], None)
  return hidden, cell


def _gru_cell(projected, state, weights):
  (hidden,) = state
  recurrent = project(hidden, weights["hh"], weights["b_hh"])
  reset_in, update_in, new_in = jnp.split(projected, 3, axis=-1)
  reset_h, update_h, new_h = jnp.split(recurrent, 3, axis=-1)
  reset = jax.nn.sigmoid(reset_in + reset_h)
  update = jax.nn.sigmoid(update_in + update_h)
  new = jnp.tanh(new_in + reset * new_h)
  return ((1 - update) * new + update * hidden,)


def _simple_cell(activation):
  def cell(projected, state, weights):
    (hidden,) = state
    return (activation(projected + project(hidden, weights["hh"], weights["b_hh"])),)

  return cell


_CELLS = {
  "lstm": _lstm_cell,
  "gru": _gru_cell,
  "tanh": _simple_cell(jnp.tanh),
  "relu": _simple_cell(jax.nn.relu),
}


def layer(input, state, mask, weights, cell: str, reverse: bool):
  """Run one direction of one layer.

  Args:
    input: (time, batch, features).
    state: list of (batch, hidden) arrays.
    mask: (time, batch, 1), False where a packed sequence has ended, or None.
    weights: [w_ih, w_hh, b_ih or None, b_hh or None, w_hr or None].
    cell: "lstm", "gru", "tanh" or "relu".
    reverse: run backward in time.

  Returns:
    Outputs (time, batch, hidden) and the last state.
  """
  w_ih, w_hh, b_ih, b_hh, w_hr = weights
  named = {"hh": w_hh, "b_hh": b_hh, "hr": w_hr}
  projected = project(input, w_ih, b_ih)

  def step(state, inputs):
    now, valid = inputs
    new = _CELLS[cell](now, state, named)
    if valid is not None:
      new = tuple(jnp.where(valid, n, old) for n, old in zip(new, state))
    return new, new[0]

  last, outputs = lax.scan(step, tuple(state), (projected, mask), reverse=reverse)
  return outputs, list(last)


def layer_weights(flat, has_biases: bool, has_projections: bool) -> list[list]:
  """Split torch's list of weights: [w_ih, w_hh, b_ih, b_hh, w_hr] per direction."""
  count = 2 + 2 * has_biases + has_projections
  groups = [list(flat[i : i + count]) for i in range(0, len(flat), count)]
  for group in groups:
    if not has_biases:
      group[2:2] = [None, None]
    if not has_projections:
      group.append(None)
  return groups


@dataclasses.dataclass(frozen=True)
class Parts:
  """Functions that `network` is built from, on tensors or on arrays.

  Attributes:
    layer: has the signature of `layer`.
    concatenate: concatenates a list of values along the last dimension.
    stack: stacks a list of values along a new first dimension.
    dropout: `(value, p)`; dropout for training, with one draw.
  """

  layer: Callable
  concatenate: Callable
  stack: Callable
  dropout: Callable


def network(
  parts: Parts, cell: str, input, hx, flat, has_biases, num_layers, dropout, train,
  bidirectional, batch_first=False, mask=None,
) -> tuple:  # fmt: skip
  """Run all layers of a recurrent network, with dropout between them.

  Args:
    parts: functions on tensors or on arrays.
    cell: "lstm", "gru", "tanh" or "relu".
    input: (time, batch, features), or (batch, time, features) with `batch_first`.
    hx: the first state, (layers · directions, batch, hidden); a pair for an LSTM.
    flat: torch's list of weights.
    has_biases, num_layers, dropout, train, bidirectional: arguments of `torch.lstm`.
    mask: (time, batch, 1), False where a packed sequence has ended, or None.

  Returns:
    Outputs (time, batch, directions · hidden) and the last states, shaped like `hx`.
  """
  states = list(hx) if cell == "lstm" else [hx]
  directions = 2 if bidirectional else 1
  # Only a projected LSTM has states of two sizes, and a fifth weight.
  has_projections = cell == "lstm" and states[0].shape[-1] != states[1].shape[-1]
  weights = layer_weights(flat, has_biases, has_projections)
  input = input.swapaxes(0, 1) if batch_first else input
  finals = []
  for number in range(num_layers):
    outputs = []
    for direction in range(directions):
      index = number * directions + direction
      state = [state[index] for state in states]
      output, final = parts.layer(
        input, state, mask, weights[index], cell, direction == 1
      )
      outputs.append(output)
      finals.append(final)
    input = outputs[0] if directions == 1 else parts.concatenate(outputs)
    if dropout and train and number < num_layers - 1:
      input = parts.dropout(input, dropout)
  output = input.swapaxes(0, 1) if batch_first else input
  return (output, *[parts.stack(final) for final in zip(*finals)])


_LSTM_MODE = 2  # cuDNN's code, which oneDNN's operation also uses


@op(aten.mkldnn_rnn_layer)
def _aten_mkldnn_rnn_layer(
  input, weight0, weight1, weight2, weight3, hx_, cx_, reverse, batch_sizes, mode,
  hidden_size, num_layers, has_biases, bidirectional, batch_first, train,
):  # fmt: skip
  """Run one direction of one LSTM layer, always (time, batch): torch's CPU kernel.

  The workspace for oneDNN's gradient is empty.
  """
  if mode != _LSTM_MODE or batch_sizes:
    raise NotImplementedError(
      f"mkldnn_rnn_layer expects a padded LSTM, which is mode {_LSTM_MODE}, but "
      f"got mode {mode} with batch_sizes {list(batch_sizes)}. Call torch.lstm, "
      "torch.gru or torch.rnn_tanh."
    )
  biases = [weight2, weight3] if has_biases else [None, None]
  weights = [weight0, weight1, *biases, None]
  state = [part.reshape(-1, hidden_size) for part in (hx_, cx_)]  # or (1, batch, …)
  outputs, last = layer(input, state, None, weights, "lstm", reverse)
  hidden, cell = [part.reshape(hx_.shape) for part in last]
  return outputs, hidden, cell, jnp.zeros(0, input.dtype)


# --- Packed sequences ---------------------------------------------------------------
# A packed sequence holds the rows of a padded batch without the padding, ordered by
# time. The lengths are numbers on the host, as in torch.


def packed_indices(batch_sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
  """Return the time and the batch column of each packed row."""
  times = [time for time, size in enumerate(batch_sizes) for _ in range(size)]
  columns = [column for size in batch_sizes for column in range(size)]
  return torch.tensor(times), torch.tensor(columns)


@op(aten._pack_padded_sequence, kind=Kind.TENSORS)
def _aten__pack_padded_sequence(input, lengths, batch_first):
  lengths = lengths.tolist()
  if lengths != sorted(lengths, reverse=True) or (lengths and lengths[-1] <= 0):
    raise RuntimeError(
      "_pack_padded_sequence expects lengths above 0 in decreasing order, but got "
      f"{lengths}. Pass enforce_sorted=False to have them sorted."
    )
  padded = input.transpose(0, 1) if batch_first else input
  if len(lengths) != padded.shape[1] or lengths[0] > padded.shape[0]:
    raise RuntimeError(
      f"_pack_padded_sequence got {len(lengths)} lengths up to {lengths[0]} for "
      f"{padded.shape[1]} sequences of {padded.shape[0]} steps."
    )
  sizes = [sum(length > time for length in lengths) for time in range(lengths[0])]
  times, columns = packed_indices(sizes)
  return padded[times, columns], torch.tensor(sizes)


@op(aten._pack_padded_sequence_backward, kind=Kind.TENSORS)
def _aten__pack_padded_sequence_backward(grad, input_size, batch_sizes, batch_first):
  times, columns = packed_indices(batch_sizes.tolist())
  shape = list(input_size)
  if batch_first:
    shape[:2] = shape[1], shape[0]
  padded = torch.index_put(grad.new_zeros(shape), (times, columns), grad)
  return padded.transpose(0, 1) if batch_first else padded
