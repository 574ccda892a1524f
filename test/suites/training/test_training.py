"""Training as users write it: eager and compiled, the same numbers from one seed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchax.interop import JittableModule, jax_jit, jax_value_and_grad

# Rounding differs if XLA fuses a compiled step; the draws are equal.
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}

pytestmark = pytest.mark.usefixtures("env")


def _transformer(seed: int, dropout: float = 0.2) -> nn.Module:
  torch.manual_seed(seed)
  layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
  return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), layer, nn.Linear(8, 2)).to(
    "jax"
  )


def _data():
  generator = torch.Generator().manual_seed(3)
  x = torch.randn(6, 5, 4, generator=generator)
  return x.to("jax"), torch.randn(6, 5, 2, generator=generator).to("jax")


def _losses(seed: int, compiled: bool, steps: int = 6, clear_first: bool = False):
  model = _transformer(seed)
  optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
  x, y = _data()

  def step(x, y):
    if clear_first:
      optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if not clear_first:
      optimizer.zero_grad()
    return loss.detach()

  losses = [step(x, y)]  # eager: the optimizer creates its state
  run = jax_jit(step) if compiled else step
  losses += [run(x, y) for _ in range(steps - 1)]
  return torch.stack(losses).cpu(), model


@pytest.mark.parametrize("clear_first", [False, True])
def test_transformer_with_dropout_trains_alike_eager_or_compiled(clear_first):
  eager, eager_model = _losses(0, compiled=False, clear_first=clear_first)
  jitted, jitted_model = _losses(0, compiled=True, clear_first=clear_first)
  torch.testing.assert_close(jitted, eager, **ROUNDING)
  for ours, theirs in zip(jitted_model.parameters(), eager_model.parameters()):
    assert (ours.grad is None) == (theirs.grad is None) == (not clear_first)


def test_losses_are_bitwise_equal_for_one_seed_and_not_for_two():
  first, _ = _losses(0, compiled=True)
  again, _ = _losses(0, compiled=True)
  other, _ = _losses(1, compiled=True)
  assert torch.equal(first, again)
  assert not torch.equal(first, other)


def test_functional_training_equals_the_closure_that_trains():
  model = _transformer(0)
  module = JittableModule(model)
  x, y = _data()

  def loss(params, buffers, x, y):
    return F.mse_loss(module.functional_call("forward", params, buffers, x), y)

  torch.manual_seed(5)
  value, grads = jax_jit(jax_value_and_grad(loss))(module.params, module.buffers, x, y)
  torch.manual_seed(5)
  eager = F.mse_loss(model(x), y)
  eager.backward()
  torch.testing.assert_close(value.cpu(), eager.detach().cpu(), **ROUNDING)
  for name, parameter in model.named_parameters():
    torch.testing.assert_close(grads[name].cpu(), parameter.grad.cpu(), **ROUNDING)


def test_compiled_step_reads_each_new_gradient_of_eager_backward():
  model = nn.Linear(4, 2).to("jax")
  optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
  step = jax_jit(lambda: optimizer.step())
  for scale in (1.0, 2.0, 3.0):
    optimizer.zero_grad()
    (model(torch.ones(1, 4, device="jax")).sum() * scale).backward()
    before = model.bias.detach().cpu()
    step()
    assert torch.equal(model.bias.detach().cpu(), before - scale)


def test_batch_norm_statistics_are_updated_by_a_compiled_step():
  model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("jax")
  reference = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
  reference.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
  x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
  step = jax_jit(lambda x: model(x))
  for _ in range(3):
    step(x.to("jax"))
    reference(x)
  for name, value in reference.named_buffers():
    torch.testing.assert_close(
      dict(model.named_buffers())[name].cpu(), value, check_dtype=False
    )
