"""Automatic mixed precision: gradients, compiled functions and training."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same, to_jax
from torch.utils.checkpoint import checkpoint

import torchax
from torchax import amp
from torchax.interop import gradient_checkpoint, jax_jit, jax_value_and_grad

env = torchax.default_env()
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = torch.rand(4, 4, generator=torch.Generator().manual_seed(8)) + 0.25

inside_and_outside = pytest.mark.parametrize("inside", [True, False])


def _autocast(device: str, dtype=bf16) -> torch.autocast:
  return torch.autocast(device, dtype=dtype)


def _scope(inside: bool):
  return env if inside else contextlib.nullcontext()


# Gradients ----------------------------------------------------------------------------


def _graph(x, weight):
  """Products, wide-range functions and operations without a policy."""
  hidden = F.linear(F.linear(x, weight).relu(), weight)
  return F.softmax(hidden, -1).log().mean() + torch.exp(hidden).sum() / 8


@inside_and_outside
def test_gradients_of_float32_leaves_are_float32(inside):
  x, weight = to_jax((SQUARE, SQUARE.clone().requires_grad_()))
  with _scope(inside):
    with _autocast("jax"):
      loss = _graph(x, weight)
    loss.backward()
  reference = SQUARE.clone().requires_grad_()
  with _autocast("cpu"):
    loss = _graph(SQUARE, reference)
  loss.backward()
  assert weight.grad.dtype == f32
  # The CPU rounds what CUDA's list keeps in float32.
  error = (weight.grad.cpu() - reference.grad).norm() / reference.grad.norm()
  assert error < 2e-2
  assert error > 0


def test_autograd_records_the_casts():
  x = SQUARE.to("jax").requires_grad_()
  with _autocast("jax"):
    product = x @ x
  assert product.grad_fn is not None
  (gradient,) = torch.autograd.grad(product.float().pow(3).sum(), x, create_graph=True)
  assert gradient.dtype == f32
  (second,) = torch.autograd.grad(gradient.sum(), x)
  assert second.dtype == f32 and second.abs().sum() > 0


@inside_and_outside
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_recomputes_in_the_same_precision(inside, use_reentrant):
  seen = []

  def block(v, weight):
    hidden = F.linear(v, weight)
    seen.append(hidden.dtype)
    return hidden.exp()

  x = SQUARE.to("jax").requires_grad_()
  with _scope(inside):
    with _autocast("jax"):
      out = checkpoint(block, x, x, use_reentrant=use_reentrant)
    out.sum().backward()
    gradient, x.grad = x.grad, None
    with _autocast("jax"):
      out = block(x, x)
    out.sum().backward()
  assert seen == [bf16] * 3
  assert torch.equal(gradient, x.grad)


def test_custom_fwd_sets_precision_of_autograd_function():
  seen = []

  class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="jax", cast_inputs=f32)
    def forward(ctx, x):
      seen.append((x.dtype, torch.is_autocast_enabled("jax")))
      ctx.save_for_backward(x)
      return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="jax")
    def backward(ctx, gradient):
      (x,) = ctx.saved_tensors
      seen.append((x.dtype, torch.is_autocast_enabled("jax")))
      return gradient @ x.t() + x.t() @ gradient

  x = SQUARE.to("jax").requires_grad_()
  with _autocast("jax"):
    out = Square.apply(x @ x)
  out.sum().backward()
  assert out.dtype == f32 and x.grad.dtype == f32
  assert seen == [(f32, False), (f32, False)]


# Compiled functions -------------------------------------------------------------------


def test_compiled_function_retraces_for_the_callers_autocast():
  traces = []

  @jax_jit
  def product(v):
    traces.append(amp.dtype_in_force())
    return v @ v

  x = SQUARE.to("jax")
  for _ in range(2):
    assert product(x).dtype == f32
    with _autocast("jax"):
      assert product(x).dtype == bf16
    with _autocast("jax", f16):
      assert product(x).dtype == f16
  assert traces == [None, bf16, f16]


def test_autocast_can_be_entered_in_a_compiled_function():
  @jax_jit
  def product(v):
    with _autocast("jax"):
      lower = F.linear(v, v)
    return lower, F.linear(v, v)

  lower, full = product(SQUARE.to("jax"))
  assert_same(lower, F.linear(SQUARE.to(bf16), SQUARE.to(bf16)))
  assert_same(full, F.linear(SQUARE, SQUARE))


def test_compiled_backward_uses_autocast_of_its_forward():
  def cubes(v):
    return (v @ v).float().pow(3).sum()

  seconds = []
  for function in (cubes, jax_jit(cubes)):
    x = SQUARE.to("jax").requires_grad_()
    with _autocast("jax"):
      out = function(x)
    # Autocast is off by now, yet the second derivative differentiates the first.
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    seconds.append(second.cpu())
  error = (seconds[0] - seconds[1]).norm() / seconds[0].norm()
  assert error < 1e-2  # XLA rounds a fused function in other places


def test_jax_differentiates_and_recomputes_under_autocast():
  x = SQUARE.to("jax")

  def loss(v):
    return gradient_checkpoint(lambda u: F.linear(u, u))(v).float().sum()

  with _autocast("jax"):
    value, gradient = jax_value_and_grad(loss)(x)
  low = SQUARE.to(bf16).requires_grad_()
  expected = F.linear(low, low).float().sum()
  expected.backward()
  assert_same(value, expected)
  assert gradient.dtype == f32
  assert_same(gradient.to(bf16), low.grad)


# Training -----------------------------------------------------------------------------


class Block(torch.nn.Module):
  """Transformer block that predicts classes."""

  def __init__(self):
    super().__init__()
    self.before = torch.nn.LayerNorm(16)
    self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    self.after = torch.nn.LayerNorm(16)
    self.mlp = torch.nn.Sequential(
      torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
    )
    self.head = torch.nn.Linear(16, 8)

  def forward(self, x):
    normal = self.before(x)
    x = x + self.attention(normal, normal, normal, need_weights=False)[0]
    x = x + self.mlp(self.after(x))
    return self.head(x)


def _block_and_data():
  torch.manual_seed(0)
  return Block(), torch.randn(4, 6, 16), torch.randint(8, (4, 6))


def _loss(model, x, classes):
  return F.cross_entropy(model(x).flatten(0, 1), classes.flatten())


@pytest.mark.parametrize("compiled", [False, True])
def test_transformer_block_trains_under_autocast(compiled):
  reference, x, classes = _block_and_data()
  with _autocast("cpu"):
    expected = _loss(reference, x, classes)
  expected.backward()
  model, _, _ = _block_and_data()
  model.to("jax")
  x, classes = to_jax((x, classes))
  optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

  def loss_under_autocast(x, classes):
    with _autocast("jax"):
      return _loss(model, x, classes)

  evaluate = jax_jit(loss_under_autocast) if compiled else loss_under_autocast
  losses = []
  with env:
    for step in range(4):
      loss = evaluate(x, classes)
      assert loss.dtype == f32
      optimizer.zero_grad()
      loss.backward()
      if step == 0:
        _assert_near(model, reference)
      optimizer.step()
      losses.append(loss.item())
  assert losses == sorted(losses, reverse=True)
  assert losses[-1] < 0.8 * losses[0]
  assert abs(losses[0] - expected.item()) < 1e-2 * expected.item()
  assert all(parameter.dtype == f32 for parameter in model.parameters())


def _assert_near(model, reference) -> None:
  """Intermediate gradients have 8 bits, so the results differ by about a percent."""
  pairs = zip(model.named_parameters(), reference.parameters())
  # Keys of attention have a gradient of zero in their bias; it is all rounding.
  for (name, parameter), expected in pairs:
    assert parameter.grad.dtype == f32, name
    error = (parameter.grad.cpu() - expected.grad).norm() / expected.grad.norm()
    assert error < 5e-2, name


@inside_and_outside
def test_gradient_scaler_skips_overflowing_steps(inside):
  torch.manual_seed(0)
  model = torch.nn.Linear(4, 4).to("jax")
  optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  scaler = torch.amp.GradScaler("jax", init_scale=2.0**10)
  x = SQUARE.to("jax")

  def step(scale_of_loss: float) -> bool:
    before = model.weight.detach().clone()
    with _autocast("jax", f16):
      loss = (model(x) * scale_of_loss).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(before, model.weight)

  with _scope(inside):
    assert step(1.0)
    assert scaler.get_scale() == 2.0**10
    assert not step(1e6)
    assert scaler.get_scale() == 2.0**9
    assert step(1.0)
