"""Stateful generators of keys, of JAX and Flax, as the seed of a scope."""

import jax
import pytest
import torch

import torchax
from torchax.compat.jax_compat import StatefulPRNG
from torchax.errors import SeedError
from torchax.interop import jax_jit, jax_view


def stateful():
  return jax.experimental.random.stateful_rng(3)


def rngs():
  nnx = pytest.importorskip("flax.nnx", reason="the flax extra is not installed")
  return nnx.Rngs(3)


def rng_stream():
  return rngs().default


def next_key(generator):
  return generator.key() if isinstance(generator, StatefulPRNG) else generator()


GENERATORS = [stateful, rngs, rng_stream]
each_generator = pytest.mark.parametrize("make", GENERATORS, ids=lambda f: f.__name__)


def draw(generator):
  with torchax.default_env().rng_scope(generator):
    return torch.rand(4, device="jax")


@each_generator
def test_scope_draws_from_the_next_key_of_a_generator(make):
  used, other = make(), make()
  for _ in range(2):
    found = draw(used)
    assert torch.equal(found, draw(next_key(other)))
  assert next_key(used) == next_key(other)


@each_generator
def test_views_and_seeds_take_a_generator(make):
  used, other = make(), make()
  dropout = jax_view(torch.nn.Dropout(0.5))
  x = jax.numpy.ones(64)
  assert (dropout(x, rng=used) == dropout(x, rng=next_key(other))).all()
  torchax.rng.manual_seed(used)
  assert torchax.rng.current().state.key == next_key(other)


def test_compiled_scope_advances_a_stateful_generator():
  used, other = stateful(), stateful()
  compiled = jax_jit(lambda: draw(used))
  for _ in range(3):
    assert torch.equal(compiled(), draw(other))


def test_other_callables_are_no_seed():
  with pytest.raises(SeedError, match=r"StatefulPRNG.*nnx\.Rngs.*but got function"):
    draw(stateful)
