"""Gradients by torch's autograd, eagerly and compiled; CPU torch is the oracle."""

import contextlib
import copy
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_close, assert_same, to_jax
from ops.harness import floats, ints
from torch.nn import functional

import torchax
from torchax.dispatch import autograd
from torchax.interop import jax_jit
from torchax.ops import ops_registry
from torchax.ops.jtorch import register_function
from torchax.tensor import Tensor

A = floats(3, 4)
B = floats(3, 4, seed=1)
env = torchax.default_env()


def leaf(values: torch.Tensor = A) -> torch.Tensor:
  """A fresh CPU leaf."""
  return values.clone().requires_grad_()


def both(values: torch.Tensor = A) -> tuple[torch.Tensor, Tensor]:
  """A CPU leaf and its twin on jax."""
  cpu = leaf(values)
  return cpu, to_jax(cpu)


def same_gradients(function, *values: torch.Tensor) -> None:
  """`function(*leaves)` and its gradients agree with the CPU's."""
  cpu = [leaf(v) for v in values]
  on_jax = [to_jax(v) for v in cpu]
  expected, actual = function(*cpu), function(*on_jax)
  assert_same(actual.detach(), expected.detach())
  expected.sum().backward()
  actual.sum().backward()
  for have, want in zip(on_jax, cpu):
    assert_same(have.grad, want.grad)


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
def test_gradients_are_those_of_torch(function, with_env):
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
  programs = len(plan._compiled)
  sum(rows[i].sum() for i in (0, 2, 3, -1)).backward()
  assert len(plan._compiled) == programs
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


def test_a_changed_tensor_that_the_gradient_needs_is_noticed():
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


# torch makes new tensors inside these gradients.
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
def test_gradients_that_make_tensors_make_them_on_jax(function, way):
  cpu, x = both()
  expected = way(function(cpu).sum(), cpu)
  with env:
    assert_same(way(function(x).sum(), x), expected)
  x = to_jax(leaf())
  if way is WAYS["method"]:
    assert_same(way(function(x).sum(), x), expected)


# Calling backward ---------------------------------------------------------------------


def test_gradients_accumulate_and_are_reset():
  cpu, x = both()
  for values in (cpu, x):
    (values * 2).sum().backward()
    (values * 3).sum().backward()
  assert_same(x.grad, cpu.grad)
  x.grad.zero_()
  assert_same(x.grad, torch.zeros(3, 4))
  x.grad = None
  (x * 2).sum().backward()
  assert_same(x.grad, torch.full((3, 4), 2.0))


def test_a_gradient_is_a_jax_tensor():
  _, x = both()
  (x * 2).sum().backward()
  assert isinstance(x.grad, Tensor)
  assert x.grad.device == torch.device("jax:0")
  assert x.grad.dtype == torch.float32


def test_backward_with_a_gradient_of_ones_own():
  cpu, x = both()
  (cpu**2).backward(B)
  (x**2).backward(B.to("jax"))
  assert_same(x.grad, cpu.grad)
  with pytest.raises(RuntimeError, match="scalar"):
    (x**2).backward()


def test_backward_on_another_thread():
  cpu, x = both()
  (cpu.exp() * 2).sum().backward()
  errors = []

  def run():
    try:
      (x.exp() * 2).sum().backward()
    except RuntimeError as error:
      errors.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert not errors
  assert_same(x.grad, cpu.grad)


def test_backward_on_many_threads_at_once():
  model = torch.nn.Linear(4, 2).to("jax")
  x = A.to("jax")
  expected = torch.autograd.grad(model(x).sum(), model.weight)[0].cpu()
  results = []

  def run():
    results.append(torch.autograd.grad(model(x).sum(), model.weight)[0])

  threads = [threading.Thread(target=run) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(results) == 4
  for result in results:
    assert_same(result, expected)


def test_a_graph_built_on_one_thread_is_walked_on_another():
  cpu, x = both()
  cpu.sin().sum().backward()
  loss = x.sin().sum()
  thread = threading.Thread(target=loss.backward)
  thread.start()
  thread.join()
  assert_same(x.grad, cpu.grad)


def test_a_graph_is_walked_once_unless_retained():
  _, x = both()
  loss = (x**2).sum()
  loss.backward(retain_graph=True)
  loss.backward()
  assert_same(x.grad, A * 4)
  with pytest.raises(RuntimeError, match="second time"):
    loss.backward()


def test_autograd_grad_leaves_grad_alone():
  cpu, x = both()
  expected = torch.autograd.grad((cpu**3).sum(), cpu)
  actual = torch.autograd.grad((x**3).sum(), x)
  assert_same(actual, expected)
  assert x.grad is None


def test_unused_inputs_are_reported():
  _, x = both()
  other = to_jax(leaf(B))
  with pytest.raises(RuntimeError, match="not have been used"):
    torch.autograd.grad((x * 2).sum(), [x, other])
  assert torch.autograd.grad((x * 2).sum(), other, allow_unused=True) == (None,)


SECOND_ORDER = {
  "polynomial": lambda a: (a**3).sum(),
  "exp": lambda a: (a.exp() * a).sum(),
  "matmul": lambda a: ((a @ a.t()) ** 2).sum(),
  "tanh": lambda a: a.tanh().pow(2).sum(),
  "softmax": lambda a: functional.softmax(a, 1).pow(2).sum(),
  "views": lambda a: (a.t()[1:] ** 3).sum(),
  "division": lambda a: (1 / (a + 3)).sum(),
  "linear": lambda a: functional.linear(a, a).pow(2).sum(),
}


@pytest.mark.parametrize("function", SECOND_ORDER.values(), ids=SECOND_ORDER)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_the_gradient_of_a_gradient(function, with_env):
  cpu, x = both()
  with env if with_env else contextlib.nullcontext():
    for values in (cpu, x):
      (first,) = torch.autograd.grad(function(values), values, create_graph=True)
      (first * B.to(values.device)).sum().backward()
  assert_same(x.grad, cpu.grad)


def test_hooks_see_and_change_gradients():
  cpu, x = both()
  for values in (cpu, x):
    seen = []
    inner = values * 2
    inner.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
    handle = values.register_hook(lambda grad: grad * 10)
    (inner**2).sum().backward()
    assert seen == [(3, 4)]
    handle.remove()
  assert_same(x.grad, cpu.grad)


def test_hooks_of_leaves_run_after_accumulation():
  seen = []
  _, x = both()
  x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
  (x * 3).sum().backward()
  assert_same(seen, [torch.full((3, 4), 3.0)])


def test_module_hooks_see_gradients():
  model = torch.nn.Linear(4, 2).to("jax")
  seen = []
  model.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
  model(to_jax(leaf())).sum().backward()
  ((grad_input,), (grad_output,)) = seen[0]
  assert grad_input.shape == (3, 4)
  assert_same(grad_output, torch.ones(3, 2))


def test_retained_gradients_of_results():
  cpu, x = both()
  for values in (cpu, x):
    inner = values * 2
    inner.retain_grad()
    (inner**2).sum().backward()
    values.inner_grad = inner.grad
  assert_same(x.inner_grad, cpu.inner_grad)


def test_nothing_is_recorded_without_grad():
  _, x = both()
  with torch.no_grad():
    assert not (x * 2).requires_grad
    assert (x * 2).grad_fn is None
    with torch.enable_grad():
      assert (x * 2).requires_grad
  with torch.inference_mode():
    assert not (x * 2).requires_grad

  @torch.no_grad()
  def decorated():
    return x * 2

  assert not decorated().requires_grad
  assert (x * 2).requires_grad


def test_integers_cannot_require_grad():
  with pytest.raises(RuntimeError, match="floating"):
    ints(3).to("jax").requires_grad_()


def test_checkpointing_gives_the_same_gradients():
  cpu, x = both()
  for values in (cpu, x):
    torch.utils.checkpoint.checkpoint(
      lambda a: (a.sin() * a).sum(), values, use_reentrant=False
    ).backward()
  assert_same(x.grad, cpu.grad)


def test_anomaly_detection_works():
  _, x = both()
  with pytest.warns(UserWarning), torch.autograd.detect_anomaly(check_nan=True):
    (x * 2).sum().backward()
  with (
    pytest.warns(UserWarning),
    torch.autograd.detect_anomaly(),
    pytest.raises(RuntimeError, match="nan"),
  ):
    torch.sqrt(x * 0 - 1).sum().backward()


# Across devices -----------------------------------------------------------------------

# A way over jax and back, and the same on the CPU.
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


# Functions of one's own ---------------------------------------------------------------


class Cube(torch.autograd.Function):
  """x³ with a gradient written by hand."""

  @staticmethod
  def forward(ctx, x, scale):
    ctx.save_for_backward(x)
    ctx.scale = scale
    return x**3 * scale

  @staticmethod
  def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return 3 * x**2 * grad * ctx.scale, None


def test_a_function_with_a_gradient_of_its_own():
  same_gradients(lambda a: Cube.apply(a * 2, 0.5), A)
  cpu, x = both()
  for values in (cpu, x):
    (first,) = torch.autograd.grad(
      Cube.apply(values, 2.0).sum(), values, None, None, True
    )
    first.sum().backward()
  assert_same(x.grad, cpu.grad)


def registered(torch_function, function, **kwargs):
  """Registers a function for one test."""

  @contextlib.contextmanager
  def scope():
    register_function(torch_function, **kwargs)(function)
    try:
      with env:
        yield
    finally:
      del ops_registry.all_torch_functions[torch_function]

  return scope()


def smooth(x, weight, power=2):
  """A torch function that others may override."""
  if torch.overrides.has_torch_function((x, weight)):
    return torch.overrides.handle_torch_function(
      smooth, (x, weight), x, weight, power=power
    )
  return (x * weight) ** power


def _smooth(x, weight, power=2):
  return jnp.power(x * weight, power)


def test_a_registered_function_is_differentiated_by_jax():
  with registered(smooth, _smooth):
    same_gradients(lambda a, b: smooth(a, b), A, B)
    same_gradients(lambda a, b: smooth(a, b, power=3), A, B)


def test_a_registered_function_is_differentiated_twice():
  cpu, x = both()
  with registered(smooth, _smooth):
    for values in (cpu, x):
      other = B.to(values.device)
      (first,) = torch.autograd.grad(
        smooth(values, other, power=3).sum(), values, create_graph=True
      )
      (first**2).sum().backward()
  assert_same(x.grad, cpu.grad)


def test_a_registered_function_of_tensors_is_differentiated_by_torch():
  def twice(x):
    return torch.overrides.handle_torch_function(twice, (x,), x)

  with registered(twice, lambda x: torch.add(x, x), is_jax_function=False):
    x = to_jax(leaf())
    (twice(x) ** 2).sum().backward()
  assert_same(x.grad, A * 8)


def test_views_are_differentiated_through_registered_functions():
  with registered(smooth, _smooth):
    same_gradients(lambda a, b: smooth(a.t()[1:], b.t()[:3]), A, B)


def test_a_registered_function_leaves_cpu_tensors_alone():
  with registered(smooth, lambda x, weight, power=2: x * 0):
    assert_close(smooth(A, B), (A * B) ** 2)


# `ArrayFunction` and `call` -----------------------------------------------------------


def test_a_call_without_gradients_records_nothing():
  function = autograd.ArrayFunction(lambda a, b: {"sum": a + b, "product": a * b})
  result = autograd.call(function, [A.to("jax"), B.to("jax")])
  assert_same(result, {"sum": A + B, "product": A * B})
  assert result["sum"].grad_fn is None


def test_a_call_is_compiled_once_a_shape():
  traces = []

  def function(a):
    traces.append(a.shape)
    return a * 2

  array_function = autograd.ArrayFunction(function)
  for _ in range(3):
    autograd.call(array_function, [A.to("jax")])
  autograd.call(array_function, [A[0].to("jax")])
  assert traces == [(3, 4), (4,)]


def test_unused_and_integer_results_have_no_gradient():
  def function(a, i):
    return a * 2, jnp.argmax(a), a + i

  x, index = to_jax(leaf()), ints(1).to("jax")
  double, place, _ = autograd.call(autograd.ArrayFunction(function), [x, index])
  assert double.requires_grad and not place.requires_grad
  double.sum().backward()
  assert_same(x.grad, torch.full((3, 4), 2.0))


def test_complex_gradients_follow_torchs_convention():
  values = torch.complex(A, B)
  function = autograd.ArrayFunction(lambda z: z * z * (1 + 2j))
  cpu, x = leaf(values), to_jax(leaf(values))
  (cpu * cpu * (1 + 2j)).abs().sum().backward()
  autograd.call(function, [x]).abs().sum().backward()
  assert_same(x.grad, cpu.grad)


def test_only_needed_gradients_come_back():
  x, constant = to_jax(leaf()), B.to("jax")
  function = autograd.ArrayFunction(lambda a, b: a * b)
  autograd.call(function, [x, constant]).sum().backward()
  assert_same(x.grad, B)
  assert constant.grad is None


def test_a_call_works_while_jax_traces():
  function = autograd.ArrayFunction(lambda a: jnp.sin(a) * 2)

  @jax_jit
  def gradient(values):
    values = values.detach().requires_grad_()
    autograd.call(function, [values]).sum().backward()
    return values.grad

  assert_same(gradient(A.to("jax")), A.cos() * 2)


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

  # An optimizer makes its state on the first step; that one is run eagerly.
  step(model, optimizers[1], A.to("jax"))
  step(cpu, optimizers[0], A)
  compiled = jax_jit(lambda x: step(model, optimizers[1], x))
  for _ in range(3):
    assert_same(compiled(A.to("jax")), step(cpu, optimizers[0], A))
  assert_same(dict(model.state_dict()), dict(cpu.state_dict()))
