"""torch.compile of operations whose shapes torch cannot tell, but our lowerings."""

import jax
import pytest
import torch
from compare import assert_same

import torchax

aten = torch.ops.aten
THREE = torch.tensor([0.5, 2.0, 4.0])
SQUARE = torch.linspace(-1, 1, 9).reshape(3, 3) + torch.eye(3)

ROWS = {
  "binomial": (lambda x: torch.binomial(x + 3, x / 5), THREE),
  "beta": (lambda x: torch.distributions.Beta(x, x + 1).rsample(), THREE),
  "geqrf": (lambda x: tuple(torch.geqrf(x)), SQUARE),
}


@pytest.mark.parametrize(
  ("name", "dynamic"),
  [("binomial", False), ("beta", False), ("beta", True), ("geqrf", True)],
)
def test_a_graph_computes_and_draws_what_eager_code_does(name, dynamic):
  function, x = ROWS[name]
  x = x.to("jax")
  torch._dynamo.reset()
  compiled = torch.compile(function, backend="jax", fullgraph=True, dynamic=dynamic)
  torch.manual_seed(3)
  expected = [function(x), function(x), torch.rand(2, device="jax")]
  torch.manual_seed(3)
  actual = [compiled(x), compiled(x), torch.rand(2, device="jax")]
  on_cpu = torch.utils._pytree.tree_map(torch.Tensor.cpu, expected)
  assert_same(actual, on_cpu)


def test_a_gradient_goes_through_such_an_operation():
  gradients = []
  for compiled in (False, True):
    function = ROWS["beta"][0]
    if compiled:
      torch._dynamo.reset()
      function = torch.compile(function, backend="jax", fullgraph=True)
    leaf = THREE.to("jax").requires_grad_()
    torch.manual_seed(3)
    function(leaf).sum().backward()
    gradients.append(leaf.grad)
  assert_same(gradients[1], gradients[0].cpu())


def test_shapes_are_those_of_the_lowering_and_nothing_is_drawn():
  env = torchax.default_env()
  vector = jax.ShapeDtypeStruct((3,), "float32")
  torch.manual_seed(3)
  (shape,) = jax.tree.leaves(env.shapes(aten.binomial.default, (vector, vector), {}))
  assert (shape.shape, shape.dtype) == ((3,), "float32")
  drawn = torch.rand(2, device="jax")
  torch.manual_seed(3)
  assert torch.equal(torch.rand(2, device="jax"), drawn)


@pytest.mark.parametrize(
  "op", [aten.nonzero.default, aten.nll_loss.default, aten.add_.Tensor]
)
def test_there_are_none_without_a_lowering_that_knows_them(op):
  """Shapes of numbers, composite operations, and what writes."""
  vector = jax.ShapeDtypeStruct((3,), "float32")
  args = [vector] * len(op._schema.arguments)
  assert torchax.default_env().shapes(op, args, {}) is None
