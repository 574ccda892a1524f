"""Each switch of `Configuration` does what its documentation says."""

import dataclasses
import logging

import jax
import pytest
import torch
from compare import assert_same
from ops.harness import floats

import torchax
from torchax.config import Configuration
from torchax.dispatch import debug
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


def test_every_switch_is_documented():
  for name in DEFAULTS:
    assert f"  {name}: " in Configuration.__doc__


def test_each_environment_has_its_own_configuration():
  env = environment()
  env.config.debug_print_each_op = True
  assert not torchax.default_env().config.debug_print_each_op


def test_operations_are_logged(caplog):
  env = environment(debug_print_each_op=True)
  x = env.to_xla(A)
  with caplog.at_level(logging.INFO, "torchax"):
    result = torch.exp(x)
  assert_same(result, A.exp())
  assert [r.getMessage() for r in caplog.records] == ["DISPATCH: aten::exp"]


def test_operands_are_logged_with_their_shapes(caplog):
  env = environment(debug_print_each_op=True, debug_print_each_op_operands=True)
  x = env.to_xla(A)
  with caplog.at_level(logging.INFO, "torchax"):
    torch.sum(x, 1, keepdim=True, dtype=torch.float16)
    torch.cat([x, x[0:0]])
  messages = [r.getMessage() for r in caplog.records]
  shown = "Tensor[torch.float32, [2, 3]]"
  assert messages == [
    f"DISPATCH: aten::sum.dim_IntList({shown}, [1], True, dtype=torch.float16)",
    f"DISPATCH: aten::slice.Tensor({shown}, 0, 0, 0)",
    f"DISPATCH: aten::cat([{shown}, View[torch.float32, [0, 3]]])",
  ]


def test_nothing_is_logged_by_default(caplog):
  with caplog.at_level(logging.DEBUG, "torchax"):
    torch.exp(A.to("jax"))
  assert not caplog.records


def test_debug_accuracy_reports_a_wrong_lowering(caplog):
  env = environment(debug_accuracy_for_each_op=True)
  env.override_op_definition(torch.ops.aten.exp, lambda x: x + 100)
  with caplog.at_level(logging.WARNING, "torchax"):
    result = torch.exp(env.to_xla(A))
  assert_same(result, A + 100)
  (message,) = [r.getMessage() for r in caplog.records]
  assert message.startswith("aten::exp differs from CPU torch")


CHECKED = {
  "functional": lambda x: torch.sin(x),
  "view": lambda x: x[0].t() * 2,
  "of_a_view": lambda x: x.t().exp(),
  "in_place": lambda x: x.clone().mul_(3),
  "in_place_on_a_view": lambda x: x.clone()[0].mul_(3),
  "random": lambda x: torch.rand_like(x) * 0,
  "many_results": lambda x: torch.max(x, 0),
}


@pytest.mark.parametrize("function", CHECKED.values(), ids=CHECKED)
def test_debug_accuracy_does_not_report_a_correct_lowering(function, caplog):
  env = environment(debug_accuracy_for_each_op=True)
  with caplog.at_level(logging.WARNING, "torchax"):
    assert_same(function(env.to_xla(A)), function(A))
  assert not caplog.records


def test_debug_accuracy_compares_one_result():
  x = A.to("jax")
  exp = torch.ops.aten.exp.default
  assert debug.debug_accuracy(exp, (x,), {}, x.exp())
  assert not debug.debug_accuracy(exp, (x,), {}, x)


def test_mixed_devices_are_logged_before_they_raise(caplog):
  env = environment(debug_mixed_tensor=True)
  with caplog.at_level(logging.INFO, "torchax"), pytest.raises(MixedDeviceError):
    env.to_xla(A) + A
  (message,) = [r.getMessage() for r in caplog.records]
  assert "aten.add.Tensor" in message and "[2, 3]" in message and "cpu" in message


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
