"""Compiled modules follow tensors that get new memory or replace other tensors."""

import weakref

import pytest
import torch
from compare import assert_same
from torch.utils.weak import WeakIdKeyDictionary

from torchax.interop import JittableModule, jax_jit

X = (torch.arange(12.0) * 7 % 5 - 2).reshape(4, 3)


class Model(torch.nn.Module):
  """Layer and a norm that writes to its buffers."""

  def __init__(self):
    super().__init__()
    self.layer = torch.nn.Linear(3, 3, bias=False)
    self.norm = torch.nn.BatchNorm1d(3)

  def forward(self, x):
    return self.norm(self.layer(x))


def _model(seed: int, device: str = "cpu") -> Model:
  torch.manual_seed(seed)
  return Model().to(device)


def _to_another_dtype_and_back(model, other):
  model.to(torch.bfloat16)
  model.to(torch.float32)
  model.load_state_dict(other.state_dict())


def _to_the_cpu_and_back(model, other):
  device = model.layer.weight.device
  model.to("cpu")
  model.to(device)
  model.load_state_dict(other.state_dict())


def _new_parameter(model, other):
  model.layer.weight = torch.nn.Parameter(other.layer.weight.detach().clone())
  model.norm.running_mean = other.norm.running_mean.clone()


def _assigned(model, other):
  model.load_state_dict(other.state_dict(), assign=True)


def _new_layer(model, other):
  model.layer = other.layer


def _data(model, other):
  for parameter, new in zip(model.parameters(), other.parameters()):
    parameter.data = new.detach().clone()


def _data_of_other_strides(model, other):
  model.layer.weight.data = other.layer.weight.detach().t()


def _frozen(model, other):
  model.layer.weight = torch.nn.Parameter(other.layer.weight.detach(), False)


CHANGES = (
  _to_another_dtype_and_back,
  _to_the_cpu_and_back,
  _new_parameter,
  _assigned,
  _new_layer,
  _data,
  _data_of_other_strides,
  _frozen,
)
WAYS = {
  "jax_jit": jax_jit,
  "method": lambda model: jax_jit(model.forward),
  "JittableModule": JittableModule,
}


def _gradients(model, out):
  trained = [p for p in model.parameters() if p.requires_grad]
  return torch.autograd.grad((out * torch.sin(out + 1)).sum(), trained)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_tensors_of_a_compiled_module_take_effect(change, way):
  plain, model = _model(0), _model(0, "jax")
  run = WAYS[way](model)
  run(X.to("jax")), plain(X)
  change(plain, _model(1))
  change(model, _model(1, "jax"))
  for _ in range(2):
    expected, out = plain(X), run(X.to("jax"))
    assert_same(out, expected)
    assert_same(_gradients(model, out), _gradients(plain, expected))
  # A call writes to the tensors that the module holds at that time.
  assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_writes_reach_a_captured_tensor_with_new_memory():
  tensor = torch.ones(3).to("jax")

  @jax_jit
  def increase():
    tensor.add_(1)

  increase()
  first = tensor.data
  tensor.data = torch.zeros(3).to("jax")
  increase()
  assert tensor.tolist() == [1, 1, 1] and first.tolist() == [2, 2, 2]


def test_writes_reach_a_swapped_tensor():
  first, second = torch.zeros(3).to("jax"), torch.ones(3).to("jax")

  @jax_jit
  def increase(by):
    first.add_(by)
    return second * 2

  increase(torch.ones(3).to("jax"))
  torch.utils.swap_tensors(first, second)
  assert increase(torch.ones(3).to("jax")).tolist() == [2, 2, 2]
  assert increase(torch.ones(1).to("jax")).tolist() == [2, 2, 2]
  assert first.tolist() == [3, 3, 3] and second.tolist() == [1, 1, 1]


def test_writes_reach_a_replaced_gradient():
  leaf = torch.ones(3).to("jax").requires_grad_()

  @jax_jit
  def double():
    with torch.no_grad():
      leaf.grad.mul_(2)
      return leaf * 1

  for value in (1.0, 5.0):
    leaf.grad = torch.full((3,), value).to("jax")
    double()
    assert leaf.grad.tolist() == [2 * value] * 3


def test_new_memory_of_the_same_layout_does_not_retrace():
  traces = []
  tensor = torch.ones(3).to("jax")

  @jax_jit
  def double():
    traces.append(1)
    return tensor * 2

  double()
  made = len(traces)
  for value in (1.0, 2.0):
    tensor.data = torch.full((3,), value).to("jax")
    assert double().tolist() == [2 * value] * 3
  assert len(traces) == made


def _normed() -> torch.nn.Module:
  torch.manual_seed(0)
  with pytest.warns(FutureWarning, match="parametrizations"):
    return torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))


def test_a_module_with_parameters_in_a_graph_can_be_moved():
  plain, model = _normed(), _normed().to("jax")
  assert_same(model(X.to("jax")), plain(X))
  assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(3, 2), _normed])
def test_backward_through_moved_parameters_raises(make):
  model = make()
  product = model(X).sum()
  model.to("jax")
  with pytest.raises(RuntimeError, match="moved to another device|swap_tensors"):
    product.backward()


# References to a parameter follow it --------------------------------------------------


class Tied(torch.nn.Module):
  """Two layers that share a weight, below a module of their own."""

  def __init__(self):
    super().__init__()
    self.below = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    self.head = torch.nn.Linear(3, 3)
    self.head.weight = self.below[0].weight

  def forward(self, x):
    return self.head(self.below(x))


def _referred(model):
  """Return a parameter with weak references, and a check that they are alive."""
  weight = model.head.weight
  weight.note = "kept"
  reference, keyed = weakref.ref(weight), WeakIdKeyDictionary()
  keyed[weight] = "here"

  def check(device: str) -> None:
    assert weight.device.type == device and weight.note == "kept"
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert reference() is weight and keyed[weight] == "here"
    assert model.head.weight is weight and model.below[0].weight is weight

  return weight, check


def test_a_weakly_referenced_parameter_moves_with_its_module():
  model = Tied()
  weight, check = _referred(model)
  expected = weight.detach().clone()
  for device in ("jax", "cpu", "jax"):
    assert model.to(device) is model
    check(device)
    assert torch.equal(weight.detach().cpu(), expected)
  model.double().float()
  model.below.to("cpu")
  check("cpu")


@pytest.mark.parametrize("source", ["cpu", "jax"])
def test_a_gradient_moves_with_its_weakly_referenced_leaf(source):
  target = {"cpu": "jax", "jax": "cpu"}[source]
  model = Tied().to(source)
  weight, check = _referred(model)
  optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
  model(X.to(source)).sum().backward()
  before, gradient = weight.detach().cpu().clone(), weight.grad.cpu().clone()
  model.to(target)
  check(target)
  assert weight.grad.device.type == target
  optimizer.step()
  torch.testing.assert_close(weight.detach().cpu(), before - 0.5 * gradient)


@pytest.mark.parametrize("source", ["cpu", "jax"])
def test_a_parameter_with_graph_and_weak_reference_moves(source):
  target = {"cpu": "jax", "jax": "cpu"}[source]
  model = Tied().to(source)
  _, check = _referred(model)
  product = model(X.to(source)).sum()
  model.to(target)
  check(target)
  with pytest.raises(RuntimeError, match="moved to another device|swap_tensors"):
    product.backward()
  model(X.to(target)).sum().backward()
  check(target)


def test_moving_a_compiled_module_recompiles():
  model = Tied()
  _, check = _referred(model)
  run = torch.compile(model, backend="jax")
  expected = model(X).detach()
  for device in ("cpu", "jax", "cpu"):
    model.to(device)
    check(device)
    out = run(X.to(device))
    assert out.device.type == device
    torch.testing.assert_close(out.detach().cpu(), expected)


def test_loading_a_state_keeps_a_weakly_referenced_parameter():
  model, other = Tied().to("jax"), Tied()
  weight, check = _referred(model)
  model.load_state_dict(other.state_dict())
  check("jax")
  assert_same(weight.detach(), other.head.weight)
  model.load_state_dict({k: v + 1 for k, v in other.state_dict().items()}, assign=True)
  assert model.head.weight is not weight  # as torch does
  assert_same(weight.detach(), other.head.weight)
