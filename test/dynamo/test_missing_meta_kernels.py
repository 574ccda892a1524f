"""Shapes in torch.compile of operations without a meta kernel, from our lowerings."""

import jax
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same

import torchax

aten = torch.ops.aten
THREE = torch.tensor([0.5, 2.0, 4.0])
SQUARE = torch.linspace(-1, 1, 9).reshape(3, 3) + torch.eye(3)


def ctc(x):
  labels = torch.tensor([[1, 2]], device=x.device)
  return F.ctc_loss(x.log_softmax(-1)[:, None], labels, (3,), (2,))


ROWS = {
  "ctc": (ctc, SQUARE),
  "binomial": (lambda x: torch.binomial(x + 3, x / 5), THREE),
  "beta": (lambda x: torch.distributions.Beta(x, x + 1).rsample(), THREE),
  "geqrf": (lambda x: tuple(torch.geqrf(x)), SQUARE),
}


@pytest.mark.parametrize(
  ("name", "dynamic"),
  [
    ("ctc", False),
    ("binomial", False),
    ("beta", False),
    ("beta", True),
    ("geqrf", True),
  ],
)
def test_graph_without_meta_kernels_equals_eager_mode(name, dynamic):
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


def test_gradient_of_an_operation_without_meta_kernel():
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


def test_shapes_come_from_the_lowering_without_draws():
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
def test_no_shapes_if_the_lowering_has_none(op):
  """Shapes of numbers, composite operations, and operations that write."""
  vector = jax.ShapeDtypeStruct((3,), "float32")
  args = [vector] * len(op._schema.arguments)
  assert torchax.default_env().shapes(op, args, {}) is None
