"""Laws of results that inherit the sharding of a tensor; `mesh_cases.py` runs them."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from distributed.mesh_parts import case, for_each_kind, mesh_of, require_alike
from jax.sharding import AxisType
from torch import nn
from torch.optim import swa_utils

from torchax.errors import MixedDeviceError
from torchax.interop import jax_jit


def followed(place) -> dict[str, Callable]:
  """Return functions whose results inherit the sharding; those in `SEEDED` draw."""
  ones = torch.ones(8, 2)

  def changed(function):
    def change(x):
      function(x)
      return x

    return change

  def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return x.copy_(torch.load(file))

  return {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "empty_like": torch.empty_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "zeros_like of a dtype": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "zeros_like of a view": lambda x: torch.zeros_like(x.view(16).view(8, 2)),
    "new_zeros": lambda x: x.new_zeros(8, 2),
    "new_empty": lambda x: x.new_empty((8, 2)),
    "new_full": lambda x: x.new_full((8, 2), 2.0),
    "new_tensor": lambda x: x.new_tensor(ones),
    "deepcopy": copy.deepcopy,
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "dropout": F.dropout,
    "zero_": lambda x: x.zero_(),
    "eye_": nn.init.eye_,
    "copy_ of the CPU": lambda x: x.copy_(ones),
    "copy_ of another dtype": lambda x: x.copy_(ones.int()),
    "copy_ of jax": lambda x: x.copy_(ones.to("jax")),
    "copy_ of another device": lambda x: x.copy_(ones.to("jax:3")),
    "copy_ of another layout": lambda x: x.copy_(place(torch.ones(8, 2), ())),
    "add_": lambda x: x.add_(place(torch.ones(8, 2), ())),
    "x[i] = v": changed(lambda x: x.__setitem__(3, 9.0)),
    "data": changed(lambda x: setattr(x, "data", x.data * 2)),
    "_foreach_zero_": changed(lambda x: torch._foreach_zero_([x])),
    "_foreach_copy_": changed(lambda x: torch._foreach_copy_([x], [ones.to("jax")])),
    "torch.save": saved,
  }


SEEDED = (
  *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "dropout"),
  *("kaiming_uniform_", "trunc_normal_"),
)


@for_each_kind
def results_inherit_the_sharding_of_their_input(kind):
  mesh = mesh_of(kind, x=8)
  numbers = torch.arange(16.0).reshape(8, 2)
  for name, function in followed(mesh.shard).items():
    torch.manual_seed(5)
    x = mesh.shard(numbers, ("x",))
    made = function(x)
    try:
      require_alike(made, mesh.shard(numbers, ("x",)))
      if name in SEEDED:
        torch.manual_seed(5)
        assert torch.equal(made.cpu(), function(numbers.to("jax")).cpu())
    except AssertionError as error:
      raise AssertionError(name) from error


# Name -> (function that makes a tensor of another shape, its values).
OF_ANOTHER_SHAPE: dict[str, tuple[Callable, list]] = {
  "new_zeros": (lambda x: x.new_zeros(3), [0, 0, 0]),
  "new_ones": (lambda x: x.new_ones((2, 1)), [[1], [1]]),
  "new_full": (lambda x: x.new_full((2,), 5.0), [5, 5]),
  "new_full of integers": (lambda x: x.new_full((2,), 5, dtype=torch.int32), [5, 5]),
  "new_empty, filled": (lambda x: x.new_empty(2).fill_(4.0), [4, 4]),
  "of a view": (lambda x: x[1:3].new_ones(3), [1, 1, 1]),
}


@for_each_kind
def factories_of_another_shape_replicate_on_the_mesh(kind):
  mesh = mesh_of(kind, x=4, y=2)
  x = mesh.shard(torch.arange(16.0).reshape(8, 2), ("x", "y"))
  for name, (function, numbers) in OF_ANOTHER_SHAPE.items():
    made = function(x)
    assert made.tolist() == numbers, name
    require_alike(made, mesh.shard(torch.tensor(numbers), ()))
    joined = made.sum() + x
    assert joined.jax().sharding.mesh == mesh.jax_mesh, name
  for elsewhere in (x.new_zeros(3, device="cpu"), x.new_zeros(8, 2, device="jax:1")):
    assert elsewhere.device.type == "cpu" or elsewhere.device.index == 1
  compiled = jax_jit(lambda x: x.new_zeros(3) + x.sum())
  assert compiled(x).tolist() == [120.0] * 3


@for_each_kind
def copies_keep_their_sharding_and_assign_takes_the_new_one(kind):
  mesh = mesh_of(kind, x=8)
  split, rows, columns = torch.zeros(8, 8), ("x",), (None, "x")
  others = {
    "of the CPU": torch.ones(8, 8),
    "of one device": torch.ones(8, 8, device="jax"),
    "of another layout": mesh.shard(torch.ones(8, 8), columns),
  }
  for name, other in others.items():
    layer = nn.Linear(8, 8, bias=False)
    mesh.shard_model(layer, lambda name, tensor: rows)
    layer.load_state_dict({"weight": other})
    require_alike(layer.weight, mesh.shard(split, rows))
    with torch.no_grad():
      layer.weight.copy_(other * 2)
    require_alike(layer.weight, mesh.shard(split, rows))
    assert layer.weight.eq(2).all(), name
    layer.load_state_dict({"weight": other}, assign=True)
    assert layer.weight.device.type == other.device.type, name
    if name == "of the CPU":
      with pytest.raises(MixedDeviceError, match=r"other\.to\(.jax.\)"):
        mesh.shard(split, rows).data = other
      continue
    require_alike(layer.weight, other)
    parameter = nn.Parameter(mesh.shard(split, rows))
    parameter.data = other
    require_alike(parameter, other)


OPTIMIZERS: dict[str, Callable] = {
  "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
  "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
  "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
  "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@for_each_kind
def optimizers_averages_and_state_dicts_keep_shardings(kind):
  mesh = mesh_of(kind, x=8)
  model = mesh.shard_model(nn.Linear(2, 8, bias=False))
  expected = mesh.shard(torch.zeros(8, 2), ("x",))
  x = torch.ones(8, 2, device="jax")
  average = swa_utils.get_ema_multi_avg_fn(0.9)
  averaged = swa_utils.AveragedModel(model, multi_avg_fn=average)
  for name, make in OPTIMIZERS.items():
    optimizer = make(model.parameters())
    for _ in range(2):
      optimizer.zero_grad()
      (model(x) ** 2).sum().backward()
      require_alike(model.weight.grad, expected)
      optimizer.step()
      optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = optimizer.state[model.weight].values()
    arrays = [v for v in state if isinstance(v, torch.Tensor) and v.dim() == 2]
    assert arrays, name
    for tensor in (model.weight, *arrays):
      require_alike(tensor, expected)
    averaged.update_parameters(model)
    require_alike(averaged.module.weight, expected)
  copied = copy.deepcopy(model)
  (copied(x) ** 2).sum().backward()
  require_alike(copied.weight.grad, expected)
  for source in (torch.ones(8, 2), torch.ones(8, 2, device="jax")):
    model.load_state_dict({"weight": source})
    require_alike(model.weight, expected)
  state = copy.deepcopy(copied.state_dict())
  model.load_state_dict(state, assign=True)
  require_alike(model.weight, expected)
  assert torch.equal(model.weight, copied.weight)


@case
def second_order_gradients_inherit_the_sharding_of_the_leaf():
  mesh = mesh_of(AxisType.Auto, x=8)
  leaf = torch.ones(8, 8, device="jax", requires_grad=True)
  leaf.shard_(mesh.sharding(("x",)))
  (first,) = torch.autograd.grad((leaf @ leaf).pow(2).sum(), leaf, create_graph=True)
  require_alike(first, leaf)
  first.sum().backward()
  require_alike(leaf.grad, leaf)
  plain = torch.ones(8, 8, device="jax", requires_grad=True)
  (again,) = torch.autograd.grad((plain @ plain).pow(2).sum(), plain, create_graph=True)
  again.sum().backward()
  assert torch.equal(leaf.grad.cpu(), plain.grad.cpu())
