"""Lowerings for graphs of ATen operations, besides those in the operator table.

Here are sizes, assertions, casts, and views as copies. Composite operations that are
kept whole are in `composites.py`, higher-order operators in `higher_order.py`.
"""

import math

import jax
import jax.numpy as jnp
import torch

from torchax.core import mappings, narrowing
from torchax.ops import casting
from torchax.registry import operators
from torchax.registry.names import aten, prims, resolve

# Sizes and assertions ----------------------------------------------------------------


def _size(self, dim=None):
  return self.shape if dim is None else self.shape[dim]


def _item(self):
  """The number of an array, which must not be traced."""
  return self.item()


def _assert_scalar(self, message):
  """Raises RuntimeError where a number is zero; undecided ones are JAX's to check."""
  if self is None or isinstance(self, jax.core.Tracer):
    return
  if not self:
    raise RuntimeError(message)


def _nothing(*args, **kwargs):
  """A check that torch has made when it captured the graph."""


def _converted(self, dtype):
  """A cast. AOTAutograd makes one also where torch promotes an operand.

  Dynamo makes a Python float a float64 tensor without dimensions. Nobody asked for its
  64 bits: a cast to the dtype of the other operand follows.
  """
  is_float = not self.ndim and jnp.issubdtype(self.dtype, jnp.floating)
  if is_float and dtype is torch.float64 and narrowing.is_on():
    return self
  return casting.cast(self, mappings.t2j_dtype(dtype))


ON_ARRAYS: dict = {
  aten.sym_size.int: _size,
  aten.sym_size.default: _size,
  aten.sym_numel.default: lambda self: math.prod(self.shape),
  aten._local_scalar_dense.default: _item,
  aten._assert_scalar.default: _assert_scalar,
  aten._assert_tensor_metadata.default: _nothing,
  aten.sym_constrain_range.default: _nothing,
  aten.sym_constrain_range_for_size.default: _nothing,
  aten._unsafe_view.default: jnp.reshape,
  prims.convert_element_type.default: _converted,
}
ASSERTIONS = frozenset(op for op, f in ON_ARRAYS.items() if f is _assert_scalar)


def _maximum(left, right):
  return jax.core.max_dim(left, right)


def _minimum(left, right):
  return jax.core.min_dim(left, right)


def _sym_float(value):
  return float(value) if isinstance(value, int | float) else jnp.asarray(value, float)


NUMBERS: dict = {
  torch.sym_max: _maximum,
  torch.sym_min: _minimum,
  torch.sym_float: _sym_float,
}

# Views -------------------------------------------------------------------------------


def copy_of(op):
  """The operation that copies what a view shows, if it has a lowering; else None."""
  packet = getattr(aten, f"{op.overloadpacket.__name__.lstrip('_')}_copy")
  overload = resolve(getattr(packet, op._overloadname))
  table = operators.all_aten_ops
  return overload if overload in table or resolve(packet) in table else None


def _slice(self, dim=0, start=None, end=None, step=1):
  return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


def _select(self, dim, index):
  return self[(slice(None),) * (dim % self.ndim) + (index,)]


def _arange(start, end=None, step=1, *, dtype=torch.int64):
  """Whole numbers; the sizes that bound them need not be known."""
  start, end = (0, start) if end is None else (start, end)
  return jnp.arange(start, end, step, dtype=mappings.t2j_dtype(dtype or torch.int64))


# For arrays with sizes that are symbols.
SYMBOLIC: dict = {
  aten.arange.default: _arange,
  aten.arange.start: _arange,
  aten.arange.start_step: _arange,
  aten.view.default: jnp.reshape,
  aten.slice.Tensor: _slice,
  aten.select.int: _select,
}
