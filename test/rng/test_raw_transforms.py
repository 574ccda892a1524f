"""Boundaries of torchax in raw JAX transformations: correct with `rng=`, or refused.

`test_errors.py` tests raw transformations around a plain draw. Here a compiled,
checkpointed, looped or mapped function draws, and JAX's transformation calls it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from torchax.errors import TracedDrawError
from torchax.interop import (
  cond,
  fori_loop,
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
  switch,
  while_loop,
)
from torchax.rng import RngState, rng_scope

N = 8


def _x() -> jax.Array:
  return jnp.arange(1.0, N + 1)


def _mesh() -> Mesh:
  return Mesh(np.array(jax.devices()[:1]), ("data",))


def _noise(x):
  """Return noise that is exact in float32, so that every bit has to agree."""
  return F.dropout(x, 0.5) + torch.randint(0, 100, x.shape, device="jax")


def _sharded(function):
  whole = PartitionSpec()
  options = {"mesh": _mesh(), "in_specs": (whole,), "out_specs": whole}
  return jax_shard_map(function, options, randomness="same")


# Functions of torchax that draw, and the same functions without a draw.
INNER = {
  "plain": lambda f: f,
  "jax_jit": jax_jit,
  "nested jax_jit": lambda f: jax_jit(lambda x: jax_jit(f)(x) + jax_jit(f)(x)),
  "gradient_checkpoint": gradient_checkpoint,
  "jax_value_and_grad": lambda f: (
    lambda x: jax_value_and_grad(lambda x: (x.sum(), f(x)), {"has_aux": True})(x)[0][1]
  ),
  "scan": lambda f: lambda x: scan(lambda c, _: (f(c), f(c)), x, length=2)[1][1],
  "fori_loop": lambda f: lambda x: fori_loop(0, 2, lambda i, v: f(v), x),
  "while_loop": lambda f: (
    lambda x: while_loop(
      lambda state: state[0] < 2,
      lambda state: (state[0] + 1, f(state[1])),
      (torch.tensor(0).to("jax"), x),
    )[1]
  ),
  "cond": lambda f: lambda x: cond(x.sum() > 0, f, lambda x: f(x) * f(x), x),
  "switch": lambda f: lambda x: switch(1, [f, lambda x: f(x) * 2, lambda x: x], x),
  "jax_vmap": lambda f: jax_vmap(f, randomness="different"),
  "jax_shard_map": _sharded,
}
each_inner = pytest.mark.parametrize("inner", INNER)


@pytest.fixture(autouse=True)
def state_stays(env):
  """Assert that a test leaves the stream where it started, after one draw."""
  torch.rand(1, device="jax")
  stream, before = env.rng, env.rng.state.state_dict()
  yield
  assert env.rng is stream
  assert env.rng.state.state_dict() == before


def _next(env) -> list:
  with env.rng_scope(env.rng.state):
    return torch.rand(4, device="jax").tolist()


# With a key --------------------------------------------------------------------------


def _scanned(f, x, keys):
  return lax.scan(lambda carry, key: (carry, f(x, rng=key)), 0, keys)[1]


def _in_fori(f, x, keys):
  body = lambda i, out: out.at[i].set(f(x, rng=keys[i]))  # noqa: E731
  return lax.fori_loop(0, 2, body, jnp.zeros((2, N)))


def _in_while(f, x, keys):
  body = lambda s: (s[0] + 1, s[1].at[s[0]].set(f(x, rng=keys[s[0]])))  # noqa: E731
  return lax.while_loop(lambda s: s[0] < 2, body, (0, jnp.zeros((2, N))))[1]


def _in_cond(f, x, keys):
  draw = lambda key: f(x, rng=key)  # noqa: E731
  taken = lax.cond(True, draw, lambda key: draw(key) * 0, keys[0])
  return [taken, lax.switch(2, [lambda key: x, lambda key: x * 2, draw], keys[1])]


def _exported(f, x, keys):
  exported = jax.export.export(jax.jit(f))(x, rng=keys[0])
  return [exported.call(x, rng=key) for key in keys]


def _closed_over(f, x, keys):
  one, other = keys
  return jax.jit(lambda x: [f(x, rng=one), f(x, rng=other)])(x)


def _sharded_raw(f, x, keys):
  whole = PartitionSpec()
  sharded = jax.shard_map(
    lambda x, key: f(x, rng=key),
    mesh=_mesh(),
    in_specs=(whole, whole),
    out_specs=whole,
    check_vma=False,
  )
  return [sharded(x, key) for key in keys]


def _each(transform):
  """Transformation of `(x, key) -> numbers`, for two keys."""

  def run(f, x, keys):
    transformed = transform(lambda x, key: f(x, rng=key))
    return [transformed(x, key) for key in keys]

  return run


# Transformations that return the draws of f with each of two keys.
OUTER = {
  "jit": _each(jax.jit),
  "jit, the key closed over": _closed_over,
  "scan": _scanned,
  "fori_loop": _in_fori,
  "while_loop": _in_while,
  "cond": _in_cond,
  "checkpoint": _each(jax.checkpoint),
  "vmap": lambda f, x, keys: jax.vmap(lambda key: f(x, rng=key))(keys),
  "jvp": lambda f, x, keys: [
    jax.jvp(lambda x, key=key: f(x, rng=key), (x,), (x,))[0] for key in keys
  ],
  "vjp": lambda f, x, keys: [
    jax.vjp(lambda x, key=key: f(x, rng=key), x)[0] for key in keys
  ],
  "linearize": lambda f, x, keys: [
    jax.linearize(lambda x, key=key: f(x, rng=key), x)[0] for key in keys
  ],
  "grad": lambda f, x, keys: [
    jax.grad(lambda x, key=key: (x.sum(), f(x, rng=key)), has_aux=True)(x)[1]
    for key in keys
  ],
  "export": _exported,
  "shard_map": _sharded_raw,
}
PAIRS = [("jax_jit", outer) for outer in OUTER]
PAIRS += [("scan", "vmap"), ("while_loop", "vmap"), ("jax_vmap", "scan")]


@functools.cache
def _drawn(inner: str) -> tuple[np.ndarray, np.ndarray]:
  """Return the eager draws of a function with each of two keys."""
  torch_function, drawn = INNER[inner](_noise), []
  for key in _keys():
    with rng_scope(key):
      drawn.append(torch_function(torch.arange(1.0, N + 1).to("jax")).numpy())
  return tuple(drawn)


def _keys() -> jax.Array:
  return jax.random.split(jax.random.key(5), 2)


@pytest.mark.parametrize("inner, outer", PAIRS)
def test_with_a_key_the_numbers_are_the_eager_ones_of_that_key(inner, outer):
  expected = _drawn(inner)
  assert not np.array_equal(*expected)
  found = OUTER[outer](jax_view(INNER[inner](_noise)), _x(), _keys())
  for numbers, known in zip(found, expected, strict=True):
    np.testing.assert_array_equal(numbers, known)


def test_with_a_key_everything_that_draws_can_be_compiled_by_jax():
  views = {inner: jax_view(INNER[inner](_noise)) for inner in INNER}
  compiled = jax.jit(lambda x, key: {n: f(x, rng=key) for n, f in views.items()})
  for place, key in enumerate(_keys()):
    for inner, numbers in compiled(_x(), key).items():
      np.testing.assert_array_equal(numbers, _drawn(inner)[place], err_msg=inner)
  assert compiled._cache_size() == 1


@each_inner
def test_abstract_evaluation_with_a_key_uses_the_key_operand(env, inner):
  view, key = jax_view(INNER[inner](_noise)), jax.random.key(5)
  assert jax.eval_shape(view, _x(), rng=key).shape == (N,)
  closed = jax.make_jaxpr(view)(_x(), rng=key)
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert sorted(kinds) == ["float32[8]", "key<fry>[]"]
  used = {id(var) for equation in closed.jaxpr.eqns for var in equation.invars}
  assert all(id(var) in used for var in closed.jaxpr.invars)


def test_an_exported_program_takes_the_key_as_an_input():
  """The same holds for a model in training mode; its draws depend on the key."""
  model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)).to("jax")
  exported = jax.export.export(jax.jit(jax_view(jax_jit(model))))(
    jnp.ones(64), rng=jax.random.key(0)
  )
  assert [str(aval) for aval in exported.in_avals] == ["float32[64]", "key<fry>[]"]
  first, same, other = (
    exported.call(jnp.ones(64), rng=jax.random.key(seed)) for seed in (1, 1, 2)
  )
  assert jnp.array_equal(first, same) and not jnp.array_equal(first, other)
  assert set(first.tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("inner", ["jax_jit", "while_loop"])
def test_the_explicit_form_carries_the_state_on(env, inner):
  torch_function = INNER[inner](_noise)
  pure = jax.jit(functional_rng(torch_function))
  state = RngState.from_seed(3)
  with env.rng_scope(state) as stream:
    expected = [torch_function(torch.arange(1.0, N + 1).to("jax")) for _ in range(2)]
    after = stream.state.state_dict()
  for numbers in expected:
    found, state = pure(state, _x())
    np.testing.assert_array_equal(found, numbers.numpy())
  assert state.state_dict() == after


def test_rows_of_a_raw_vmap_with_one_key_draw_the_same():
  view = jax_view(jax_jit(_noise))
  rows = jax.vmap(lambda x: view(x, rng=jax.random.key(5)))(jnp.zeros((3, N)))
  expected = view(jnp.zeros(N), rng=jax.random.key(5))
  assert jnp.array_equal(rows, jnp.stack([expected] * 3))


def test_the_mask_of_a_gradient_is_that_of_the_key():
  view, key = jax_view(jax_jit(lambda x: F.dropout(x, 0.5))), jax.random.key(5)
  forward = view(jnp.ones(64), rng=key)
  loss = lambda x, key: view(x, rng=key).sum()  # noqa: E731
  for gradient in (
    jax.grad(loss),
    jax.jit(jax.grad(loss)),
    jax.grad(jax.jit(loss)),
    jax.grad(jax.checkpoint(loss)),
    jax.jacrev(jax.jit(loss)),
    lambda x, key: jax.linear_transpose(lambda x: view(x, rng=key), x)(jnp.ones(64))[0],
  ):
    assert jnp.array_equal(gradient(jnp.ones(64), key), forward)


# Without a key -----------------------------------------------------------------------

STAGED = {
  "jit": lambda f: jax.jit(f)(_x()),
  "scan": lambda f: lax.scan(lambda c, _: (f(c), None), _x(), None, length=2),
  "fori_loop": lambda f: lax.fori_loop(0, 2, lambda _, x: f(x), _x()),
  "while_loop": lambda f: lax.while_loop(lambda x: x.sum() < 9, f, _x()),
  "cond": lambda f: lax.cond(True, f, lambda x: x, _x()),
  "checkpoint": lambda f: jax.checkpoint(f)(_x()),
  "make_jaxpr": lambda f: jax.make_jaxpr(f)(_x()),
  "eval_shape": lambda f: jax.eval_shape(f, _x()),
  "export": lambda f: jax.export.export(jax.jit(f))(_x()),
  "grad of jit": lambda f: jax.grad(lambda x: jax.jit(f)(x).sum())(_x()),
  "linearize of jit": lambda f: jax.linearize(jax.jit(f), _x()),
  "shard_map": lambda f: jax.shard_map(
    f, mesh=_mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec()
  )(_x()),
}


SOME_STAGED = ("jit", "scan", "checkpoint", "eval_shape")


@each_inner
def test_staged_draw_without_a_key_raises_and_keeps_the_state(env, inner):
  view, expected = jax_view(INNER[inner](_noise)), _next(env)
  for name in STAGED if inner == "jax_jit" else SOME_STAGED:
    for _ in range(2):  # leftovers of the first refusal would show
      with pytest.raises(TracedDrawError) as caught:
        STAGED[name](view)
      for way in ("jax_jit", "rng=key", "env.rng_scope(key)"):
        assert way in str(caught.value), name
      assert _next(env) == expected, name


@each_inner
def test_without_a_key_a_draw_in_a_raw_vmap_is_refused(env, inner):
  view, expected = jax_view(INNER[inner](_noise)), _next(env)
  with pytest.raises(TracedDrawError, match="each row its key"):
    jax.vmap(view)(jnp.ones((2, N)))
  assert _next(env) == expected


RUN_ONCE = {
  "jvp": lambda f: jax.jvp(f, (_x(),), (_x(),))[0],
  "vjp": lambda f: jax.vjp(f, _x())[0],
  "linearize": lambda f: jax.linearize(f, _x())[0],
  "grad": lambda f: jax.grad(lambda x: (x.sum(), f(x)), has_aux=True)(_x())[1],
}


ONCE = [("jax_jit", outer) for outer in RUN_ONCE]
ONCE += [(inner, "vjp") for inner in ("scan", "cond", "jax_vmap")]
ONCE += [("while_loop", "jvp")]


@pytest.mark.parametrize("inner, outer", ONCE)
def test_without_a_key_differentiation_draws_as_a_plain_call(env, inner, outer):
  with env.rng_scope(_keys()[0]) as stream:
    found = RUN_ONCE[outer](jax_view(INNER[inner](_noise)))
    np.testing.assert_array_equal(found, _drawn(inner)[0])
    assert stream.draws > 0


@each_inner
def test_without_a_draw_any_raw_transformation_is_fine(env, inner):
  torch_function = INNER[inner](lambda x: x * 2)
  expected = torch_function(torch.arange(1.0, N + 1).to("jax")).numpy()
  view = jax_view(torch_function)
  for transformed in (jax.jit(view), jax.checkpoint(view)):
    np.testing.assert_array_equal(transformed(_x()), expected)
  np.testing.assert_array_equal(jax.vmap(view)(jnp.stack([_x()] * 2))[1], expected)
