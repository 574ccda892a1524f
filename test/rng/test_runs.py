"""Comparison of runs: the first difference of two runs, and repeated draws."""

import json

import jax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.errors import RngError
from torchax.interop import jax_jit, scan
from torchax.rng import Ledger, diff, replay


@pytest.fixture(autouse=True)
def enabled(env):
  with env:
    yield


def _x() -> torch.Tensor:
  return torch.linspace(0.1, 0.9, 6).to("jax")


def _net() -> torch.nn.Module:
  return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.25))


def _ledger(env, run, seed=0) -> Ledger:
  torch.manual_seed(seed)
  with env.rng.record() as ledger:
    run()
  return ledger


def _program():
  _net()(_x())
  torch.randint(-3, 9, (4,), device="jax")
  jax_jit(lambda: torch.randn(3, device="jax"))()
  _x().normal_(float("inf"), 0.5)


# First difference of two runs ---------------------------------------------------------


def test_runs_that_draw_the_same_do_not_differ(env):
  eager, again = (_ledger(env, _program) for _ in range(2))
  compiled = _ledger(env, jax_jit(lambda: _program()))
  assert diff(eager, again) is None and diff([], []) is None
  assert diff(eager, compiled) is None


CHANGES = {
  "another seed": (lambda: _net()(_x()), 1, 0, ("key",)),
  "a draw before": (
    lambda: (torch.rand(1, device="jax"), _net()(_x())),
    0,
    0,
    ("site", "shape", "distribution", "op"),
  ),
  "another rate": (
    lambda: torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.1))(_x()),
    0,
    1,
    ("distribution",),
  ),
  "another batch": (
    lambda: _net()[1](_net()[0](_x())[:3]),
    0,
    0,
    ("site",),
  ),
  "another dtype": (lambda: _net()(_x().half()), 0, 0, ("dtype",)),
  "a layer less": (lambda: torch.nn.Sequential(_net()[0])(_x()), 0, 1, ()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_draw_that_differs_is_named(env, name):
  run, seed, index, fields = CHANGES[name]
  expected = _ledger(env, lambda: _net()(_x()))
  found = diff(expected, _ledger(env, run, seed))
  assert (found.index, found.fields) == (index, fields)
  assert found.first == expected[index]
  assert f"draw {index}" in str(found) and all(field in str(found) for field in fields)
  other = diff(_ledger(env, run, seed), expected)
  assert (other.index, other.second) == (index, expected[index])


def test_a_difference_has_a_picture(env):
  pyplot = pytest.importorskip("matplotlib.pyplot", reason="no extra `plot` installed")
  found = diff(
    _ledger(env, lambda: _net()(_x())), _ledger(env, lambda: _net()[0](_x()))
  )
  ax = found.plot()
  assert [tick.get_text() for tick in ax.get_yticklabels()] == [
    "first run",
    "second run",
  ]
  assert ax.get_title(loc="left") == "draw 0: site"
  pyplot.close(ax.figure)


# Repeated draws -----------------------------------------------------------------------

# Name -> (draw, tensors that its numbers depend on).
OF_NUMBERS = {
  "rand": lambda: torch.rand(3, 2, device="jax"),
  "rand, half": lambda: torch.rand(3, dtype=torch.float16, device="jax"),
  "randn": lambda: torch.randn(3, device="jax"),
  "randint": lambda: torch.randint(-3, 9, (4,), device="jax"),
  "randperm": lambda: torch.randperm(7, device="jax"),
  "rand_like": lambda: torch.rand_like(_x()),
  "uniform_": lambda: _x().uniform_(-1, 2),
  "normal_": lambda: _x().normal_(1 / 3, 2),
  "exponential_": lambda: _x().exponential_(2.0),
  "cauchy_": lambda: _x().cauchy_(),
  "geometric_": lambda: _x().geometric_(0.3),
  "log_normal_": lambda: _x().log_normal_(),
  "random_": lambda: _x().random_(2, 5),
  "bernoulli_": lambda: _x().bernoulli_(0.3),
  "normal": lambda: torch.normal(1.0, 2.0, (3,), device="jax"),
  "dropout": lambda: F.dropout(torch.ones(6, device="jax"), 0.3),
  "compiled": lambda: jax_jit(lambda: torch.rand(3, device="jax"))(),
  "a scan": lambda: scan(lambda c, _: (c, torch.rand(3, device="jax")), _x(), length=1)[
    1
  ][0],
}
OF_TENSORS = {
  "bernoulli": (torch.bernoulli, lambda: [_x()]),
  "normal": (torch.normal, lambda: [_x(), _x() + 1]),
  "multinomial": (lambda w: torch.multinomial(w, 3), lambda: [_x()]),
  "poisson": (torch.poisson, lambda: [_x()]),
  "gamma": (torch._standard_gamma, lambda: [_x()]),
  "binomial": (torch.binomial, lambda: [torch.ceil(_x() * 9), _x()]),
}


@pytest.mark.parametrize("mode", ["order", "site"])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_draw_is_made_again_from_its_row(env, name, mode):
  torchax.rng.address_by(mode)
  try:
    torch.rand(1, device="jax")
    with env.rng.record() as ledger:
      drawn = OF_NUMBERS[name]()
    before = env.rng.state.state_dict()
    (row,) = ledger
    again = replay(row)
    assert torch.equal(again, drawn) and again.dtype == drawn.dtype
    assert env.rng.state.state_dict() == before
  finally:
    torchax.rng.address_by("order")


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_draw_that_depends_on_tensors_takes_them_again(env, name):
  function, tensors = OF_TENSORS[name]
  with env.rng.record() as ledger:
    drawn = function(*tensors())
  assert torch.equal(replay(ledger[0], *tensors()), drawn)
  assert torch.equal(replay(ledger[0], *[t.cpu() for t in tensors()]), drawn)
  with pytest.raises(ValueError, match=r"Give them again.*float32\[6\].* but got none"):
    replay(ledger[0])
  with pytest.raises(ValueError, match=r"got float32\[1\]"):
    replay(ledger[0], torch.ones(1, device="jax"))


def test_a_draw_with_a_generator_is_made_again(env):
  generator = torch.Generator().manual_seed(5)
  torch.rand(1, device="jax", generator=generator)
  with env.rng.record() as ledger:
    drawn = torch.rand(3, device="jax", generator=generator)
  before = generator.get_state()
  assert torch.equal(replay(ledger[0]), drawn)
  assert torch.equal(generator.get_state(), before)


def test_a_key_that_was_taken_is_known_and_draws_nothing(env):
  with env.rng.record() as ledger:
    key = env.get_and_rotate_prng_key()
  assert ledger[0].prng_key == key
  with pytest.raises(RngError, match="is a key that was taken"):
    replay(ledger[0])


def test_a_key_without_a_value_is_said_to_have_none(env):
  @jax_jit
  def scoped(key):
    with env.rng_scope(key):
      return torch.rand(2, device="jax")

  with env.rng.record() as ledger:
    scoped(jax.random.key(0))
  with pytest.raises(RngError, match="the key has no value"):
    replay(ledger[0])


def test_arguments_are_plain_data(env):
  ledger = _ledger(env, _program)
  for draw in ledger:
    assert json.loads(json.dumps(draw.arguments)) is not None
    hash(draw)
