"""The laws that hold over every boundary, as equalities to the last bit.

`docs/rng-design.md` states them. A boundary here is a way to run a function of tensors:
eagerly, compiled, compiled inside compiled, checkpointed, differentiated. Loops and
maps are in `test_loops.py` and `test_maps.py`, nests of all in `test_nests.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.draws import DRAWS
from rng.jaxprs import equations

from torchax.compat import jax_compat
from torchax.errors import TracedDrawError
from torchax.interop import (
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
  torch_view,
)
from torchax.rng import RngState, is_typed_key, samplers
from torchax.rng.threefry import unrolled_key


def _x(n=6) -> torch.Tensor:
  return torch.arange(1.0, n + 1).to("jax")


def _drop(x):
  return F.dropout(x, 0.5)


def _rand() -> torch.Tensor:
  return torch.rand(6, device="jax")


def _state(env) -> dict:
  return env.rng.state.state_dict()


def _same(first, second) -> bool:
  return len(first) == len(second) and all(map(torch.equal, first, second))


# eager == jit == nested jit == checkpointed == value_and_grad ------------------------


def _program(x) -> list[torch.Tensor]:
  return [draw(x) for draw in DRAWS.values()]


def _with_gradient(wrap):
  """The program as the auxiliary output of a differentiated function."""

  def run(function):
    def loss(x):
      return (x * x).sum(), function(x)

    differentiated = wrap(jax_value_and_grad(loss, {"has_aux": True}))
    return lambda x: differentiated(x)[0][1]

  return run


def _identity(function):
  return function


BOUNDARIES = {
  "jit": jax_jit,
  "nested jit": lambda f: jax_jit(lambda x: jax_jit(f)(x)),
  "checkpoint": gradient_checkpoint,
  "jit of checkpoint": lambda f: jax_jit(gradient_checkpoint(f)),
  "checkpoint of jit": lambda f: gradient_checkpoint(jax_jit(f)),
  "value_and_grad": _with_gradient(_identity),
  "jit of value_and_grad": _with_gradient(jax_jit),
  "value_and_grad of jit of checkpoint": lambda f: _with_gradient(_identity)(
    jax_jit(gradient_checkpoint(f))
  ),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_draw_is_the_eager_one(env, name):
  wrapped = BOUNDARIES[name](_program)
  with env:
    expected = _program(_x()) + _program(_x())
  after = _state(env)
  torch.manual_seed(0)
  drawn = wrapped(_x()) + wrapped(_x())
  for label, first, second in zip([*DRAWS] * 2, drawn, expected):
    assert torch.equal(first, second), label
  assert _state(env) == after


def test_eager_draws_are_the_same_inside_the_environment_block(env):
  with env:
    inside = _program(_x())
  torch.manual_seed(0)
  for label, first, second in zip(DRAWS, _program(_x()), inside):
    assert torch.equal(first, second), label


def test_the_functional_form_draws_the_eager_numbers(env):
  with env:
    expected = _program(_x())
  state = RngState.from_seed(0)
  pure = functional_rng(_program)
  before = _state(env)
  for function in (pure, jax.jit(pure)):
    drawn, after = function(state, _x().jax())
    assert all(map(jnp.array_equal, drawn, jax_view(expected)))
    assert after.state_dict() == before
  assert _state(env) == before


def test_a_jax_view_with_a_key_draws_the_eager_numbers(env):
  with env:
    expected = jax_view(_program(_x()))
  view = jax_view(_program)
  for rng in (0, jax.random.key(0), RngState.from_seed(0)):
    assert all(map(jnp.array_equal, view(_x().jax(), rng=rng), expected))
  compiled = jax.jit(view)(_x().jax(), rng=jax.random.key(0))
  assert all(map(jnp.array_equal, compiled, expected))


def test_alpha_dropout_drops_the_same_eager_and_compiled(env):
  """XLA may contract its arithmetic, so results differ by up to 1 ulp."""
  x = _x(256)
  with env:
    eager = F.alpha_dropout(x, 0.3, training=True)
  torch.manual_seed(0)
  compiled = jax_jit(lambda x: F.alpha_dropout(x, 0.3, training=True))(x)
  np.testing.assert_array_max_ulp(eager.numpy(), compiled.numpy(), maxulp=1)


@pytest.mark.parametrize("name", ["normal", "multinomial", "bernoulli", "uniform_"])
def test_a_draw_gives_its_parameters_no_gradient(name):
  """As in torch, for `backward` and for gradients of JAX."""
  draws = {
    "normal": lambda x: torch.normal(x, x),
    "multinomial": lambda x: torch.multinomial(x, 3).float(),
    "bernoulli": lambda x: torch.bernoulli(x / 10),
    "uniform_": lambda x: (x * 1).uniform_(1.0, 2.0),
  }
  loss = lambda x: draws[name](x).sum() + 3 * x.sum()  # noqa: E731
  x = _x()
  _, grad = jax_value_and_grad(loss)(x)
  assert grad.tolist() == [3.0] * 6
  leaf = x.clone().requires_grad_()
  loss(leaf).backward()
  assert leaf.grad.tolist() == [3.0] * 6


def test_calls_go_on_where_eager_draws_and_other_calls_left_off():
  compiled = jax_jit(_drop)
  x = _x(32)
  mixed = [_drop(x), compiled(x), compiled(x), _drop(x), compiled(x)]
  torch.manual_seed(0)
  assert _same(mixed, [_drop(x) for _ in range(5)])


@pytest.mark.parametrize("wrap", [jax_jit, gradient_checkpoint])
def test_shape_dependent_draws_advance_by_the_actual_number(env, wrap):
  def f(x):
    return torch.stack([_rand() for _ in range(len(x))])

  wrapped = wrap(f)
  for n, total in ((3, 3), (1, 4), (3, 7)):
    wrapped(_x(n))
    assert env.rng.state.count == total


# Masks in the backward pass ---------------------------------------------------------


@pytest.mark.parametrize("wrap", [_identity, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("block", [_identity, gradient_checkpoint, jax_jit])
def test_the_gradient_has_the_mask_of_the_forward_pass(wrap, block):
  masked = block(lambda x: x * _drop(torch.ones(64, device="jax")))
  step = wrap(
    jax_value_and_grad(lambda x: ((y := masked(x)).sum(), y), {"has_aux": True})
  )
  (_, forward), grad = step(torch.ones(64, device="jax"))
  assert set(forward.tolist()) == {0.0, 2.0}
  assert torch.equal(grad, forward)


def test_backward_in_a_compiled_function_uses_the_forward_mask():
  def step(x):
    leaf = x.detach().requires_grad_()
    y = leaf * _drop(torch.ones(64, device="jax"))
    y.sum().backward()
    return y.detach(), leaf.grad

  x = torch.ones(64, device="jax")
  expected = step(x)
  torch.manual_seed(0)
  compiled = jax_jit(step)(x)
  assert torch.equal(*compiled) and _same(compiled, expected)


# Key and count are operands ---------------------------------------------------------


def _constants(closed):
  yield from closed.consts
  for equation in equations(closed.jaxpr):
    for inner in equation.params.values():
      yield from getattr(inner, "consts", ())


def _baked_keys(closed) -> list[str]:
  """Where a closed jaxpr makes or holds a key that is no operand."""
  found_equations = list(equations(closed.jaxpr))
  # The words of a key that has come in, under another implementation, are fine.
  words = {
    id(equation.outvars[0])
    for equation in found_equations
    if equation.primitive.name == "random_unwrap"
  }
  found = [
    str(equation)
    for equation in found_equations
    if equation.primitive.name == "random_seed"
    or (
      equation.primitive.name == "random_wrap" and id(equation.invars[0]) not in words
    )
  ]
  found += [
    f"constant {constant}"
    for constant in _constants(closed)
    if is_typed_key(constant)
    or (getattr(constant, "dtype", None) == jnp.uint32 and constant.size >= 2)
  ]
  return found


@pytest.mark.parametrize(
  "baked",
  [
    lambda: jax.random.uniform(jax.random.key(0)),
    lambda key=jax.random.key(0): jax.random.uniform(key),  # noqa: B008
    lambda data=jnp.zeros(2, jnp.uint32): jax.random.uniform(  # noqa: B008
      jax.random.wrap_key_data(data)
    ),
    lambda: jax.jit(lambda: jax.random.uniform(jax.random.key(0)))(),
    lambda key=jax.random.key(0): jax.random.uniform(unrolled_key(key)),  # noqa: B008
  ],
  ids=["seeded", "closed over", "raw data", "nested", "closed over, unrolled"],
)
def test_the_search_for_baked_keys_finds_them(baked):
  assert _baked_keys(jax.make_jaxpr(baked)())


TRACED = {
  "jit": lambda: jax_jit(_drop),
  "nested jit": lambda: jax_jit(lambda x: jax_jit(_drop)(jax_jit(_drop)(x))),
  "checkpoint": lambda: jax_jit(gradient_checkpoint(_drop)),
  "value_and_grad": lambda: jax_jit(jax_value_and_grad(lambda x: _drop(x).sum())),
  "value_and_grad of checkpoint": lambda: jax_jit(
    jax_value_and_grad(gradient_checkpoint(lambda x: _drop(x).sum()))
  ),
  "every draw": lambda: jax_jit(_program),
}


@pytest.mark.parametrize("name", TRACED)
def test_key_and_count_are_invars_and_never_constants(name):
  closed = TRACED[name]().trace(_x()).jaxpr
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert sorted(kinds) == ["float32[6]", "key<fry>[]", "uint32[]"]
  assert _baked_keys(closed) == []
  used = [var for equation in closed.jaxpr.eqns for var in equation.invars]
  for var in closed.jaxpr.invars:
    assert any(var is other for other in used), f"{var.aval} is never used"


@pytest.mark.parametrize(
  "wrap", [lambda f: f, gradient_checkpoint], ids=["plain", "checkpoint"]
)
def test_the_key_of_a_jax_view_is_an_invar(wrap):
  view = jax_view(wrap(_drop))
  closed = jax.make_jaxpr(view)(jnp.ones(6), rng=jax.random.key(0))
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert sorted(kinds) == ["float32[6]", "key<fry>[]"]
  assert _baked_keys(closed) == []


def test_the_state_of_a_functional_form_is_an_invar():
  closed = jax.make_jaxpr(functional_rng(_drop))(RngState.from_seed(0), jnp.ones(6))
  assert str(closed.jaxpr.invars[0].aval) == "key<fry>[]"
  assert len(closed.jaxpr.invars) == 3 and _baked_keys(closed) == []


def test_new_seed_changes_numbers_without_recompiling(env):
  traces = []

  def f(x):
    traces.append(None)
    return _drop(x) + torch.rand(32, device="jax")

  compiled = jax_jit(f)
  x = _x(32)
  outs = []
  for seed in (None, None, 1, -1, 2**40, jax.random.key(3), None):
    if seed is not None:
      env.manual_seed(seed)
    outs.append(tuple(compiled(x).tolist()))
  with env.rng_scope(9):
    outs.append(tuple(compiled(x).tolist()))
  with env.rng_scope(RngState.from_seed(9).advance(100_000)):
    outs.append(tuple(compiled(x).tolist()))
  assert len(traces) == 1
  assert len(set(outs)) == len(outs)


def test_a_seed_after_compilation_gives_its_eager_numbers():
  compiled = jax_jit(_drop)
  x = _x(32)
  compiled(x)
  for seed in (5, 6):
    torch.manual_seed(seed)
    expected = _drop(x)
    torch.manual_seed(seed)
    assert torch.equal(compiled(x), expected)


def _signature(text: str) -> str:
  return next(line for line in text.splitlines() if "@main" in line).split("->")[0]


def test_a_function_that_draws_nothing_has_no_key_parameter():
  signature = _signature(jax_jit(lambda x: x * 2).lower(_x()).as_text())
  assert signature.count("%arg") == 1 and "ui32" not in signature
  signature = _signature(jax_jit(_drop).lower(_x()).as_text())
  assert signature.count("%arg") == 3 and signature.count("ui32") == 2


def test_a_function_that_draws_nothing_leaves_the_stream_alone(env):
  before = _state(env)
  jax_jit(lambda x: x * 2)(_x())
  jax_value_and_grad(lambda x: x.sum())(_x())
  gradient_checkpoint(lambda x: x * 2)(_x())
  assert _state(env) == before


# Nothing leaks ----------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDARIES)
def test_no_tracer_leaks_from_a_boundary(env, name):
  def f(x):
    return [_drop(x), torch.randn(6, device="jax")]

  with jax.checking_leaks():
    BOUNDARIES[name](f)(_x())
  assert isinstance(env.rng.state.count, int)
  assert not isinstance(env.rng.state.key, jax.core.Tracer)


class _Mine(BaseException):
  """Not an Exception: as KeyboardInterrupt, it is caught by nobody."""


def _failing(error):
  def f(x):
    _drop(x)
    torch.manual_seed(3)
    _rand()
    raise error

  return f


# Outside of a trace a checkpointed function simply runs, draw by draw.
@pytest.mark.parametrize("name", [name for name in BOUNDARIES if name != "checkpoint"])
@pytest.mark.parametrize("error", [ValueError, _Mine])
def test_an_exception_in_a_boundary_leaves_the_state_as_it_was(env, name, error):
  _rand()
  expected = _rand()
  torch.manual_seed(0)
  _rand()
  stream, before = env.rng, _state(env)
  wrapped = BOUNDARIES[name](_failing(error))
  for _ in range(2):
    with pytest.raises(error):
      wrapped(_x())
    assert env.rng is stream and _state(env) == before
  assert torch.equal(_rand(), expected)


def test_a_shape_error_found_by_jax_leaves_the_state_as_it_was(env):
  compiled = jax_jit(lambda x: _drop(x) @ torch.rand(5, device="jax"))
  before = _state(env)
  with pytest.raises(Exception, match="shape|size|dimension|contract"):
    compiled(_x())
  assert _state(env) == before


def test_failed_draw_leaves_the_enclosing_trace_usable(env):
  def f(x):
    with pytest.raises(TracedDrawError):
      jax.vmap(jax_view(_drop))(jnp.ones((2, 3)))
    return _drop(x)

  x = _x(32)
  expected = _drop(x)
  torch.manual_seed(0)
  assert torch.equal(jax_jit(f)(x), expected)
  assert env.rng.state.count == 1


# Nothing is read back ---------------------------------------------------------------


@pytest.fixture
def no_readback(monkeypatch):
  """Any read of an array's numbers on the host raises, also where memory is shared."""

  def read(array, *args):
    raise AssertionError("an array was read back from the device")

  monkeypatch.setattr(jax_compat.ArrayImpl, "_value", property(read))
  monkeypatch.setattr(jax_compat.ArrayImpl, "item", read)
  # numpy takes the memory of a CPU array without asking it.
  for name in ("array", "asarray"):
    plain = getattr(np, name)

    def guarded(value, *args, plain=plain, **kwargs):
      is_array = isinstance(value, jax.Array)
      return read(value) if is_array else plain(value, *args, **kwargs)

    monkeypatch.setattr(np, name, guarded)


@pytest.mark.parametrize(
  "read",
  [
    float,
    int,
    bool,
    repr,
    jax.device_get,
    lambda array: array.item(),
    lambda array: np.asarray(array),
    lambda array: np.array(array),
    lambda array: torch.multinomial(torch_view(array.reshape(1)), 1),
  ],
  ids=[
    "float",
    "int",
    "bool",
    "repr",
    "get",
    "item",
    "asarray",
    "array",
    "multinomial",
  ],
)
def test_the_guard_against_reading_back_sees_reads(no_readback, read):
  array = jnp.zeros(()) + 1
  with pytest.raises(AssertionError, match="read back"):
    read(array)


def test_no_draw_and_no_compiled_call_reads_from_the_device(env, no_readback):
  # multinomial checks its weights, as torch does; every other draw must not wait.
  draws = [draw for name, draw in DRAWS.items() if "multinomial" not in name]

  def program(x):
    return [draw(x) for draw in draws]

  x = torch.ones(6, device="jax")
  compiled = jax_jit(program)
  step = jax_value_and_grad(gradient_checkpoint(lambda x: _drop(x).sum()))
  # Under a guard no operation runs on the host while its shapes are new.
  with jax.transfer_guard_device_to_host("disallow"):
    for n in (1, 2):  # so those of the program are operands: they are not the first
      torch.randint(n, 90, (6,), device="jax")
      torch.empty_like(x).random_(n, 90)
      torch.empty_like(x).bernoulli_(n / 10)
      F.dropout(x, n / 10)
    program(x)
    compiled(x)
    compiled(x)
    step(x)
    torch.manual_seed(4)
    compiled(x)
    with env.rng_scope(3):
      compiled(x)
    env.rng.fork("data").next_key()
    assert is_typed_key(env.prng_key)


# Upstream's names -------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [_identity, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("draws_before", [0, 3])
def test_prng_key_read_and_set_back_repeats_the_draws(env, wrap, draws_before):
  f = wrap(_rand)
  for _ in range(draws_before):
    _rand()
  key = env.prng_key
  first = [f(), f()]
  env.prng_key = key
  assert _same([f(), f()], first)


def test_reading_the_key_after_draws_and_writing_it_back_goes_on(env):
  """Upstream's compiled functions do this; the draws must not repeat."""
  drawn = []
  for _ in range(4):
    drawn.append(tuple(_rand().tolist()))
    env.prng_key = env.prng_key
  assert len(set(drawn)) == 4


def test_a_key_read_inside_a_compiled_function_goes_on_after_it(env):
  def f():
    first = _rand()
    key = env.prng_key
    second = _rand()
    env.prng_key = key
    return first, second, _rand()

  eager = [*f(), _rand(), *f(), _rand()]
  assert torch.equal(eager[1], eager[2]) and not torch.equal(eager[2], eager[4])
  torch.manual_seed(0)
  compiled = jax_jit(f)
  assert _same([*compiled(), _rand(), *compiled(), _rand()], eager)


def test_param_prng_is_prng_key(env):
  _rand()
  key = env.param.prng
  expected = _rand()
  env.prng_key = key
  assert torch.equal(_rand(), expected)


@pytest.mark.parametrize("wrap", [_identity, jax_jit], ids=["eager", "jit"])
def test_override_property_draws_from_its_key_then_resumes(env, wrap):
  f = wrap(_rand)
  outside = [f(), f()]
  torch.manual_seed(0)
  assert torch.equal(f(), outside[0])
  with env.override_property(prng=jax.random.key(5)):
    inside = [f(), f()]
  assert torch.equal(f(), outside[1])
  with env.override_property(prng=jax.random.key(5)):
    assert _same([f(), f()], inside)
  assert not torch.equal(inside[0], inside[1])


def test_override_property_restores_after_an_exception(env):
  before = _state(env)
  with pytest.raises(KeyError), env.override_property(prng=jax.random.key(5)):
    _rand()
    raise KeyError
  assert _state(env) == before


def test_get_and_rotate_prng_key_is_a_draw_like_any_other(env):
  keys = [env.get_and_rotate_prng_key() for _ in range(3)]
  after = _rand()
  torch.manual_seed(0)
  drawn = [_rand() for _ in range(4)]
  for key, numbers in zip(keys, drawn):
    expected = jax.jit(lambda key: samplers.uniform(key, (6,), jnp.float32))(key)
    assert jnp.array_equal(expected, numbers.jax())
  assert torch.equal(after, drawn[3])


def test_compiled_get_and_rotate_prng_key_matches_eager(env):
  expected = [jax.random.key_data(env.get_and_rotate_prng_key()) for _ in range(2)]
  torch.manual_seed(0)
  compiled = jax_jit(lambda: env.get_and_rotate_prng_key())
  for data in expected:
    key = compiled()
    assert is_typed_key(key) and jnp.array_equal(jax.random.key_data(key), data)


# Seeding inside compiled functions --------------------------------------------------


@pytest.mark.parametrize("name", ["jit", "nested jit", "checkpoint", "value_and_grad"])
def test_seed_inside_a_boundary_matches_eager_and_persists(env, name):
  def f(x):
    first = _drop(x)
    torch.manual_seed(7)
    return [first, _drop(x)]

  x = _x(32)
  expected = [*f(x), _rand(), *f(x), _rand()]
  torch.manual_seed(0)
  wrapped = BOUNDARIES[name](f)
  drawn = [*wrapped(x), _rand(), *wrapped(x), _rand()]
  assert _same(drawn, expected)


def test_traced_seed_in_a_compiled_function_matches_eager(env):
  def f(seed):
    env.manual_seed(seed)
    return _rand()

  compiled = jax_jit(f)
  for number in (5, 6, -1, 2**31 - 1):
    seed = torch.tensor(number, dtype=torch.int32).to("jax")
    expected = [f(seed), _rand()]
    torch.manual_seed(0)
    assert _same([compiled(seed), _rand()], expected)


def test_a_traced_seed_does_not_retrace(env):
  traces = []

  def f(seed):
    traces.append(None)
    env.manual_seed(seed)
    return _rand()

  compiled = jax_jit(f)
  drawn = [compiled(torch.tensor(n, dtype=torch.int32).to("jax")) for n in range(3)]
  assert len(traces) == 1
  assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3


def test_a_key_argument_inside_a_compiled_function_seeds_it(env):
  compiled = jax_jit(lambda key: (env.manual_seed(key), _rand())[1])
  for seed in (3, 4):
    with env.rng_scope(seed):
      expected = _rand()
    assert torch.equal(compiled(jax.random.key(seed)), expected)


# Keys are used as JAX allows --------------------------------------------------------


def test_no_key_is_used_twice_as_far_as_jax_can_tell(env):
  def f(x):
    return _drop(x) + torch.randn(6, device="jax") + _drop(x)

  with jax.debug_key_reuse(True):
    f(_x())
    for wrap in (jax_jit, gradient_checkpoint):
      wrapped = wrap(f)
      wrapped(_x())
      wrapped(_x())
    jax_jit(jax_value_and_grad(gradient_checkpoint(lambda x: f(x).sum())))(_x())
    with env.rng_scope(env.rng.fork("data")):
      jax_jit(f)(_x())
    _ = env.prng_key
    jax_jit(f)(_x())
