"""Functions with a gradient of their own: of torch, registered, and of arrays.

Gradients of operations are tested in `test_autograd.py`.
"""

import contextlib
import copy

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_close, assert_same, to_jax
from gradients import A, B, both, env, leaf, same_gradients
from ops.harness import ints

from torchax.core import program_limit
from torchax.dispatch import autograd
from torchax.interop import JittableModule, jax_jit, jax_value_and_grad
from torchax.ops.jtorch import register_function
from torchax.registry import operators

# Functions of users -------------------------------------------------------------------


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


def test_autograd_function_uses_its_backward():
  same_gradients(lambda a: Cube.apply(a * 2, 0.5), A)
  cpu, x = both()
  for values in (cpu, x):
    (first,) = torch.autograd.grad(
      Cube.apply(values, 2.0).sum(), values, None, None, True
    )
    first.sum().backward()
  assert_same(x.grad, cpu.grad)


class Reversible(torch.autograd.Function):
  """`x + module(x)`, whose backward adds to the `.grad` of the module's parameters."""

  @staticmethod
  def forward(ctx, x, module):
    ctx.module = module
    ctx.save_for_backward(x)
    return x + module(x)

  @staticmethod
  def backward(ctx, gradient):
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
      ctx.module(x).backward(gradient)
    return gradient + x.grad, None


class Network(torch.nn.Linear):
  def forward(self, x):
    inner = super().forward
    return Reversible.apply(Reversible.apply(x, inner), inner).sin() @ self.weight


def _step_of(network):
  def step(x):
    network.zero_grad()
    loss = network(x).sum()
    loss.backward()
    return loss.detach()

  return jax_jit(step)


def _accumulating(network):
  return lambda x: network(x).sum().backward()


REVERSIBLE = {
  "eager": _accumulating,
  "jit": lambda network: _accumulating(jax_jit(network)),
  "arguments of a jit": lambda network: _accumulating(JittableModule(network)),
  "step": _step_of,
}


@pytest.mark.parametrize("way", REVERSIBLE)
def test_a_backward_adds_to_the_gradients_of_parameters(way):
  torch.manual_seed(0)
  network = Network(4, 4)
  on_jax = copy.deepcopy(network).to("jax")
  train = REVERSIBLE[way](on_jax)
  for x in (A, 2 * A):
    expected, actual = x.clone().requires_grad_(), x.to("jax").requires_grad_()
    if way == "step":
      network.zero_grad()
    _accumulating(network)(expected)
    train(actual)
    assert_same(
      [p.grad for p in on_jax.parameters()], [p.grad for p in network.parameters()]
    )
    assert_same(actual.grad, expected.grad)


class UsedInBackward(torch.autograd.Function):
  """Square, whose backward runs a module that the forward pass does not."""

  @staticmethod
  def forward(ctx, x, module):
    ctx.module = module
    ctx.save_for_backward(x)
    return x**2

  @staticmethod
  def backward(ctx, gradient):
    with torch.enable_grad():
      ctx.module(ctx.saved_tensors[0]).sum().backward()
    return gradient, None


@pytest.mark.parametrize("compiler", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_a_backward_may_be_the_first_to_use_a_module(compiler):
  linear = torch.nn.Linear(4, 4)
  on_jax = copy.deepcopy(linear).to("jax")
  call = compiler(lambda x: UsedInBackward.apply(x, on_jax))
  for _ in range(2):
    UsedInBackward.apply(A.clone().requires_grad_(), linear).sum().backward()
    call(A.to("jax").requires_grad_()).sum().backward()
    assert_same(on_jax.weight.grad, linear.weight.grad)


def test_jax_ignores_what_a_backward_adds_to_grad():
  network = Network(4, 4)
  expected = A.clone().requires_grad_()
  network(expected).sum().backward()
  network.to("jax").zero_grad()
  _, actual = jax_value_and_grad(lambda x: network(x).sum())(A.to("jax"))
  assert_same(actual, expected.grad)
  assert network.weight.grad is None


def registered(torch_function, function, **kwargs):
  """Register a function for one test."""

  @contextlib.contextmanager
  def scope():
    register_function(torch_function, **kwargs)(function)
    try:
      with env:
        yield
    finally:
      del operators.all_torch_functions[torch_function]

  return scope()


def smooth(x, weight, power=2):
  """Torch function that subclasses may override."""
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


def test_torch_differentiates_registered_tensor_functions():
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


def test_a_call_is_compiled_once_per_shape():
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


def test_only_needed_gradients_are_returned():
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


@pytest.mark.usefixtures("strict_mode")  # calls JAX with the results
def test_residuals_share_memory_with_arguments_and_results():
  function = autograd.ArrayFunction(
    lambda a, b: {"product": a @ b, "power": jnp.exp(a)}, saves_residuals=True
  )
  arrays = jnp.ones((2, 3)), jnp.ones((3, 4))
  result, pullback = function.linearize(*arrays)
  residuals = set(map(id, jax.tree.leaves(pullback)))
  assert {id(result["power"]), *map(id, arrays)} <= residuals
  of_power, of_product = jnp.ones((2, 3)), jnp.ones((2, 4))
  to_a, to_b = function.pull(pullback, [of_power, of_product])
  assert jnp.allclose(to_a, 4 + jnp.exp(arrays[0]))
  assert (to_b == 2).all()


@pytest.mark.parametrize("saves", [True, False])
def test_programs_of_gradients_are_named_like_the_function(saves, monkeypatch):
  names, jit = [], program_limit.jit

  def recorded(function, **options):
    names.append(function.__name__)
    return jit(function, **options)

  monkeypatch.setattr(program_limit, "jit", recorded)

  def _wave(a):
    return jnp.sin(a)

  x = to_jax(leaf())
  autograd.call(autograd.ArrayFunction(_wave, saves), [x]).sum().backward()
  assert_same(x.grad, A.cos())
  assert {"_wave", "wave_with_residuals", "gradient_of_wave"} <= set(names)
