"""The private API of JAX that torchax relies on exists and behaves as it assumes."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax.compat import jax_compat, private

# The trace in progress ----------------------------------------------------------------


def seen_in(transform, *args):
  """Return the answer of a function of `jax_compat` inside a transformation."""
  seen = []

  def function(x):
    trace = jax_compat._trace_context.trace
    owner = jax_compat.draw_owner()
    seen.append(
      {
        "trace": type(trace).__name__,
        "top_level": jax_compat.is_top_level(),
        "staging": jax_compat.is_staging(),
        "batching": jax_compat.is_batching(trace),
        "owner": None if owner is None else type(owner).__name__,
        "abstract": isinstance(x, jax_compat.Tracer),
      }
    )
    return x * 2

  transform(function)(*(args or (jnp.ones(()),)))
  return seen[0]


STAGING = {
  "trace": "DynamicJaxprTrace",
  "top_level": False,
  "staging": True,
  "batching": False,
  "owner": "DynamicJaxprTrace",
  "abstract": True,
}
BATCHING = {
  "trace": "BatchTrace",
  "top_level": False,
  "staging": False,
  "batching": True,
  "owner": "BatchTrace",
  "abstract": True,
}
CASES = {
  "jit": (jax.jit, STAGING),
  "checkpoint": (jax.checkpoint, STAGING),
  "make_jaxpr": (jax.make_jaxpr, STAGING),
  "eval_shape": (lambda f: lambda x: jax.eval_shape(f, x), STAGING),
  "scan": (
    lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2),
    STAGING,
  ),
  "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.ones(3)), BATCHING),
  "vmap_of_jit": (lambda f: lambda x: jax.vmap(jax.jit(f))(jnp.ones(3)), STAGING),
}


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_transformation_is_identified_by_its_trace(row):
  transform, expected = row
  assert seen_in(transform) == expected


def test_no_transformation_is_in_progress_at_the_top():
  assert jax_compat.is_top_level()
  assert not jax_compat.is_staging()
  assert jax_compat.draw_owner() is None
  seen = seen_in(lambda f: f)
  assert seen["top_level"] and not seen["abstract"] and seen["owner"] is None


DIFFERENTIATION = {
  "grad": jax.grad,
  "value_and_grad": jax.value_and_grad,
  "vjp": lambda f: lambda x: jax.vjp(f, x),
  "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
  "linearize": lambda f: lambda x: jax.linearize(f, x),
  "grad_of_grad": lambda f: jax.grad(jax.grad(f)),
}


@pytest.mark.parametrize("transform", DIFFERENTIATION.values(), ids=DIFFERENTIATION)
def test_differentiation_runs_once_and_owns_no_draw(transform):
  seen = seen_in(transform)
  assert seen["owner"] is None
  assert not seen["staging"] and not seen["top_level"]
  assert seen["trace"] in ("JVPTrace", "LinearizeTrace")


def test_draw_in_nested_grad_belongs_to_the_outer_trace():
  assert seen_in(lambda f: jax.jit(jax.grad(f)))["owner"] == "DynamicJaxprTrace"
  vmapped = seen_in(lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.ones(3)))
  assert vmapped["owner"] == "BatchTrace"


def test_the_trace_belongs_to_a_thread():
  inside = []

  def function(x):
    thread = threading.Thread(target=lambda: inside.append(jax_compat.is_top_level()))
    thread.start()
    thread.join()
    return x

  jax.jit(function)(jnp.ones(()))
  assert inside == [True]


def test_values_are_concrete_outside_of_traces():
  found = []

  def note(x):
    with jax_compat.outside_of_traces():
      found.append(jnp.arange(3) + 1)
    return x

  mesh, spec = (
    jax.sharding.Mesh(jax.devices()[:1], "x"),
    jax.sharding.PartitionSpec("x"),
  )
  for transform in (jax.jit, jax.vmap, jax.grad):
    transform(lambda x: note(x).sum())(jnp.ones(4))
  jax.shard_map(note, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(4))
  assert [array.tolist() for array in found] == [[1, 2, 3]] * 4


def test_jax_has_started_once_an_array_exists():
  jnp.ones(1).block_until_ready()
  assert jax_compat.has_started()


def test_cpu_array_is_in_host_memory():
  for array in (jnp.ones(2), jax.random.key(0)):
    on_cpu = jax.device_put(array, jax.devices("cpu")[0])
    assert jax_compat.is_in_host_memory(on_cpu)
  assert not jax_compat.is_in_host_memory(object())
  for device in jax.devices():
    there = jax.device_put(jnp.ones(2), device)
    assert jax_compat.is_in_host_memory(there) == (device.platform == "cpu")


def test_an_array_is_an_instance_of_the_concrete_class():
  assert type(jnp.ones(2)) is jax_compat.ArrayImpl
  traced = []
  jax.jit(lambda x: traced.append(type(x) is jax_compat.ArrayImpl))(jnp.ones(2))
  assert traced == [False]


def _raised(function, *args) -> Exception:
  with pytest.raises(Exception) as caught:
    function(*args)
  return caught.value


def test_memory_errors_of_jax_are_recognized():
  array = jnp.ones(2)
  array.delete()
  deleted = _raised(lambda: array + 1)
  assert jax_compat.is_about_deletion(deleted)
  for donated in (0, 1):
    add = jax.jit(lambda x, y: (x + 1, y + 1), donate_argnums=donated)
    array = jnp.ones(2)
    assert jax_compat.is_about_donation(_raised(add, array, array))
  for is_about in (jax_compat.is_about_deletion, jax_compat.is_about_donation):
    assert not is_about(RuntimeError("another"))


def test_argument_errors_of_jax_are_recognized():
  jitted = jax.jit(lambda x, *others: x, static_argnums=2)
  refused = _raised(jitted, 1.0, object())
  assert jax_compat.refused_argument(refused) == ("object", "others[0]")
  assert jax_compat.refused_argument(TypeError("another")) is None
  assert jax_compat.is_about_static_arguments(_raised(jitted, 1.0, 2.0, []))


NEEDS_VALUES = {
  "shape": lambda x: jnp.ones(x[0].astype(int)),
  "slice": lambda x: x[: x[0].astype(int)],
  "mask": lambda x: x[x > 0],
  "branch": lambda x: x if x.sum() > 0 else -x,
  "numpy": lambda x: np.asarray(x),
  "index": lambda x: range(x[0].astype(int)),
}


@pytest.mark.parametrize("name", NEEDS_VALUES)
def test_value_errors_of_tracers_are_recognized(name):
  error = _raised(jax.jit(NEEDS_VALUES[name]), jnp.ones(2))
  assert jax_compat.is_about_values(error)


def test_other_trace_errors_are_not_about_values():
  for function in (lambda x: "a" + x, lambda x: x @ jnp.ones(3), lambda x: x[0, 0]):
    assert not jax_compat.is_about_values(_raised(jax.jit(function), jnp.ones(2)))


def test_the_constants_of_a_scan_are_counted():
  def scanned(carry, constant, xs):
    return jax.lax.scan(lambda c, x: (c + constant * x, c), carry, xs)

  program = jax.make_jaxpr(scanned)(1.0, 2.0, jnp.ones(3))
  (params,) = [e.params for e in program.jaxpr.eqns if e.primitive.name == "scan"]
  assert jax_compat.constants_of_scan(params) == 1


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_jaxpr_is_repeated_in_a_trace(is_missing, monkeypatch):
  """The derivative, batching and names of operations stay, and no call is added."""
  if is_missing:
    monkeypatch.setattr(jax_compat, "_add_equation", None)

  def f(x, y):
    with jax.named_scope("outer"):
      closed = jax.make_jaxpr(lambda: (inner(x) * y, y, x + 1.5, 2.5))()
      jaxpr = jax_compat.without_constants(closed)
      return jax_compat.repeat(jaxpr, closed.consts)

  @jax.named_scope("inner")
  def inner(x):
    return jnp.sin(x)

  x, y = jnp.float32(0.5), jnp.arange(3.0)
  expected = (jnp.sin(x) * y, y, x + 1.5, 2.5)
  for run in (jax.jit(f), jax.jit(jax.vmap(f, (None, 0)))):
    for found, wanted in zip(run(x, y), expected):
      np.testing.assert_allclose(found, np.broadcast_to(wanted, found.shape))
  gradient = jax.jit(jax.grad(lambda x: f(x, y)[0].sum()))(x)
  np.testing.assert_allclose(gradient, jnp.cos(x) * y.sum(), rtol=1e-6)
  equations = jax.make_jaxpr(f)(x, y).jaxpr.eqns
  assert [equation.primitive.name for equation in equations] == ["sin", "mul", "add"]
  assert "jit(f)/outer/inner/sin" in jax.jit(f).lower(x, y).as_text(debug_info=True)


def test_sharding_type_error_is_recognized():
  mesh = jax.make_mesh((1,), ("x",))
  assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  array = jax.device_put(jnp.ones((4, 4)), rows)
  error = _raised(jax.jit(lambda x: x.T @ x), array)
  assert type(error) is jax_compat.ShardingTypeError


def test_varying_axes_are_read_from_the_type():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
  seen = []

  def note(array):
    seen.extend([jax_compat.varying_axes(array), jax_compat.varying_axes(array * 0)])
    seen.append(jax_compat.varying_axes(jax.lax.psum(array, "x")))
    return array

  spec = jax.sharding.PartitionSpec("x")
  jax.jit(jax.shard_map(note, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(1))
  assert seen == [{"x"}, {"x"}, set()]
  assert jax_compat.varying_axes(jnp.ones(1)) == set()


def test_varying_alike_casts_to_the_union_of_axes():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
  seen = []

  def note(one, other):
    found = jax_compat.match_varying_axes(one, other, jnp.ones(1))
    seen.extend(map(jax_compat.varying_axes, found))
    return sum(found)

  specs = jax.P("x"), jax.P("y")
  jax.jit(jax.shard_map(note, mesh=mesh, in_specs=specs, out_specs=jax.P(("x", "y"))))(
    jnp.ones(1), jnp.ones(1)
  )
  assert seen == [{"x", "y"}] * 3
  array = jnp.ones(1)
  assert jax_compat.match_varying_axes(array)[0] is array


def test_tpu_flash_attention_takes_our_arguments():
  kernel = jax_compat.flash_attention_of_tpus()
  parameters = inspect.signature(kernel).parameters
  assert list(parameters)[:3] == ["q", "k", "v"]
  assert {"causal", "sm_scale"} <= set(parameters)


def test_program_is_divisible_unless_all_axes_are_mapped(monkeypatch):
  assert not jax_compat.is_divisible()
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  assert jax_compat.is_divisible()
  mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  seen, spec = [], jax.P("a")
  for names in ({"a"}, {"a", "b"}):

    def note(x):
      seen.append(jax_compat.is_divisible())
      return x

    shards = jax.shard_map(
      note, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names
    )
    jax.jit(shards)(np.ones(2))
  assert seen == [True, False]


def test_coordination_client_has_the_methods_in_use():
  assert jax_compat.coordination_client() is None  # a process that is alone
  from_runtime = private.resolve("jax._src.lib._jax.DistributedRuntimeClient")
  for name in ("wait_at_barrier", "key_value_set", "key_value_dir_get"):
    assert callable(getattr(from_runtime, name))
  assert callable(from_runtime.key_value_delete)


def test_missing_cluster_error_is_recognized():
  with pytest.raises(ValueError) as caught:
    private.resolve("jax._src.distributed.State")().initialize(
      cluster_detection_method="deactivate"
    )
  assert jax_compat.is_about_missing_cluster(caught.value)
  assert not jax_compat.is_about_missing_cluster(ValueError("another"))


def test_gloo_listens_at_the_given_address(monkeypatch):
  registered, made = {}, []
  monkeypatch.setattr(
    jax_compat,
    "_register_client",
    lambda name, make, **o: registered.update({name: make}),
  )
  gloo, client = jax_compat._make_gloo, jax_compat._make_cpu_client
  assert "hostname" in gloo.__doc__
  assert "collectives" in inspect.signature(client).parameters
  monkeypatch.setattr(jax_compat, "_make_gloo", lambda **options: options)
  monkeypatch.setattr(jax_compat, "_make_cpu_client", lambda **o: made.append(o))
  jax_compat.join_cpus_at("127.0.0.1")
  registered["cpu"]()
  options = {"distributed_client": None, "hostname": "127.0.0.1"}
  assert made == [{"collectives": options}]


# Stand-ins ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.5, np.ones(3, np.float32), jax.random.key(0)])
def test_a_stand_in_is_a_constant_of_an_inner_jaxpr(value):
  @jax.jit
  def outer(x):
    trace, made = jax_compat.current_trace(), []

    def inner():
      made.extend([jax_compat.stand_in(value, trace) for _ in range(2)])
      return made

    constants = jax.make_jaxpr(inner)().consts
    assert list(map(id, constants)) == list(map(id, made))
    assert made[0] is not made[1] and jax.typeof(made[0]) == jax.typeof(value)
    return x

  outer(1.0)


def test_there_are_stand_ins_only_while_a_jaxpr_is_made():
  assert jax_compat.current_trace() is None
  jax.vmap(lambda x: seen.append(jax_compat.current_trace()) or x)(jnp.ones(2))
  assert seen == [None]


seen: list = []
