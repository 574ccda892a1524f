"""Functions of arrays on explicit axes, on one device, where the types are the same."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from torchax.core import explicit_axes
from torchax.errors import ShardingError

MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))


def rows(mesh=MESH) -> jax.Array:
  array = jnp.arange(16.0).reshape(4, 4)
  return jax.device_put(array, NamedSharding(mesh, P(mesh.axis_names[0])))


def product(x):
  """Return a product that JAX refuses: both contracted dimensions are sharded."""
  return x.T @ x


def test_shardings_that_jax_infers_are_kept():
  calls = []

  def plus_one(x):
    calls.append(jax.typeof(x).sharding.mesh)
    return x + 1

  found = jax.jit(lambda x: explicit_axes.call(plus_one, (x,), "add"))(rows())
  assert calls == [MESH.abstract_mesh] and found.sharding.spec == P("x", None)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_refused_operations_are_computed_with_explicit_results(wrap):
  found = wrap(explicit_axes.with_explicit_axes(product))(rows())
  assert explicit_axes.mesh_of(found) == MESH.abstract_mesh
  assert (found == product(jnp.arange(16.0).reshape(4, 4))).all()


def test_partitioner_runs_once_per_function_and_types():
  runs = []

  def counted(x):
    runs.append(jax.typeof(x).sharding.mesh.axis_types)
    return product(x)

  explicit = explicit_axes.with_explicit_axes(counted)
  jax.jit(explicit)(rows())
  first = len(runs)
  jax.jit(lambda x: explicit(x) + 1)(rows())
  # One call to learn that JAX refuses, one to compute, and none to ask for the
  # sharding.
  assert first == 3 and len(runs) == first + 2


def test_a_mistake_is_the_one_of_automatic_axes():
  for wrap in (jax.jit, lambda f: f):
    with pytest.raises(TypeError, match="dot_general requires"):
      wrap(explicit_axes.with_explicit_axes(lambda x: x @ jnp.ones((3, 3))))(rows())


def test_two_meshes_are_refused_by_name():
  other = jax.make_mesh((1,), ("y",), axis_types=(AxisType.Explicit,))
  with pytest.raises(ShardingError, match=r"aten\.mm expects.*'x': 1.*'y': 1.*shard_"):
    explicit_axes.call(jnp.matmul, (rows(), rows(other)), "aten.mm")


def test_pull_backs_take_cotangents_of_any_layout():
  def pulled(x, cotangent):
    result, pull_back = jax.vjp(lambda x: [x * 2], x)
    return explicit_axes.accept_any_sharding(pull_back, result)([cotangent])

  x = rows()
  columns = jax.device_put(x, NamedSharding(MESH, P(None, "x")))
  (found,) = jax.jit(pulled)(x, columns)
  assert (found == 2 * x).all() and found.sharding.spec == P("x", None)
  assert explicit_axes.accept_any_sharding(product, [jnp.ones(2)]) is product


def test_meshes_of_the_same_devices_have_the_same_arrays():
  mesh = explicit_axes.auto_mesh(MESH)
  assert mesh.axis_types == (AxisType.Auto,)
  x = rows()
  on_mesh = explicit_axes.with_mesh(x, mesh)
  assert explicit_axes.mesh_of(on_mesh) is None
  assert on_mesh.tolist() == x.tolist()
  assert on_mesh.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
