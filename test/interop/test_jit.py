"""`jax_jit`: programs, options, and changes of arguments and captured tensors."""

import jax
import pytest
import torch
from compare import assert_same
from ops.harness import floats

from torchax import interop
from torchax.errors import MixedDeviceError
from torchax.interop import jax_jit

A = floats(3, 4)


B = floats(3, 4, seed=1)


def test_a_compiled_function_equals_the_function(x):
  def function(a, b, *, scale=1.0, extra=None):
    out = {"mm": a @ b.t() * scale, "rows": [a[0], b.sum()]}
    return (out, extra)

  other = B.to("jax")
  compiled = jax_jit(function)
  assert_same(compiled(x, other), function(A, B))
  assert_same(compiled(x, other, scale=2.0), function(A, B, scale=2.0))
  assert_same(compiled(x, other, extra=x), function(A, B, extra=A))


@pytest.mark.parametrize("keys", ["ba", "ab", (1, "a")])
def test_dicts_keep_the_order_of_their_keys(x, keys):
  def function(values):
    first, second = values.values()
    return {"z": first - second, "y": {2: first, "x": second}}

  for order in (keys, keys[::-1]):
    actual = jax_jit(function)(dict(zip(order, (x, 2 * x))))
    expected = function(dict(zip(order, (A, 2 * A))))
    assert list(actual) == list(expected)
    assert list(actual["y"]) == list(expected["y"])
    assert_same(list(actual["y"].values()), list(expected["y"].values()))
    assert_same(actual["z"], expected["z"])


def test_gradients_of_a_dict_keep_the_order_of_its_keys(x):
  _, gradients = interop.jax_value_and_grad(lambda d: (d["b"] * d["a"]).sum())(
    {"b": x, "a": 2 * x}
  )
  assert list(gradients) == ["b", "a"]
  assert_same(gradients["b"], 2 * A)


def test_a_compiled_function_is_traced_once_per_shape(x):
  traces = []

  @jax_jit
  def function(a):
    traces.append(tuple(a.shape))
    return a * 2

  for values in (x, x + 1, x[:2], x):
    function(values)
  assert traces == [(3, 4), (2, 4)]
  assert function.__name__ == "function"


def test_static_argnums_refer_to_the_users_arguments(x):
  compiled = jax_jit(lambda a, name, n: getattr(a, name)(n), {"static_argnums": (1, 2)})
  assert_same(compiled(x, "sum", 0), A.sum(0))
  assert_same(compiled(x, "mean", 1), A.mean(1))
  by_name = jax_jit(lambda a, *, dim: a.sum(dim), {"static_argnames": ("dim",)})
  assert_same(by_name(x, dim=1), A.sum(1))
  last = jax_jit(lambda a, dim: a.sum(dim), {"static_argnums": -1})
  assert_same(last(x, 1), A.sum(1))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donate_argnums_refer_to_the_users_arguments(x):
  kept = B.to("jax")
  compiled = jax_jit(lambda a, b: a + b, {"donate_argnums": (0,)})
  assert_same(compiled(x, kept), A + B)
  assert not kept.jax().is_deleted()


def test_a_compiled_function_can_be_lowered(x):
  compiled = jax_jit(lambda a: torch.tanh(a))
  assert "tanh" in compiled.lower(x).as_text()
  assert "tanh" in str(compiled.trace(x).jaxpr)
  assert_same(compiled(x), A.tanh())


def test_changes_of_arguments_reach_the_caller(x):
  alias = x.view(-1)

  @jax_jit
  def change(a, b):
    a.mul_(2)
    b[0] = a[1]
    return a.sum()

  other = B.to("jax")
  change(x, other)
  expected = B.clone()
  expected[0] = A[1] * 2
  assert_same(x, A * 2)
  assert_same(alias, A.view(-1) * 2)
  assert_same(other, expected)


def test_changes_of_captured_tensors_reach_the_caller(x):
  counter = torch.zeros((), dtype=torch.int32, device="jax")

  @jax_jit
  def count(a):
    counter.add_(1)
    return a * counter

  for n in (1, 2, 3):
    assert_same(count(x), A * n)
  assert_same(counter, torch.tensor(3, dtype=torch.int32))


def test_captured_tensors_are_operands_not_constants(x):
  weight = B.to("jax")
  traces = []

  @jax_jit
  def function(a):
    traces.append(1)
    return a * weight

  assert_same(function(x), A * B)
  before = len(traces)
  weight.zero_()
  assert_same(function(x), A * 0)
  assert len(traces) == before


def test_one_tensor_given_twice_is_one_tensor(x):
  @jax_jit
  def change(a, b):
    a.add_(1)
    return b * 1

  assert_same(change(x, x), A + 1)
  assert_same(x, A + 1)


def test_compiled_functions_nest(x):
  inner = jax_jit(lambda a: a.mul_(2))
  outer = jax_jit(lambda a: inner(a) + 1)
  assert_same(outer(x), A * 2 + 1)
  assert_same(x, A * 2)


def test_a_cpu_tensor_is_refused_by_a_compiled_function(x):
  compiled = jax_jit(lambda a, b: a + b)
  with pytest.raises(MixedDeviceError, match="jax"):
    compiled(x, B)
  assert_same(compiled(x, torch.tensor(1.0)), A + 1)


def test_another_compiler_can_be_wrapped(x):
  calls = []

  def my_jit(function, **kwargs):
    calls.append(kwargs)
    return jax.jit(function, **kwargs)

  compiled = interop.wrap_jax_jit(
    lambda a, n: a.add_(n), my_jit, {"static_argnums": (1,)}
  )
  assert_same(compiled(x, 2), A + 2)
  assert_same(x, A + 2)
  assert len(calls) == 1
  assert_same(interop.wrap_jax_jit(torch.neg)(x), -(A + 2))
