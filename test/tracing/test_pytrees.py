"""Containers that torch registers as pytrees, as arguments and results of JAX code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from torchax.interop import jax_jit, jax_value_and_grad, jax_view


@dataclasses.dataclass
class Results:
  """Output class like those of model libraries; it accepts only tensors."""

  values: torch.Tensor
  names: list[str]

  def __post_init__(self):
    if not isinstance(self.values, torch.Tensor):
      raise TypeError(f"not a tensor: {type(self.values)}")


@dataclasses.dataclass
class Lenient:
  """Output class that accepts any values."""

  values: object


torch_pytree.register_pytree_node(
  Results,
  lambda results: ([results.values], results.names),
  lambda children, names: Results(*children, names),
)
torch_pytree.register_pytree_node(
  Lenient,
  lambda lenient: ([lenient.values], None),
  lambda children, _: Lenient(*children),
)

pytestmark = pytest.mark.usefixtures("env")


def _x() -> torch.Tensor:
  return torch.arange(3.0, device="jax")


def test_a_compiled_function_returns_the_container():
  out = jax_jit(lambda x: [Results(x * 2, ["double"]), x])(_x())[0]
  assert type(out) is Results and out.names == ["double"]
  assert out.values.tolist() == [0, 2, 4]


def test_a_compiled_function_takes_the_container():
  traces = []

  @jax_jit
  def total(results):
    traces.append(results.names)
    return results.values.sum() * len(results.names)

  assert total(Results(_x(), ["one"])).item() == 3
  assert total(Results(_x() + 1, ["one"])).item() == 6
  assert total(Results(_x(), ["one", "two"])).item() == 6
  assert traces == [["one"], ["one", "two"]]


def test_containers_hold_containers():
  out = jax_jit(lambda outer: outer)(Lenient([Results(_x(), []), Lenient(_x())]))
  assert out.values[0].values.tolist() == out.values[1].values.tolist() == [0, 1, 2]


def test_autograd_goes_through_the_container():
  x = _x().requires_grad_()
  out = jax_jit(lambda given: Results(given.values**2, []))(Results(x, []))
  out.values.sum().backward()
  assert x.grad.tolist() == [0, 2, 4]


def test_writes_to_a_container_reach_the_caller():
  given = Results(_x(), [])
  jax_jit(lambda given: given.values.add_(1))(given)
  assert given.values.tolist() == [1, 2, 3]


def test_gradients_of_a_container_are_a_container():
  value, gradient = jax_value_and_grad(lambda given: (given.values**2).sum())(
    Results(_x(), ["x"])
  )
  assert value.item() == 5
  assert type(gradient) is Results and gradient.values.tolist() == [0, 2, 4]


def test_jax_code_sees_the_container_with_arrays():
  def run():
    out = jax.jit(jax_view(lambda given: Lenient(given.values + 1)))(
      Lenient(jnp.ones(2))
    )
    assert type(out) is Lenient and isinstance(out.values, jax.Array)
    assert out.values.tolist() == [2, 2]

  first = jax_view(Lenient(_x()))  # JAX knows the class from here on
  assert isinstance(first.values, jax.Array)
  run()


def test_a_class_registered_with_jax_still_crosses():
  with pytest.raises(TypeError, match="not a tensor"):  # it holds arrays
    jax_view(Results(_x(), []))
  assert jax_jit(lambda x: Results(x, []))(_x()).values.tolist() == [0, 1, 2]


class Named:
  """Container that JAX knows, with static data that has no hash."""

  def __init__(self, values, names):
    self.values, self.names = values, names


jax.tree_util.register_pytree_node(
  Named,
  lambda named: ((named.values,), named.names),
  lambda names, values: Named(*values, names),
)


def test_results_may_have_static_data_without_a_hash():
  found = jax_jit(lambda x: Named(x, ["a"]))(_x())
  assert isinstance(found.values, torch.Tensor) and found.names == ["a"]
