"""Lowerings that only graphs of ATen operations need; `interpreter.py` looks them up.

They cover sizes, assertions, casts, views as copies, and composite operations that are
kept whole. All other lowerings are in the operator table (`registry/operators.py`),
higher-order operators in `higher_order.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.core import mappings, narrowing
from torchax.environment import default_env
from torchax.ops import casting
from torchax.ops.jaten import attention, rnn
from torchax.registry import operators
from torchax.registry.names import aten, prims, resolve

# Sizes and assertions ----------------------------------------------------------------


def _size(self, dim=None):
  return self.shape if dim is None else self.shape[dim]


def _number(self):
  """Return the only number of an array.

  A traced number is an array with the dtype of Python's, without a gradient. It serves
  arithmetic, comparisons and assertions; a shape cannot depend on it.
  """
  if not isinstance(self, jax.core.Tracer):
    return self.item()
  kind = type(np.zeros((), self.dtype).item())
  number = jax.lax.stop_gradient(self.reshape(()))
  return jax.lax.convert_element_type(number, kind)


def _assert_scalar(self, message):
  """Raise RuntimeError if a number is zero; skip numbers that are traced or unknown."""
  if self is None or isinstance(self, jax.core.Tracer):
    return
  if not self:
    raise RuntimeError(message)


def _skip_check(*args, **kwargs):
  """Do nothing: torch made this check at capture."""


def _convert(self, dtype):
  """Cast an array; AOTAutograd also inserts a cast where torch promotes an operand.

  Dynamo turns a Python float into a 0-d float64 tensor, and a cast to the dtype of the
  other operand follows. So a cast to float64 is skipped for 0-d floats.
  """
  is_float = not self.ndim and jnp.issubdtype(self.dtype, jnp.floating)
  if is_float and dtype is torch.float64 and narrowing.is_on():
    return self
  return casting.cast(self, mappings.t2j_dtype(dtype))


ON_ARRAYS: dict = {
  aten.sym_size.int: _size,
  aten.sym_size.default: _size,
  aten.sym_numel.default: lambda self: math.prod(self.shape),
  aten._local_scalar_dense.default: _number,
  aten._assert_scalar.default: _assert_scalar,
  aten._assert_tensor_metadata.default: _skip_check,
  aten.sym_constrain_range.default: _skip_check,
  aten.sym_constrain_range_for_size.default: _skip_check,
  aten._unsafe_view.default: jnp.reshape,
  prims.convert_element_type.default: _convert,
}
ASSERTIONS = frozenset(op for op, f in ON_ARRAYS.items() if f is _assert_scalar)


def _of_traced(function, traced):
  """Return a function of a number that calls `traced` for a traced number."""

  def call(number, *args):
    is_traced = isinstance(number, jax.core.Tracer)
    return (traced if is_traced else function)(number, *args)

  return call


def _round(number, digits=None):
  rounded = jnp.round(number, digits or 0)
  return rounded.astype(int) if digits is None else rounded


NUMBERS: dict = {
  torch.sym_max: jax.core.max_dim,
  torch.sym_min: jax.core.min_dim,
  torch.sym_ite: _of_traced(torch.sym_ite, jnp.where),
  torch.sym_not: _of_traced(torch.sym_not, jnp.logical_not),
  math.trunc: _of_traced(math.trunc, lambda number: jnp.trunc(number).astype(int)),
  math.floor: _of_traced(math.floor, lambda number: jnp.floor(number).astype(int)),
  math.ceil: _of_traced(math.ceil, lambda number: jnp.ceil(number).astype(int)),
  round: _of_traced(round, _round),
  torch.sym_float: lambda value: (
    float(value) if isinstance(value, int | float) else jnp.asarray(value, float)
  ),
}

# Views -------------------------------------------------------------------------------


def copying_form(op):
  """Return the copying variant of a view operation if it has a lowering, else None."""
  packet = getattr(aten, f"{op.overloadpacket.__name__.lstrip('_')}_copy")
  overload = resolve(getattr(packet, op._overloadname))
  table = operators.all_aten_ops
  return overload if overload in table or resolve(packet) in table else None


def _slice(self, dim=0, start=None, end=None, step=1):
  return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


def _select(self, dim, index):
  return self[(slice(None),) * (dim % self.ndim) + (index,)]


def _arange(start, end=None, step=1, *, dtype=torch.int64):
  """Return consecutive integers; the bounds may be symbolic sizes."""
  start, end = (0, start) if end is None else (start, end)
  return jnp.arange(start, end, step, dtype=mappings.t2j_dtype(dtype or torch.int64))


# Lowerings for arrays with symbolic sizes.
SYMBOLIC: dict = {
  aten.arange.default: _arange,
  aten.arange.start: _arange,
  aten.arange.start_step: _arange,
  aten.view.default: jnp.reshape,
  aten.slice.Tensor: _slice,
  aten.select.int: _select,
}


# Composite operations that an exported program keeps whole ---------------------------
# Each computes and draws the same as the eager function, which is intercepted above
# ATen (`torchax/functions`). Sizes may be symbolic here.


def _lower(op, *args):
  return default_env().plan_for(op).run_on_arrays(args, {}, caches=False)


def _attention(
  query,
  key,
  value,
  attn_mask=None,
  dropout_p=0.0,
  is_causal=False,
  *,
  scale=None,
  enable_gqa=False,
):
  """Compute attention, with one draw for its dropout."""
  keep_mask = None
  if dropout_p > 0.0:
    shape = attention.noise_shape(query.shape, key.shape)
    noise = _lower(aten.bernoulli.p, jnp.zeros(shape, query.dtype), 1.0 - dropout_p)
    keep_mask = noise.astype(bool)
  return _compiled_attention(
    query,
    key,
    value,
    attn_mask,
    keep_mask,
    dropout_p=dropout_p,
    is_causal=is_causal,
    scale=scale,
    enable_gqa=enable_gqa,
  )


_compiled_attention = jax.jit(
  attention.scaled_dot_product_attention,
  static_argnames=("dropout_p", "is_causal", "scale", "enable_gqa"),
)

_PARTS = rnn.Parts(
  jax.jit(rnn.layer, static_argnums=(4, 5)),
  concatenate=lambda outputs: jnp.concatenate(outputs, axis=-1),
  stack=jnp.stack,
  dropout=lambda input, p: _lower(aten.native_dropout.default, input, p, True)[0],
)


def _recurrent(cell: str):
  return functools.partial(rnn.network, _PARTS, cell)


COMPOSITES: dict = {
  aten.scaled_dot_product_attention.default: _attention,
  aten.lstm.input: _recurrent("lstm"),
  aten.gru.input: _recurrent("gru"),
  aten.rnn_tanh.input: _recurrent("tanh"),
  aten.rnn_relu.input: _recurrent("relu"),
}
