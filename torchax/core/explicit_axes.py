"""Computation on meshes with explicit axes: shardings are part of array types.

JAX derives the sharding of each result, and raises if it is ambiguous: for a matrix
product over a sharded dimension, most reshapes and indexing. `call` then runs the
function in `jax.sharding.auto_axes`. XLA's partitioner chooses the shardings of the
results for that function alone, so eager and compiled results agree.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from torchax.compat import jax_compat
from torchax.compat.user_code import name_of
from torchax.core.bounded_cache import BoundedCache
from torchax.core.partitions import Partition, is_array
from torchax.errors import ShardingError

# Exceptions of JAX for conflicting shardings; plain ones come from loops and
# conversions. If the arguments are wrong, the call with automatic axes raises again.
_CONFLICTS = (jax_compat.ShardingTypeError, TypeError, ValueError, NotImplementedError)
_cached_shardings: BoundedCache = BoundedCache(4096)


def mesh_of(array) -> AbstractMesh | None:
  """Return the mesh of an array if it has explicit axes, else None."""
  aval = getattr(array, "aval", None)
  mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
  return mesh if mesh is not None and is_explicit(mesh) else None


@functools.lru_cache(maxsize=256)
def is_explicit(mesh) -> bool:
  """Return True for a mesh with explicit axes."""
  return AxisType.Explicit in mesh.axis_types


def _meshes(operands) -> list[AbstractMesh]:
  meshes = []
  for leaf in jax.tree.leaves(operands):
    mesh = mesh_of(leaf)
    if mesh is not None and mesh not in meshes:
      meshes.append(mesh)
  return meshes


def call(function: Callable, operands, name: str, key: Any = None):
  """Return `function(*operands)`, even if JAX cannot derive the result's sharding.

  Args:
    function: a function of trees of arrays.
    operands: its arguments, a sequence.
    name: name of the operation, for errors.
    key: hashable key of the function, to cache its result shardings; None if it is
      called once.

  Raises:
    ShardingError: the operands are on several meshes, or the mesh has more devices
      than this program.
  """
  meshes = _meshes(operands)
  if not meshes:
    return function(*operands)
  try:
    return function(*operands)
  except _CONFLICTS as error:
    conflict = error
  if len(meshes) > 1:
    axes = " and ".join(str(dict(mesh.shape)) for mesh in meshes)
    raise ShardingError(
      f"{name} expects tensors on one mesh, but got some on meshes of the axes {axes}. "
      "Lay them out on one of them, with `tensor.shard_(NamedSharding(mesh, spec))`."
    ) from conflict
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
    return _call_on_auto_mesh(function, operands)
  shardings = _result_shardings(function, operands, meshes[0], name, key)
  return _call_in_auto_axes(function, operands, shardings)


def with_explicit_axes(function: Callable, is_reused: bool = True) -> Callable:
  """Wrap a function of arrays to run on meshes with explicit axes; see `call`.

  Args:
    function: a function of trees of arrays.
    is_reused: it is called more than once, so its result shardings are cached.
  """
  name = name_of(function)

  def explicit(*operands):
    return call(function, operands, name, function if is_reused else None)

  explicit.__name__ = name
  return explicit


def accept_any_sharding(pullback: Callable, results: list) -> Callable:
  """Wrap a pullback of `jax.vjp` to accept cotangents of any sharding.

  Args:
    pullback: function of one list of cotangents.
    results: primal results, one per cotangent.
  """
  shardings = [None if mesh_of(r) is None else jax.typeof(r).sharding for r in results]
  if not any(shardings):
    return pullback
  return jax.tree_util.Partial(_resharding_pullback(tuple(shardings)), pullback)


@functools.lru_cache(maxsize=256)
def _resharding_pullback(shardings: tuple) -> Callable:
  """Return the same function for equal shardings: JAX's cache key includes it."""

  def resharding(pullback, cotangents):
    return pullback([_reshard(*pair) for pair in zip(cotangents, shardings)])

  return resharding


def _reshard(array, sharding):
  if sharding is None or jax.typeof(array).sharding == sharding:
    return array
  return jax.sharding.reshard(array, sharding)


def reshard_to_specs(tree: Any, specs: Any, mesh: Mesh | AbstractMesh | None) -> Any:
  """Reshard arrays to the specs of `jax.shard_map`, on a mesh of explicit axes.

  JAX raises there if an array's sharding differs from its spec, and torch code does not
  choose the sharding of results. On other meshes return the arrays unchanged.

  Args:
    tree: a tree of arrays.
    specs: a prefix tree of specs; None leaves the subtree unchanged.
    mesh: mesh of the `shard_map`; None for the mesh of the context.
  """
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  if mesh.empty or not is_explicit(mesh):
    return tree

  def reshard(spec, subtree):
    if spec is None:
      return subtree
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda leaf: jax.reshard(leaf, sharding) if is_array(leaf) else leaf, subtree
    )

  is_spec = lambda spec: spec is None or isinstance(spec, PartitionSpec)  # noqa: E731
  return jax.tree.map(reshard, specs, tree, is_leaf=is_spec)


# Concrete arrays: run on a mesh of automatic axes -------------------------------------


@functools.lru_cache(maxsize=256)
def auto_mesh(mesh: Mesh) -> Mesh:
  """Return the mesh with the same devices and names, and automatic axes."""
  return Mesh(
    mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
  )


def with_mesh(array: jax.Array, mesh: Mesh) -> jax.Array:
  """Return the array on `mesh`, of the same devices and names, without a copy."""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return array
  sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(
    array.shape, sharding, shards, dtype=array.dtype
  )


def _call_on_auto_mesh(function: Callable, operands):
  """Run a function of concrete arrays on their mesh with automatic axes."""
  arrays = [leaf for leaf in jax.tree.leaves(operands) if mesh_of(leaf) is not None]
  mesh = arrays[0].sharding.mesh
  auto = auto_mesh(mesh)

  def to_auto(leaf):
    return leaf if mesh_of(leaf) is None else with_mesh(leaf, auto)

  def to_explicit(leaf):
    sharding = getattr(leaf, "sharding", None)
    is_on_auto = isinstance(sharding, NamedSharding) and sharding.mesh == auto
    return with_mesh(leaf, mesh) if is_on_auto else leaf

  operands = jax.tree.map(to_auto, operands)
  with no_mesh():
    return jax.tree.map(to_explicit, function(*operands))


# Traced arrays: the partitioner chooses the shardings of results ----------------------


def no_mesh() -> contextlib.AbstractContextManager:
  """Return a context without the mesh of `jax.set_mesh`, which has explicit axes."""
  if jax.sharding.get_abstract_mesh().empty:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _call_in_auto_axes(function: Callable, operands, shardings):
  flat = Partition(tuple(operands), is_array)

  def run(*arrays):
    return function(*flat.unflatten(arrays))

  return jax.sharding.auto_axes(run, out_sharding=shardings)(*flat.dynamic)


def _concrete_auto_mesh(mesh: AbstractMesh, name: str) -> Mesh:
  """Return a concrete mesh with automatic axes, for XLA's partitioner."""
  devices = jax.devices()
  if mesh.size > len(devices):
    raise ShardingError(
      f"{name} is traced for a mesh of {mesh.size} devices, but this program has "
      f"{len(devices)}, and JAX cannot derive the sharding of its result. Trace it "
      "where the devices are, or use a mesh of `AxisType.Auto` axes."
    )
  sizes = tuple(mesh.axis_sizes)
  chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
  return Mesh(chosen, mesh.axis_names, axis_types=(AxisType.Auto,) * len(sizes))


def _aval_key(leaf) -> tuple:
  aval = jax.typeof(leaf)
  spec = None if mesh_of(leaf) is None else tuple(aval.sharding.spec)
  return aval.shape, str(aval.dtype), spec


def _result_shardings(function: Callable, operands, mesh: AbstractMesh, name: str, key):
  """Compile the function once; return the shardings that the partitioner chose."""
  flat = Partition(tuple(operands), is_array)
  cache_key = None
  if key is not None:
    avals = tuple(map(_aval_key, flat.dynamic))
    cache_key = (key, mesh, avals, flat.without_arrays())
    cached = _cached_shardings.get(cache_key)
    if cached is not None:
      return cached
  auto = _concrete_auto_mesh(mesh, name)

  def on_auto_mesh(leaf):
    aval = jax.typeof(leaf)
    spec = PartitionSpec() if mesh_of(leaf) is None else aval.sharding.spec
    sharding = NamedSharding(auto, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

  def run(*arrays):
    return function(*flat.unflatten(arrays))

  run.__name__ = "layout_of_" + name.replace(".", "_")
  with jax_compat.outside_of_traces(), no_mesh():
    lowered = jax.jit(run).lower(*map(on_auto_mesh, flat.dynamic))
    chosen = lowered.compile().output_shardings
  explicit = {
    axis
    for axis, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind is AxisType.Explicit
  }
  shardings = jax.tree.map(
    lambda sharding: NamedSharding(mesh, _spec_of(sharding, explicit)), chosen
  )
  if cache_key is not None:
    _cached_shardings[cache_key] = shardings
  return shardings


def _spec_of(sharding, explicit: set[str]) -> PartitionSpec:
  """Return the spec of a sharding, reduced to explicit axes."""
  if not isinstance(sharding, NamedSharding):
    return PartitionSpec()
  entries = []
  for entry in sharding.spec:
    names = entry if isinstance(entry, tuple) else (entry,)
    axes = tuple(name for name in names if name in explicit)
    entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
  return PartitionSpec(*entries)
