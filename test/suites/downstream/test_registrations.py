"""Lowerings that a program registers, replaces and calls."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
import registries
import torch
from compare import assert_same

import torchax
from torchax.ops import jaten, jtorch, ops_registry
from torchax.ops.ops_registry import Operator

F = torch.nn.functional
ONES = torch.ones(3)


@pytest.fixture(autouse=True)
def _registry_as_it_was():
  with registries.restored():
    yield


@pytest.fixture(name="env")
def _env():
  return torchax.Environment()


def test_a_function_of_the_library_is_replaced_and_reached():
  linear = F.linear
  ours = ops_registry.all_torch_functions[linear]

  @jtorch.register_function(linear, is_user_defined=True)
  def doubled(x, weight, bias=None):
    return 2 * ours.func(x, weight, bias)

  assert ops_registry.all_torch_functions[linear].func is doubled
  assert ops_registry.all_torch_functions[linear].replaced is ours
  with torchax.default_env():
    x, w = torch.ones(2, 3, device="jax"), torch.eye(3, device="jax")
    assert_same(F.linear(x, w), torch.full((2, 3), 2.0))


class _Callable:
  def __call__(self, x, *args, **kwargs):
    return x + 3


@pytest.mark.parametrize(
  "function",
  [functools.partial(lambda by, x, inplace=False: x + by, 3), _Callable()],
  ids=["partial", "callable"],
)
def test_nameless_callable_is_registered_and_returned(function):
  assert jtorch.register_function(F.silu)(function) is function
  with torchax.default_env():
    assert_same(F.silu(torch.ones(3, device="jax")), ONES + 3)


FLAGS = {
  "tensors": dict(is_jax_function=False),
  "views": dict(is_view_op=True),
  "environment": dict(is_jax_function=False, needs_env=True),
  "arrays": dict(is_jax_function=True),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_determine_the_arguments_of_a_function(name):
  seen = []

  @jtorch.register_function(F.softsign, **FLAGS[name])
  def spy(x, env=None):
    seen.append((x, env))
    return x

  with torchax.default_env() as env:
    F.softsign(torch.ones(3, device="jax"))
  (x, found), *_ = seen
  assert isinstance(x, jax.Array) is (name == "arrays")
  assert found is (env if name == "environment" else None)


def _register_op(operation, function):
  return jaten.op(operation)(function)


REGISTER = {
  "op": (torch.ops.aten.tanh, _register_op),
  "dispatch": (torch.ops.aten.tanh, ops_registry.register_torch_dispatch_op),
  "function": (F.linear, ops_registry.register_torch_function_op),
  "register_function": (F.linear, lambda f, g: jtorch.register_function(f)(g)),
}


@pytest.mark.parametrize("name", REGISTER)
def test_duplicate_registration_warns_at_the_users_line(name):
  operation, register = REGISTER[name]
  function = lambda *args: args[0] * 5  # noqa: E731
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert register(operation, function) is function
  (warning,) = [w for w in found if "already has the lowering" in str(w.message)]
  assert warning.filename == __file__
  with torchax.default_env():
    x = torch.ones(3, device="jax")
    out = torch.tanh(x) if operation is torch.ops.aten.tanh else F.linear(x, x)
  assert_same(out, ONES * 5)


@pytest.mark.parametrize("name", REGISTER)
def test_user_defined_replacement_does_not_warn(name):
  operation, _ = REGISTER[name]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    ops_registry.register(
      Operator(operation, lambda *args: args[0], is_user_defined=True)
    )


# torch functions that programs look up in tables.
LOOKED_UP = {
  "__getitem__": torch.Tensor.__getitem__,
  "ones": torch.ones,
  "einsum": torch.einsum,
  "interpolate": F.interpolate,
  "det": torch.linalg.det,
  "sdpa": F.scaled_dot_product_attention,
  "repeat_interleave": torch.Tensor.repeat_interleave,
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_every_torch_function_has_an_entry(name):
  function = LOOKED_UP[name]
  operator = ops_registry.all_torch_functions[function]
  assert operator.torch_op is function and callable(operator.func)


def test_subscripts_are_wrapped_by_the_function_in_the_table(env):
  getitem = torch.Tensor.__getitem__
  ours, seen = ops_registry.all_torch_functions[getitem].func, []

  def noting(tensor, index):
    seen.append(index)
    return ours(tensor, index)

  jtorch.register_function(getitem, is_jax_function=False, is_view_op=True)(noting)
  with torchax.default_env():
    assert torch.arange(4, device="jax")[2].item() == 2
  assert 2 in seen


def test_no_function_of_torch_has_no_entry():
  with pytest.raises(KeyError):
    ops_registry.all_torch_functions[jnp.add]
