"""`torch.no_grad` under JAX's differentiation has its meaning in torch."""

import jax
import pytest
import torch
from gradients import Doubling

import torchax
from torchax.core import grad_mode
from torchax.interop import (
  call_jax,
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
)


@pytest.fixture(autouse=True)
def enabled():
  torch.manual_seed(0)
  with torchax.default_env():
    yield


def _clamped(x):
  y = x * 1
  with torch.no_grad():
    y.clamp_(min=0.5)
  return y * x


def _written_through_a_view(x):
  y = x * 2
  with torch.no_grad():
    y[0:1].fill_(5.0)
  return y


def _written_through_detach(x):
  y = x * 2
  y.detach().clamp_(min=3.0)
  return y


def _custom(x):
  class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * 2

    @staticmethod
    def backward(ctx, gradient):
      return gradient * 2

  return Double.apply(x) * x


class _Quiet(torch.autograd.Function):
  """Function that doubles and disables recording itself."""

  @staticmethod
  def forward(ctx, x):
    with torch.no_grad():
      return x * 2

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 2


class _Outer(torch.autograd.Function):
  """Function that doubles by another function of its kind."""

  @staticmethod
  def forward(ctx, x):
    return _Quiet.apply(x)

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 2


class _AsksJax(torch.autograd.Function):
  """Function that squares, after JAX has differentiated a function inside."""

  @staticmethod
  def forward(ctx, x):
    ctx.save_for_backward(x)
    if isinstance(x, torchax.tensor.Tensor):
      jax_value_and_grad(lambda x: _Quiet.apply(x).sum())(x)
    return x * x

  @staticmethod
  def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return 2 * x * gradient


def _one_after_another(x):
  with torch.no_grad():
    y = _Quiet.apply(x)
  return _Quiet.apply(x) * y


def _doubled_in_place(x):
  y = x * 1
  with torch.no_grad():
    Doubling.apply(y)
  return y * x


def _under(f, mode=torch.no_grad):
  def g(x):
    with mode():
      y = f(x)
    return y.clone() * x

  return g


FUNCTIONS = {
  "an operation": _under(lambda x: x * 2),
  "a view": _under(lambda x: x.view(3, 1)[:, 0]),
  "a view of a view": _under(lambda x: x.view(1, 3).t().squeeze(1)),
  "several results": _under(lambda x: torch.sort(x).values),
  "a function": _under(lambda x: torch.nn.functional.layer_norm(x, (3,))),
  "a linear layer": _under(lambda x: torch.nn.functional.linear(x, torch.eye(3).to(x))),
  "a decomposition": _under(lambda x: torch.nn.functional.softsign(x)),
  "a change in place": _clamped,
  "a write through a view": _written_through_a_view,
  "a write through detach": _written_through_detach,
  "enable_grad inside": _under(lambda x: torch.enable_grad()(torch.sin)(x)),
  "a custom function": _custom,
  "no_grad in a custom function": lambda x: _Quiet.apply(x) * x,
  "a custom function in another": lambda x: _Outer.apply(x) * x,
  "inference mode": _under(lambda x: x * 2, torch.inference_mode),
  "a custom function in inference mode": _under(_Quiet.apply, torch.inference_mode),
  "a custom function under no_grad": _under(_Quiet.apply),
  "one that is recorded after one that is not": _one_after_another,
  "a custom function that grad is off for": _under(
    _Outer.apply, lambda: torch.set_grad_enabled(False)
  ),
  "a custom function in place under no_grad": _doubled_in_place,
  "a custom function that asks JAX for a gradient": lambda x: _AsksJax.apply(x) * x,
  "the same under no_grad": _under(_AsksJax.apply),
  "enable_grad around a custom function": _under(torch.enable_grad()(_Quiet.apply)),
  "set_grad_enabled": lambda x: torch.set_grad_enabled(True) and None or x * 3,
}


def _numbers() -> torch.Tensor:
  return torch.tensor([0.25, 1.0, 2.0])


def _of_torch(f) -> torch.Tensor:
  x = _numbers().requires_grad_()
  return torch.autograd.grad(f(x).sum(), x)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrap", ["value_and_grad", "jit inside", "jax.grad"])
def test_jax_finds_the_gradient_of_torch(name, wrap):
  f = FUNCTIONS[name]
  x = _numbers().to("jax")
  if wrap == "jax.grad":
    found = jax.grad(lambda a: jax_view(f)(a).sum())(x.jax())
    found = torch.tensor(found.tolist())
  else:
    inner = jax_jit(f) if wrap == "jit inside" else f
    found = jax_value_and_grad(lambda x: inner(x).sum())(x)[1].cpu()
  torch.testing.assert_close(found, _of_torch(f))


RECORDED = {
  "jit": jax_jit,
  "checkpoint": gradient_checkpoint,
  "scan": lambda f: lambda x: scan(lambda c, _: (f(c), None), x, length=1)[0],
  "jit of scan": lambda f: jax_jit(
    lambda x: scan(lambda c, _: (f(c), None), x, length=1)[0]
  ),
}


@pytest.mark.parametrize("wrap", RECORDED)
@pytest.mark.parametrize(
  "name",
  [
    *("an operation", "inference mode", "no_grad in a custom function"),
    "a custom function under no_grad",
  ],
)
def test_no_grad_counts_inside_of_recorded_functions(name, wrap):
  f = FUNCTIONS[name]
  x = _numbers().to("jax").requires_grad_()
  RECORDED[wrap](f)(x).sum().backward()
  torch.testing.assert_close(x.grad.cpu(), _of_torch(f))


BOUNDARIES = {
  "jit": jax_jit,
  "checkpoint": gradient_checkpoint,
  "scan": lambda f: lambda x: scan(lambda c, _: (f(c), None), x, length=1)[0],
  "cond": lambda f: lambda x: cond(x.sum() > 0, f, f, x),
  "vmap": lambda f: lambda x: jax_vmap(f)(x),
  "call_jax": lambda f: lambda x: call_jax(jax_view(f), x),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_results_of_a_boundary_under_no_grad_have_no_gradient(name):
  wrapped = BOUNDARIES[name](lambda x: x * 2)
  x = _numbers().to("jax")
  _, gradient = jax_value_and_grad(lambda x: _under(wrapped)(x).sum())(x)
  assert gradient.tolist() == [0.5, 2.0, 4.0]


OUTSIDE = {
  "value_and_grad": lambda f, x: jax_value_and_grad(lambda x: f(x).sum())(x)[1],
  "value_and_grad of jit": lambda f, x: jax_value_and_grad(
    jax_jit(lambda x: f(x).sum())
  )(x)[1],
  "jit of value_and_grad": lambda f, x: jax_jit(
    jax_value_and_grad(lambda x: f(x).sum())
  )(x)[1],
  "jax.grad": lambda f, x: torchax.interop.torch_view(
    jax.grad(lambda a: jax_view(f)(a).sum())(x.jax())
  ),
  "jax.jit of jax.grad": lambda f, x: torchax.interop.torch_view(
    jax.jit(jax.grad(lambda a: jax_view(f)(a).sum()))(x.jax())
  ),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("square", [lambda x: x**2, lambda x: _Quiet.apply(x) * x / 2])
def test_no_grad_around_a_gradient_of_jax_does_not_count(name, mode, square):
  """A gradient of JAX ignores the caller's grad mode, as `torch.func.grad` does."""
  with mode():
    gradient = OUTSIDE[name](square, _numbers().to("jax"))
  assert gradient.tolist() == [0.5, 2.0, 4.0]


def test_function_compiled_under_no_grad_still_has_a_gradient():
  compiled = jax_jit(lambda x: x * 2)
  x = _numbers().to("jax")
  with torch.no_grad():
    compiled(x)
  _, gradient = jax_value_and_grad(lambda x: compiled(x).sum())(x)
  assert gradient.tolist() == [2.0] * 3
  x.requires_grad_()
  compiled(x).sum().backward()
  assert x.grad.tolist() == [2.0] * 3


def test_a_sample_has_no_gradient_and_an_rsample_has_one():
  def loss(method):
    def f(x):
      draw = getattr(torch.distributions.Laplace(x, 1.0), method)
      return draw((4,)).sum()

    return jax_value_and_grad(f)(torch.zeros(2, device="jax"))[1].tolist()

  assert loss("sample") == [0.0, 0.0]
  assert loss("rsample") == [4.0, 4.0]


def test_with_derivative_of_keeps_the_tangent_of_the_old_array():
  def f(x):
    return grad_mode.with_derivative_of(x * 3, jax.numpy.sin(x))

  x = jax.numpy.ones(2)
  value, tangent = jax.jvp(f, (x,), (x,))
  assert value.tolist() == jax.numpy.sin(x).tolist()
  assert tangent.tolist() == [3.0, 3.0]
  for transformed in (jax.jit, jax.vmap, lambda g: jax.jit(jax.vmap(g))):
    assert transformed(f)(x).tolist() == value.tolist()
  rows = jax.vmap(jax.grad(f))(x)
  assert rows.tolist() == [3.0, 3.0]
  assert jax.grad(jax.grad(f))(1.0) == 0.0


def test_another_shape_is_refused():
  with pytest.raises(ValueError, match="Expected an array of shape"):
    grad_mode.with_derivative_of(jax.numpy.ones(2), jax.numpy.ones(3))
