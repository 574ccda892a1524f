"""Recurrent networks: layers joined, with dropout between them as torch draws it.

One direction of one layer is a function of arrays, `ops/jaten/rnn.py`.
"""

import functools
from collections.abc import Callable

import torch

from torchax import _torch_compat
from torchax.ops.jaten import rnn
from torchax.ops.jtorch._register import register_function
from torchax.ops.names import F
from torchax.ops.ops_registry import Kind


def run(
  run_layer: Callable, cell: str, input, states, flat, has_biases, num_layers, dropout,
  train, bidirectional, mask=None,
):  # fmt: skip
  """All layers of a recurrent network.

  Args:
    run_layer: does what `rnn.layer` does, with tensors.
    cell: "lstm", "gru", "tanh" or "relu".
    input: (time, batch, features).
    states: the first state, a list of (layers · directions, batch, hidden).
    flat: torch's list of weights.
    has_biases, num_layers, dropout, train, bidirectional: as `torch.lstm` takes them.
    mask: (time, batch, 1), False where a packed sequence has ended, or None.

  Returns:
    Outputs (time, batch, directions · hidden) and the last state, shaped as the first.
  """
  directions = 2 if bidirectional else 1
  # Only a projected LSTM has states of two sizes; its weights come in fives.
  has_projections = cell == "lstm" and states[0].shape[-1] != states[1].shape[-1]
  weights = rnn.layer_weights(flat, has_biases, has_projections)
  finals = []
  for layer in range(num_layers):
    outputs = []
    for direction in range(directions):
      place = layer * directions + direction
      state = [state[place] for state in states]
      output, final = run_layer(
        input, state, mask, weights[place], cell, direction == 1
      )
      outputs.append(output)
      finals.append(final)
    input = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
    if dropout and train and layer < num_layers - 1:
      input = F.dropout(input, dropout, True)
  return input, [torch.stack(parts) for parts in zip(*finals)]


def run_padded(
  run_layer: Callable, cell: str, input, hx, flat, has_biases, num_layers, dropout,
  train, bidirectional, batch_first,
):  # fmt: skip
  """`torch.lstm` and its like for padded sequences: outputs and the last state."""
  states = list(hx) if cell == "lstm" else [hx]
  if batch_first:
    input = input.transpose(0, 1)
  output, finals = run(
    run_layer, cell, input, states, flat, has_biases, num_layers, dropout, train,
    bidirectional,
  )  # fmt: skip
  return (output.transpose(0, 1) if batch_first else output, *finals)


def _run_packed(run_layer, cell, data, batch_sizes, hx, *options):
  states = list(hx) if cell == "lstm" else [hx]
  padded, mask, rows, columns = _unpack(data, batch_sizes)
  output, finals = run(run_layer, cell, padded, states, *options, mask)
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
  return padded, mask.to(data.device), rows, columns


def is_padded(args) -> bool:
  """Which of torch's signatures: padded with `batch_first`, packed with batch sizes."""
  return isinstance(args[3], bool)


def _recurrent(cell, args, env):
  run_form = run_padded if is_padded(args) else _run_packed
  return run_form(functools.partial(env.functions.call, rnn.layer), cell, *args)


@register_function(_torch_compat.lstm, kind=Kind.TENSORS, needs_env=True)
def _lstm(*args, env):
  return _recurrent("lstm", args, env)


@register_function(_torch_compat.gru, kind=Kind.TENSORS, needs_env=True)
def _gru(*args, env):
  return _recurrent("gru", args, env)


@register_function(_torch_compat.rnn_tanh, kind=Kind.TENSORS, needs_env=True)
def _rnn_tanh(*args, env):
  return _recurrent("tanh", args, env)


@register_function(_torch_compat.rnn_relu, kind=Kind.TENSORS, needs_env=True)
def _rnn_relu(*args, env):
  return _recurrent("relu", args, env)
