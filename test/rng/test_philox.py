"""Philox4x32-10 beside published vectors, numpy and JAX's samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torchax
from torchax.errors import SeedError
from torchax.rng import philox, torch_key

# Counter, key, encrypted counter: known answers of Random123,
# https://github.com/DEShawResearch/random123, tests/kat_vectors.
KNOWN = (
  (
    (0, 0, 0, 0),
    (0, 0),
    (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
  ),
  (
    (0xFFFFFFFF,) * 4,
    (0xFFFFFFFF,) * 2,
    (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
  ),
  (
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    (0xA4093822, 0x299F31D0),
    (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
  ),
)


def uint32(*words):
  return tuple(jnp.uint32(word) for word in words)


def torch_random():
  return pytest.importorskip(
    "torch.func._random", reason="torch has stateless random numbers since 2.13"
  )


def typed(seed=42):
  return jax.random.key(seed, impl=philox.NAME)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_blocks_equal_the_known_answers(counter, key, expected):
  assert philox.encrypt(uint32(*key), uint32(*counter)) == uint32(*expected)


@pytest.mark.parametrize("x64", [False, True])
def test_blocks_equal_numpy_across_the_end_of_the_offset(x64):
  """The key of numpy's generator is the seed; its counter starts one block earlier."""
  seed, offset = 0x0123456789ABCDEF, 2**64 - 2
  with jax.enable_x64(x64):
    key = torch.tensor([seed, offset], dtype=torch.uint64).to("jax")
    words = philox.bits(philox.words_of(key.jax()), 16, 32)
    blocks = np.asarray(words).reshape(4, 4)
  for block, counter in zip(blocks, (2**64 - 2, 2**64 - 1, 0, 1), strict=True):
    low, high = counter % 2**32, counter >> 32
    expected = philox.encrypt(uint32(seed % 2**32, seed >> 32), uint32(low, high, 0, 0))
    assert block.tolist() == [int(word) for word in expected]


@pytest.mark.parametrize("width", [8, 16, 32])
def test_narrow_integers_are_the_low_bits_of_words(width):
  words = jax.random.bits(typed(), (3, 7))
  narrow = jax.random.bits(typed(), (3, 7), f"uint{width}")
  assert jnp.array_equal(narrow, words.astype(narrow.dtype))


def test_a_wide_integer_is_two_words():
  words = np.asarray(jax.random.bits(typed(), (6,))).astype(np.uint64)
  with jax.enable_x64(True):
    wide = jax.random.bits(typed(), (3,), "uint64")
  assert wide.tolist() == (words[::2] << np.uint64(32) | words[1::2]).tolist()


def test_a_split_is_the_blocks_of_the_key():
  blocks = jax.random.bits(typed(), (3, 4))
  assert jnp.array_equal(jax.random.key_data(jax.random.split(typed(), 3)), blocks)
  assert jax.random.key_data(jax.random.fold_in(typed(), 2)).tolist() == (
    blocks[2].tolist()
  )


def test_keys_of_torch_and_jax_convert_into_one_another():
  seed = 2**40 + 7
  key = torch_random().key(seed, device="jax")
  for given in (key, key.cpu()):
    assert torch_key(torchax.rng.as_key(given)).tolist() == [seed, 0]
  children = torch_key(jax.random.split(torchax.rng.as_key(key), 3))
  assert children.dtype == jnp.uint64
  assert children.tolist() == torch_random().split(key, 3).tolist()


def test_another_key_is_no_key_of_torch():
  with pytest.raises(SeedError, match="torch_philox.*got a key of threefry2x32"):
    torch_key(jax.random.key(0))


def test_a_scope_with_a_torch_key_draws_from_it(env):
  key = torch_random().key(3, device="jax")
  with env, env.rng_scope(key):
    first = torch.rand(4, device="jax")
    assert env.rng.state.impl == philox.NAME
  with env, env.rng_scope(typed(3)):
    assert torch.equal(torch.rand(4, device="jax"), first)
