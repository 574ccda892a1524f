"""Gradients by torch's autograd, eager and compiled; CPU torch is the oracle.

Calls of `backward` are tested in `test_autograd_backward.py`, functions with a gradient
of their own in `test_autograd_functions.py`.
"""

import contextlib
import copy

import jax
import pytest
import torch
from compare import assert_close, assert_same, to_jax
from gradients import A, B, both, env, leaf, same_gradients
from torch.nn import functional

from torchax.dispatch import autograd
from torchax.interop import jax_jit

# Through operations -------------------------------------------------------------------

FUNCTIONS = {
  "arithmetic": lambda a, b: a * b + a / (b + 3) - a**2,
  "matmul": lambda a, b: a @ b.t(),
  "broadcast": lambda a, b: a * b[0] + b[:, :1],
  "reduction": lambda a, b: a.sum(0) * b.mean(1)[:1],
  "max": lambda a, b: a.max(1)[0] + torch.maximum(a, b).sum(1),
  "softmax": lambda a, b: functional.softmax(a, 1) * b,
  "where": lambda a, b: torch.where(a > b, a, b * 2),
  "cat": lambda a, b: torch.cat([a, b]) ** 2,
  "stack": lambda a, b: torch.stack([a, b], 1).tanh(),
  "index": lambda a, b: a[[0, 2, 0]].sum(1) * b[:, [1, 1]].sum(1),
  "gather": lambda a, b: a.gather(1, (b > 0).long()) * 3,
  "cumulative": lambda a, b: a.cumsum(1) * b.sigmoid(),
  "norm": lambda a, b: a.norm() + b.norm(dim=1),
  "clone": lambda a, b: a.clone() * b,
  "dtype": lambda a, b: a.bfloat16().float() * b,
  "linear": lambda a, b: functional.linear(a, b, b[:, 0]),
  "layer_norm": lambda a, b: functional.layer_norm(a, (4,), b[0], b[1]),
  "gelu": lambda a, b: functional.gelu(a) * functional.silu(b),
  "mse": lambda a, b: functional.mse_loss(a, b),
  "cross_entropy": lambda a, b: functional.cross_entropy(a, b.softmax(1)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_gradients_match_torch(function, with_env):
  with env if with_env else contextlib.nullcontext():
    same_gradients(function, A, B)


VIEWS = {
  "view": lambda a: a.view(12),
  "transpose": lambda a: a.t(),
  "slice": lambda a: a[1:, ::2],
  "select": lambda a: a[1],
  "select from the end": lambda a: a[-2],
  "slice from the end": lambda a: a[:, -3:-1],
  "slice with steps": lambda a: a[:, 1:4:2],
  "expand": lambda a: a[:, :1].expand(3, 5),
  "squeeze": lambda a: a.unsqueeze(1).squeeze(),
  "permute": lambda a: a.view(3, 2, 2).permute(2, 0, 1),
  "diagonal": lambda a: a.diagonal(1),
  "unfold": lambda a: a.unfold(1, 2, 1),
  "split": lambda a: a.split([1, 3], 1)[1],
  "unbind": lambda a: a.unbind(1)[2],
  "as_strided": lambda a: a.as_strided((2, 2), (4, 1), 1),
  "reshape": lambda a: a.t().reshape(2, 6),
  "narrow": lambda a: a.narrow(0, 1, 2),
  "chain": lambda a: a.t()[1:].view(3, 3)[0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_gradients_pass_through_views(view):
  same_gradients(lambda a: view(a) ** 2, A)


def test_gradients_of_rows_share_a_program():
  rows = torch.ones(7, 3, device="jax", requires_grad=True)
  plan = env._dispatcher.plan_for(torch.ops.aten.select_backward.default)
  rows[1].sum().backward()
  programs = len(plan.programs)
  sum(rows[i].sum() for i in (0, 2, 3, -1)).backward()
  assert len(plan.programs) == programs
  assert_same(rows.grad, torch.tensor([1.0] * 4 + [0, 0, 1])[:, None].expand(7, 3))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_leaf_has_its_own_history(view):
  cpu, x = both()
  assert (view(x).grad_fn is None) == (view(cpu).grad_fn is None)
  assert view(x).requires_grad
  assert view(x)._is_view() == view(cpu)._is_view()


IN_PLACE = {
  "scale": lambda a: a.mul_(3),
  "add_itself": lambda a: a.add_(a),
  "view": lambda a: (a[0].mul_(3), a)[1],
  "transposed": lambda a: (a.t()[1].add_(a[0, 0]), a)[1],
  "assign": lambda a: (a.__setitem__(0, a[1] * 2), a)[1],
  "assign_number": lambda a: (a.__setitem__((slice(None), 1), 5.0), a)[1],
  "assign_mask": lambda a: (a.__setitem__(a > 0, 0.0), a)[1],
  "assign_index": lambda a: (a.__setitem__([0, 2], a[:2] * 2), a)[1],
  "copy": lambda a: (a[1].copy_(a[0] * 2), a)[1],
  "masked_fill": lambda a: a.masked_fill_(a > 0, 1.0),
  "zero": lambda a: (a[1:].zero_(), a)[1],
  "read_before_and_after": lambda a: a.clone() * a.mul_(2),
  "view_after": lambda a: (a.mul_(2), a.view(-1)[3:])[1],
  "relu_": lambda a: a.relu_(),
  "metadata": lambda a: a.t_().mul_(2),
  "accumulate": lambda a: sum(
    (a[:, i].add_(a[:, i - 1]) for i in range(1, 4)), a[:, 0]
  ),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_gradients_pass_through_in_place_changes(change):
  same_gradients(lambda a: change(a * 2) ** 2, A)


def test_a_leaf_that_requires_grad_is_not_changed_in_place():
  x = to_jax(leaf())
  with pytest.raises(RuntimeError, match="leaf"):
    x.mul_(2)
  with pytest.raises(RuntimeError, match="leaf"):
    x[0].mul_(2)
  with torch.no_grad():
    x.mul_(2)
  assert_same(x.detach(), A * 2)


def test_write_to_a_saved_tensor_raises_in_backward():
  for values in both():
    result = values.exp()
    result.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
      result.sum().backward()


def test_detach_stops_the_gradient_and_shares_memory():
  cpu, x = both()
  for values in (cpu, x):
    (values * values.detach()).sum().backward()
  assert_same(x.grad, cpu.grad)
  assert not x.detach().requires_grad


# torch creates new tensors inside these gradients.
MAKES_TENSORS = {
  "trace": lambda a: a[:, :3].trace(),
  "prod": lambda a: a.prod(),
  "cummax": lambda a: a.cummax(1)[0],
  "sort": lambda a: a.sort()[0],
  "median": lambda a: a.median(1)[0],
  "gather": lambda a: a.gather(0, torch.zeros_like(a, dtype=torch.int64)),
}
WAYS = {
  "method": lambda loss, x: (loss.backward(), x.grad)[1],
  "function": lambda loss, x: (torch.autograd.backward(loss), x.grad)[1],
  "grad": lambda loss, x: torch.autograd.grad(loss, x)[0],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("function", MAKES_TENSORS.values(), ids=MAKES_TENSORS)
def test_tensors_created_in_backward_are_on_jax(function, way):
  cpu, x = both()
  expected = way(function(cpu).sum(), cpu)
  with env:
    assert_same(way(function(x).sum(), x), expected)
  x = to_jax(leaf())
  if way is WAYS["method"]:
    assert_same(way(function(x).sum(), x), expected)


# Across devices -----------------------------------------------------------------------

# Transfers to jax and back, and the same program on the CPU.
CROSSINGS = {
  "to_cpu": (lambda a: a.to("jax").mul(2).to("cpu"), lambda a: a.mul(2)),
  "cpu": (lambda a: a.to("jax").mul(2).cpu(), lambda a: a.mul(2)),
  "jax": (lambda a: a.jax().mul(2).cpu(), lambda a: a.mul(2)),
  "with_dtype": (
    lambda a: a.to("jax", torch.bfloat16).mul(2).to("cpu", torch.float32),
    lambda a: a.bfloat16().mul(2).float(),
  ),
  "twice": (
    lambda a: (a.to("jax").mul(2).cpu() + a).to("jax").sin().cpu(),
    lambda a: (a.mul(2) + a).sin(),
  ),
}


@pytest.mark.parametrize("row", CROSSINGS.values(), ids=CROSSINGS)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_gradients_cross_devices_with_the_data(row, with_env):
  crossing, plain = row
  cpu, twin = leaf(), leaf()
  with env if with_env else contextlib.nullcontext():
    crossed = crossing(twin)
  assert type(crossed) is torch.Tensor
  (crossed**2).sum().backward()
  (plain(cpu) ** 2).sum().backward()
  assert type(twin.grad) is torch.Tensor
  assert_close(twin.grad, cpu.grad)


def test_gradients_of_jax_leaves_cross_the_cpu():
  cpu, x = both()
  (cpu.sin() * B).sum().backward()
  (x.cpu().sin() * B).sum().backward()
  assert_same(x.grad, cpu.grad)


def test_a_zero_dimensional_cpu_number_gets_its_gradient():
  cpu, x = both()
  expected, number = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
  (cpu * expected).sum().backward()
  (x * number).sum().backward()
  assert_same(x.grad, cpu.grad)
  assert type(number.grad) is torch.Tensor
  assert_close(number.grad, expected.grad)


# Inside compiled functions ------------------------------------------------------------


def test_backward_inside_a_compiled_function():
  cpu = torch.nn.Linear(4, 2)
  model = copy.deepcopy(cpu).to("jax")

  def step(net, x):
    net.zero_grad()
    loss = (net(x) ** 2).sum()
    loss.backward()
    return loss.detach()

  expected = step(cpu, A)
  compiled = jax_jit(lambda x: step(model, x))
  for _ in range(2):
    assert_same(compiled(A.to("jax")), expected)
  assert_same(model.weight.grad, cpu.weight.grad)
  assert_same(model.bias.grad, cpu.bias.grad)
  assert not isinstance(model.weight.grad.jax(), jax.core.Tracer)


@pytest.mark.parametrize("saves_residuals", [False, True])
def test_equal_layers_of_a_compiled_function_are_traced_once(saves_residuals):
  runs = []

  def sine(x):
    runs.append(x.shape)
    return jax.numpy.sin(x)

  layer = autograd.ArrayFunction(sine, saves_residuals)

  def gradient(x, depth):
    x = start = x.detach().requires_grad_()
    for _ in range(depth):
      x = autograd.call(layer, [x])
    return torch.autograd.grad(x.sum(), start)[0]

  counts = []
  for depth in (1, 4):
    runs.clear()
    found = jax_jit(lambda x: gradient(x, depth))(A.to("jax"))  # noqa: B023
    assert_close(found, gradient(A.to("jax"), depth))
    counts.append(len(runs))
  # The eager calls of both depths trace their own programs, the second time none.
  assert counts[1] == 0


def test_autograd_grad_inside_a_compiled_function():
  @jax_jit
  def gradient(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x.sin() ** 2).sum(), x)[0]

  cpu = leaf()
  (expected,) = torch.autograd.grad((cpu.sin() ** 2).sum(), cpu)
  assert_same(gradient(A.to("jax")), expected)


def test_the_gradient_of_a_gradient_inside_a_compiled_function():
  @jax_jit
  def second(x):
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]

  assert_same(second(A.to("jax")), A * 6)


def test_gradients_pass_through_a_compiled_function():
  cpu = torch.nn.Linear(4, 2)
  model = copy.deepcopy(cpu).to("jax")
  a, x = both()
  compiled = jax_jit(lambda values: model(values).tanh())
  (cpu(a).tanh() ** 2).sum().backward()
  (compiled(x) ** 2).sum().backward()
  assert_same(x.grad, a.grad)
  assert_same(model.weight.grad, cpu.weight.grad)


def test_a_whole_training_step_can_be_compiled():
  cpu = torch.nn.Sequential(
    torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
  )
  model = copy.deepcopy(cpu).to("jax")
  optimizers = [
    torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (cpu, model)
  ]

  def step(net, optimizer, x):
    optimizer.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

  # An optimizer creates its state in the first step, which runs eagerly.
  step(model, optimizers[1], A.to("jax"))
  step(cpu, optimizers[0], A)
  compiled = jax_jit(lambda x: step(model, optimizers[1], x))
  for _ in range(3):
    assert_same(compiled(A.to("jax")), step(cpu, optimizers[0], A))
  assert_same(dict(model.state_dict()), dict(cpu.state_dict()))
