"""Jagged nested tensors (`torch.nested`, `layout=torch.jagged`) whose parts are on jax.

torch's class runs operations on its parts. Its wrapper would be on torch's own device
for jax, where autograd has no thread; here it is on the hidden device of jax tensors.
"""

import functools

import torch
import torch.nn.functional as F

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.graphs import is_fake
from torchax.compat.torch_compat.wrappers import HIDDEN_DEVICE
from torchax.errors import UnsupportedDtypeError

_FEATURE = "jagged nested tensors on jax"
_MODULE = "torch.nested._internal.nested_tensor"

_class = private.find(f"{_MODULE}.NestedTensor", _FEATURE, instead=None)
# Symbolic length of the ragged dimension, one object for each tensor of offsets.
_symint_of = private.find(f"{_MODULE}.get_tensor_symint", _FEATURE, instead=None)
_symints = private.find(f"{_MODULE}._tensor_symint_registry", _FEATURE, instead=None)
_ATTENTION = "attention of jagged nested tensors on jax"
_OPERATIONS = "torch.nested._internal.ops"
_attention = private.find(
  f"{_OPERATIONS}.jagged_scaled_dot_product_attention", _ATTENTION, instead=None
)


class _Hidden(torch.Tensor):
  """Layout of a part of a jagged tensor, without numbers, on the hidden device."""

  device = HIDDEN_DEVICE


def hold_jagged_parts(tensor_class: type) -> None:
  """Let jagged nested tensors have parts of a class with a `_shell` on meta."""
  if None in (_class, _symint_of, _symints):
    return
  make = _class.__new__

  def new(cls, values, offsets, *, lengths=None, **options):
    if not isinstance(values, tensor_class):
      return make(cls, values, offsets, lengths=lengths, **options)
    if is_fake(values._shell):
      raise UnsupportedDtypeError(
        "torch.compile expects dense tensors on jax, but got a jagged nested one. Pass "
        "its `.values()` and `.offsets()` to a function compiled by "
        "`torchax.interop.jax_jit`, which may build it from them."
      )
    parts = [values, offsets] if lengths is None else [values, offsets, lengths]
    shells = [part._shell.as_subclass(_Hidden) for part in parts]
    _symints[shells[-1]] = _symint_of(parts[-1])  # the same ragged dimension
    if lengths is not None:
      options["lengths"] = shells.pop()
    return make(cls, *shells, **options)

  def device(tensor) -> torch.device:
    values = tensor.__dict__.get("_values")
    if isinstance(values, tensor_class):
      return values.device
    return torch.Tensor.device.__get__(tensor)

  patch(_class, "__new__", staticmethod(new), _FEATURE)
  patch(_class, "device", property(device), _FEATURE)
  if _attention is not None:
    name = "jagged_scaled_dot_product_attention"
    attend = _attention_of(tensor_class)
    patch(private.resolve(_OPERATIONS), name, attend, _ATTENTION)


def _attention_of(tensor_class: type):
  """Return attention that pads jagged tensors with values of `tensor_class`.

  torch's kernels for jagged tensors are for CUDA; elsewhere it makes strided ones.
  """

  @functools.wraps(_attention)
  def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
    jagged = query, key, value
    is_ours = all(isinstance(x.__dict__.get("_values"), tensor_class) for x in jagged)
    # torch refuses masks. It has dense attention if only another dimension is ragged.
    dim = query.dim() - 2
    if attn_mask is not None or not is_ours or {x._ragged_idx for x in jagged} != {dim}:
      return _attention(*jagged, attn_mask, dropout_p, is_causal, **rest)
    (query_rows, _), (key_rows, is_key), (value_rows, _) = map(_padded, jagged)
    mask = is_key[:, None]
    if is_causal:
      mask = mask & mask.new_ones(query_rows.shape[dim], mask.shape[-1]).tril()
    mask = mask[:, None] if dim == 2 else mask
    dense = query_rows, key_rows, value_rows
    output = F.scaled_dot_product_attention(*dense, mask, dropout_p, **rest)
    offsets = query.offsets()
    rows = torch.arange(query.values().shape[dim - 1], device=query.device)
    sequence = torch.searchsorted(offsets, rows, right=True) - 1
    values = output.transpose(1, dim)[sequence, rows - offsets[sequence]]
    return torch.nested.nested_tensor_from_jagged(
      values.transpose(0, dim - 1),
      offsets,
      query.lengths(),
      dim,
      query._maybe_min_seqlen,
      query._maybe_max_seqlen,
    )

  return attend


def _padded(jagged) -> tuple[torch.Tensor, torch.Tensor]:
  """Return a jagged tensor padded with zeros, and which positions it has.

  `to_padded_tensor` pads to the number of all rows if the longest sequence is unknown,
  and refuses holes.
  """
  starts, ends = jagged.offsets()[:-1, None], jagged.offsets()[1:, None]
  longest = jagged._maybe_max_seqlen
  if longest is None:
    longest = int((ends - starts).max())
  rows = starts + torch.arange(longest, device=jagged.device)
  lengths = jagged.lengths()
  is_row = rows < (ends if lengths is None else starts + lengths[:, None])
  dim = jagged._ragged_idx
  values = jagged.values().transpose(0, dim - 1)
  dense = values[rows.clamp(max=values.shape[0] - 1)]
  dense = dense.masked_fill(~is_row.reshape(*rows.shape, *[1] * (dense.dim() - 2)), 0)
  return dense.transpose(1, dim), is_row
