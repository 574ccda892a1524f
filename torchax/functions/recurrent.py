"""Handlers of LSTM, GRU and RNN, padded or packed; see `ops/jaten/rnn.py`."""

import functools
from collections.abc import Callable

import torch

from torchax.compat import torch_compat
from torchax.functions.builtin import register_function
from torchax.ops.jaten import rnn
from torchax.registry.names import F
from torchax.registry.operators import Kind


def tensor_parts(layer: Callable) -> rnn.Parts:
  """Return the functions on tensors that `rnn.network` is built from.

  Args:
    layer: function on tensors with the signature of `rnn.layer`.
  """
  return rnn.Parts(
    layer,
    concatenate=lambda outputs: torch.cat(outputs, dim=-1),
    stack=torch.stack,
    dropout=lambda input, p: F.dropout(input, p, True),
  )


def _run_packed(parts, cell, data, batch_sizes, *options):
  padded, mask, times, rows = _pad(data, batch_sizes)
  output, *final_states = rnn.network(parts, cell, padded, *options, mask=mask)
  return (output[times, rows], *final_states)


def _pad(data, batch_sizes):
  """Pad a packed sequence; return (time, batch, …), mask, time and batch indices."""
  sizes = batch_sizes.tolist()
  times, rows = rnn.packed_indices(sizes)
  padded = data.new_zeros((len(sizes), sizes[0], *data.shape[1:]))
  padded = torch.index_put(padded, (times, rows), data)
  mask = torch.zeros(len(sizes), sizes[0], 1, dtype=torch.bool)
  mask[times, rows] = True
  return padded, mask.to(data.device), times, rows


def is_padded(args) -> bool:
  """Return True for arguments of torch's padded overload, False for the packed one."""
  return isinstance(args[3], bool)


def _recurrent(cell, args, env):
  parts = tensor_parts(functools.partial(env.functions.call, rnn.layer))
  run = rnn.network if is_padded(args) else _run_packed
  return run(parts, cell, *args)


@register_function(torch_compat.lstm, kind=Kind.TENSORS, needs_env=True)
def _lstm(*args, env):
  return _recurrent("lstm", args, env)


@register_function(torch_compat.gru, kind=Kind.TENSORS, needs_env=True)
def _gru(*args, env):
  return _recurrent("gru", args, env)


@register_function(torch_compat.rnn_tanh, kind=Kind.TENSORS, needs_env=True)
def _rnn_tanh(*args, env):
  return _recurrent("tanh", args, env)


@register_function(torch_compat.rnn_relu, kind=Kind.TENSORS, needs_env=True)
def _rnn_relu(*args, env):
  return _recurrent("relu", args, env)
