"""Functional collectives of torch as `psum`, `all_gather`, `all_to_all`, … of JAX.

They run where JAX has named axes: inside `jax_shard_map` or `jax_vmap(axis_name=)`.
A process group is one or several mapped axes. It is given as:

  - a dimension of a `DeviceMesh` on jax: `mesh["tp"]`, `(mesh, 1)`;
  - the name of an axis itself: `all_reduce(x, "sum", "tp")`;
  - the group of all processes: all axes that are mapped.

All members run one program, so their tensors have equal shapes, and
`all_to_all_single` exchanges equal parts. `permute_tensor` replaces `send` and `recv`.
The result of a reduction is invarying along the axis in JAX's types, so `out_specs` of
a `shard_map` may omit the axis. A gathered result is varying.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.errors import CollectiveError
from torchax.ops.builtin import Kind
from torchax.ops.builtin import op as builtin_op
from torchax.ops.register import op

__all__ = ["GROUPS", "WORLDS", "axes_of", "op", "permute", "reduce"]

GROUPS: dict[str, tuple[str, ...]] = {}
"""Mesh axes of each process group, by the group's name."""

WORLDS: set[str] = {""}
"""Names of the groups of all processes."""

# Axis name in google/torchax's `shard_map`, for every group.
_UPSTREAM_AXIS = "torch_dist"

Axes = tuple[str, ...]


def is_mapped(axis: str) -> bool:
  """Return True inside a `shard_map` or `vmap` with this axis name."""
  try:
    lax.axis_size(axis)
  except NameError:
    return False
  return True


def axes_of(group_name: Any, operation: str) -> Axes:
  """Return the mapped axes of a process group; () for a world of one process.

  Args:
    group_name: name of a group or of an axis, or a group.
    operation: name of the collective, for the error.

  Raises:
    CollectiveError: the axes are not mapped, or no axis has that name.
  """
  name = str(getattr(group_name, "group_name", group_name))
  axes = GROUPS.get(name, (name,))
  if all(map(is_mapped, axes)):
    return axes
  if name not in GROUPS and is_mapped(_UPSTREAM_AXIS):
    return (_UPSTREAM_AXIS,)
  mesh = jax.sharding.get_abstract_mesh()
  mapped = tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes)
  if name in WORLDS and mapped:
    return mapped
  if name in WORLDS and jax.process_count() == 1:
    return ()
  raise CollectiveError(_unmapped_message(operation, name, axes, mapped))


def _unmapped_message(operation: str, name: str, axes: Axes, mapped: Axes) -> str:
  if name in WORLDS:
    return (
      f"{operation} over all processes is a functional collective, and runs where a "
      f"mesh axis is mapped. Write `torch.distributed.{operation}(tensor)`, or "
      "`jax_shard_map(f, mesh=mesh, in_specs=…, out_specs=…)` around it."
    )
  inside = f"the mapped axes are {', '.join(mapped)}" if mapped else "no axis is mapped"
  axis = axes[0]
  return (
    f'{operation} runs over the mesh axis "{axis}", but {inside} here. Call it in a '
    "function of one shard:\n"
    f'  mesh = jax.sharding.Mesh(jax.devices(), ("{axis}",))\n'
    "  torchax.interop.jax_shard_map(f, mesh=mesh, "
    f'in_specs=PartitionSpec("{axis}"), out_specs=…)(tensor)'
  )


def _size(axes: Axes) -> int:
  return math.prod(lax.axis_size(axis) for axis in axes)


def _require_size(operation: str, group_size: int, axes: Axes) -> None:
  if group_size != _size(axes):
    raise CollectiveError(
      f"{operation} expects group_size={_size(axes)}, the size of the axes "
      f"({', '.join(axes)}), but got {group_size}."
    )


def _make_varying(array: jax.Array, axes: Axes) -> jax.Array:
  """Make an array varying along all of the axes if it varies along some.

  JAX requires it for a collective over several axes.
  """
  varying = jax_compat.varying_axes(array)
  others = tuple(axis for axis in axes if axis not in varying)
  if not others or len(others) == len(axes):
    return array
  return lax.pcast(array, others, to="varying")


# Reductions ---------------------------------------------------------------------------


def _sum(array: jax.Array, axes: Axes) -> jax.Array:
  if array.dtype == jnp.bool_:  # torch's sum of bools is their `or`
    return lax.psum(array.astype(jnp.int32), axes) > 0
  return lax.psum(array, axes)


def _mean(array: jax.Array, axes: Axes) -> jax.Array:
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    raise CollectiveError(
      f'The reduction "avg" expects floats, but got {array.dtype}. Use "sum", and '
      "divide."
    )
  return lax.pmean(array, axes)


def _extremum(extreme: Callable, array: jax.Array, axes: Axes) -> jax.Array:
  """Apply `pmax` or `pmin`; members that attain the extremum share the gradient."""

  def reduce(array):
    if array.dtype == jnp.bool_:
      return extreme(array.astype(jnp.int32), axes).astype(bool)
    return extreme(array, axes)

  @jax.custom_jvp
  def differentiable(array):
    return reduce(array)

  @differentiable.defjvp
  def _(primals, tangents):
    (array,), (tangent,) = primals, tangents
    result = reduce(array)
    is_extremum = (array == result).astype(array.dtype)
    return result, lax.psum(tangent * is_extremum, axes) / lax.psum(is_extremum, axes)

  inexact = jnp.issubdtype(array.dtype, jnp.inexact)
  return differentiable(array) if inexact else reduce(array)


def _stack_members(array: jax.Array, axes: Axes) -> jax.Array:
  """Stack the arrays of all members; the result does not vary along the axes."""
  return lax.all_gather(array, axes, to="invarying")


def _product(array: jax.Array, axes: Axes) -> jax.Array:
  return jnp.prod(_stack_members(array, axes), axis=0, dtype=array.dtype)


def _bitwise(function: Callable, array: jax.Array, axes: Axes) -> jax.Array:
  if jnp.issubdtype(array.dtype, jnp.inexact):
    raise CollectiveError(
      f"A bitwise reduction expects integers or bools, but got {array.dtype}."
    )
  members = _stack_members(array, axes)
  return functools.reduce(function, (members[i] for i in range(len(members))))


_REDUCTIONS: dict[str, Callable[[jax.Array, Axes], jax.Array]] = {
  "sum": _sum,
  "avg": _mean,
  "product": _product,
  "min": functools.partial(_extremum, lax.pmin),
  "max": functools.partial(_extremum, lax.pmax),
  "band": functools.partial(_bitwise, jnp.bitwise_and),
  "bor": functools.partial(_bitwise, jnp.bitwise_or),
  "bxor": functools.partial(_bitwise, jnp.bitwise_xor),
}


def reduce(array: jax.Array, reduction: str, axes: Axes) -> jax.Array:
  """Reduce the arrays of all members; every member gets the result.

  Args:
    array: an array of any shape, equal for all members.
    reduction: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
    axes: mapped axes; () for a world of one process.

  Raises:
    CollectiveError: the reduction is unknown, or undefined for the dtype.

  >>> reduce(jnp.ones(2), "sum", ())
  Array([1., 1.], dtype=float32)
  """
  function = _REDUCTIONS.get(reduction.lower())
  if function is None:
    raise CollectiveError(
      f"reduce expects a reduction of {', '.join(_REDUCTIONS)}, but got {reduction!r}."
    )
  return function(_make_varying(array, axes), axes) if axes else array


# Lowerings ----------------------------------------------------------------------------


def _register(name: str, **options) -> Callable:
  """Register a lowering of `_c10d_functional::name`.

  It is not compiled by itself, because it runs only inside a trace.
  """
  return builtin_op(f"_c10d_functional::{name}", compiled=False, **options)


@_register("all_reduce")
def _c10d_all_reduce(self, reduceOp: str, group_name: str):
  return reduce(self, reduceOp, axes_of(group_name, "all_reduce"))


@_register("all_gather_into_tensor")
@builtin_op("_c10d_functional_autograd::all_gather_into_tensor", compiled=False)
def _c10d_all_gather(input, group_size: int, group_name: str):
  """Concatenate the tensors (n, …) of all members to (members · n, …)."""
  axes = axes_of(group_name, "all_gather_into_tensor")
  _require_size("all_gather_into_tensor", group_size, axes)
  return lax.all_gather(_make_varying(input, axes), axes, tiled=True) if axes else input


@_register("reduce_scatter_tensor")
@builtin_op("_c10d_functional_autograd::reduce_scatter_tensor", compiled=False)
def _c10d_reduce_scatter(input, reduceOp: str, group_size: int, group_name: str):
  """Reduce (members · n, …); each member gets its part (n, …)."""
  axes = axes_of(group_name, "reduce_scatter_tensor")
  _require_size("reduce_scatter_tensor", group_size, axes)
  if not axes:
    return input
  if input.shape[0] % group_size:
    raise CollectiveError(
      f"reduce_scatter_tensor expects a dimension 0 of {group_size} equal parts, but "
      f"got the shape {tuple(input.shape)}."
    )
  if reduceOp.lower() in ("sum", "avg") and jnp.issubdtype(input.dtype, jnp.inexact):
    total = lax.psum_scatter(_make_varying(input, axes), axes, tiled=True)
    return total / group_size if reduceOp.lower() == "avg" else total
  reduced = reduce(input, reduceOp, axes)
  size = input.shape[0] // group_size
  start = lax.axis_index(axes) * size
  return lax.dynamic_slice_in_dim(reduced, start, size)


@_register("all_to_all_single")
@builtin_op("_c10d_functional_autograd::all_to_all_single", compiled=False)
def _c10d_all_to_all(input, output_split_sizes, input_split_sizes, group_name: str):
  """Send part i of each member to member i, which concatenates the parts."""
  axes = axes_of(group_name, "all_to_all_single")
  sizes = {*output_split_sizes, *input_split_sizes}
  is_equal = len(sizes) < 2 and (not axes or input.shape[0] % _size(axes) == 0)
  if axes and not is_equal:
    raise CollectiveError(
      f"all_to_all_single expects equal parts for {_size(axes)} members, since all run "
      f"one program, but got shape {tuple(input.shape)}, input_split_sizes="
      f"{list(input_split_sizes)} and output_split_sizes={list(output_split_sizes)}. "
      "Pad the parts to the largest."
    )
  if not axes:
    return input
  return lax.all_to_all(_make_varying(input, axes), axes, 0, 0, tiled=True)


@_register("broadcast")
def _c10d_broadcast(self, src: int, group_name: str):
  """Return the tensor of member `src` on all members."""
  axes = axes_of(group_name, "broadcast")
  if not 0 <= src < _size(axes):
    raise CollectiveError(
      f"broadcast expects a source from 0 to {_size(axes) - 1}, but got {src}."
    )
  if not axes:
    return self
  is_source = lax.axis_index(axes) == src
  return _sum(jnp.where(is_source, self, jnp.zeros_like(self)), axes)


@_register("_wrap_tensor_autograd")  # from torch 2.15 on
@_register("wait_tensor")
def _c10d_wait_tensor(tensor):
  """Return the tensor unchanged; XLA waits for its computation."""
  return tensor


@_register("wait_tensors")  # from torch 2.15 on
def _c10d_wait_tensors(tensors):
  return list(tensors)


def permute(
  array: jax.Array, destinations: Sequence[int], group_name: Any
) -> jax.Array:
  """Send the array of member i to member `destinations[i]`.

  Args:
    array: an array of any shape, equal for all members.
    destinations: target of each member, a permutation of them.
    group_name: name of a group or of an axis, or a group.

  Raises:
    CollectiveError: the destinations are not a permutation of the members.
  """
  axes = axes_of(group_name, "permute_tensor")
  members = range(_size(axes))
  valid = len(destinations) == len(members) and set(destinations) <= set(members)
  if not valid or len(set(destinations)) < len(members):
    raise CollectiveError(
      f"permute_tensor expects a permutation of 0 to {len(members) - 1}, the target "
      f"of each member, but got {list(destinations)}."
    )
  if not axes:
    return array
  return lax.ppermute(
    _make_varying(array, axes), axes, list(zip(members, destinations, strict=True))
  )


# Coalesced, in-place and `out=` variants ----------------------------------------------


def _coalesce(lowering: Callable) -> Callable:
  def coalesced(inputs, *args):
    return [lowering(array, *args) for array in inputs]

  return coalesced


def _in_place(functional: str) -> Callable:
  """Return the in-place variant of a collective, as a function of tensors."""

  def in_place(target, *args):
    results = _operation(functional)(target, *args)
    if isinstance(target, torch.Tensor):
      return target.copy_(results)
    return [tensor.copy_(r) for tensor, r in zip(target, results, strict=True)]

  return in_place


def _out_variant(functional: str) -> Callable:
  def out_variant(*args, out):
    return out.copy_(_operation(functional)(*args))

  return out_variant


def _operation(name: str):
  return getattr(torch.ops._c10d_functional, name)


_COALESCED = {
  "all_reduce_coalesced": _c10d_all_reduce,
  "all_gather_into_tensor_coalesced": _c10d_all_gather,
  "reduce_scatter_tensor_coalesced": _c10d_reduce_scatter,
}
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast")
_OUT = ("all_gather_into_tensor", "reduce_scatter_tensor")

for _name, _lowering in _COALESCED.items():
  _register(_name)(_coalesce(_lowering))
for _name in _IN_PLACE:
  _register(f"{_name}_", kind=Kind.TENSORS)(_in_place(_name))
for _name in _OUT:
  _register(f"{_name}_out", kind=Kind.TENSORS)(_out_variant(_name))


def _refuse_point_to_point(name: str) -> Callable:
  def refuse(*args):
    raise CollectiveError(
      f"{name} belongs to a program for one rank, but one program runs here for all "
      "members. Use `torch.distributed._functional_collectives.permute_tensor(tensor, "
      "destinations, group)`: member i sends to destinations[i]."
    )

  return refuse


for _name in ("isend", "irecv", "batch_p2p_ops"):
  _register(_name, kind=Kind.TENSORS)(_refuse_point_to_point(_name))
