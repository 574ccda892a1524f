"""Scaled dot-product attention on arrays against CPU torch."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from ops.harness import floats

import torchax
from torchax.core.program_limit import Effort
from torchax.functions import one_position
from torchax.ops import mappings
from torchax.ops.jaten.attention import scaled_dot_product_attention

QUERY, KEY, VALUE = floats(2, 4, 5, 8), floats(2, 4, 7, 8, seed=1), floats(2, 4, 7, 6)
MASK = floats(5, 7, seed=3) > 0
MASK[2] = False  # one row that sees nothing
ONE_KEY = torch.eye(5, 7, dtype=torch.bool)
NO_ROW_EMPTY = floats(2, 1, 5, 7, seed=3) > -0.5
HALF_TOLERANCE = dict(atol=1e-2, rtol=1.6e-2)


def attend(*tensors, **kwargs):
  arrays = [mappings.t2j(tensor) for tensor in tensors]
  masks = {k: mappings.t2j(v) for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
  return mappings.j2t(scaled_dot_product_attention(*arrays, **{**kwargs, **masks}))


@pytest.mark.parametrize(
  "kwargs",
  (
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": MASK},
    {"attn_mask": NO_ROW_EMPTY},
    {"attn_mask": floats(5, 7, seed=4)},
    {"attn_mask": torch.where(MASK, 0.0, -torch.inf)},
    {"attn_mask": torch.where(MASK, 0.0, torch.finfo(torch.float32).min)},
  ),
  ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_attention_equals_cpu_torch(kwargs):
  expected = F.scaled_dot_product_attention(QUERY, KEY, VALUE, **kwargs)
  torch.testing.assert_close(attend(QUERY, KEY, VALUE, **kwargs), expected)


@pytest.mark.parametrize(
  "shapes",
  (
    ((5, 8), (7, 8), (7, 6)),
    ((2, 5, 8), (2, 7, 8), (2, 7, 6)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 6)),
  ),
  ids=("2d", "3d", "broadcast"),
)
def test_leading_dimensions_broadcast(shapes):
  tensors = [floats(*shape, seed=i) for i, shape in enumerate(shapes)]
  expected = F.scaled_dot_product_attention(*tensors)
  torch.testing.assert_close(attend(*tensors), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_error_is_one_rounding(dtype):
  halves = [t.to(dtype) for t in (QUERY, KEY, VALUE)]
  exact = F.scaled_dot_product_attention(*(t.float() for t in halves), is_causal=True)
  output = attend(*halves, is_causal=True)
  assert output.dtype == dtype
  torch.testing.assert_close(output.float(), exact, **HALF_TOLERANCE)


@pytest.mark.parametrize("heads", ((4, 2, 2), (4, 1, 1), (4, 4, 4), (4, 2, 4)), ids=str)
@pytest.mark.parametrize("masked", (False, True))
def test_groups_of_query_heads_share_a_key_head(heads, masked):
  query, key, value = (floats(2, h, 6, 8, seed=h) for h in heads)
  mask = floats(2, heads[0], 6, 6, seed=9) if masked else None
  expected = F.scaled_dot_product_attention(
    query,
    key.repeat_interleave(heads[0] // heads[1], 1),
    value.repeat_interleave(heads[0] // heads[2], 1),
    mask,
  )
  actual = attend(query, key, value, attn_mask=mask, enable_gqa=True)
  torch.testing.assert_close(actual, expected)


def test_dropout_scales_the_survivors():
  keep = floats(2, 4, 5, 7, seed=5) > -0.4
  weights = torch.softmax(QUERY @ KEY.mT / 8**0.5, -1)
  expected = torch.where(keep, weights / 0.7, 0) @ VALUE
  actual = attend(QUERY, KEY, VALUE, keep_mask=keep, dropout_p=0.3)
  torch.testing.assert_close(actual, expected)


def test_dropping_all_weights_gives_zeros():
  keep = torch.zeros(2, 4, 5, 7, dtype=torch.bool)
  actual = attend(QUERY, KEY, VALUE, keep_mask=keep, dropout_p=1.0)
  torch.testing.assert_close(actual, torch.zeros(2, 4, 5, 6))


@pytest.mark.parametrize("attn_mask", (MASK, ONE_KEY), ids=("no key", "one key"))
def test_gradients_of_rows_with_few_keys_equal_torch(attn_mask):
  arrays = [mappings.t2j(t) for t in (QUERY, KEY, VALUE)]
  mask = mappings.t2j(attn_mask)

  def total(query, key, value):
    return jnp.sum(jnp.sin(scaled_dot_product_attention(query, key, value, mask)))

  leaves = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
  F.scaled_dot_product_attention(*leaves, attn_mask).sin().sum().backward()
  for gradient, leaf in zip(jax.grad(total, (0, 1, 2))(*arrays), leaves):
    torch.testing.assert_close(mappings.j2t(gradient), leaf.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key_heads", (4, 2))
def test_program_transposes_no_operand(key_heads):
  query, key, value = (mappings.t2j(t) for t in (QUERY, KEY, VALUE))

  def attention(query, key, value):
    return scaled_dot_product_attention(query, key, value, enable_gqa=True)

  jaxpr = jax.make_jaxpr(attention)(query, key[:, :key_heads], value[:, :key_heads])
  assert "dot_general" in str(jaxpr)
  assert "transpose[" not in str(jaxpr)


@pytest.mark.parametrize(
  "tensors, kwargs, message",
  (
    ((QUERY, KEY, VALUE), {"attn_mask": MASK, "is_causal": True}, "is_causal"),
    ((QUERY, KEY.half(), VALUE), {}, "same dtype"),
    ((QUERY, KEY, VALUE), {"attn_mask": MASK.int()}, "bool or float"),
    ((QUERY[:, :3], KEY[:, :2], VALUE[:, :2]), {"enable_gqa": True}, "heads"),
    ((QUERY[0, 0, 0], KEY, VALUE), {}, "2 dimensions"),
  ),
  ids=("causal", "dtype", "mask", "heads", "rank"),
)
def test_arguments_invalid_in_torch_raise(tensors, kwargs, message):
  with pytest.raises(RuntimeError, match=message):
    attend(*tensors, **kwargs)


@pytest.mark.parametrize(
  "kwargs",
  ({}, {"is_causal": True}, {"attn_mask": floats(1, 1, 5, 5, seed=4), "scale": 0.3}),
  ids=("plain", "causal", "mask"),
)
def test_cpu_flash_attention_equals_cpu_torch(kwargs):
  forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
  backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
  inputs = [floats(2, 4, 5, 8, seed=seed) for seed in range(3)]
  grad, causal = floats(2, 4, 5, 8, seed=9), kwargs.get("is_causal", False)
  rest = {name: kwargs[name] for name in ("attn_mask", "scale") if name in kwargs}
  expected = forward(*inputs, **kwargs)
  gradients = backward(grad, *inputs, *expected, 0.0, causal, **rest)
  moved = [tensor.to("jax") for tensor in inputs]
  on_jax = {k: v.to("jax") if k == "attn_mask" else v for k, v in rest.items()}
  actual = forward(*moved, is_causal=causal, **on_jax)
  found = backward(grad.to("jax"), *moved, *actual, 0.0, causal, **on_jax)
  for have, want in zip((*actual, *found), (*expected, *gradients)):
    torch.testing.assert_close(have.cpu(), want)


def test_cpu_flash_attention_with_dropout_raises():
  forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
  x = torch.ones(1, 1, 2, 2, device="jax")
  with pytest.raises(RuntimeError, match="no dropout"):
    forward(x, x, x, 0.5)


@pytest.mark.parametrize("positions", [5, 2**13 + 1])
def test_attention_of_one_query_position_equals_torch(positions):
  """A call with few keys takes the program that compiles faster."""
  shapes = (1, 2, 1, 8), (1, 2, positions, 8), (1, 2, positions, 8)
  tensors = [floats(*shape, seed=seed) for seed, shape in enumerate(shapes)]
  given = [tensor.clone().requires_grad_() for tensor in tensors]
  expected = F.scaled_dot_product_attention(*given)
  expected.sum().backward()
  with torchax.default_env():
    moved = [tensor.to("jax").requires_grad_() for tensor in tensors]
    effort = Effort.NONE if positions == 5 else None
    assert one_position.effort(*moved[:2]) is effort
    found = F.scaled_dot_product_attention(*moved)
    found.sum().backward()
  torch.testing.assert_close(found.cpu(), expected)
  for ours, theirs in zip(moved, given):
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
