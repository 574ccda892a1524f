"""Memory that results of `torch.compile(backend="jax")` share."""

import pytest
import torch
from compare import assert_same
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.errors import OperatorNotFound


@pytest.fixture(autouse=True)
def inside():
  torch.compiler.reset()
  with torchax.default_env():
    yield


def compiled(function):
  return torch.compile(function, backend="jax")


def assert_written_alike(function, device):
  """Assert that writes to each result reach the same tensors as without a compiler."""
  ours, theirs = torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(4, 6)
  ours = ours.to(device)
  pairs = list(zip(compiled(function)(ours), function(theirs), strict=True))
  for found, expected in pairs:
    found.add_(1)
    expected.add_(1)
  for found, expected in [*pairs, (ours, theirs)]:
    assert torch.equal(found.cpu(), expected)


def added_in_place(view):
  view += view
  return view.float()


@pytest.mark.parametrize(
  "function",
  [
    lambda p: (p[1:],),
    lambda p: (p.split(2)[0], p.t()),
    lambda p: (p.mul_(2)[:, 1:].unbind(1)[0],),
    lambda p: ((v := p * 2), v[1:], v.view(-1)),
    lambda p: (p.detach(), p.view(2, 12)[0]),
    lambda p: ((v := p.chunk(2, 1)[1]).swapdims_(0, 1), v[0]),
    lambda p: (p + 1, p.reshape(-1)),
    lambda p: ((v := p.sort(1).values), v.t()),
    lambda p: ((v := checkpoint(torch.neg, p, use_reentrant=False)), v.diagonal()),
    lambda p: ((v := p[[0, 2]]), v.movedim(0, 1)),
    lambda p: (p.permute(1, 0), p.swapdims_(-1, 1), p[1:]),
    lambda p: (p[...], p.t_()),
    lambda p: (p[..., None, :], p[1:].t_(), p.unsqueeze_(0), p.view(2, 12)),
    lambda p: (p[1:], p.unsqueeze_(1).transpose_(0, 2), p[0]),
    lambda p: ((v := p**2), v.data),
    lambda p: (added_in_place(p[::2]),),
    lambda p: (added_in_place(p.conj()),),
    lambda p: (p.view(torch.int16), p.unfold(1, 2, 2)),
    lambda p: ((v := torch.view_as_complex(p.view(4, 3, 2) * 1)), v.imag, v.mH),
  ],
)
@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_results_share_memory_as_in_torch(function, device):
  assert_written_alike(function, device)


@pytest.mark.parametrize(
  "function",
  [
    lambda v: (v, v.chunk(2, 1)[1]),
    lambda v: (v.split(2)[0], v.chunk(4)[0]),
    lambda v: (v, v, (v * v).sum()),
    lambda v: ((c := v.to(torch.complex64)), torch.atleast_2d(c)),
    lambda v: ((top := v.topk(2, 0).values), top.contiguous()),
  ],
)
@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_results_with_gradients_share_memory(function, device):
  x = torch.arange(24.0).reshape(4, 6).to(device).requires_grad_()
  results = compiled(lambda x: function(x * 2))(x)
  with torch.no_grad():
    results[0].fill_(0.0)
    assert results[1].abs().sum() == 0.0


def test_strided_view_of_transposed_input_shares_memory():
  p = torch.arange(12.0, device="jax").reshape(4, 3)
  found = compiled(lambda p: p[1:].as_strided((2, 2), (1, 2)))(p.t())
  found.zero_()
  assert p.flatten()[:6].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 5.0]


def test_result_reshaped_in_place_shares_memory():
  # AOTAutograd fails on plain tensors: sizes differ in its backward pass.
  x = torch.arange(24.0, device="jax").reshape(4, 6).requires_grad_()
  turned, rows = compiled(
    lambda x: ((v := x.cumsum(1).swapaxes_(0, 1)), v.expand(2, 6, 4))
  )(x)
  with torch.no_grad():
    turned.fill_(0.0)
  assert rows.abs().sum() == 0.0


def test_detached_slice_is_an_input_beside_its_base():
  x = torch.arange(3.0, device="jax", requires_grad=True)
  found = compiled(lambda part, x: (part * x[1:]).sum())(x[1:].detach(), x)
  found.backward()
  assert_same(x.grad, torch.tensor([0.0, 1.0, 2.0]))


@pytest.mark.parametrize(
  "view",
  [
    lambda c: c.imag,
    lambda c: torch.view_as_real(c)[1:, 0],
    lambda c: torch.view_as_complex(c.real.reshape(2, 3, 2) * 1)[:, 1],
    lambda c: c.conj()[1:],
  ],
)
def test_view_that_converts_its_base_is_an_input(view):
  c = torch.complex(torch.arange(12.0), 1 - torch.arange(12.0)).reshape(4, 3)
  found = compiled(lambda view: view * 2)(view(c.to("jax")))
  assert torch.equal(found.cpu(), view(c) * 2)


@pytest.mark.parametrize(
  "view",
  [
    lambda x, n: x[:n:2],
    lambda x, n: x[: 4 * n].view(n, 4)[:, 1:],
    lambda x, n: x[: 4 * n].view(n, 4).t()[1:],
    lambda x, n: x.as_strided((n,), (n,)),
  ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_views_of_several_sizes_are_inputs(view, needs_grad):
  x = torch.arange(40.0, requires_grad=needs_grad)
  run = compiled(lambda view: view * 2)
  for size in (4, 5, 6):
    ours = x.detach().to("jax").requires_grad_(needs_grad)
    found, expected = run(view(ours, size)), view(x, size) * 2
    assert torch.equal(found.cpu(), expected)
    if needs_grad:
      (gradient,) = torch.autograd.grad(found.sum(), ours)
      assert torch.equal(gradient.cpu(), *torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_empty_tensor_is_an_input(shape):
  x = torch.ones(shape, device="jax", requires_grad=True)
  found = compiled(lambda x: (x.t() * 2).sum())(x)
  found.backward()
  assert found.item() == 0.0
  assert x.grad.shape == shape


def test_view_survives_a_graph_break():
  def function(p):
    view = p[1:]
    torch._dynamo.graph_break()
    view.mul_(2)
    return p.clone()

  base = torch.ones(3, device="jax")
  with pytest.warns(UserWarning, match="shares as a different view"):
    copy = compiled(function)(base)
  assert copy.tolist() == base.tolist() == [1.0, 2.0, 2.0]


def test_result_returned_twice_changes_with_its_gradient():
  def function(x):
    double = x * 2
    return double, torch.atleast_1d(double)

  x = torch.ones(3, requires_grad=True)
  first, second = compiled(function)(x)
  first.mul_(3)
  second.sum().backward()
  assert torch.equal(x.grad, torch.full((3,), 6.0))


def test_gradients_flow_through_shared_results():
  def function(x):
    double = x * 2
    return double, double[1:]

  x = torch.ones(3, device="jax", requires_grad=True)
  double, rest = compiled(function)(x)
  rest.mul_(3)
  (double**2).sum().backward()
  assert_same(x.grad, torch.tensor([8.0, 72.0, 72.0]))


def halved(x):
  with torch.no_grad():
    x.mul_(0.5)


def halved_and_used(x):
  with torch.no_grad():
    x.mul_(0.5)
  return x * x


def shifted(x):
  with torch.no_grad():
    x[1:].copy_(x[:-1].clone())
    x[0].zero_()


@pytest.mark.parametrize("function", [halved, halved_and_used, shifted])
@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_change_of_an_input_under_no_grad_keeps_its_gradient(function, device):
  def gradient(function, device):
    leaf = torch.arange(12.0).reshape(4, 3).to(device).requires_grad_()
    x = leaf * 2
    result = function(x)
    ((x if result is None else result) * x).sum().backward()
    return x.detach().cpu(), leaf.grad.cpu()

  found, expected = gradient(compiled(function), device), gradient(function, "cpu")
  assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_view_of_a_parameter_changes_under_no_grad(device):
  parameter = torch.arange(12.0, device=device).reshape(4, 3).requires_grad_()
  compiled(halved)(parameter.view(-1))
  assert torch.equal(parameter.detach().cpu(), torch.arange(12.0).reshape(4, 3) / 2)


def test_as_strided_uses_the_memory_order_of_an_input():
  def function(p):
    first = p.split(2)[0]
    p.swapaxes_(0, -1)
    first[first > 0] = -1.5
    return p.clone(), first.clone()

  p, q = [(torch.arange(12.0).reshape(4, 3) * 7 % 12 - 6) / 4 for _ in range(2)]
  for found, expected in zip(compiled(function)(p), function(q), strict=True):
    assert torch.equal(found, expected)
  assert torch.equal(p, q)


@pytest.mark.parametrize(
  "read",
  [
    lambda p: p[0].as_strided((2, 2), (1, 3), 2),
    lambda p: p[1:].as_strided_((2, 2), (1, 2), 0),
    lambda p: p[:, 1].as_strided_((2, 2), (1, 2)),
    lambda p: p.split(2)[1].as_strided((3,), (2,), 1),
    lambda p: p.t()[1:].as_strided((2, 3), (3, 1), 0),
    lambda p: torch.complex(p, p + 1).imag[1:].as_strided((3,), (2,), 1),
  ],
)
@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_as_strided_reads_the_memory_around_a_view(read, device):
  p = torch.arange(12.0).reshape(4, 3)
  found = compiled(lambda p: read(p) * 2)(p.to(device))
  assert torch.equal(found.cpu(), read(p) * 2)


@pytest.mark.parametrize("view", [lambda p: p[:, 1], lambda p: p[1:]])
def test_as_strided_of_an_input_needs_its_memory(view):
  function = compiled(lambda v: v.as_strided((2, 2), (1, 2), 0) * 2)
  with pytest.raises(OperatorNotFound, match="memory that its tensor skips"):
    function(view(torch.arange(12.0).reshape(4, 3)))


def test_a_list_as_index_of_an_assignment_is_captured():
  def function(p):
    p[[0, 2]] = 2
    return p * 2

  found = torch.compile(function, backend="jax", fullgraph=True)(
    torch.ones(3, device="jax")
  )
  assert_same(found, torch.tensor([4.0, 2.0, 4.0]))
