"""`torch.compile(backend="jax")` of functions of jax tensors."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from dynamo.counting import CountingBackend

import torchax
import torchax.dynamo
from torchax.errors import MixedDeviceError
from torchax.tensor import Tensor

PLAIN = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)

each_place = pytest.mark.parametrize("is_inside", [True, False])


def place(is_inside):
  """Run inside the environment, or outside of it."""
  return torchax.default_env() if is_inside else contextlib.nullcontext()


def make_model():
  torch.manual_seed(0)
  return torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.BatchNorm1d(16),
    torch.nn.GELU(),
    torch.nn.Dropout(0.5),
    torch.nn.Linear(16, 3),
  )


def train(model, run, steps=3):
  optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  torch.manual_seed(7)
  losses = []
  for step in range(steps):
    x = (PLAIN + step).to("jax")
    optimizer.zero_grad()
    loss = F.cross_entropy(run(x), torch.tensor([0, 1, 2, 0]).to("jax"))
    loss.backward()
    optimizer.step()
    losses.append(loss.detach().cpu())
  state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
  return losses, state


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian", "vmap"])
def test_transforms_of_an_argument_are_part_of_the_graph(transform):
  """The argument is first seen inside of the transform."""
  transformed = getattr(torch.func, transform)(lambda x: x.sin().sum())
  x = PLAIN.to("jax")
  run = torch.compile(lambda x: transformed(x), backend="jax", fullgraph=True)
  torch.testing.assert_close(run(x).cpu(), transformed(PLAIN))


@each_place
def test_training_in_one_graph_equals_eager_training(is_inside):
  backend = CountingBackend()
  first, second = make_model().to("jax"), make_model().to("jax")
  with place(is_inside):
    actual = train(first, torch.compile(first, backend=backend, fullgraph=True))
  with torchax.default_env():
    expected = train(second, second)
  torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
  assert len(backend.graphs) == 1


@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}], ids=["", "mode"])
def test_the_default_backend_is_jax(options):
  """Inductor, torch's default, does not support jax."""
  first, second = make_model().to("jax"), make_model().to("jax")
  actual = train(first, torch.compile(first, fullgraph=True, **options))
  expected = train(second, torch.compile(second, backend="jax", fullgraph=True))
  torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_default_backend_of_a_graph_without_inputs_is_jax():
  torch.manual_seed(3)
  expected = torch.rand(3, device="jax") + 1
  torch.manual_seed(3)
  make = torch.compile(lambda n: torch.rand(n, device="jax") + 1)
  torch.testing.assert_close(make(3), expected)


@each_place
def test_new_tensors_of_the_same_shape_do_not_recompile(is_inside):
  backend = CountingBackend()
  with place(is_inside):
    run = torch.compile(lambda x, y: x * y, backend=backend, fullgraph=True)
    for number in range(5):
      x = torch.full((3,), float(number)).to("jax")
      assert run(x, x.clone()).tolist() == [number**2] * 3
  assert len(backend.graphs) == 1


def test_results_are_jax_tensors():
  def function(x):
    return {"a": [x * 2, None, 3], "shape": x.shape[0]}

  result = torch.compile(function, backend="jax", fullgraph=True)(PLAIN.to("jax"))
  assert type(result["a"][0]) is Tensor
  assert result["a"][1:] == [None, 3]
  assert result["shape"] == 4


class Image(torch.Tensor):
  """Subclass with a method of its own and one that replaces torch's."""

  def brighter(self):
    return self + 1

  def sin(self):
    return torch.cos(self)


class Doubled(torch.Tensor):
  """Subclass whose copies have other values."""

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    with torch._C.DisableTorchFunctionSubclass():
      result = func(*args, **(kwargs or {}))
      return result * 2 if func is torch.clone else result


@pytest.mark.parametrize(
  ("cls", "function"),
  [
    (Image, lambda x: x.brighter()),
    (Image, lambda x: x.sin()),
    (Image, lambda x: torch.stack([x, x])[0]),
    (Doubled, torch.clone),
  ],
)
def test_overrides_of_a_user_class_are_traced(cls, function):
  backend = CountingBackend()
  run = torch.compile(lambda x: function(x), backend=backend, fullgraph=True)
  for scale in (1, 2):
    x = (PLAIN * scale).to("jax").as_subclass(cls)
    actual, expected = run(x), function(x)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual.cpu(), expected.cpu())
  assert len(backend.graphs) == 1


def test_factories_in_the_graph():
  def function(x):
    return x + torch.arange(8, device=x.device) * torch.ones(8, device="jax")

  x = PLAIN.to("jax")
  with torchax.default_env():
    actual = torch.compile(function, backend="jax", fullgraph=True)(x)
  torch.testing.assert_close(actual.cpu(), PLAIN + torch.arange(8))


def test_data_in_the_graph_is_on_jax():
  def scale(x):
    return x * torch.tensor([0.5] * 8, device=x.device) + torch.where(x > 0, x, 0.0)

  compiled = torch.compile(scale, backend="jax", fullgraph=True)
  torch.testing.assert_close(compiled(PLAIN.to("jax")).cpu(), scale(PLAIN))


def test_attention_with_a_mask_is_one_graph():
  """torch's C++ creates a number for the mask on the wrapper's hidden meta device."""

  def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

  x, mask = PLAIN.reshape(1, 2, 2, 8), torch.tensor([[True, False], [True, True]])
  compiled = torch.compile(attend, backend="jax", fullgraph=True)
  torch.testing.assert_close(
    compiled(x.to("jax"), mask.to("jax")).cpu(), attend(x, mask)
  )


def test_a_cast_like_another_tensor_is_in_the_graph():
  compiled = torch.compile(lambda x, y: x.type_as(y) + y, backend="jax", fullgraph=True)
  y = torch.ones(4, 8, dtype=torch.bfloat16, device="jax")
  assert compiled(PLAIN.to("jax"), y).dtype == torch.bfloat16


def test_an_unused_move_leaves_a_graph_on_the_cpu():
  """Libraries call `isinstance(x.jax(), Tracer)` for any tensor."""

  def function(x):
    isinstance(x.jax(), int)
    return F.dropout(x, 0.5)

  torch.manual_seed(0)
  actual = torch.compile(function, backend="jax", fullgraph=True)(PLAIN)
  assert actual.device.type == "cpu"
  torch.manual_seed(0)
  assert torch.equal(actual, F.dropout(PLAIN.to("jax"), 0.5).cpu())


def test_changes_in_place_reach_views_and_bases():
  def function(x, total):
    x[:, 0] = 5.0
    total.add_(x.sum())
    return x.mul_(2).t()

  run = torch.compile(function, backend="jax", fullgraph=True)
  base, plain = torch.zeros(6, 8).to("jax"), torch.zeros(6, 8)
  total, plain_total = torch.zeros(()).to("jax"), torch.zeros(())
  with torchax.default_env():
    actual = run(base[1:5], total)
  expected = function(plain[1:5], plain_total)
  torch.testing.assert_close(actual.cpu(), expected)
  torch.testing.assert_close(base.cpu(), plain)
  torch.testing.assert_close(total.cpu(), plain_total)


def test_changed_sizes_of_a_tensor_with_a_graph():
  run = torch.compile(lambda x: x.exp(), backend="jax", fullgraph=True)
  for shape in ((4, 2, 8, 8), (4, 8, 4, 4)):  # three sizes become dynamic
    leaf = torch.ones(shape, device="jax", requires_grad=True)
    run(leaf * 2).sum().backward()
    torch.testing.assert_close(leaf.grad, (leaf * 2).exp().detach() * 2)


def test_dynamic_shapes():
  run = torch.compile(
    lambda x: x.reshape(x.shape[0] * 2, -1).cumsum(0), backend="jax", dynamic=True
  )
  for rows in (3, 5, 7):
    x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    expected = x.reshape(rows * 2, -1).cumsum(0)
    torch.testing.assert_close(run(x.to("jax")).cpu(), expected)


def test_stream_continues_after_a_graph_break():
  def function(x):
    y = F.dropout(x, 0.5)
    torch._dynamo.graph_break()
    return F.dropout(y + 1, 0.5)

  x = PLAIN.to("jax")
  with torchax.default_env():
    torch.manual_seed(2)
    actual = torch.compile(function, backend="jax")(x)
    torch.manual_seed(2)
    expected = function(x)
  assert torch.equal(actual, expected)


def test_plain_and_jax_tensors_draw_the_same():
  def function(x):
    return F.dropout(x, 0.5) + torch.rand_like(x)

  run = torch.compile(function, backend="jax", fullgraph=True)
  torch.manual_seed(3)
  on_jax = run(PLAIN.to("jax"))
  torch.manual_seed(3)
  torch.testing.assert_close(run(PLAIN), on_jax.cpu())


@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast_around_and_inside(is_inside):
  torch.manual_seed(0)
  layer = torch.nn.Linear(8, 4).to("jax")

  def function(x):
    with torch.autocast("jax", dtype=torch.bfloat16, enabled=is_inside):
      return layer(x)

  run = torch.compile(function, backend="jax", fullgraph=True)
  x = PLAIN.to("jax")
  with torchax.default_env():
    assert run(x).dtype is (torch.bfloat16 if is_inside else torch.float32)
    torch.testing.assert_close(run(x), function(x))


def test_modes_without_gradients():
  layer = torch.nn.Linear(8, 4).to("jax")
  run = torch.compile(layer, backend="jax", fullgraph=True)
  x = PLAIN.to("jax")
  assert run(x).requires_grad
  with torch.no_grad():
    assert not run(x).requires_grad


def test_a_second_derivative():
  run = torch.compile(lambda x: (x**3).sum(), backend="jax", fullgraph=True)
  x = PLAIN.to("jax").requires_grad_()
  (first,) = torch.autograd.grad(run(x), x, create_graph=True)
  (second,) = torch.autograd.grad(first.sum(), x)
  torch.testing.assert_close(second.cpu(), 6 * PLAIN)


def test_recurrent_layers():
  torch.manual_seed(0)
  layer = torch.nn.LSTM(8, 5, 2, batch_first=True)
  expected, _ = layer(PLAIN[None])
  moved = copy.deepcopy(layer).to("jax")
  run = torch.compile(moved, backend="jax")
  with torchax.default_env():
    actual, _ = run(PLAIN[None].to("jax"))
  torch.testing.assert_close(actual.detach().cpu(), expected.detach())


def test_mixed_devices_name_the_operation():
  run = torch.compile(lambda x, y: x + y, backend="jax", fullgraph=True)
  with pytest.raises(Exception, match="aten.add.Tensor") as caught:
    run(PLAIN.to("jax"), PLAIN)
  assert MixedDeviceError.__name__ in str(caught.value) or "cpu" in str(caught.value)


def test_another_backend_raises_for_jax_tensors():
  """Only the jax backend takes graphs of jax tensors; others raise or run eagerly."""
  x = PLAIN.to("jax")
  result = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x)
  assert type(result) is Tensor
  torch.testing.assert_close(result.cpu(), PLAIN * 2)


def test_fake_tensor_has_no_values():
  """Reading a number breaks the graph, and raises if graph breaks are errors."""

  def function(x):
    return x * x.sum().item()

  x = PLAIN.to("jax") + 1
  with torchax.default_env():
    actual = torch.compile(function, backend="jax")(x)
    torch.testing.assert_close(actual, function(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"(?i)item"):
      torch.compile(function, backend="jax", fullgraph=True)(x)
