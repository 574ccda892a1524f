"""Flash attention for GPUs and TPUs, interpreted or lowered without such a device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.experimental.pallas import tpu as pallas_tpu

import torchax
from torchax import device_module
from torchax.compat import jax_compat
from torchax.devices import placement
from torchax.interop import jax_view
from torchax.ops.jaten import _attention_kernels as kernels
from torchax.ops.jaten.attention import scaled_dot_product_attention

BFLOAT16 = torch.bfloat16


def normals(*shapes, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def value_and_gradients(attend, *arrays):
  def total(*arrays):
    output = attend(*arrays)
    return jnp.sin(output.astype(jnp.float32)).sum(), output

  return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize(
  "leading, key_heads, flags",
  (
    ((1, 2), 2, {"is_causal": True}),
    ((2,), 1, {"scale": 0.2}),  # no batch, and grouped heads
  ),
  ids=("causal", "groups"),
)
def test_the_interpreted_tpu_kernel_equals_attention(leading, key_heads, flags):
  of_keys = *leading[:-1], key_heads, 256, 64
  arrays = normals((*leading, 256, 64), of_keys, of_keys)

  def pallas(*arrays):
    return kernels.attention(*arrays, kernel="pallas", **flags)

  def plain(*arrays):
    return scaled_dot_product_attention(*arrays, enable_gqa=True, **flags)

  with pallas_tpu.force_tpu_interpret_mode():
    found = value_and_gradients(pallas, *arrays)
  for have, want in zip(
    *map(jax.tree.leaves, (found, value_and_gradients(plain, *arrays)))
  ):
    np.testing.assert_allclose(have, want, atol=2e-5, rtol=2e-5)


def test_without_the_kernel_attention_is_plain(monkeypatch):
  monkeypatch.setattr(jax_compat, "flash_attention_of_tpus", lambda: None)
  query, key = normals((1, 2, 8, 4), (1, 1, 6, 4))
  found = kernels.attention(query, key, key, kernel="pallas", scale=0.3)
  expected = scaled_dot_product_attention(query, key, key, scale=0.3, enable_gqa=True)
  np.testing.assert_array_equal(found, expected)


@pytest.fixture
def machine(monkeypatch):
  """Return `machine(platform)`, which makes programs compile for another platform."""

  def pretend(platform):
    monkeypatch.setattr(placement, "current_platform", lambda: platform)
    monkeypatch.setattr(device_module, "get_device_capability", lambda: (9, 0))
    # JAX asks the machine before it traces cuDNN's attention.
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{cudnn}.check_compute_capability", lambda least: True)
    monkeypatch.setattr(
      f"{cudnn}.is_cuda_compute_capability_equal", lambda capability: False
    )

  return pretend


def lowered(platform: str, attend, *tensors) -> str:
  """Return the program of attention and its gradients for a platform."""

  def step(*tensors):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    return output.detach(), torch.autograd.grad(output.float().sin().sum(), leaves)

  arrays = [jax.ShapeDtypeStruct(t.shape, t.jax().dtype) for t in tensors]
  with torchax.default_env():
    traced = jax.jit(jax_view(step)).trace(*arrays, rng=jax.random.key(0))
  return traced.lower(lowering_platforms=(platform,)).as_text()


SDPA = F.scaled_dot_product_attention
LENGTH = 1024
SCORES = rf"{LENGTH}x{LENGTH}x(?:f32|bf16)"


def of_length(heads=2):
  return torch.zeros(2, heads, LENGTH, 64, dtype=BFLOAT16, device="jax")


# Calls of the program, in order.
CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
CUDNN_WITH_BIAS = [
  "__cudnn$fmhaScaleBiasSoftmax",
  "__cudnn$fmhaScaleBiasSoftmaxBackward",
]
PALLAS = ["tpu_custom_call"] * 3
MASK = np.tril(np.ones((LENGTH, LENGTH), bool))
ROWS = {
  "cudnn": ("cuda", {}, CUDNN),
  "cudnn, causal": ("cuda", {"is_causal": True, "scale": 0.3}, CUDNN),
  "cudnn, mask": ("cuda", {"attn_mask": MASK}, CUDNN_WITH_BIAS),
  "cudnn, groups": ("cuda", {"enable_gqa": True}, CUDNN),
  "pallas": ("tpu", {}, PALLAS),
  "pallas, causal": ("tpu", {"is_causal": True}, PALLAS),
  "pallas, groups": ("tpu", {"enable_gqa": True}, PALLAS),
}


@pytest.mark.parametrize("name", ROWS)
def test_lowered_programs_call_the_kernel_of_the_platform(name, machine):
  platform, flags, expected = ROWS[name]
  if "attn_mask" in flags:
    flags = {"attn_mask": torch.tensor(flags["attn_mask"], device="jax")}
  few = of_length(1 if "groups" in name else 2)
  machine(platform)
  text = lowered(platform, lambda *t: SDPA(*t, **flags), of_length(), few, few)
  assert re.findall(r"tpu_custom_call|__cudnn\$\w+", text) == expected
  if name != "cudnn, mask":  # a mask is a bias of that size
    assert not re.search(SCORES, text)


@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_dropout_lowers_without_a_kernel_or_a_mask(platform, machine):
  machine(platform)
  tensors = [of_length() for _ in range(3)]
  text = lowered(platform, lambda *t: SDPA(*t, dropout_p=0.1), *tensors)
  assert not re.search(r"tpu_custom_call|__cudnn", text)
  assert not re.search(rf"{LENGTH}x{LENGTH}x", text)
  assert f"x{LENGTH}x512xi1" in text


@pytest.mark.parametrize("platform", ("cuda", "tpu"))
def test_the_plain_implementation_can_be_requested(platform, machine):
  machine(platform)
  config = torchax.default_env().config
  config.attention = "plain"
  try:
    text = lowered(platform, SDPA, *[of_length() for _ in range(3)])
  finally:
    config.attention = "auto"
  assert not re.search(r"tpu_custom_call|__cudnn", text)
  assert re.search(SCORES, text)


def test_fully_masked_rows_are_zero(monkeypatch):
  """cuDNN gives such a row the mean of the values, and so does the fake here."""

  def mean_of_values(query, key, value, *, mask, **rest):
    assert mask.shape == (2, 1, 4, 6) and rest["implementation"] == "cudnn"
    return jnp.ones_like(query)

  monkeypatch.setattr(jax.nn, "dot_product_attention", mean_of_values)
  query, key = normals((2, 1, 3, 4, 8), (2, 1, 3, 6, 8), dtype=jnp.bfloat16)
  mask = jnp.ones((2, 1, 1, 4, 6), bool).at[1, 0, 0, 2].set(False)
  output = kernels.attention(query, key, key, mask)
  expected = np.ones((2, 1, 3, 4, 8))
  expected[1, 0, :, 2] = 0
  np.testing.assert_array_equal(output.astype(jnp.float32), expected)
