"""`torch.autograd.Function` keeps its own backward wherever JAX differentiates."""

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same
from gradients import Doubling
from torch.autograd.function import once_differentiable

import torchax
from torchax.interop import (
  call_jax,
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
)

X = torch.tensor([[-1.5, 0.0, 0.25], [0.5, 1.0, 3.0]])
W = torch.tensor([[2.0, -1.0, 0.5], [1.0, 0.0, -0.5]])


class Step(torch.autograd.Function):
  """Sign of x, with the gradient of the identity if |x| <= 1."""

  @staticmethod
  def forward(ctx, x):
    ctx.save_for_backward(x)
    return x.sign()

  @staticmethod
  def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * (x.abs() <= 1)


class Reversal(torch.autograd.Function):
  """Identity with a negated gradient."""

  @staticmethod
  def forward(ctx, x, scale):
    ctx.scale = scale
    return x.view_as(x)

  @staticmethod
  def backward(ctx, gradient):
    return gradient.neg() * ctx.scale, None


class Clipped(torch.autograd.Function):
  """Identity with a clipped gradient, which is not a linear map."""

  @staticmethod
  def forward(ctx, x):
    return x.clone()

  @staticmethod
  def backward(ctx, gradient):
    return gradient.clamp(-0.5, 0.5)


class Exp(torch.autograd.Function):
  """Exponential that saves its result and has three times its derivative."""

  @staticmethod
  def forward(ctx, x):
    result = x.exp()
    ctx.save_for_backward(result)
    return result

  @staticmethod
  def backward(ctx, gradient):
    (result,) = ctx.saved_tensors
    return 3 * gradient * result


class Cube(torch.autograd.Function):
  """Cube that saves its argument and an intermediate value without a derivative."""

  @staticmethod
  def forward(x):
    return x**3, x * x

  @staticmethod
  def setup_context(ctx, inputs, output):
    (x,), (_, square) = inputs, output
    ctx.mark_non_differentiable(square)
    ctx.save_for_backward(x, square, x * 2)

  @staticmethod
  def backward(ctx, gradient, of_square):
    x, square, between = ctx.saved_tensors
    return gradient * (2 * square + x * between)


class Product(torch.autograd.Function):
  """Two results of two arguments, with a layout of its own."""

  @staticmethod
  def forward(ctx, x, w, transposed):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w)
    ctx.transposed = transposed
    return (x * w).t() if transposed else x * w, x + 2 * w

  @staticmethod
  def backward(ctx, of_product, of_sum):
    x, w = ctx.saved_tensors
    if of_product is None:
      of_product = torch.zeros_like(x.t() if ctx.transposed else x)
    if of_sum is None:
      of_sum = torch.zeros_like(x)
    if ctx.transposed:
      of_product = of_product.t()
    of_x = of_product * w * 10 + of_sum if ctx.needs_input_grad[0] else None
    of_w = of_product * x * 10 + of_sum if ctx.needs_input_grad[1] else None
    return of_x, of_w, None


class Rectangle(torch.autograd.Function):
  """|x| by another function of this kind; only the outer gradient counts."""

  @staticmethod
  def forward(ctx, x):
    ctx.save_for_backward(x)
    return Step.apply(x) * x

  @staticmethod
  @once_differentiable
  def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * (Step.apply(x) + 4)


class Recomputed(torch.autograd.Function):
  """Checkpoint as programs write it, recorded in the backward pass."""

  @staticmethod
  def forward(ctx, x, function):
    ctx.function = function
    ctx.save_for_backward(x)
    return function(x)

  @staticmethod
  def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    x = x.detach().requires_grad_()
    with torch.enable_grad():
      result = ctx.function(x)
    torch.autograd.backward(result, gradient)
    return x.grad, None


class Chosen(torch.autograd.Function):
  """Function that takes integers and returns them with its floats."""

  @staticmethod
  def forward(ctx, x, index):
    ctx.save_for_backward(index)
    ctx.shape = x.shape
    return x.gather(1, index), index + 1

  @staticmethod
  def backward(ctx, gradient, of_index):
    (index,) = ctx.saved_tensors
    zeros = torch.zeros(ctx.shape, device=gradient.device)
    return zeros.scatter_add(1, index, 5 * gradient), None


def _in_place(x):
  y = x * 1
  z = Doubling.apply(y, 20)
  return y * z + x


def _in_place_of_a_view(x):
  y = x * 1
  Doubling.apply(y[:, 1], 20)
  return y * x


def _chosen(x):
  index = torch.tensor([[0, 0], [2, 1]], device="cpu").to(x.device)
  values, next_index = Chosen.apply(x, index)
  return values * next_index


FUNCTIONS = {
  "straight through": Step.apply,
  "reversal": lambda x: Reversal.apply(x, 0.5) * x,
  "clipped": lambda x: Clipped.apply(x) * x,
  "saves its result": Exp.apply,
  "saves what is between": lambda x: Cube.apply(x)[0] + Cube.apply(x)[1],
  "two arguments": lambda x: Product.apply(x, x * 2, False)[0],
  "one argument twice": lambda x: Product.apply(x, x, True)[1],
  "both results": lambda x: sum(Product.apply(x.sin(), x, False)),
  "in place": _in_place,
  "in place of a view": _in_place_of_a_view,
  "within another": Rectangle.apply,
  "recorded in the backward pass": lambda x: Recomputed.apply(x, torch.tanh),
  "integers": _chosen,
  "of a view": lambda x: Step.apply(x.t()[1:]) * 2,
  "under no_grad": lambda x: torch.no_grad()(Step.apply)(x) * x,
}


def _by_jax(f, x):
  return jax_value_and_grad(lambda x: f(x).sum())(x)[1]


def _by_jax_of_a_jit(f, x):
  return jax_value_and_grad(jax_jit(lambda x: f(x).sum()))(x)[1]


def _by_jax_in_a_jit(f, x):
  return jax_jit(jax_value_and_grad(lambda x: f(x).sum()))(x)[1]


def _of_a_view(f, x):
  array = jax.grad(jax_view(lambda x: f(x).sum()))(x.jax())
  return torchax.interop.torch_view(array)


def _recorded(wrap):
  def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(wrap(f, x).sum(), x)[0]

  return gradient


def _scanned(f, x):
  return scan(lambda carry, row: (carry, f(row)), x[0, 0], x[None])[1]


WAYS = {
  "eager": _recorded(lambda f, x: f(x)),
  "jit": _recorded(lambda f, x: jax_jit(f)(x)),
  "jax_value_and_grad": _by_jax,
  "jax_value_and_grad of a jit": _by_jax_of_a_jit,
  "jax_value_and_grad in a jit": _by_jax_in_a_jit,
  "jax.grad of jax_view": _of_a_view,
  "scan": _recorded(_scanned),
  "cond": _recorded(lambda f, x: cond(x.sum() > 0, f, lambda x: f(x) * 2, x)),
  "jax_vmap": _recorded(lambda f, x: jax_vmap(f)(x[None])),
  "checkpoint": _recorded(lambda f, x: gradient_checkpoint(f)(x)),
  "checkpoint in a jit": _recorded(lambda f, x: jax_jit(gradient_checkpoint(f))(x)),
  "call_jax": _recorded(lambda f, x: call_jax(jax_view(f), x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_gradient_is_the_functions_backward(name, way):
  f = FUNCTIONS[name]
  expected = _recorded(lambda f, x: f(x))(f, X)
  assert_same(WAYS[way](f, X.to("jax")), expected)


# Higher orders ------------------------------------------------------------------------


def _is_differentiated_once(name):
  return name in ("within another", "recorded in the backward pass")


@pytest.mark.parametrize(
  "name", [name for name in FUNCTIONS if not _is_differentiated_once(name)]
)
def test_second_derivatives_of_a_backward_match_torch(name):
  def weighed(x):
    return (FUNCTIONS[name](x) * torch.linspace(-1, 1, 6).view(2, 3).to(x.device)).sum()

  def weighed_transposed(x):
    result = FUNCTIONS[name](x)
    return (result * result.detach()).sum()

  for f in (weighed, weighed_transposed):
    if FUNCTIONS[name](X).shape != X.shape and f is weighed:
      continue
    expected = torch.autograd.functional.hessian(f, X)
    hessians = [lambda g: jax.jacrev(jax.jit(jax.grad(g)))]
    if name != "clipped":  # it is not linear, so it has no transpose
      hessians.append(jax.hessian)
    for hessian in hessians:
      found = hessian(jax_view(f))(X.to("jax").jax())
      assert_same(torchax.interop.torch_view(found), expected, name)


def test_forward_mode_is_the_transpose_of_the_backward():
  x = X.to("jax").jax()
  tangent = jnp.ones_like(x)
  for name, scale in (("saves its result", 3.0), ("reversal", None)):
    f = jax_view(FUNCTIONS[name])
    _, moved = jax.jvp(f, (x,), (tangent,))
    pulled = jax.vjp(f, x)[1](tangent)[0]  # both are diagonal
    assert jnp.allclose(moved, pulled), name
    if scale:
      assert jnp.allclose(moved, scale * jnp.exp(x))


def test_backward_works_under_vmap_inside_and_outside_grad():
  f = jax_view(lambda x: sum(Product.apply(x.sin(), x, False)).sum())
  x = X.to("jax").jax()
  expected = _recorded(lambda f, x: f(x))(FUNCTIONS["both results"], X)
  inside = jax.grad(lambda x: jax.vmap(f)(x).sum())(x)
  outside = jax.vmap(jax.grad(f))(x)
  for found in (inside, outside):
    assert_same(torchax.interop.torch_view(found), expected)


# Side effects of the forward pass -----------------------------------------------------


def test_captured_tensors_have_no_gradient():
  class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * weight

    @staticmethod
    def backward(ctx, gradient):
      return gradient * weight

  weight = X

  def scaled(x, w):
    nonlocal weight
    weight = w
    return (Scaled.apply(x) * w.detach()).sum()

  x = X.clone().requires_grad_()
  expected = torch.autograd.grad(scaled(x, W), x)[0]
  values = {"x": X.to("jax"), "w": W.to("jax")}
  _, found = jax_value_and_grad(lambda v: scaled(v["x"], v["w"]))(values)
  assert_same(found["x"], expected)
  assert_same(found["w"], torch.zeros_like(W))


class Counting(torch.nn.Module):
  """Function that counts its forward passes in a buffer."""

  def __init__(self):
    super().__init__()
    self.weight = torch.nn.Parameter(W.clone())
    self.register_buffer("count", torch.zeros(()))

  def forward(self, x):
    return _Counted.apply(x, self.weight, self.count)


class _Counted(torch.autograd.Function):
  @staticmethod
  def forward(ctx, x, weight, count):
    count += 1
    ctx.save_for_backward(x, weight)
    return x * weight

  @staticmethod
  def backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient * weight, gradient * x * 7, None


@pytest.mark.parametrize("jits", [False, True])
def test_forward_writes_to_its_arguments(jits):
  model = Counting().to("jax")

  def step(x):
    loss, of_x = jax_value_and_grad(lambda x: model(x).sum())(x)
    return of_x

  found = (jax_jit(step) if jits else step)(X.to("jax"))
  assert_same(found, W)
  assert_same(model.count.detach(), torch.ones(()))


def test_backward_in_scan_gives_torch_gradients_of_parameters():
  model = Counting().to("jax")
  x = X.to("jax").requires_grad_()
  result = scan(lambda carry, row: (carry, model(row)), x[0, 0], x[None])[1]
  of_x, of_weight = torch.autograd.grad(result.sum(), [x, model.weight])
  assert_same(of_x, W)
  assert_same(of_weight, X * 7)


def test_torch_gradient_inside_jit_uses_the_backward():
  model = Counting().to("jax")

  def inside(x):
    (of_weight,) = torch.autograd.grad(model(x).sum(), model.weight)
    return of_weight * x

  found = jax_jit(inside)(X.to("jax"))
  assert_same(found, 7 * X * X)


class Adjoint(torch.autograd.Function):
  """`f(x)`, whose backward differentiates a second call of `f` by its parameters."""

  @staticmethod
  def forward(ctx, f, x, *parameters):
    ctx.f = f
    ctx.save_for_backward(x, None, *parameters)
    return f(x)

  @staticmethod
  def backward(ctx, gradient):
    x, _, *parameters = ctx.saved_tensors
    with torch.enable_grad():
      x = x.detach().requires_grad_()
      found = torch.autograd.grad(ctx.f(x), (x, *parameters), gradient)
    return None, *found


PARAMETERS = {
  "leaf": lambda weight: weight,
  "product": lambda weight: weight * 3,
  "view": lambda weight: (weight * 3)[:1],
}


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("jits", ["loss", "step"])
def test_backward_differentiates_by_parameters_of_a_closure(jits, parameter):
  def loss(x, weight):
    scaled = parameter(weight)
    return (Adjoint.apply(lambda x: (x * scaled).sin(), x, scaled) ** 2).sum()

  def step(x, weight):
    return torch.autograd.grad(loss(x, weight), (x, weight))

  inputs = [X.clone().requires_grad_(), W.clone().requires_grad_()]
  on_jax = [X.to("jax").requires_grad_(), W.to("jax").requires_grad_()]
  if jits == "step":
    found = jax_jit(step)(*on_jax)
  else:
    found = torch.autograd.grad(jax_jit(loss)(*on_jax), on_jax)
  assert_same(found, step(*inputs))


def test_jax_differentiates_by_parameters_of_a_closure():
  def loss(weight, x):
    return (Adjoint.apply(lambda x: (x * weight).sin(), x, weight) ** 2).sum()

  actual = jax_value_and_grad(loss)(W.to("jax"), X.to("jax"))
  weight = W.clone().requires_grad_()
  expected = loss(weight, X.clone().requires_grad_())
  assert_same(actual, (expected.detach(), *torch.autograd.grad(expected, weight)))
  hessian = jax.hessian(jax_view(loss))(W.to("jax").jax(), X.to("jax").jax())
  expected = torch.autograd.functional.hessian(
    lambda weight: ((X * weight).sin() ** 2).sum(), W
  )
  assert_same(torchax.interop.torch_view(hessian), expected)


class Noise(torch.autograd.Function):
  """Dropout whose mask is drawn in the forward pass."""

  @staticmethod
  def forward(ctx, x):
    mask = torch.rand_like(x) < 0.5
    ctx.save_for_backward(mask)
    return x * mask

  @staticmethod
  def backward(ctx, gradient):
    (mask,) = ctx.saved_tensors
    return gradient * mask * 3


@pytest.mark.parametrize(
  "way",
  ["jax_value_and_grad", "jax_value_and_grad in a jit", "checkpoint in a jit", "scan"],
)
def test_forward_draws_once_and_backward_uses_its_mask(way):
  kept = []

  def noise(x):
    result = Noise.apply(x)
    kept.append(result)
    return result

  x = torch.ones(50, 40, device="jax")
  with torchax.default_env():
    torch.manual_seed(3)
    gradient = WAYS[way](lambda x: Noise.apply(x), x)
    after = torch.rand(3, device="jax")
    torch.manual_seed(3)
    mask = Noise.apply(x)
    after_eagerly = torch.rand(3, device="jax")
  if way != "scan":  # each row has draws of its own
    assert_same(gradient, mask.cpu() * 3)
    assert_same(after, after_eagerly.cpu())
  share = (gradient > 0).float().mean().item()
  assert abs(share - 0.5) < 0.05
  assert set(gradient.unique().tolist()) == {0.0, 3.0}


def test_sharded_arguments_use_the_backward():
  mesh = jax.sharding.Mesh(jax.devices()[:1], "rows")
  rows = jax.sharding.PartitionSpec("rows")
  x = X.to("jax").requires_grad_()
  f = jax_shard_map(Exp.apply, mesh=mesh, in_specs=(rows,), out_specs=rows)
  (found,) = torch.autograd.grad(f(x).sum(), x)
  assert_same(found, 3 * X.exp())


# Errors -------------------------------------------------------------------------------


class Faulty(torch.autograd.Function):
  """Function that doubles and has no gradient."""

  @staticmethod
  def forward(ctx, x):
    return x * 2

  @staticmethod
  def backward(ctx, gradient):
    raise NotImplementedError("Doubling has no gradient.")


def test_a_failing_backward_raises_only_if_differentiated():
  x = X.to("jax")
  assert_same(jax_jit(Faulty.apply)(x), X * 2)
  assert_same(jax_vmap(Faulty.apply)(x), X * 2)
  with pytest.raises(NotImplementedError, match="Doubling has no gradient"):
    jax_value_and_grad(lambda x: Faulty.apply(x).sum())(x)
  with pytest.raises(NotImplementedError, match="Doubling has no gradient"):
    jax_value_and_grad(jax_jit(lambda x: Faulty.apply(x).sum()))(x)


class Drawing(torch.autograd.Function):
  """Function that draws in its backward pass."""

  @staticmethod
  def forward(ctx, x):
    return x * 2

  @staticmethod
  def backward(ctx, gradient):
    return gradient * torch.rand_like(gradient)


def test_a_backward_that_draws_is_refused():
  x = X.to("jax")
  with torchax.default_env():
    torch.manual_seed(0)
    expected = torch.rand(3, device="jax")
    torch.manual_seed(0)
    with pytest.raises(torchax.errors.RngError, match="backward"):
      jax_value_and_grad(lambda x: Drawing.apply(x).sum())(x)
    assert_same(torch.rand(3, device="jax"), expected.cpu())


def test_a_forward_that_raises_leaves_the_arguments_as_they_were():
  class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      x.mul_(2)
      raise ValueError("broken on purpose")

  def broken(x):
    y = x * 1
    with pytest.raises(ValueError, match="on purpose"):
      Broken.apply(y)
    return (y * x).sum()

  value, gradient = jax_value_and_grad(broken)(X.to("jax"))
  assert_same(gradient, 2 * X)
