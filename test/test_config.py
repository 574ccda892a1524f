"""Each switch of `Configuration` does what its documentation says."""

import dataclasses

import jax
import pytest
import torch
from compare import assert_same
from ops.harness import floats

import torchax
from torchax.config import Configuration
from torchax.errors import MixedDeviceError
from torchax.tensor import Environment

A = floats(2, 3)

DEFAULTS = {
  "debug_print_each_op": False,
  "debug_accuracy_for_each_op": False,
  "debug_mixed_tensor": False,
  "debug_print_each_op_operands": False,
  "use_int32_for_index": False,
  "allow_mixed_math_with_scalar_tensor": True,
  "force_materialize_views": False,
  "use_dlpack_for_data_conversion": False,
  "treat_cuda_as_jax_device": True,
  "internal_respect_torch_return_dtypes": False,
  "prng_impl": "threefry2x32",
  "rng_addressing": "order",
  "compilation_cache_size": 4096,
  "check_indices": False,
  "attention": "auto",
  "eager_mode": None,
}


def environment(**switches) -> Environment:
  return Environment(Configuration(**switches))


def test_switches_contain_upstreams_with_the_same_defaults():
  # "cuda" for jax takes a mode of torch, which slows programs on the CPU down.
  ours = {**DEFAULTS, "treat_cuda_as_jax_device": False}
  assert dataclasses.asdict(Configuration()) == ours


def test_attention_accepts_four_values():
  config = Configuration(attention="blockwise")
  with pytest.raises(ValueError, match="one of 'auto', 'flash', .* but got 'quick'"):
    config.attention = "quick"
  assert config.attention == "blockwise"


def test_unknown_switch_names_the_nearest_one():
  config = Configuration()
  with pytest.raises(AttributeError, match="Did you mean 'check_indices'?"):
    config.check_index = True
  with pytest.raises(AttributeError, match="no switch 'zzz'. Look it up"):
    config.zzz = True
  assert config == Configuration()


def test_every_switch_is_documented():
  for name in DEFAULTS:
    assert f"  {name}: " in Configuration.__doc__


def test_each_environment_has_its_own_configuration():
  env = environment()
  env.config.debug_print_each_op = True
  assert not torchax.default_env().config.debug_print_each_op


def test_mixing_with_cpu_scalars_can_be_forbidden():
  number = torch.tensor(2.0)
  assert_same(environment().to_xla(A) * number, A * 2)
  env = environment(allow_mixed_math_with_scalar_tensor=False)
  with pytest.raises(MixedDeviceError):
    env.to_xla(A) * number


def test_materialized_views_still_alias():
  env = environment(force_materialize_views=True)
  cpu, x = A.clone(), env.to_xla(A)
  for tensor in (cpu, x):
    tensor[0].t().mul_(2)
    tensor.split(1)[1].zero_()
  assert_same(x, cpu)


def test_conversion_with_and_without_dlpack_is_equal():
  env = environment(use_dlpack_for_data_conversion=True)
  for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int8):
    source = A.to(dtype)
    back = env.to_xla(source).cpu()
    assert back.dtype == dtype and torch.equal(back, source)
    back.zero_()
    assert torch.equal(env.to_xla(source).cpu(), source)


INDICES = {
  "argmax": lambda t: t.argmax(1),
  "sort": lambda t: t.sort()[1],
  "topk": lambda t: t.topk(2)[1],
  "max": lambda t: t.max(1)[1],
}


@pytest.mark.parametrize("function", INDICES.values(), ids=INDICES)
def test_indices_are_int64_under_x64_unless_switched(function):
  with jax.enable_x64(True):
    assert function(environment().to_xla(A)).dtype == torch.int64
    env = environment(use_int32_for_index=True)
    indices = function(env.to_xla(A))
    assert indices.dtype == torch.int32
    assert torch.equal(indices.cpu().long(), function(A))


RETURN_DTYPES = {
  "argmax": lambda t: t.argmax(1),
  "sum_of_ints": lambda t: t.to(torch.int32).sum(),
  "sum_of_bools": lambda t: (t > 0).sum(0),
  "cumsum_of_ints": lambda t: t.to(torch.int32).cumsum(0),
  "mean_of_half": lambda t: t.half().mean(),
  "comparison": lambda t: t > 0,
  "double": lambda t: t.double() * 2,
}


@pytest.mark.parametrize("function", RETURN_DTYPES.values(), ids=RETURN_DTYPES)
def test_results_have_torch_dtypes_if_configured(function):
  with jax.enable_x64(True):
    env = environment(internal_respect_torch_return_dtypes=True)
    assert function(env.to_xla(A)).dtype == function(A).dtype


@pytest.fixture
def _restored():
  x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
  yield
  jax.config.update("jax_enable_x64", x64)
  jax.config.update("jax_default_matmul_precision", precision)
  torchax.default_env().config.internal_respect_torch_return_dtypes = False


def test_accuracy_mode_sets_x64_and_highest_precision(_restored):
  torchax.enable_accuracy_mode()
  assert jax.config.jax_enable_x64
  assert jax.config.jax_default_matmul_precision == "highest"
  assert torchax.default_env().config.internal_respect_torch_return_dtypes
  assert torch.ones(2, dtype=torch.float64, device="jax").dtype == torch.float64
  torchax.enable_performance_mode()
  assert not jax.config.jax_enable_x64
  assert jax.config.jax_default_matmul_precision == "default"
  assert not torchax.default_env().config.internal_respect_torch_return_dtypes
