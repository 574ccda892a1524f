"""`jax_vmap` and `jax_shard_map`: a torch function mapped over rows or shards.

`randomness` is the policy for draws. With "different", row i of `jax_vmap` draws the
numbers of iteration i of a Python loop over the rows, for every batch size. Each shard
draws from its own key, derived from its index along the mesh axes with this policy.

`loops.py` has loops and branches; `tracing/transform.py` is the common part.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from torchax.compat.user_code import name_of
from torchax.core import explicit_axes
from torchax.core.tracebacks import hide_library_frames
from torchax.errors import RngError
from torchax.interop.jit_options import ShardMapOptions, merge
from torchax.rng import Advance, stream_operands
from torchax.rng.ledger import as_child_draws
from torchax.tracing.transform import Transformed
from torchax.types import P, R

DIFFERENT, SAME, ERROR = "different", "same", "error"


@hide_library_frames
def jax_vmap(
  torch_function: Callable[P, R],
  in_axes: Any = 0,
  out_axes: Any = 0,
  *,
  randomness: str = ERROR,
  axis_name: Any = None,
  axis_size: int | None = None,
  spmd_axis_name: Any = None,
) -> Callable[P, R]:
  """Apply `jax.vmap` to a torch function; differentiable by torch and by JAX.

  Args:
    torch_function: function of one row, with trees of tensors as arguments and result.
      It must not change captured tensors in place.
    in_axes, out_axes, axis_name, axis_size, spmd_axis_name: as in `jax.vmap`; they
      refer to the positional arguments. Keyword arguments are mapped over axis 0.
    randomness: policy for draws, as in `torch.func.vmap`. "error": raise if the
      function draws. "different": each row draws the numbers of its iteration in a
      Python loop. "same": all rows draw the same numbers.

  Returns:
    The function of batched arguments.

  Raises:
    ValueError: the policy is unknown.
    RngError: raised by the returned function if it draws and `randomness` is "error".

  >>> rows = torch.arange(6.0, device="jax").view(2, 3)
  >>> jax_vmap(torch.dot, in_axes=(0, None))(rows, torch.ones(3, device="jax"))
  tensor([ 3., 12.], device='jax:0')
  >>> draws = jax_vmap(torch.rand_like, randomness="same")(rows)
  >>> torch.equal(draws[0], draws[1])
  True
  """
  if randomness not in (ERROR, DIFFERENT, SAME):
    raise ValueError(
      f'randomness expects "error", "different" or "same", but got {randomness!r}.'
    )
  name = axis_name or _AXIS_NAME
  transform = functools.partial(
    jax.vmap,
    out_axes=out_axes,
    axis_name=name,
    axis_size=axis_size,
    spmd_axis_name=spmd_axis_name,
  )

  @hide_library_frames
  @functools.wraps(torch_function, updated=())
  def mapped(*args, **kwargs):
    def on_row(args, kwargs):
      return torch_function(*args, **kwargs)

    on_row.__name__ = name_of(torch_function)
    function = Transformed(
      "jax_vmap",
      (on_row,),
      lambda *operands: _lower_vmap(
        function, transform, in_axes, name, randomness, *operands
      ),
      may_change=False,
    )
    return function((args, kwargs))

  return mapped


_AXIS_NAME = "torchax_rows"


def _lower_vmap(
  function: Transformed, transform, in_axes, name, randomness, call, rng, captured, args
):
  advances: list[Advance] = []

  def row(args, kwargs):
    streams = rng
    if randomness == DIFFERENT:
      function.times = jax.lax.axis_size(name)
      streams = _streams_of_row(function, rng, name)
    result = call(0, streams, captured, (args, kwargs))
    _check_policy(result.advance, randomness)
    if randomness == DIFFERENT:
      function.require_known(result.advance)
    advances.append(result.advance)
    return result.out

  if isinstance(in_axes, list):
    in_axes = tuple(in_axes)
  out = transform(row, in_axes=(in_axes, 0))(*args)
  return out, [], advances[-1].repeat(function.times or 0, "row")


def _streams_of_row(
  function: Transformed, rng: stream_operands.Values, name
) -> stream_operands.Values:
  """Advance the streams to this row's iteration of a Python loop over the rows."""
  if function.known.is_nothing:
    return rng
  iteration = jax.lax.axis_index(name).astype(jnp.uint32)
  return stream_operands.advance_counts(
    rng, [iteration * n if n else 0 for n in function.known.draws]
  )


def _check_policy(advance: Advance, randomness: str) -> None:
  if randomness == ERROR and any(advance.draws):
    raise RngError(
      "A function under jax_vmap draws random numbers. Choose what the rows draw: "
      'jax_vmap(f, randomness="different") gives each row its own numbers, '
      'randomness="same" gives all of them the same.'
    )
  if advance.seedings:
    raise RngError(
      "A function under jax_vmap seeds the random stream: each row would seed it to "
      "something else. Seed outside of it, or draw in `with env.rng_scope(key):`."
    )


@overload
def jax_shard_map(
  torch_function: Callable[P, R],
  kwargs_for_jax_shard_map: dict[str, Any] | None = None,
  *,
  randomness: str | Mapping[str, str] = DIFFERENT,
  **options: Unpack[ShardMapOptions],
) -> Callable[P, R]: ...


@overload
def jax_shard_map(
  torch_function: None = None,
  kwargs_for_jax_shard_map: dict[str, Any] | None = None,
  *,
  randomness: str | Mapping[str, str] = DIFFERENT,
  **options: Unpack[ShardMapOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jax_shard_map(
  torch_function=None,
  kwargs_for_jax_shard_map=None,
  *,
  randomness=DIFFERENT,
  **options,
):
  """Apply `jax.shard_map` to a torch function; differentiable by torch and by JAX.

  Args:
    torch_function: function of one shard, with trees of tensors as arguments and
      result. It must not change captured tensors in place. Without it, `jax_shard_map`
      returns a decorator.
    kwargs_for_jax_shard_map: the options as a dict, for compatibility with upstream.
    randomness: policy for draws. "different": each shard draws its own numbers. "same":
      all shards draw the same numbers. A dict gives a policy per mesh axis; axes that
      it lacks are "different". With {"model": "same"} dropout differs along a data
      axis, and agrees along a tensor-parallel axis.
    **options: keyword arguments of `jax.shard_map`: `mesh`, `in_specs`, `out_specs`,
      `axis_names`, `check_vma`. The specs refer to the arguments of `torch_function`.
      On a mesh of explicit axes the arguments are resharded to `in_specs`, while
      `jax.shard_map` raises.

  Returns:
    The function of global tensors. It takes no keyword arguments.

  Raises:
    TypeError: `jax.shard_map` has no such option.
    ValueError: the policy is unknown, or the mesh has no such axis.

  >>> mesh = jax.make_mesh((1,), ("data",))
  >>> rows = jax.sharding.PartitionSpec("data")
  >>> f = jax_shard_map(torch.exp, mesh=mesh, in_specs=rows, out_specs=rows)
  >>> f(torch.zeros(2, device="jax"))
  tensor([1., 1.], device='jax:0')
  """
  options = merge("jax_shard_map", jax.shard_map, kwargs_for_jax_shard_map, options)
  if torch_function is None:
    return functools.partial(
      jax_shard_map, kwargs_for_jax_shard_map=options, randomness=randomness
    )
  in_specs = options.pop("in_specs", None)
  out_specs = options.pop("out_specs", None)
  axes = _different_axes(randomness, options)

  @hide_library_frames
  @functools.wraps(torch_function, updated=())
  def sharded(*args):
    lower = functools.partial(_lower_shards, options, in_specs, out_specs, axes)
    function = Transformed("jax_shard_map", (torch_function,), lower, may_change=False)
    return function(args)

  return sharded


def _lower_shards(options, in_specs, out_specs, axes, call, rng, captured, args):
  advances: list[Advance] = []
  replicated = PartitionSpec()

  def shard(rng, captured, args):
    # Only the keys differ by shard; counts and static parts are equal.
    streams = stream_operands.values_of_shard(rng, _shard_index(axes)) if axes else rng
    result = call(0, streams, captured, args)
    _check_policy(result.advance, SAME)
    advances.append(result.advance)
    return result.out

  is_one_spec = in_specs is None or isinstance(in_specs, PartitionSpec)
  specs = in_specs if is_one_spec else tuple(in_specs)
  transformed = jax.shard_map(
    shard, in_specs=(replicated, replicated, specs), out_specs=out_specs, **options
  )
  operands = explicit_axes.reshard_to_specs(
    (rng, captured, args), (replicated, replicated, specs), options.get("mesh")
  )
  out = transformed(*operands)
  advance = advances[-1]
  if axes:
    advance = dataclasses.replace(advance, log=as_child_draws(advance.log, "shard"))
  return out, [], advance.or_none()


def _shard_index(axes: tuple[str, ...]):
  index: Any = 0
  for axis in axes:
    index = index * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
  return jnp.asarray(index).astype(jnp.uint32)


def _different_axes(randomness, options) -> tuple[str, ...]:
  """Return the mesh axes along which shards draw different numbers, in mesh order."""
  mesh = options.get("mesh") or jax.sharding.get_abstract_mesh()
  names = options.get("axis_names") or mesh.axis_names
  names = tuple(name for name in mesh.axis_names if name in names)
  if not isinstance(randomness, Mapping):
    randomness = dict.fromkeys(names, randomness)
  unknown = [name for name in randomness if name not in names]
  if unknown:
    raise ValueError(f"randomness names the axes {unknown}, but the mesh has {names}.")
  for axis, policy in randomness.items():
    if policy not in (DIFFERENT, SAME):
      raise ValueError(
        f'randomness expects "different" or "same", but got {policy!r} for axis '
        f"{axis!r}."
      )
  return tuple(n for n in names if randomness.get(n, DIFFERENT) == DIFFERENT)
