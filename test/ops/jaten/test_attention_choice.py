"""Choice of an implementation of attention, as a table; no device is needed."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec

import torchax
from torchax import device_module
from torchax.devices import placement
from torchax.functions import attention as caught
from torchax.interop import jax_jit
from torchax.ops.jaten._attention_choice import Call, Target, choose

HOPPER, AMPERE, TURING = (Target("cuda", c) for c in ((9, 0), (8, 6), (7, 5)))
TPU, ROCM, CPU = Target("tpu"), Target("rocm"), Target("cpu")


def call(length=2048, features=64, keys=None, heads=4, key_heads=4, **rest) -> Call:
  rest.setdefault("dtypes", ("bfloat16",) * 3)
  keys = length if keys is None else keys
  of_keys = 2, key_heads, keys, features
  return Call((2, heads, length, features), of_keys, of_keys, **rest)


SINGLE = ("float32",) * 3
MASK = {"mask": (2, 1, 2048, 2048)}
WIDER = dataclasses.replace(call(), value=(2, 4, 2048, 128))
BROADCAST = dataclasses.replace(call(), query=(1, 4, 2048, 64))

# Name -> device and transformations, call, expected implementation.
ROWS = {
  "a CPU": (CPU, call(), "plain"),
  "another platform": (ROCM, call(), "plain"),
  "cudnn": (HOPPER, call(), "cudnn"),
  "cudnn, fp16": (HOPPER, call(dtypes=("float16",) * 3), "cudnn"),
  "cudnn, short": (HOPPER, call(8), "cudnn"),
  "cudnn, causal": (AMPERE, call(is_causal=True), "cudnn"),
  "cudnn, causal, other keys": (HOPPER, call(8, keys=16, is_causal=True), "plain"),
  "cudnn, other keys": (HOPPER, call(8, keys=16), "cudnn"),
  "cudnn, groups": (HOPPER, call(key_heads=2, enable_gqa=True), "cudnn"),
  "cudnn, no groups asked for": (HOPPER, call(key_heads=2), "plain"),
  "cudnn, groups of no size": (HOPPER, call(key_heads=3, enable_gqa=True), "plain"),
  "cudnn, mask": (HOPPER, call(**MASK), "cudnn"),
  "cudnn, mask of rows": (HOPPER, call(mask=(2048,)), "cudnn"),
  "cudnn, odd mask": (HOPPER, call(7, mask=(7, 7)), "plain"),
  "cudnn, mask that does not fit": (HOPPER, call(mask=(3, 2048)), "plain"),
  "cudnn, floats for a mask": (HOPPER, call(**MASK, mask_dtype="bfloat16"), "plain"),
  "cudnn, mask and causal": (HOPPER, call(**MASK, is_causal=True), "plain"),
  "cudnn, float32": (HOPPER, call(dtypes=SINGLE), "plain"),
  "cudnn, mixed": (HOPPER, call(dtypes=("float16", "float16", "float32")), "plain"),
  "cudnn, 256 features": (HOPPER, call(features=256), "cudnn"),
  "cudnn, 256 features, older": (AMPERE, call(features=256), "plain"),
  "cudnn, 260 features": (HOPPER, call(features=264), "plain"),
  "cudnn, 60 features": (HOPPER, call(features=60), "plain"),
  "cudnn, wider values": (HOPPER, WIDER, "plain"),
  "cudnn, broadcasting": (HOPPER, BROADCAST, "plain"),
  "cudnn, too old": (TURING, call(), "plain"),
  "cudnn, vmap": (dataclasses.replace(HOPPER, is_mapped=True), call(), "plain"),
  "cudnn, x64": (dataclasses.replace(HOPPER, has_x64=True), call(), "cudnn"),
  "cudnn, divided": (
    dataclasses.replace(HOPPER, may_be_partitioned=True),
    call(),
    "plain",
  ),
  "cudnn, nothing": (HOPPER, call(0), "plain"),
  "cudnn, dropout": (HOPPER, call(has_dropout=True), "blockwise"),
  "cudnn, short dropout": (HOPPER, call(512, has_dropout=True), "plain"),
  "dropout of other keys": (
    HOPPER,
    call(has_dropout=True, has_positions=False),
    "plain",
  ),
  "dropout in float32": (HOPPER, call(has_dropout=True, dtypes=SINGLE), "plain"),
  "pallas": (TPU, call(), "pallas"),
  "pallas, float32": (TPU, call(dtypes=SINGLE), "pallas"),
  "pallas, fp16": (TPU, call(dtypes=("float16",) * 3), "plain"),
  "pallas, causal": (TPU, call(is_causal=True), "pallas"),
  "pallas, causal, other keys": (TPU, call(keys=4096, is_causal=True), "plain"),
  "pallas, groups": (TPU, call(key_heads=1, enable_gqa=True), "pallas"),
  "pallas, mask": (TPU, call(**MASK), "plain"),
  "pallas, short": (TPU, call(512), "plain"),
  "pallas, no multiple": (TPU, call(2050), "plain"),
  "pallas, 80 features": (TPU, call(features=80), "plain"),
  "pallas, x64": (dataclasses.replace(TPU, has_x64=True), call(), "plain"),
  "pallas, types": (dataclasses.replace(TPU, is_typed=True), call(), "plain"),
  "pallas, dropout": (TPU, call(has_dropout=True), "blockwise"),
  "pallas, divided": (
    dataclasses.replace(TPU, may_be_partitioned=True),
    call(),
    "plain",
  ),
}


@pytest.mark.parametrize("name", ROWS)
def test_choose_picks_the_expected_implementation(name):
  target, given, expected = ROWS[name]
  assert choose(target, given) == expected
  assert choose(target, given, "plain") == "plain"


@pytest.mark.parametrize(
  "target, given, requested, expected",
  (
    (dataclasses.replace(HOPPER, may_be_partitioned=True), call(), "flash", "cudnn"),
    (
      dataclasses.replace(HOPPER, may_be_partitioned=True),
      call(has_dropout=True),
      "flash",
      "block",
    ),
    (CPU, call(), "flash", "plain"),
    (CPU, call(8), "blockwise", "blockwise"),
    (CPU, call(8, has_dropout=True, dtypes=SINGLE), "blockwise", "blockwise"),
    (CPU, WIDER, "blockwise", "blockwise"),
    (CPU, call(8, mask=(8, 8)), "blockwise", "blockwise"),
    (CPU, call(8, mask=(8, 8), mask_dtype="float32"), "blockwise", "plain"),
    (CPU, call(8, has_dropout=True, has_positions=False), "blockwise", "plain"),
    (CPU, BROADCAST, "blockwise", "plain"),
    (HOPPER, call(), "blockwise", "blockwise"),
  ),
)
def test_choose_follows_the_configured_implementation(
  target, given, requested, expected
):
  assert choose(target, given, requested).startswith(expected)


def taken(env, *tensors, mask=None, dropout_p=0.0, **flags) -> str:
  causal, groups = flags.get("is_causal", False), flags.get("enable_gqa", False)
  given = None if mask is None else (mask.shape, mask.dtype)
  return caught.form_of(env, *tensors, given, dropout_p, causal, groups)


@pytest.fixture
def hopper(monkeypatch):
  """Make the choice assume a Hopper GPU."""
  monkeypatch.setattr(placement, "current_platform", lambda: "cuda")
  monkeypatch.setattr(placement, "platform_of", lambda device: "cuda")
  monkeypatch.setattr(device_module, "get_device_capability", lambda: (9, 0))


def halves(length=8, heads=4):
  shape = (2, heads, length, 64)
  return torch.zeros(shape, device="jax", dtype=torch.bfloat16)


def test_shapes_and_dtypes_of_a_call_reach_the_choice(hopper):
  env, x = torchax.default_env(), halves()
  assert taken(env, x, x, x) == "cudnn"
  assert taken(env, x.float(), x.float(), x.float()) == "plain"
  assert taken(env, x, x.float(), x) == "plain"
  mask = torch.ones(8, 8, device="jax") > 0
  assert taken(env, x, x, x, mask=mask) == "cudnn"
  assert taken(env, x, x, x, mask=mask.to(torch.bfloat16)) == "plain"
  assert taken(env, x, x, x, dropout_p=0.1) == "plain"  # too few scores
  few = halves(heads=2)
  assert taken(env, x, few, few) == "plain"
  assert taken(env, x, few, few, enable_gqa=True) == "cudnn"
  assert taken(env, x.cpu(), x, x) == "plain"  # which raises the error
  assert taken(env, x[0, 0, 0], x[0, 0, 0], x[0, 0, 0]) == "plain"


def test_dropout_is_blockwise_if_the_mask_has_positions(hopper):
  env, long = torchax.default_env(), halves(1024)
  assert taken(env, long, long, long, dropout_p=0.1) == "blockwise"
  # A probability that 1 - p rounds away drops nothing.
  assert taken(env, long, long, long, dropout_p=1e-20) == "plain"
  with env.rng_scope(jax.random.key(0, impl="rbg")):
    assert taken(env, long, long, long, dropout_p=0.1) == "plain"


def test_programs_are_divided_if_there_are_several_devices(hopper, monkeypatch):
  env, x, found = torchax.default_env(), halves(), []

  @jax_jit
  def form_of(x):
    found.append(taken(env, x, x, x))
    return x

  form_of(x)
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  form_of(x[:1])
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
  spec = PartitionSpec("x")
  jax_jit(
    torchax.interop.jax_shard_map(form_of, mesh=mesh, in_specs=spec, out_specs=spec)
  )(x)
  # The last call is inside `shard_map`, where each program has one device.
  assert found == ["cudnn", "plain", "cudnn"]


def test_attention_under_vmap_is_plain(hopper):
  env, found = torchax.default_env(), []
  torchax.interop.jax_vmap(lambda x: found.append(taken(env, x, x, x)) or x)(
    halves()[None]
  )
  assert set(found) == {"plain"}


def test_a_compiled_function_follows_the_configuration():
  env = torchax.default_env()
  x, forms = torch.randn(1, 1, 4, 8, device="jax"), []

  @jax_jit
  def attend(x):
    forms.append(env.config.attention)
    return F.scaled_dot_product_attention(x, x, x)

  try:
    for word in ("auto", "auto", "blockwise", "blockwise", "auto"):
      env.config.attention = word
      attend(x)
  finally:
    env.config.attention = "auto"
  assert forms == ["auto", "blockwise"]  # one trace for each, both cached
