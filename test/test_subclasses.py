"""Jax tensors of users' subclasses of `torch.Tensor` act like those on the CPU."""

import contextlib
import copy
import functools
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

import torchax
from torchax.interop import jax_jit
from torchax.subclasses import class_with_array


class Named:
  """Base without tensors, which has its own descriptor of `__dict__`."""


class Image(Named, torch.Tensor):
  """Subclass with the default overrides."""

  def brightest(self):
    return self.max()


class Boxes(torch.Tensor):
  """Subclass with metadata, whose operations return plain tensors."""

  def __new__(cls, data, unit: str = "pixel"):
    made = torch.as_tensor(data).as_subclass(cls)
    made.unit = unit
    return made

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    with torch._C.DisableTorchFunctionSubclass():
      return func(*args, **(kwargs or {}))


class OnManifold(torch.nn.Parameter):
  """Parameter with an attribute, made by torch's constructor of subclasses."""

  def __new__(cls, data, requires_grad=True, curvature=1.0):
    made = torch.Tensor._make_subclass(cls, data, require_grad=requires_grad)
    made.curvature = curvature
    return made


class Loaded(torch.nn.Parameter):
  """Parameter whose constructor is torch's."""

  def __new__(cls, data, **kwargs):
    return super().__new__(cls, data, requires_grad=False)

  def __init__(self, data, loader):
    self.loader = loader


class Layer(torch.nn.Module):
  """Module with a parameter of a user's class."""

  def __init__(self):
    super().__init__()
    self.weight = OnManifold(torch.ones(3), curvature=2.0)


def _ones(cls=Image, **options):
  return torch.ones(3, device="jax", **options).as_subclass(cls)


@pytest.mark.parametrize(
  "run",
  [
    lambda x: x + 1,
    lambda x: x[:2],
    lambda x: x.float().to(torch.int32),
    lambda x: torch.stack([x, x]),
    lambda x: x.split(2)[0],
    lambda x: x.max(0).values,
    lambda x: x.mul_(2),
    lambda x: x.detach(),
    lambda x: torch.nn.functional.dropout(x, 0.5),
    lambda x: torch.ones(3, device=x.device) + x,
  ],
)
def test_results_keep_class(run):
  result = run(_ones())
  assert isinstance(result, Image) and isinstance(result, torchax.tensor.Tensor)
  assert isinstance(run(torch.ones(3).as_subclass(Image)), Image)


ALIASES = (lambda x: x.detach(), torch.detach, lambda x: x.data)


@pytest.mark.parametrize("cls", [Boxes, OnManifold])
def test_aliases_of_overriding_classes_are_plain(cls):
  for x in (_ones(cls), torch.ones(3).as_subclass(cls)):
    for alias in ALIASES:
      assert type(alias(x)) in (torch.Tensor, torchax.tensor.Tensor)
      assert alias(x).tolist() == [1, 1, 1]
  for alias in ALIASES:
    assert isinstance(alias(_ones()), Image)


def test_values_and_methods_are_those_of_both_classes():
  image = _ones()
  assert image.brightest().item() == 1 and image.device.type == "jax"
  assert_close(image.cpu().as_subclass(torch.Tensor), torch.ones(3))
  assert type(image.as_subclass(torch.Tensor)) is torchax.tensor.Tensor


def test_as_subclass_as_a_function_of_torch():
  x = torch.ones(3, device="jax")[:2]
  assert torch.Tensor.as_subclass(x, Image).tolist() == [1, 1]
  assert type(torch.Tensor.as_subclass(torch.ones(3), Image)) is Image


def test_alias_shares_storage_and_gradient():
  x = torch.ones(3, device="jax", requires_grad=True)
  image = (x * 2).as_subclass(Image)
  image.square().sum().backward()
  assert_close(x.grad.cpu(), torch.full((3,), 8.0))
  base = torch.zeros(3, device="jax")
  base.as_subclass(Image).add_(1)
  assert base.tolist() == [1, 1, 1]


def test_subclass_moves_to_jax_and_back():
  image = torch.ones(3).as_subclass(Image).to("jax")
  assert isinstance(image, Image) and image.device.type == "jax"
  assert type(image.cpu()) is Image
  assert type(torch.ones(3).as_subclass(type(image))) is Image
  assert type(image.cpu().as_subclass(torchax.tensor.Tensor)) is torch.Tensor


def test_subclass_with_own_override_keeps_metadata():
  boxes = Boxes(torch.ones(3, device="jax"), unit="meter")
  assert isinstance(boxes, Boxes) and boxes.unit == "meter"
  assert type(boxes * 2) is torchax.tensor.Tensor
  assert type(boxes.cpu()) is torch.Tensor
  assert (boxes * 2).tolist() == [2, 2, 2]


class Labelled(torch.Tensor):
  """Subclass that copies its metadata to results, through torch's default."""

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    if not all(issubclass(cls, other) for other in types):
      return NotImplemented
    result = super().__torch_function__(func, types, args, kwargs or {})
    if isinstance(result, cls):
      result.label = next(a.label for a in args if hasattr(a, "label"))
    return result


def test_override_that_calls_torchs_default():
  image = _ones(Labelled)
  image.label = "cat"
  for result in (image + torch.ones(3, device="jax"), image.cpu(), image.to("cpu")):
    assert isinstance(result, Labelled) and result.label == "cat"


def test_class_of_tensor_constructs_on_any_device():
  image = _ones()
  assert type(type(image)(torch.ones(2))) is Image
  assert isinstance(type(image)(image), torchax.tensor.Tensor)


def test_alias_does_not_share_attributes():
  first = Boxes(torch.ones(3, device="jax"), unit="meter")
  assert Boxes(first).unit == "pixel" and first.unit == "meter"


def test_parameter_subclass_trains():
  weight = OnManifold(torch.ones(3, device="jax"), curvature=2.0)
  assert isinstance(weight, OnManifold) and isinstance(weight, torch.nn.Parameter)
  assert weight.is_leaf and weight.requires_grad and weight.curvature == 2
  assert type(weight * 2) is torchax.tensor.Tensor
  assert not isinstance(weight.data, torch.nn.Parameter)
  (weight * 2).sum().backward()
  torch.optim.SGD([weight], lr=0.5).step()
  assert weight.tolist() == [0, 0, 0]


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
@pytest.mark.parametrize(
  "make",
  [
    torch.nn.Parameter,
    OnManifold,
    copy.copy,
    copy.deepcopy,
    lambda weight: weight.new_tensor([1.0, 2.0], requires_grad=True),
  ],
)
def test_transforms_of_torch_take_new_parameters(make, transform):
  weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], device="jax"))
  made = []

  def loss(x):
    made.append(make(weight))
    return (x * made[0]).sum()

  x = torch.ones(2, 2, device="jax")
  found = transform(loss)(x)
  expected = [3, 3] if transform is torch.vmap else [[1, 2], [1, 2]]
  assert found.tolist() == expected
  assert made[0].requires_grad and made[0].is_leaf


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_class_of_a_parameter_makes_parameters(device):
  weight = torch.nn.Parameter(torch.ones(2, device="jax"))
  made = type(weight)(torch.zeros(3, device=device), requires_grad=False)
  assert isinstance(made, torch.nn.Parameter) and not made.requires_grad
  assert made.device.type == device and made.tolist() == [0, 0, 0]
  assert type(weight)(weight, requires_grad=True).requires_grad


def test_constructor_of_parameter_runs_init():
  weight = Loaded(torch.ones(3, device="jax"), loader=len)
  assert isinstance(weight, Loaded) and weight.loader is len
  assert not weight.requires_grad


def test_module_to_keeps_class_of_parameters():
  layer = Layer().to("jax")
  assert isinstance(layer.weight, OnManifold) and layer.weight.curvature == 2
  assert layer.weight.device.type == "jax"
  assert isinstance(layer.half().weight, OnManifold)
  assert type(layer.cpu().weight) is OnManifold and layer.weight.curvature == 2


class Watching(torch.Tensor):
  """Subclass that keeps the types of each call."""

  seen: list[tuple] = []

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    Watching.seen.append(tuple(types))
    return super().__torch_function__(func, types, args, kwargs or {})


WITH_PLAIN = {
  "tensor_first": lambda x, tensor: x + tensor,
  "view_first": lambda x, tensor: x[0] + tensor,
  "view_last": lambda x, tensor: tensor + x[0],
  "two_views": lambda x, tensor: x[0, 1:] + tensor[1:],
  "list": lambda x, tensor: torch.cat([x[0], tensor]),
  "function": lambda x, tensor: F.linear(x[:1], tensor),
}


@pytest.mark.parametrize("cls", [Image, Watching])
@pytest.mark.parametrize("run", WITH_PLAIN.values(), ids=WITH_PLAIN)
def test_plain_tensors_do_not_hide_the_class(run, cls):
  Watching.seen.clear()
  x = torch.ones(2, 3, device="jax")
  assert isinstance(run(x, _ones(cls)), cls)
  assert all(types == (Watching,) for types in Watching.seen)


PER_SAMPLE = {
  "linear": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)),
  "rnn": lambda: torch.nn.RNN(4, 2, batch_first=True),
}


@pytest.mark.parametrize("make", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_gradients_of_each_sample(make):
  """torch's ExpandedWeight is a class of parameters with its own functions."""
  x, found = torch.linspace(-1, 1, 24).reshape(2, 3, 4), []
  module = make()
  for device in ("cpu", "jax"):
    model = copy.deepcopy(module).to(device)
    result = call_for_per_sample_grads(model, loss_reduction="sum")(x.to(device))
    tree_leaves(result)[0].square().sum().backward()
    found.append([parameter.grad_sample.cpu() for parameter in model.parameters()])
  assert_close(*found)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_keeps_class(copied):
  image = _ones()
  image.label = "cat"
  made = copied(image)
  assert isinstance(made, Image) and made.label == "cat" and made.tolist() == [1, 1, 1]


def test_pickle_and_file_keep_class(tmp_path):
  image = _ones()
  image.label = "cat"
  torch.save(image, tmp_path / "image.pt")
  saved = torch.load(tmp_path / "image.pt", weights_only=False)
  for made in (pickle.loads(pickle.dumps(image)), saved):
    assert isinstance(made, Image) and made.label == "cat"
    assert made.device.type == "jax" and made.tolist() == [1, 1, 1]


@pytest.mark.parametrize("load", ["file", "pickle"])
@pytest.mark.parametrize(
  "make", [OnManifold, lambda x: torch.nn.Parameter(x.as_subclass(Image))]
)
def test_saved_parameter_is_a_parameter(make, load, tmp_path):
  parameter = make(torch.ones(3, device="jax"))
  parameter.label = "cat"
  if load == "file":
    torch.save(parameter, tmp_path / "parameter.pt")
    loaded = torch.load(tmp_path / "parameter.pt", weights_only=False)
  else:
    loaded = pickle.loads(pickle.dumps(parameter))
  assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad
  assert loaded.label == "cat" and loaded.tolist() == [1, 1, 1]


def test_printing_shows_the_class():
  image = torch.ones(2, 1, device="jax").as_subclass(Image)
  text = "Image([[1.],\n       [1.]], device='jax:0'"
  assert repr(image) == f"{text})"
  parameter = torch.nn.Parameter(image)
  assert repr(parameter) == f"Parameter({text}, requires_grad=True))"


def test_subclass_with_slots_raises():
  class Slotted(torch.Tensor):
    __slots__ = ("label",)

  with pytest.raises(TypeError, match="Slotted, which has __slots__"):
    _ones(Slotted)


class Plain(torch.Tensor):
  """Class with the constructor of torch, which passes its tensor to it."""

  def __init__(self, data):
    super().__init__()
    self.unit = "pixel"


@pytest.mark.parametrize("cls", [torch.Tensor, Plain])
def test_constructor_of_torch_returns_an_alias(cls):
  x = torch.ones(3, device="jax")
  leaf = torch.ones(3, device="jax", requires_grad=True)
  made = cls(x)
  assert isinstance(made, cls) and isinstance(made * 2, cls)
  assert cls is torch.Tensor or made.unit == "pixel"
  made.add_(1)
  assert x.tolist() == [2, 2, 2]
  (cls(leaf) * 2).sum().backward()
  assert leaf.grad.tolist() == [2, 2, 2]


def test_jax_jit_keeps_the_class():
  image = _ones()
  brightest, double = map(jax_jit, (Image.brightest, lambda pair: pair["image"] * 2))
  assert brightest(image).tolist() == 1
  result = double({"image": image})
  assert isinstance(result, Image) and result.tolist() == [2, 2, 2]
  jax_jit(lambda image: image.add_(1))(image)
  assert image.tolist() == [2, 2, 2]


def test_jax_jit_keeps_attributes():
  traces = []

  def scaled(boxes):
    traces.append(boxes.unit)
    return boxes.detach() * boxes.scale, boxes

  function = jax_jit(scaled)
  for unit, scale in (("pixel", 2.0), ("pixel", 3.0), ("meter", 4.0)):
    boxes = Boxes(torch.ones(2, device="jax"), unit)
    boxes.scale = torch.tensor(scale, device="jax")
    product, same = function(boxes)
    assert product.tolist() == [scale, scale]
    assert isinstance(same, Boxes) and same.unit == unit and same.scale.item() == scale
  assert traces == ["pixel", "meter"]  # a tensor is an operand


def test_jax_jit_follows_arrays_of_numpy():
  function, image = jax_jit(lambda image: image * float(image.scale.sum())), _ones()
  for scale in (np.ones(2), np.ones(2), np.full(2, 3.0)):
    image.scale = scale
    assert function(image).tolist() == [scale.sum()] * 3


def test_jax_jit_differentiates_a_class():
  image = _ones().requires_grad_()
  loss = jax_jit(lambda image: (image * image).sum())(image)
  loss.backward()
  assert image.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("copied", [dict, dict.copy, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
  "assign",
  [
    lambda tensor, attributes: setattr(tensor, "__dict__", attributes),
    lambda tensor, attributes: tensor.__dict__.update(attributes),
  ],
  ids=["assigned", "updated"],
)
def test_copied_attributes_leave_the_values(assign, copied):
  source, target = _ones() * 2, _ones()
  source.label = "cat"
  assign(target, copied(source.__dict__))
  assert target.label == "cat" and target.tolist() == [1, 1, 1]
  target.add_(1)
  assert source.tolist() == [2, 2, 2] and target.tolist() == [2, 2, 2]


def test_class_is_made_once():
  assert class_with_array(Image) is class_with_array(type(_ones()))
  assert type(_ones()) is class_with_array(Image)


def test_subclass_with_own_dispatch_raises():
  class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
      return func(*args, **(kwargs or {}))

  with pytest.raises(TypeError, match="Wrapped, which has its own"):
    _ones(Wrapped)


class Scaled(torch.Tensor):
  """Wrapper subclass: a product of two parts, on which its operations run."""

  @staticmethod
  def __new__(cls, values, scale):
    options = {"dtype": values.dtype, "device": values.device}
    return torch.Tensor._make_wrapper_subclass(cls, values.shape, **options)

  def __init__(self, values, scale):
    self.values, self.scale = values, scale

  def __tensor_flatten__(self):
    return ["values", "scale"], None

  @classmethod
  def __tensor_unflatten__(cls, parts, context, size, stride):
    return cls(parts["values"], parts["scale"])

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    if func is torch.ops.aten.detach.default:
      return cls(args[0].values.detach(), args[0].scale)

    def merged(x):
      return x.values * x.scale if isinstance(x, cls) else x

    return func(*tree_map(merged, args), **tree_map(merged, kwargs or {}))


def _scaled(device) -> Scaled:
  values = torch.arange(9.0, device=device).reshape(3, 3)
  return Scaled(values, torch.tensor(2.0, device=device))


WITH_PARTS = {
  "operation": lambda x, w: x + w,
  "part_first": lambda x, w: w @ x,
  "list": lambda x, w: torch.cat([x[None], w]),
  "function": lambda x, w: F.linear(x, w),
  "in_place": lambda x, w: x.clone().copy_(w[1]),
  "gradient": lambda x, w: torch.func.grad(lambda x: F.linear(x, w).sin().sum())(x),
}


@pytest.mark.parametrize("global_env", [False, True], ids=["no_env", "env"])
@pytest.mark.parametrize("run", WITH_PARTS.values(), ids=WITH_PARTS)
def test_operations_run_on_parts_of_a_wrapper_subclass(run, global_env):
  x = torch.linspace(-1, 1, 3)
  expected = run(x, _scaled("cpu"))
  with torchax.default_env() if global_env else contextlib.nullcontext():
    assert_close(run(x.to("jax"), _scaled("jax")).cpu(), expected)


class Function(Scaled):
  """Wrapper subclass with torch's usual check of the other classes."""

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    if not all(issubclass(cls, other) for other in types):
      return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
      return func(*args, **(kwargs or {}))


class Dispatch(Scaled):
  """Wrapper subclass with the same check of operations."""

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    if not all(issubclass(cls, other) for other in types):
      return NotImplemented
    return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("cls", [Function, Dispatch])
@pytest.mark.parametrize("operation", [torch.matmul, torch.sub, operator.add])
def test_classes_do_not_see_jax_tensors_among_the_types(cls, operation):
  x, w = torch.ones(3, 3, device="jax"), _scaled("jax")
  selective = cls(w.values, w.scale)
  assert_close(operation(x, selective).cpu(), operation(x, w).cpu())
  assert_close(operation(selective, x).cpu(), operation(w, x).cpu())


def test_gradients_of_a_wrapper_subclass():
  expected, x, w = _scaled("cpu").requires_grad_(), torch.ones(3), _scaled("jax")
  F.linear(x, expected).sin().sum().backward()
  x, w = x.to("jax"), w.requires_grad_()
  F.linear(x, w).sin().sum().backward()
  assert_close(w.grad.cpu(), expected.grad)


def test_jax_jit_takes_and_returns_a_wrapper_subclass():
  apply = jax_jit(lambda x, w: (F.linear(x, w), w))
  x = torch.ones(3, device="jax")
  for scale in (2.0, 3.0):
    w = Scaled(torch.ones(3, 3, device="jax"), torch.tensor(scale, device="jax"))
    product, same = apply(x, w)
    assert product.tolist() == [3 * scale] * 3
    assert type(same) is Scaled and same.scale.item() == scale


@pytest.mark.parametrize("closes_over", [True, False], ids=["closure", "argument"])
def test_jax_jit_refuses_gradients_of_a_wrapper_subclass(closes_over):
  w, x = _scaled("jax").requires_grad_(), torch.ones(3, device="jax")
  if closes_over:
    product = jax_jit(lambda x: F.linear(x, w))
  else:
    product = functools.partial(jax_jit(F.linear), weight=w)
  with pytest.raises(NotImplementedError, match="cannot differentiate a Scaled"):
    product(x)
  with torch.no_grad():
    assert_close(product(x), F.linear(x, w))


def test_jax_jit_follows_the_parts_of_a_wrapper_subclass():
  layer = torch.nn.Linear(3, 3, device="jax")
  layer.weight = torch.nn.Parameter(_scaled("jax"), requires_grad=False)
  jitted, x = jax_jit(layer), torch.ones(2, 3, device="jax")
  for _ in range(2):
    assert_close(jitted(x), layer(x))
    layer.weight.values.add_(1)


def _trained():
  torch.manual_seed(0)
  layer = torch.nn.Linear(3, 2)
  optimizer = torch.optim.Adam(layer.parameters(), 0.1)
  layer(torch.ones(1, 3)).sum().backward()
  optimizer.step()
  layer.weight.name_of_mine = "weight"
  return layer, optimizer


def test_assigned_data_moves_parameters_and_optimizer_state():
  (layer, optimizer), (expected, by_torch) = _trained(), _trained()
  kept = list(layer.parameters())
  for tensor in (*kept, *(t for s in optimizer.state.values() for t in s.values())):
    tensor.data = tensor.data.to("jax")
    if tensor.grad is not None:
      tensor.grad.data = tensor.grad.data.to("jax")
  assert layer.weight is kept[0] and layer.weight.name_of_mine == "weight"
  assert_close(layer.weight.grad.cpu(), expected.weight.grad)
  for model, step, device in ((layer, optimizer, "jax"), (expected, by_torch, "cpu")):
    model(torch.full((1, 3), 2.0, device=device)).sum().backward()
    step.step()
  assert layer.weight.device.type == "jax"
  assert_close(layer.weight.cpu(), expected.weight)


def test_assigned_data_of_a_cpu_tensor_is_an_alias_on_jax():
  leaf, other = torch.ones(2, requires_grad=True), torch.zeros(2, device="jax")
  leaf.data = other
  other.add_(5)
  assert leaf.tolist() == [5, 5] and leaf.requires_grad and leaf.device.type == "jax"


def test_assigned_data_moves_no_result_and_nothing_in_a_trace():
  result, plain = torch.ones(2, requires_grad=True) * 2, torch.ones(2)
  on_jax = torch.zeros(2, device="jax")
  with pytest.raises(torchax.errors.MutationError, match="only if the tensor"):
    result.data = on_jax
  with pytest.raises(torchax.errors.MutationError, match="only if the tensor"):
    jax_jit(lambda x: setattr(plain, "data", x))(on_jax)
  assert result.tolist() == [2, 2] and plain.tolist() == [1, 1]
