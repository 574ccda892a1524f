"""0-d CPU tensors that count for an optimizer, in a compiled step."""

import pytest
import torch
from tracing.steps import training_step

import torchax
from torchax.errors import MutationError
from torchax.interop import jax_jit

X = torch.linspace(-1, 1, 6).reshape(2, 3)

pytestmark = pytest.mark.usefixtures("env")


class Counting(torch.optim.Optimizer):
  """Gradient descent with a rate that a row computes from a count."""

  def __init__(self, params, rate):
    super().__init__(params, {"rate": torch.tensor(0.1)})
    self.rate = rate

  @torch.no_grad()
  def step(self):
    for p in self.param_groups[0]["params"]:
      count = self.state[p].setdefault("count", torch.tensor(1.0))
      p.sub_(p.grad * self.rate(count, self.param_groups[0]["rate"]))


def _list(count, rate):
  torch._foreach_add_([count], torch.tensor(1.0, device="cpu"), alpha=2.0)
  return rate / count


def _chain(count, rate):
  return rate / (count.add_(1).mul_(2).sub_(1, alpha=2) + 1).sqrt()


def _type(count, rate):
  count += 1
  return rate / count if count.dtype == torch.float32 and not count.dim() else rate


def _function(count, rate):
  count += 1
  return torch.lerp(count, rate, 0.9) / 2


def _python(count, rate):
  count += 1
  return rate * float(count) / 10


RATES = [_list, _chain, _type, _function, _python]
# Rows that compile a program for each value.
OF_VALUES = {_function, _python}


def _steps(device, rate, compile_step):
  torch.manual_seed(0)
  model = torch.nn.Linear(3, 2).to(device)
  optimizer = Counting(model.parameters(), rate)
  step = compile_step(lambda x: training_step(model, optimizer, x))
  losses = [step(X.to(device)).item() for _ in range(5)]
  counts = [state["count"].item() for state in optimizer.state.values()]
  return losses, counts, step


@pytest.mark.parametrize("rate", RATES)
def test_a_compiled_step_counts_as_torch(rate):
  losses, counts, _ = _steps("cpu", rate, lambda step: step)
  ours, our_counts, step = _steps("jax", rate, jax_jit)
  assert ours == pytest.approx(losses, rel=1e-5)
  assert our_counts == counts
  compilations = torchax.explain(step, X.to("jax")).compilations
  assert compilations == (6 if rate in OF_VALUES else 2)


def test_a_product_with_a_jax_tensor_has_its_shape():
  model = torch.nn.Linear(3, 2, device="jax")
  shapes = []

  def rate(count, rate):
    count += 1
    product = model.bias * count
    shapes.append((product.shape, torch.add(input=rate, other=count).shape))
    return product.sum() * 0

  optimizer = Counting(model.parameters(), rate)
  training_step(model, optimizer, X.to("jax"))
  jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert set(shapes) == {((2,), ())}


def _exponential(count, rate):
  return rate * count.exp_()


def _power(count, rate):
  count **= 2
  return rate * count


@pytest.mark.parametrize("rate", [_exponential, _power])
def test_another_change_of_a_count_raises(rate):
  model = torch.nn.Linear(3, 2, device="jax")
  optimizer = Counting(model.parameters(), lambda count, rate: rate)
  training_step(model, optimizer, X.to("jax"))
  optimizer.rate = rate
  with pytest.raises(MutationError, match="only through arithmetic"):
    jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert [state["count"].item() for state in optimizer.state.values()] == [1, 1]
