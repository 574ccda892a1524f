"""torch's autograd through compiled functions, loops and functions of JAX.

The oracle is the eager run on jax, with the same numbers and gradients.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.compat import versions
from torchax.errors import MutationError, RngError
from torchax.interop import (
  JittableModule,
  call_jax,
  cond,
  fori_loop,
  gradient_checkpoint,
  j2t_autograd,
  jax_jit,
  jax_vmap,
  scan,
)


@pytest.fixture(autouse=True)
def enabled():
  torch.manual_seed(0)
  with torchax.default_env() as env:
    yield env


def _model() -> torch.nn.Module:
  torch.manual_seed(1)
  return torch.nn.Sequential(
    # With a bias, the gradient would be 0 plus noise.
    torch.nn.Linear(4, 8, bias=False),
    torch.nn.BatchNorm1d(8),
    torch.nn.GELU(),
    torch.nn.Dropout(0.5),
    torch.nn.Linear(8, 2),
  ).to("jax")


def _x(requires_grad=True) -> torch.Tensor:
  return torch.linspace(-1, 1, 24).view(6, 4).to("jax").requires_grad_(requires_grad)


def _train(model, call, steps=2) -> list[torch.Tensor]:
  """Return outputs, gradients and buffers of some steps."""
  torch.manual_seed(0)
  optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
  found, x = [], _x()
  for _ in range(steps):
    out = call(x)
    optimizer.zero_grad()
    x.grad = None
    (out**2).sum().backward()
    found += [out.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]
    optimizer.step()
  return [*found, *[b.clone() for b in model.buffers()], torch.rand(2, device="jax")]


def _assert_close(actual, expected, tolerance=1e-5) -> None:
  assert len(actual) == len(expected)
  for have, want in zip(actual, expected):
    torch.testing.assert_close(have.cpu(), want.cpu(), rtol=tolerance, atol=tolerance)


WRAPS = {
  "jit": jax_jit,
  "module": JittableModule,
  "nested jit": lambda f: jax_jit(lambda x: jax_jit(f)(x)),
  "checkpoint": gradient_checkpoint,
  "jit of checkpoint": lambda f: jax_jit(gradient_checkpoint(f)),
  "checkpoint of jit": lambda f: gradient_checkpoint(jax_jit(f)),
  "jit of torch's checkpoint": lambda f: jax_jit(
    lambda x: checkpoint(f, x, use_reentrant=False)
  ),
  "jit of torch's reentrant checkpoint": lambda f: jax_jit(
    lambda x: checkpoint(f, x, use_reentrant=True)
  ),
}


@pytest.mark.parametrize("name", WRAPS)
def test_training_a_compiled_model_equals_eager_training(name):
  eager, model = _model(), _model()
  if "checkpoint" in name:  # a checkpoint updates running statistics twice, as in torch
    for net in (eager, model):
      net[1].track_running_stats = False
  # BatchNorm's backward pass subtracts nearly equal numbers.
  _assert_close(_train(model, WRAPS[name](model)), _train(eager, eager), 1e-4)


def test_backward_uses_the_dropout_mask_of_forward():
  compiled = jax_jit(lambda x: F.dropout(x, 0.5))
  x = torch.ones(64, device="jax", requires_grad=True)
  for _ in range(3):
    x.grad = None
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_calls_compile_once_forward_and_backward():
  traces = []

  def f(x):
    traces.append(None)
    return torch.tanh(x) * 2

  compiled, x = jax_jit(f), _x()
  for _ in range(4):
    compiled(x).sum().backward()
  assert len(traces) == 1


def test_inputs_without_grad_record_nothing():
  compiled, x = jax_jit(torch.tanh), _x()
  with torch.no_grad():
    assert not compiled(x).requires_grad
  assert not compiled(x.detach()).requires_grad
  assert compiled(x).requires_grad


def test_independent_outputs_have_no_grad_fn():
  def f(x, y):
    return x * 2, y * 3, (x > 0), x.detach() * 4

  x, y = _x(), _x(requires_grad=False)
  outs = jax_jit(f)(x, y)
  assert [out.requires_grad for out in outs] == [True, False, False, False]


def test_no_grad_inside_stops_the_gradient():
  """A target network does this: the same weights, half of them without gradient."""
  model = torch.nn.Linear(4, 2).to("jax")

  def loss(x):
    with torch.no_grad():
      target = model(x * 2)
    return ((model(x) - target) ** 2).sum()

  x = _x(requires_grad=False)
  loss(x).backward()
  expected = model.weight.grad.clone()
  model.weight.grad = None
  jax_jit(loss)(x).backward()
  _assert_close([model.weight.grad], [expected])


def test_a_custom_function_has_its_own_gradient():
  class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
      return gradient * 3

  x = _x()
  jax_jit(Straight.apply)(x).sum().backward()
  assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_hooks_inside_run():
  def f(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 10)
    return y.sum()

  x = _x()
  jax_jit(f)(x).backward()
  assert torch.equal(x.grad, torch.full_like(x, 20.0))


def test_captured_non_leaf_passes_its_gradient_on():
  x = _x()
  hidden = torch.sin(x)
  jax_jit(lambda y: (y * hidden).sum())(torch.ones(6, 4, device="jax")).backward()
  _assert_close([x.grad], [torch.cos(x)])


def test_captured_view_of_a_parameter_gets_its_gradient():
  weight = torch.ones(4, 3, device="jax", requires_grad=True)
  jax_jit(lambda y: (y * weight[1:3].t()).sum())(
    torch.ones(3, 2, device="jax")
  ).backward()
  assert weight.grad.sum(1).tolist() == [0.0, 3.0, 3.0, 0.0]


def test_freezing_and_unfreezing_parameters_retraces():
  model = torch.nn.Linear(4, 2).to("jax")
  compiled, x = jax_jit(model), _x(requires_grad=False)
  model.bias.requires_grad_(False)
  compiled(x).sum().backward()
  assert model.bias.grad is None and model.weight.grad is not None
  model.bias.requires_grad_(True)
  compiled(x).sum().backward()
  assert model.bias.grad.tolist() == [6.0, 6.0]


def test_an_unused_parameter_gets_no_gradient():
  unused = torch.ones(2, device="jax", requires_grad=True)

  def f(x):
    unused.sum()
    return (x * 2).sum()

  x = _x()
  jax_jit(f)(x).backward()
  assert unused.grad is None and x.grad is not None


def test_one_tensor_passed_twice_gets_both_gradients():
  x = _x()
  jax_jit(lambda a, b: (2 * a + 3 * b).sum())(x, x).backward()
  assert torch.equal(x.grad, torch.full_like(x, 5.0))


def test_a_tensor_and_its_detach_are_two_arguments():
  x = _x()
  jax_jit(lambda a, b: (a * b).sum())(x, x.detach()).backward()
  assert torch.equal(x.grad, x.detach())


def test_backward_frees_the_graph_as_in_torch():
  x = _x()
  loss = jax_jit(lambda x: torch.tanh(x).sum())(x)
  loss.backward(retain_graph=True)
  loss.backward()
  with pytest.raises(RuntimeError, match="second time"):
    loss.backward()


def test_residuals_and_arguments_are_freed_by_backward():
  x = _x()
  batch = torch.ones(6, 4, device="jax")
  loss = jax_jit(lambda x, batch: torch.tanh(x * batch).sum())(x, batch)
  (saved,) = loss.grad_fn.saved_tensors
  kept = [weakref.ref(saved.content[0][0]), weakref.ref(batch)]
  del saved, batch
  assert all(reference() is not None for reference in kept)
  loss.backward()
  gc.collect()
  assert not any(reference() is not None for reference in kept)
  assert loss.item() == pytest.approx(0.0, abs=1e-5)


def test_a_step_that_calls_backward_returns_a_detached_loss():
  model, x = _model(), _x(requires_grad=False)

  def step(x):
    model.zero_grad()
    loss = (model(x) ** 2).sum()
    loss.backward()
    return loss

  loss = jax_jit(step)(x)
  assert not loss.requires_grad  # its graph is freed inside
  assert model[0].weight.grad is not None


def test_gradients_of_gradients():
  model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).to("jax")

  def penalty(f):
    torch.manual_seed(3)
    x = _x()
    (gradient,) = torch.autograd.grad(torch.tanh(f(x)).sum(), x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), [x, *model.parameters()][:2])

  _assert_close(penalty(jax_jit(model)), penalty(model))


def test_a_gradient_inside_can_be_differentiated_outside():
  def force(x):
    energy = torch.sin(x).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]

  x = _x()
  jax_jit(force)(x).sum().backward()
  _assert_close([x.grad], [-torch.sin(x)])


def test_finite_differences_agree():
  compiled = jax_jit(lambda x: F.dropout(torch.sin(x), 0.5).sum())
  x = _x()
  torch.manual_seed(5)
  compiled(x).backward()
  step = torch.zeros_like(x)
  step[2, 1] = 1e-2
  values = []
  for sign in (1, -1):
    torch.manual_seed(5)
    values.append(compiled((x + sign * step).detach()).item())
  slope = (values[0] - values[1]) / 2e-2
  assert slope == pytest.approx(x.grad[2, 1].item(), abs=2e-3)


@pytest.mark.parametrize("wrap", [jax_jit, lambda f: jax_jit(jax_jit(f))])
def test_a_captured_tensor_never_joins_a_traced_graph(wrap):
  kept = torch.zeros(6, 4, device="jax")
  with pytest.raises(MutationError, match="closes over.*no_grad"):
    wrap(lambda x: kept.copy_(x * 2).sum())(_x())
  assert kept.grad_fn is None and not kept.any().item()

  def under_no_grad(x):
    with torch.no_grad():
      kept.copy_(x * 2)
    return (kept * x).sum()

  x = _x()
  wrap(under_no_grad)(x).backward()
  assert torch.equal(kept, x.detach() * 2) and torch.equal(x.grad, kept)


@pytest.mark.parametrize("wrap", [jax_jit, lambda f: jax_jit(jax_jit(f))])
def test_write_to_view_of_parameter_under_no_grad(wrap):
  weight = torch.nn.Parameter(torch.ones(3, 2, device="jax"))

  def step():
    with torch.no_grad():
      weight[0].zero_()
      weight.view(-1)[2:4] += 1
    return weight.sum()

  wrap(step)().backward()
  assert weight.tolist() == [[0.0, 0.0], [2.0, 2.0], [1.0, 1.0]]
  assert weight.grad.tolist() == [[1.0, 1.0]] * 3


def test_second_derivatives_repeat_the_draws_of_forward():
  """Second derivatives run the function again, with the generator's words."""
  generator, x, found = torch.Generator(), _x(), []

  def f(x):
    return x**3 * torch.rand(6, 4, generator=generator, device="jax")

  for function in (f, jax_jit(f)):
    generator.manual_seed(0)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    after = torch.rand(2, generator=generator, device="jax")
    found.append((first.detach(), second, after))
  for have, want in zip(*found):
    torch.testing.assert_close(have, want)


def test_a_draw_in_the_backward_pass_raises():
  class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * 1

    @staticmethod
    def backward(ctx, gradient):
      return gradient + torch.rand(6, 4, device="jax")

  with pytest.raises(RngError, match="backward pass"):
    jax_jit(Noisy.apply)(_x())


# Loops and rows -----------------------------------------------------------------------


def _cell(carry, x):
  carry = F.dropout(torch.tanh(carry * WEIGHT["w"] + x), 0.25)
  return carry, carry.sum()


WEIGHT: dict = {}


def _unrolled(init, xs):
  ys = []
  for x in xs:
    init, y = _cell(init, x)
    ys.append(y)
  return init, torch.stack(ys)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_a_scan_has_the_gradients_of_the_unrolled_loop(wrap):
  def run(loop):
    torch.manual_seed(0)
    WEIGHT["w"] = torch.ones(6, device="jax", requires_grad=True)
    init = torch.zeros(6, device="jax", requires_grad=True)
    xs = torch.linspace(-1, 1, 18).view(3, 6).to("jax").requires_grad_()
    last, ys = loop(init, xs)
    ((last**2).sum() + ys.sum()).backward()
    return [last.detach(), ys.detach(), WEIGHT["w"].grad, init.grad, xs.grad]

  def scanned(init, xs):
    return scan(lambda c, x: _cell(c, x), init, xs)

  _assert_close(run(wrap(scanned)), run(_unrolled))


def test_fori_loop_cond_and_vmap_have_gradients():
  weight = torch.full((3,), 2.0, device="jax", requires_grad=True)
  start = torch.ones(3, device="jax")
  fori_loop(0, 3, lambda i, v: v * weight, start).sum().backward()
  _assert_close([weight.grad], [torch.full((3,), 12.0)])
  weight.grad = None
  flag = torch.tensor(True).to("jax")
  cond(flag, lambda: weight * 5, lambda: weight * 7).sum().backward()
  _assert_close([weight.grad], [torch.full((3,), 5.0)])
  weight.grad = None
  jax_vmap(lambda x: (x * weight).sum())(
    torch.ones(4, 3, device="jax")
  ).sum().backward()
  _assert_close([weight.grad], [torch.full((3,), 4.0)])


# Functions of JAX ---------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_call_jax_has_the_gradient_of_the_jax_function(wrap):
  x = _x()
  f = wrap(lambda x: call_jax(lambda a, *, scale: jnp.sin(a) * scale, x, scale=2.0))
  f(x).sum().backward()
  _assert_close([x.grad], [2 * torch.cos(x)])


def test_call_jax_keeps_non_tensor_results():
  x = _x()
  out, shape, index, key = call_jax(
    lambda a: (a * 2, a.shape, jnp.argmax(a), jax.random.key(0)), x
  )
  assert out.requires_grad and not index.requires_grad
  assert shape == (6, 4) and isinstance(key, jax.Array)


def test_j2t_autograd_can_be_differentiated_twice():
  cube = j2t_autograd(lambda a: a**3)
  x = _x()
  (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
  (second,) = torch.autograd.grad(first.sum(), x)
  _assert_close([second], [6 * x])


def test_complex_gradients_equal_torch():
  def f(z):
    return (z * z.conj() * (1 + 2j)).real.sum() + torch.view_as_real(z).sum()

  cpu = torch.complex(torch.linspace(-1, 1, 4), torch.linspace(0, 1, 4))
  expected = cpu.clone().requires_grad_()
  f(expected).backward()
  for wrap in (lambda g: g, jax_jit):
    z = cpu.to("jax").requires_grad_()
    wrap(f)(z).backward()
    _assert_close([z.grad], [expected.grad])


def _leaf_and_loss():
  x = _x()
  y = checkpoint(torch.nn.functional.layer_norm, x, (4,), use_reentrant=False)
  return x, (y * torch.arange(24.0).view(6, 4).to("jax")).sum()


INPUTS = {
  "a tensor": lambda x: x,
  "a list": lambda x: [x],
  "an edge": lambda x: torch.autograd.graph.get_gradient_edge(x),
}


if not versions.is_older(torch.__version__, "2.12"):
  INPUTS["a dict"] = lambda x: {"x": x}


@pytest.mark.parametrize("name", INPUTS)
def test_backward_inputs_through_a_checkpoint(name):
  x, loss = _leaf_and_loss()
  loss.backward(retain_graph=True)
  expected, x.grad = x.grad, None
  loss.backward(inputs=INPUTS[name](x))
  _assert_close([x.grad], [expected])


def _scan_and_write(x):
  rows = x * 2
  carry, _ = scan(lambda total, row: (total * row, row), rows[0], rows)
  rows.zero_()
  return carry.sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit])
def test_gradient_of_scan_ignores_later_writes_to_its_input(wrap):
  x = torch.tensor([[1.0], [3.0]], device="jax", requires_grad=True)
  wrap(_scan_and_write)(x).backward()
  assert x.grad.tolist() == [[48.0], [8.0]]


def test_second_derivative_of_scan_needs_its_unchanged_input():
  x = torch.tensor([[1.0], [3.0]], device="jax", requires_grad=True)
  with pytest.raises(RuntimeError, match="modified by an inplace operation"):
    torch.autograd.grad(_scan_and_write(x), x, create_graph=True)


def test_backward_pass_that_cannot_be_traced_says_how_to_omit_it():
  weights = torch.ones(2, 3, device="jax", requires_grad=True)

  def step(x, result_of):
    loss = (x @ weights @ weights.T).sum()
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
    with torch.no_grad():
      weights.sub_(gradient)
    return result_of(loss)

  x = torch.ones(2, device="jax")
  with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
    jax_jit(lambda x: step(x, lambda loss: loss))(x)
  assert "return `result.detach()`" in error.value.__notes__[0]
  assert weights.tolist() == [[1] * 3] * 2
  jax_jit(lambda x: step(x, torch.detach))(x)
  assert weights.tolist() == [[-3] * 3] * 2


def test_second_derivative_needs_unchanged_tensors():
  x = torch.ones(2, device="jax", requires_grad=True)
  weight, scale = torch.ones(2, device="jax", requires_grad=True), x.detach() * 2
  run = jax_jit(lambda double: (double.exp() * weight * scale).sum())

  def differentiated(change):
    double = x * 2
    loss = run(double)
    with torch.no_grad():
      change(double).mul_(3)
    return torch.autograd.grad(loss, x, create_graph=True)

  for change in (lambda double: double, lambda double: weight, lambda double: scale):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
      differentiated(change)


def test_second_derivative_uses_the_arguments_of_the_call():
  def function(x, scale):
    scale.mul_(2)
    return (x**3 * scale).sum()

  x = torch.ones(2, device="jax", requires_grad=True)
  base = torch.ones(3, device="jax")
  loss = jax_jit(function)(x, base[1:])
  (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
  (second,) = torch.autograd.grad(gradient.sum(), x)
  assert (gradient.tolist(), second.tolist()) == ([6.0, 6.0], [12.0, 12.0])


@pytest.mark.parametrize("compiled", [jax_jit, torch.compile(backend="jax")])
def test_a_view_made_under_no_grad_has_no_grad_fn(compiled):
  def function(x):
    with torch.no_grad():
      view = x[1:]
    return view, view.neg(), view.detach(), x * 2

  x = torch.ones(3, device="jax", requires_grad=True)
  view, negated, detached, double = compiled(function)(x)
  assert view.requires_grad
  assert view.grad_fn is None
  assert negated.requires_grad
  assert not detached.requires_grad
  (double.sum() + negated.sum()).backward()
  assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_view_made_under_no_grad_alone_requires_grad():
  x = torch.ones(3, device="jax", requires_grad=True)
  view = jax_jit(torch.no_grad()(lambda x: x[1:]))(x)
  assert view.requires_grad
  assert view.is_leaf
