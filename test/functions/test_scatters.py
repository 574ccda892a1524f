"""`scatter_add` and `scatter_reduce` with an index that selects whole rows."""

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


def scatter_by(function, reduce, **options):
  return lambda *args: function(*args, reduce, **options)


SCATTERS = {
  "function": torch.scatter_add,
  "method": torch.Tensor.scatter_add,
  "in place": torch.Tensor.scatter_add_,
  "sum": scatter_by(torch.scatter_reduce, "sum"),
  "sum without self": scatter_by(torch.scatter_reduce, "sum", include_self=False),
  "prod": scatter_by(torch.Tensor.scatter_reduce, "prod"),
  "mean": scatter_by(torch.Tensor.scatter_reduce_, "mean", include_self=False),
  "amax": scatter_by(torch.scatter_reduce, "amax", include_self=False),
  "amin": scatter_by(torch.Tensor.scatter_reduce_, "amin"),
}


@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
@pytest.mark.parametrize("dim", (0, 1, -1))
@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
def test_expanded_index_combines_rows(scatter, dim, jit):
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


@pytest.mark.parametrize("name", ("scatter_add", "scatter_reduce"))
def test_expanded_index_needs_no_scatter(name):
  index = ROWS.to("jax")[:, None].expand(6, 2)
  called = []

  class Record(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      called.append(func)
      return func(*args, **(kwargs or {}))

  with Record():
    reduce = ("amax",) if name == "scatter_reduce" else ()
    scatter = getattr(torch.zeros(4, 2, device="jax"), name)
    result = scatter(0, index, index.float(), *reduce)
  total = 3 if reduce else 9
  assert result.tolist() == [[0, 0], [1, 1], [0, 0], [total, total]]
  names = {function.overloadpacket.__name__ for function in called}
  assert name.replace("scatter", "index") in names and name not in names


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


@pytest.mark.parametrize(
  "named", ({}, {"reduce": "median"}, {"reduce": "sum", "initial": 0})
)
def test_unknown_reductions_of_rows_raise_an_error(named):
  index = ROWS[:4, None].expand(4, 2)
  for device in ("cpu", "jax"):
    values = torch.ones(4, 2, device=device)
    with pytest.raises((TypeError, RuntimeError)):
      values.scatter_reduce(0, index.to(device), values, **named)
  with pytest.raises(TypeError):
    values.scatter_add(0, index.to("jax"), values, reduce="sum")


def test_index_of_fewer_columns_adds_to_them_only():
  index = torch.tensor([[2], [0]], device="jax").expand(2, 2)
  result = torch.zeros(3, 3, device="jax").scatter_add(0, index, index.float() + 1)
  assert result.tolist() == [[1, 1, 0], [0, 0, 0], [3, 3, 0]]
