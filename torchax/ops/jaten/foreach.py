"""Operations on lists of tensors, one program per list; optimizers use them.

All are derived from elementwise lowerings: `_foreach_add.List` applies the lowering of
`aten.add.Tensor` to each row of its lists. A lowering is looked up when a program is
traced, so a replaced one takes effect. The in-place variants follow from torch's
schemas (`dispatch/in_place.py`). Optimizer steps with `fused=True` are in
`fused_optimizers.py`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from torchax.core import mappings
from torchax.core.partitions import Partition, is_array
from torchax.core.program_limit import Effort
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.promotion import is_exact, to_float, widen
from torchax.registry.names import aten, present, resolve
from torchax.registry.operators import all_aten_ops

_UNARY = (
  *("abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc"),
  *("exp", "expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "neg"),
  *("reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan"),
  *("tanh", "trunc"),
)
# Operations whose overloads List and Tensor map to Tensor, and all others to Scalar.
_ARITHMETIC = ("add", "sub", "mul", "div", "lerp")
# torch implements these by clamps with one bound, also for numbers.
_CLAMPS = {
  "clamp_max": aten.clamp_max,
  "minimum": aten.clamp_max,
  "clamp_min": aten.clamp_min,
  "maximum": aten.clamp_min,
}

# Foreach overload -> the overload for one row of its lists.
ROWS = {
  aten._foreach_max.default: aten.max.default,
  aten._foreach_mm.default: aten.mm.default,
  aten._foreach_zero.default: aten.zeros_like.default,
  aten._foreach_copy.default: aten.copy.default,
  aten._foreach_pow.List: aten.pow.Tensor_Tensor,
  aten._foreach_pow.Scalar: aten.pow.Tensor_Scalar,
  aten._foreach_pow.ScalarList: aten.pow.Tensor_Scalar,
  aten._foreach_pow.ScalarAndTensor: aten.pow.Scalar,
}


def _functional_overloads(name: str) -> dict:
  packet = resolve(getattr(aten, f"_foreach_{name}"))
  if packet is None:  # not in every version of torch
    return {}
  names = [overload for overload in packet.overloads() if not overload.endswith("out")]
  return {overload: getattr(packet, overload) for overload in names}


for _name in _UNARY:
  for _foreach in _functional_overloads(_name).values():
    ROWS[_foreach] = getattr(aten, _name).default
for _name in _ARITHMETIC:
  for _overload, _foreach in _functional_overloads(_name).items():
    _of_tensors = _overload in ("List", "Tensor")
    ROWS[_foreach] = getattr(
      getattr(aten, _name), "Tensor" if _of_tensors else "Scalar"
    )
for _name, _packet in _CLAMPS.items():
  for _overload, _foreach in _functional_overloads(_name).items():
    ROWS[_foreach] = _packet.Tensor if _overload == "List" else _packet.default
ROWS = present(ROWS)


def _operator(row_op):
  return all_aten_ops.get(row_op) or all_aten_ops.get(row_op.overloadpacket)


def _is_list(value) -> bool:
  return isinstance(value, list | tuple)


def _rows(*args) -> list[list]:
  """Return the arguments of each row: an element of each list, and other arguments."""
  lists = [arg for arg in args if _is_list(arg)]
  dtypes = {jnp.result_type(value) for values in lists for value in values}

  def shared(value):
    # The rows would convert a number one by one.
    is_number = getattr(value, "weak_type", False) and {value.dtype} == dtypes
    return lax.convert_element_type(value, value.dtype) if is_number else value

  return _split([arg if _is_list(arg) else shared(arg) for arg in args])


def _split(args) -> list[list]:
  length = next(len(arg) for arg in args if _is_list(arg))
  return [[arg[row] if _is_list(arg) else arg for arg in args] for row in range(length)]


# Arguments that the lowering of a row needs as Python numbers.
_STATIC = {aten._foreach_pow: ("exponent",)}
# Their results depend only on the shapes and dtypes of the first list.
_OVERWRITING = (aten._foreach_zero, aten._foreach_copy)


def _each(row_op, rows: list[list], **kwargs) -> list:
  """Apply the lowering of an operation to each row; equal rows are traced once."""
  lower = _operator(row_op).func

  @functools.cache
  def program(like: Partition) -> Callable:
    def run(*arrays):
      row, kwargs = like.unflatten(arrays)
      return lower(*row, **kwargs)

    return jax.jit(run, inline=True)

  calls = [Partition((row, kwargs), is_array) for row in rows]
  return [program(call.without_arrays())(*call.dynamic) for call in calls]


def _each_on_host(row_op, rows: list[list], **kwargs) -> tuple | None:
  """Apply the numpy version of an operation to each row; None if there is none."""
  on_host = _operator(row_op).execution.on_host
  if on_host is None:
    return None
  results = tuple([on_host(*row, **kwargs) for row in rows])
  return None if any(result is None for result in results) else results


def _register(foreach_op, row_op) -> None:
  def each(*args, **kwargs):
    return _each(row_op, _rows(*args), **kwargs)

  def on_host(*args, **kwargs):
    return _each_on_host(row_op, _split(args), **kwargs)

  each.__name__ = f"_aten_{foreach_op.overloadpacket.__name__}"
  static = _STATIC.get(foreach_op.overloadpacket, ())
  overwrites = foreach_op.overloadpacket in _OVERWRITING
  op(foreach_op, static=static, overwrites=overwrites, on_host=on_host)(each)


for _foreach, _row in ROWS.items():
  _register(_foreach, _row)


def _scalars_of(scalars, like) -> list:
  """Split a 1-d tensor of scalars into one scalar for each tensor of `like`.

  Raises:
    RuntimeError: the shape of `scalars` is not (len(like),).
  """
  if scalars.ndim != 1:
    raise RuntimeError(
      f"Expected packed scalar Tensor to be of dimension 1. Got {scalars.ndim} instead."
    )
  if len(scalars) != len(like):
    raise RuntimeError(
      f"Expected length of scalars to match input of length {len(like)} but got "
      f"{len(scalars)} instead."
    )
  return [scalars[row] for row in range(len(like))]


def _check_packed(self, tensor1, tensor2, scalars) -> None:
  if not scalars.is_contiguous():
    raise RuntimeError("Expected scalars to be contiguous.")


def _pointwise(foreach_op, row_op, is_packed: bool) -> None:
  def each(self, tensor1, tensor2, scalars=1):
    if is_packed:
      scalars = _scalars_of(scalars, self)
    return _each(row_op, _rows(self, tensor1, tensor2, scalars))

  each.__name__ = f"_aten_{foreach_op.overloadpacket.__name__}"
  # torch requires the tensor of all rows' scalars on the CPU.
  op(foreach_op, takes_cpu=is_packed, check=_check_packed if is_packed else None)(each)


for _packet, _row in (
  (aten._foreach_addcdiv, aten.addcdiv.default),
  (aten._foreach_addcmul, aten.addcmul.default),
):
  for _overload in ("Scalar", "ScalarList", "Tensor"):
    _pointwise(getattr(_packet, _overload), _row, is_packed=_overload == "Tensor")


# The older emitters of XLA unroll reductions of small arrays with several dimensions,
# which compile for up to a second each.
_NORMS = {
  "static": ("ord",),
  "prepare": _numbers.norm_order("ord"),
  "effort": Effort.REPEATED,
}


@op(aten._foreach_norm, **_NORMS)
def _aten__foreach_norm(self, ord=2, dtype=None):
  """Compute the norms of floating-point and complex tensors.

  Raises:
    RuntimeError: a tensor has integers, which torch refuses even with a `dtype`.
  """
  for array in self:
    if is_exact(array):
      raise RuntimeError(
        "linalg.vector_norm: Expected a floating point or complex tensor as input. Got "
        f"{array.dtype}"
      )
  lower = _operator(aten.linalg_vector_norm.default).func
  return [lower(array, ord, dtype=dtype) for array in self]


@op("aten::_foreach_powsum", **_NORMS)  # by name: newer than torch 2.11
def _aten__foreach_powsum(self, ord=2, dtype=None):
  """Sum powers of the magnitudes: norms without the root."""
  if dtype is not None:
    self = [array.astype(mappings.t2j_dtype(dtype)) for array in self]
  order, _ = ord if isinstance(ord, tuple) else (ord, None)
  magnitudes = [jnp.abs(to_float(array)) for array in self]
  return [jnp.sum(widen(array) ** order).astype(array.dtype) for array in magnitudes]


@op(aten._amp_foreach_non_finite_check_and_unscale)
def _aten__amp_foreach_non_finite_check_and_unscale(self, found_inf, inv_scale):
  """Unscale gradients; set `found_inf` to 1 if one of them is not finite."""
  finite = [jnp.all(jnp.isfinite(array)) for array in self]
  flag = jnp.where(jnp.all(jnp.stack(finite)), found_inf, 1.0)
  unscaled = [(array * inv_scale).astype(array.dtype) for array in self]
  return unscaled, flag.astype(found_inf.dtype).reshape(found_inf.shape)


@op(aten._amp_update_scale)
def _aten__amp_update_scale(
  self,
  growth_tracker,
  found_inf,
  scale_growth_factor,
  scale_backoff_factor,
  growth_interval,
):
  """Return the next scale of a loss, and the number of steps since its last change."""
  failed = found_inf.reshape(self.shape) > 0
  count = growth_tracker.reshape(self.shape) + 1
  grown = self * scale_growth_factor
  grows = ~failed & (count == growth_interval)
  next_scale = jnp.where(grows & jnp.isfinite(grown), grown, self)
  scale = jnp.where(failed, self * scale_backoff_factor, next_scale)
  count = jnp.where(failed | grows, 0, count)
  new_count = count.astype(growth_tracker.dtype).reshape(growth_tracker.shape)
  return scale.astype(self.dtype), new_count
