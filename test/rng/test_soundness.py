"""`explain(f, …).require_sound()`: keys that are constants, used twice, or dropped."""

import jax
import pytest
import torch
from rng.boundaries import drop
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.interop import (
  JittableModule,
  call_jax,
  cond,
  fori_loop,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_vmap,
  scan,
  while_loop,
)
from torchax.rng import explain


@pytest.fixture(autouse=True)
def enabled(env):
  with env:
    yield


def _x(n=4) -> torch.Tensor:
  return torch.arange(1.0, n + 1).to("jax")


def _net() -> torch.nn.Module:
  layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.RReLU()]
  return torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)).to("jax")


def _by_key(env, function):
  return call_jax(function, env.get_and_rotate_prng_key())


def _normal(key):
  return jax.random.normal(key, (4,))


GENERATOR = torch.Generator().manual_seed(0)

SOUND = {
  "nothing": lambda env: lambda x: x * 2,
  "draws": lambda env: lambda x: drop(drop(x)) + torch.randn(4, device="jax"),
  "a module": lambda env: _net(),
  "a jitted module": lambda env: JittableModule(_net()),
  "nested": lambda env: jax_jit(lambda x: jax_jit(drop)(drop(x))),
  "checkpoint": lambda env: lambda x: gradient_checkpoint(drop)(drop(x)),
  "torch's checkpoint": lambda env: lambda x: checkpoint(drop, x, use_reentrant=False),
  "gradient": lambda env: lambda x: jax_value_and_grad(lambda x: drop(x).sum())(x)[1],
  "scan": lambda env: lambda x: scan(lambda c, _: (drop(c), drop(c)), x, length=3)[1],
  "nested loops": lambda env: (
    lambda x: fori_loop(
      0, 3, lambda i, c: scan(lambda d, _: (drop(d), None), c, length=2)[0], x
    )
  ),
  "while_loop": lambda env: (
    lambda x: while_loop(
      lambda v: v.sum() < 90, lambda v: v + torch.rand(4, device="jax"), x
    )
  ),
  "branches": lambda env: lambda x: cond(x.sum() > 0, drop, lambda x: drop(drop(x)), x),
  "vmap": lambda env: lambda x: jax_vmap(drop, randomness="different")(x.view(2, 2)),
  "a generator": lambda env: (
    lambda x: (
      torch.rand(4, device="jax", generator=GENERATOR)
      + torch.rand(4, device="jax", generator=GENERATOR)
    )
  ),
  "keys for JAX": lambda env: lambda x: _by_key(env, _normal) + _by_key(env, _normal),
  "a key that is split": lambda env: (
    lambda x: _by_key(env, lambda key: sum(map(_normal, jax.random.split(key))))
  ),
  "a scope of an operand": lambda env: lambda x: _in_scope(env, x.sum().int()),
}


def _in_scope(env, seed):
  with env.rng_scope(seed):
    return torch.rand(4, device="jax") + torch.rand(4, device="jax")


@pytest.mark.parametrize("mode", ["order", "site"])
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_program_is_proved(env, name, mode):
  torchax.rng.address_by(mode)
  try:
    before = env.rng.state.state_dict()
    explain(SOUND[name](env), _x()).require_sound()
    assert env.rng.state.state_dict() == before
  finally:
    torchax.rng.address_by("order")


def _loop_with_one_key(env):
  def function(x):
    key = env.get_and_rotate_prng_key()
    return scan(lambda c, _: (c + call_jax(_normal, key), None), x, length=3)[0]

  return function


UNSOUND = {
  "a constant": (
    lambda env: lambda x: x + call_jax(lambda: _normal(jax.random.key(3))),
    "constant of the program",
  ),
  "a constant in a loop": (
    lambda env: (
      lambda x: scan(
        lambda c, _: (c + call_jax(lambda: _normal(jax.random.key(3))), None),
        x,
        length=3,
      )[0]
    ),
    "constant of the program",
  ),
  "a scope of a number": (
    lambda env: lambda x: x + _in_scope(env, 3),
    "constant of the program",
  ),
  "one key twice": (
    lambda env: lambda x: _by_key(env, lambda key: _normal(key) + _normal(key)),
    "with one key, so they",
  ),
  "one state twice": (
    lambda env: lambda x: _twice_from_one_state(env, x),
    "with one key, so they",
  ),
  "one key in every turn": (_loop_with_one_key, "in each turn of a loop"),
  "a key that is dropped": (
    lambda env: lambda x: (env.get_and_rotate_prng_key(), x)[1],
    "takes a key that nothing draws with",
  ),
}


def _twice_from_one_state(env, x):
  state = torch.jax.get_rng_state()
  first = torch.rand(4, device="jax")
  torch.jax.set_rng_state(state)
  return x + first + torch.rand(4, device="jax")


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_program_is_named_with_its_line(env, name):
  make, message = UNSOUND[name]
  with pytest.raises(AssertionError, match=message) as raised:
    explain(make(env), _x()).require_sound()
  assert "test_soundness.py:" in str(raised.value)


def test_a_recorded_ledger_has_no_program(env):
  with env.rng.record() as ledger:
    torch.rand(2, device="jax")
  with pytest.raises(ValueError, match="Only a ledger of `torchax.rng.explain"):
    ledger.require_sound()
