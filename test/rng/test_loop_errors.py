"""Refusals of loops, branches and maps: a clear error, and no state changes."""

import pytest
import torch
from rng.boundaries import drop

from torchax.errors import MixedDeviceError, MutationError, RngError
from torchax.interop import (
  cond,
  fori_loop,
  jax_jit,
  jax_vmap,
  scan,
  switch,
  while_loop,
)


def _x() -> torch.Tensor:
  return torch.ones(3, device="jax")


def _rand(generator=None) -> torch.Tensor:
  return torch.rand(3, generator=generator, device="jax")


def _three(index=3) -> torch.Tensor:
  return torch.tensor(index).to("jax")


@pytest.fixture(autouse=True)
def state_stays(env):
  """Assert that a test leaves the stream where it was."""
  _rand()
  stream, before = env.rng, env.rng.state.state_dict()
  yield
  assert env.rng is stream
  assert env.rng.state.state_dict() == before


# Loops of each kind around a body `x -> x` -------------------------------------------

LOOPS = {
  "scan": lambda f: scan(lambda c, _: (f(c), None), _x(), length=2),
  "fori_loop": lambda f: fori_loop(0, 2, lambda i, v: f(v), _x()),
  "fori_loop of tensors": lambda f: fori_loop(0, _three(), lambda i, v: f(v), _x()),
  "while_loop": lambda f: while_loop(lambda v: v.sum() < 9, f, _x()),
  "cond": lambda f: cond(_three() > 0, f, lambda x: x, _x()),
  "switch": lambda f: switch(_three(0), [f, lambda x: x, drop], _x()),
  "jax_vmap": lambda f: jax_vmap(f, randomness="different")(torch.stack([_x(), _x()])),
}
each_loop = pytest.mark.parametrize("name", LOOPS)
WRAPS = {"eager": lambda loop: loop(), "jit": lambda loop: jax_jit(loop)()}
each_wrap = pytest.mark.parametrize("wrap", WRAPS)


def _require_refused(loop, error, match: str | None = None) -> None:
  """Assert the error twice, so that leftovers of the first trace would show."""
  for _ in range(2):
    with pytest.raises(error, match=match):
      loop()


@each_wrap
@each_loop
def test_a_body_that_seeds_is_refused(name, wrap):
  def body(x):
    drop(x)
    torch.manual_seed(3)
    return drop(x)

  _require_refused(lambda: WRAPS[wrap](lambda: LOOPS[name](body)), RngError, "seeds")


@each_loop
def test_an_exception_in_a_body_passes_through(name):
  generator = torch.Generator().manual_seed(2)
  before = generator.get_state()

  def body(x):
    drop(x)
    if name not in ("while_loop", "fori_loop of tensors"):
      _rand(generator)
    raise KeyError("mine")

  _require_refused(lambda: LOOPS[name](body), KeyError, "mine")
  _require_refused(lambda: jax_jit(lambda: LOOPS[name](body))(), KeyError, "mine")
  assert torch.equal(generator.get_state(), before)


@each_loop
def test_backward_in_a_body_is_refused(name):
  weight = torch.ones(3, device="jax", requires_grad=True)

  def body(x):
    with torch.enable_grad():
      (drop(weight) * x).sum().backward()
    return x

  with torch.no_grad():
    _require_refused(
      lambda: LOOPS[name](body), MutationError, "backward.*autograd.grad"
    )
  assert weight.grad is None


UNKNOWN = ("while_loop", "fori_loop of tensors")


@pytest.mark.parametrize("name", UNKNOWN)
@each_wrap
def test_a_generator_in_a_loop_of_unknown_length_is_refused(name, wrap):
  generator = torch.Generator().manual_seed(2)
  before = generator.get_state()
  body = lambda x: drop(x) + _rand(generator)  # noqa: E731
  loop = lambda: WRAPS[wrap](lambda: LOOPS[name](body))  # noqa: E731
  _require_refused(loop, RngError, "Generator.*length is not known.*`scan`")
  assert torch.equal(generator.get_state(), before)


@each_wrap
def test_a_condition_of_while_loop_that_draws_is_refused(wrap):
  def is_open(x):
    return drop(x).sum() < 2

  loop = lambda: WRAPS[wrap](lambda: while_loop(is_open, drop, _x()))  # noqa: E731
  _require_refused(loop, RngError, "condition of while_loop draws")


def _shrinking(x):
  return drop(x)[:2]


WRONG = {
  "scan without a pair": (
    lambda: scan(lambda c, _: drop(c), _x(), length=2),
    TypeError,
  ),
  "scan with a triple": (
    lambda: scan(lambda c, _: (drop(c), c, c), _x(), length=2),
    TypeError,
  ),
  "scan with another carry": (
    lambda: scan(lambda c, _: (_shrinking(c), None), _x(), length=2),
    TypeError,
  ),
  "fori_loop with another value": (lambda: LOOPS["fori_loop"](_shrinking), TypeError),
  "while_loop with another value": (lambda: LOOPS["while_loop"](_shrinking), TypeError),
  "cond with unequal results": (lambda: LOOPS["cond"](_shrinking), TypeError),
  "switch with unequal results": (lambda: LOOPS["switch"](_shrinking), TypeError),
  "while_loop with a number for a condition": (
    lambda: while_loop(lambda x: x.sum(), drop, _x()),
    TypeError,
  ),
  "no function": (lambda: scan(_x(), _x(), length=2), TypeError),
  "no branches": (lambda: switch(_three(), [], _x()), ValueError),
  "no length": (lambda: scan(lambda c, x: (drop(c), None), _x()), ValueError),
  "another length": (
    lambda: scan(lambda c, x: (drop(c), None), _x(), _x(), length=2),
    ValueError,
  ),
  "unequal lengths": (
    lambda: scan(lambda c, x: (drop(c), None), _x(), [_x(), _x()[:2]]),
    ValueError,
  ),
  "xs without dimensions": (
    lambda: scan(lambda c, x: (drop(c), None), _x(), _three()),
    ValueError,
  ),
  "xs on the CPU": (
    lambda: scan(lambda c, x: (drop(c), None), _x(), torch.ones(2)),
    MixedDeviceError,
  ),
}


@each_wrap
@pytest.mark.parametrize("name", WRONG)
def test_arguments_and_results_of_the_wrong_form_are_refused(name, wrap):
  loop, error = WRONG[name]
  _require_refused(lambda: WRAPS[wrap](loop), error)


def test_a_loop_works_after_it_was_refused(env):
  seeds = [True]

  def body(carry, _):
    if seeds:
      torch.manual_seed(3)
    return drop(carry), _rand()

  _require_refused(lambda: scan(body, _x(), length=2), RngError)
  seeds.clear()
  with env.rng_scope(0):
    first, second = scan(body, _x(), length=2)[1].tolist()
  assert first != second
