"""`scatter_add` with an index that selects whole rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchax.interop import jax_jit

ROWS = torch.tensor([3, 0, 3, 1, 0, 3])


def results(scatter, input, dim, index, src):
  """Return the sum, its gradients by input and source, and how it changed `input`."""
  leaves = input.clone().requires_grad_(), src.clone().requires_grad_()
  total = leaves[0] * 1
  added = scatter(total, dim, index, leaves[1])
  grads = torch.autograd.grad((added**3).sum(), leaves)
  return added.detach(), *grads, total.detach()


@pytest.mark.parametrize(
  "scatter",
  (torch.scatter_add, torch.Tensor.scatter_add, torch.Tensor.scatter_add_),
  ids=("function", "method", "in place"),
)
@pytest.mark.parametrize("dim", (0, 1, -1))
@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
def test_expanded_index_adds_rows(scatter, dim, jit):
  torch.manual_seed(0)
  shape = [2, 3, 3]
  shape[dim] = 4
  input, src = torch.randn(shape), torch.randn(*shape)
  shape[dim] = len(ROWS)
  src = torch.randn(shape)
  sizes = [1, 1, 1]
  sizes[dim] = len(ROWS)

  def run(input, rows, src):
    return results(scatter, input, dim, rows.view(sizes).expand_as(src), src)

  run_on_jax = jax_jit(run) if jit else run
  actual = run_on_jax(*(tensor.to("jax") for tensor in (input, ROWS, src)))
  for mine, expected in zip(actual, run(input, ROWS, src), strict=True):
    torch.testing.assert_close(mine.cpu(), expected)


def test_expanded_index_needs_no_scatter():
  index = ROWS.to("jax")[:, None].expand(6, 2)
  called = []

  class Record(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      called.append(func)
      return func(*args, **(kwargs or {}))

  with Record():
    result = torch.zeros(4, 2, device="jax").scatter_add(0, index, index.float())
  assert result.tolist() == [[0, 0], [1, 1], [0, 0], [9, 9]]
  assert torch.ops.aten.index_add.default in called
  assert torch.ops.aten.scatter_add.default not in called


@pytest.mark.parametrize(
  "index, message",
  (
    (torch.tensor([[4], [0]]).expand(2, 3), "out of bounds"),
    (torch.tensor([[0], [1]]).expand(2, 4), "shape|size"),
  ),
  ids=("out of bounds", "too wide"),
)
def test_bad_expanded_index_raises_an_error(index, message):
  input = torch.zeros(4, 3, device="jax")
  with pytest.raises(RuntimeError, match=message):
    input.scatter_add_(0, index.to("jax"), torch.ones(2, 3, device="jax"))
  assert not input.any()


def test_index_of_fewer_columns_adds_to_them_only():
  index = torch.tensor([[2], [0]], device="jax").expand(2, 2)
  result = torch.zeros(3, 3, device="jax").scatter_add(0, index, index.float() + 1)
  assert result.tolist() == [[1, 1, 0], [0, 0, 0], [3, 3, 0]]
