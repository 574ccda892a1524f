"""Attention in blocks of keys: equal to plain attention, with the same dropout mask."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops.harness import floats

import torchax
from torchax.interop import gradient_checkpoint, jax_jit, jax_value_and_grad, jax_vmap
from torchax.ops import mappings
from torchax.ops.jaten import _blockwise_attention as blockwise
from torchax.ops.jaten.attention import scaled_dot_product_attention

ROWS, KEYS = 5, 7
QUERY, KEY, VALUE = floats(2, 4, 5, 8), floats(2, 4, 7, 8, seed=1), floats(2, 4, 7, 6)
MASK = floats(2, 1, ROWS, KEYS, seed=3) > 0
MASK[1, 0, 2] = False  # one fully masked row
MASKS = {
  "none": None,
  "whole": MASK,
  "of keys": MASK[:, :, 1:2],
  "of rows": MASK[..., 1:2],
  "without a batch": MASK[0, 0],
}


def gradients(attend, *arrays):
  def total(*arrays):
    output = attend(*arrays)
    return jnp.sin(output).sum(), output

  return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize(
  "mask, is_causal, block, key_heads",
  (
    *itertools.product(MASKS, (False,), (3,), (4,)),
    ("none", True, 3, 4),
    ("none", True, 512, 2),
    ("whole", False, 7, 1),
  ),
)
def test_values_and_gradients_equal_plain_attention(mask, is_causal, block, key_heads):
  arrays = [mappings.t2j(t) for t in (QUERY, KEY[:, :key_heads], VALUE[:, :key_heads])]
  mask = None if MASKS[mask] is None else mappings.t2j(MASKS[mask])
  flags = dict(is_causal=is_causal, scale=0.4)
  found = gradients(
    lambda *a: blockwise.attention(*a, mask, block=block, **flags), *arrays
  )
  expected = gradients(
    lambda *a: scaled_dot_product_attention(*a, mask, enable_gqa=True, **flags), *arrays
  )
  for have, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(have, want, atol=1e-6, rtol=1e-5)


@pytest.fixture
def env():
  env = torchax.default_env()
  yield env
  env.config.attention = "auto"


def both(env, function):
  """Return a function's results with plain and blockwise attention, with one seed."""
  found = []
  for word in ("plain", "blockwise"):
    env.config.attention = word
    torch.manual_seed(5)
    with env:
      # Both must also leave the stream at the same offset.
      found.append([*function(), torch.rand(2, device="jax")])
  return found


def attend_and_differentiate(dtype, dropout_p, attend):
  leaves = [t.to("jax", dtype).requires_grad_() for t in (QUERY, KEY, VALUE)]
  output = attend(*leaves, dropout_p)
  return [output, *torch.autograd.grad(output.sin().sum(), leaves)]


def eagerly(q, k, v, p):
  return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


def twice(q, k, v, p):
  return eagerly(q, k, v, 0.9 * p) + eagerly(q, k, v, p)


WAYS = {
  "eager": eagerly,
  "several probabilities": twice,
  "checkpoint": lambda *a: gradient_checkpoint(eagerly)(*a),
  "torch's checkpoint": lambda *a: torch.utils.checkpoint.checkpoint(
    eagerly, *a, use_reentrant=False
  ),
  "compiled": lambda *a: jax_jit(lambda q, k, v: eagerly(q, k, v, a[3]))(*a[:3]),
  "vmap": lambda q, k, v, p: jax_vmap(
    lambda q, k, v: eagerly(q, k, v, p), randomness="different"
  )(q, k, v),
}


@pytest.mark.parametrize("way", WAYS)
def test_dropout_draws_the_same_mask_as_plain_attention(env, way):
  found, expected = both(
    env, lambda: attend_and_differentiate(torch.float32, 0.4, WAYS[way])
  )
  for have, want in zip(found, expected, strict=True):
    torch.testing.assert_close(have, want, atol=1e-6, rtol=1e-5)


def test_dropout_mask_is_bitwise_equal_to_plain_attention(env):
  """With equal weights and values of one key each, the output is the mask."""
  size, p = 600, 0.3  # more keys than in a block
  zeros = (
    torch.zeros(2, 3, 4, 8, device="jax"),
    torch.zeros(2, 3, size, 8, device="jax"),
  )
  values = torch.eye(size, device="jax").expand(2, 3, size, size)

  def dropped():
    return [F.scaled_dot_product_attention(*zeros, values, dropout_p=p) != 0]

  (plain, _), (blocks, _) = both(env, dropped)
  assert torch.equal(plain, blocks)
  kept = plain.float().mean().item()
  assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / plain.numel()) ** 0.5


@pytest.mark.parametrize("size", (1, 6))
def test_half_precision_is_as_accurate_as_plain_attention(env, size):
  """Large queries give rows with one large weight."""

  def in_dtype(dtype):
    leaves = [(size * t).to("jax", torch.bfloat16) for t in (QUERY, KEY, VALUE)]
    leaves = [t.to(dtype).requires_grad_() for t in leaves]
    output = eagerly(*leaves, 0.4)
    return [output, *torch.autograd.grad(output.float().sin().sum(), leaves)]

  (*exact, _), _ = both(env, lambda: in_dtype(torch.float32))
  (*plain, _), (*found, _) = both(env, lambda: in_dtype(torch.bfloat16))
  for have, other, want in zip(found, plain, exact, strict=True):
    assert have.dtype == other.dtype == torch.bfloat16
    errors = [(t.float() - want).norm().item() for t in (have, other)]
    assert errors[0] < 1.5 * errors[1] < 0.2 * want.norm().item()


def test_second_derivatives_exist(env):
  def second():
    leaves = [t.to("jax").requires_grad_() for t in (QUERY, KEY, VALUE)]
    output = eagerly(*leaves, 0.4)
    first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

  found, expected = both(env, second)
  for have, want in zip(found, expected, strict=True):
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


def test_dropout_probability_one_gives_zeros(env):
  for output in both(env, lambda: [eagerly(*operands(), 1.0)]):
    assert not output[0].any()


def operands():
  return [t.to("jax") for t in (QUERY, KEY, VALUE)]


def test_one_draw_is_made_and_recorded(env):
  env.config.attention = "blockwise"
  with env, env.rng.record() as ledger:
    eagerly(*operands(), 0.5)
    eagerly(*operands(), 0.0)
  (draw,) = ledger
  assert draw.distribution.startswith("bernoulli")
  words = jax.random.key_data(draw.prng_key)
  assert torchax.rng.replay(draw).tolist() == words.tolist()


def test_memory_is_linear_in_the_length(env):
  def needed(word, length):
    env.config.attention = word
    shape = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)
    step = jax_jit(jax_value_and_grad(lambda x: eagerly(x, x, x, 0.1).sum()))
    x = torch.zeros(shape.shape, device="jax")
    with env:
      return step.lower(x).compile().memory_analysis().temp_size_in_bytes

  short, long = needed("blockwise", 2048), needed("blockwise", 4096)
  assert long < 2.2 * short
  assert 4 * long < needed("plain", 4096)
