"""Functional training steps, and stacks of layers run by one compiled loop."""

import copy

import jax
import optax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.interop import jax_jit, jax_value_and_grad, jax_view, torch_view
from torchax.train import ScannedModule, make_train_step, mark_sharding, remat


@pytest.fixture(autouse=True)
def env():
  torch.manual_seed(0)
  with torchax.default_env() as environment:
    yield environment


class Layer(torch.nn.Module):
  """Layer with weights, running statistics, random numbers and options."""

  def __init__(self, width=8):
    super().__init__()
    self.linear = torch.nn.Linear(width, width)
    self.norm = torch.nn.BatchNorm1d(width)
    self.drop = torch.nn.Dropout(0.3)

  def forward(self, x, scale=None, *, residual=False):
    out = self.drop(torch.tanh(self.norm(self.linear(x))))
    out = out if scale is None else out * scale
    return x + out if residual else out


def _layers(count=3) -> torch.nn.ModuleList:
  torch.manual_seed(1)
  return torch.nn.ModuleList([Layer() for _ in range(count)]).to("jax")


def _unrolled(layers):
  def forward(x, *args, **kwargs):
    for layer in layers:
      x = layer(x, *args, **kwargs)
    return x

  return forward


def _run(model, *args, **kwargs):
  """Return the result, the gradient of the input, and the next random number."""
  torch.manual_seed(0)
  x = torch.linspace(-1, 1, 48).view(6, 8).to("jax").requires_grad_()
  out = model(x, *args, **kwargs)
  (out**2).sum().backward()
  return out.detach(), x.grad, torch.rand(2, device="jax")


def _assert_close(actual, expected) -> None:
  for have, want in zip(actual, expected):
    torch.testing.assert_close(have.cpu(), want.cpu(), rtol=1e-4, atol=1e-4)


POLICIES = {
  "kept": None,
  "recomputed": jax.checkpoint_policies.nothing_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_scanned_stack_equals_the_unrolled_stack(policy, wrap):
  layers = _layers()
  scanned = ScannedModule(copy.deepcopy(layers), POLICIES[policy])
  scale = torch.tensor(1.5).to("jax")
  expected = _run(_unrolled(layers), scale, residual=True)
  actual = _run(wrap(lambda x, s: scanned(x, s, residual=True)), scale)
  _assert_close(actual, expected)
  assert torch.equal(actual[2], expected[2])  # as many draws
  gradient = scanned.params[scanned._param_name_new("linear.weight")].grad
  wanted = torch.stack([layer.linear.weight.grad for layer in layers])
  _assert_close([gradient], [wanted])
  statistics = scanned.get_buffer(scanned._param_name_new("norm.running_mean"))
  _assert_close(
    [statistics], [torch.stack([layer.norm.running_mean for layer in layers])]
  )


def test_scanned_stack_draws_masks_of_the_unrolled_stack(env):
  layers = torch.nn.ModuleList([torch.nn.Dropout(0.5) for _ in range(3)])
  scanned = ScannedModule(layers)
  x = torch.ones(64, device="jax")
  expected = _unrolled(layers)(x)
  torch.manual_seed(0)
  assert torch.equal(scanned(x), expected)
  scanned.eval()
  assert torch.equal(scanned(x), x)


def test_jax_gradient_of_scanned_stack_is_equal():
  layers = _layers().eval()
  scanned = ScannedModule(layers).eval()
  x = torch.linspace(-1, 1, 48).view(6, 8).to("jax")
  losses = [lambda x, f=f: (f(x) ** 2).sum() for f in (scanned, _unrolled(layers))]
  (first, gradient), (second, wanted) = [jax_value_and_grad(f)(x) for f in losses]
  _assert_close([first, gradient], [second, wanted])


def test_a_scanned_stack_is_compiled_once():
  layers = _layers()
  traces = []
  layers[0].register_forward_pre_hook(lambda *_: traces.append(None))
  scanned = ScannedModule(layers)
  x = torch.ones(6, 8, device="jax")
  for _ in range(2):
    scanned(x)
  count = len(traces)
  for _ in range(3):
    scanned(x)
  assert len(traces) == count


def test_a_scanned_stack_has_a_state_dict_of_stacked_tensors():
  scanned = ScannedModule(_layers(3))
  state = scanned.state_dict()
  assert {tuple(t.shape[:1]) for t in state.values()} == {(3,)}
  other = ScannedModule(_layers(3))
  other.load_state_dict(state)
  name = scanned._param_name_new("linear.weight")
  assert scanned._param_name_old(name) == "linear.weight"
  assert torch.equal(other.params[name], scanned.params[name])


def test_layers_of_different_structure_raise():
  with pytest.raises(ValueError, match="layer 1 differs.*linear.bias"):
    ScannedModule([Layer(8), Layer(6)])
  with pytest.raises(ValueError, match="at least one layer"):
    ScannedModule([])
  with pytest.raises(TypeError, match="input of the first layer"):
    ScannedModule([torch.nn.Dropout()])()


# make_train_step --------------------------------------------------------------------


def _model_fn(model):
  def model_fn(weights, buffers, args):
    return torch.func.functional_call(model, {**weights, **buffers}, args)

  return model_fn


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_step_equals_a_torch_step(policy):
  torch.manual_seed(1)
  model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to("jax")
  weights = {name: p.detach().clone() for name, p in model.named_parameters()}
  optimizer = optax.sgd(0.1)
  step = make_train_step(_model_fn(model), F.mse_loss, optimizer, POLICIES[policy])
  x, label = torch.ones(4, 8, device="jax"), torch.zeros(4, 8, device="jax")

  torch.manual_seed(0)
  expected, sgd = [], torch.optim.SGD(model.parameters(), 0.1)
  for _ in range(3):
    loss = F.mse_loss(model(x), label)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    expected.append(loss.detach())

  for run in (step, jax_jit(step)):
    torch.manual_seed(0)
    current, losses = weights, []
    state = torch_view(optimizer.init(jax_view(weights)))
    for _ in range(3):
      loss, current, state = run(current, {}, state, (x,), label)
      losses.append(loss)
    _assert_close(losses, expected)
    for name, parameter in model.named_parameters():
      _assert_close([current[name]], [parameter])


def test_step_in_microbatches_equals_step_of_the_batch():
  torch.manual_seed(1)
  model = torch.nn.Linear(8, 8).to("jax")
  weights = {name: p.detach().clone() for name, p in model.named_parameters()}
  optimizer = optax.sgd(0.1)
  x, label = torch.randn(6, 8, device="jax"), torch.zeros(6, 8, device="jax")
  found = []
  for parts in (1, 3):
    step = make_train_step(_model_fn(model), F.mse_loss, optimizer, microbatches=parts)
    state = torch_view(optimizer.init(jax_view(weights)))
    loss, updated, _ = jax_jit(step)(weights, {}, state, (x,), label)
    found.append([loss, *updated.values()])
  _assert_close(*found)


def test_microbatches_draw_one_after_another():
  """Each part takes one draw, with other numbers than the rest."""
  step = make_train_step(
    lambda weights, buffers, args: F.dropout(weights["w"] * args[0], 0.5),
    lambda result, label: result.sum(),
    optax.sgd(1.0),
    microbatches=4,
  )
  weights = {"w": torch.zeros(64, device="jax")}
  state = torch_view(optax.sgd(1.0).init(jax_view(weights)))
  x = torch.eye(4, device="jax").repeat_interleave(1, 0)[..., None].expand(4, 4, 64)
  torch.manual_seed(0)
  _, updated, _ = step(weights, {}, state, (x.reshape(4, 4, 64),), x[:, 0])
  torch.manual_seed(0)
  masks = [F.dropout(torch.ones(1, 4, 64, device="jax"), 0.5)[0] for _ in range(4)]
  expected = -sum(mask[n] for n, mask in enumerate(masks)) / 4
  _assert_close([updated["w"]], [expected])


@pytest.mark.parametrize("parts", [0, 4])
def test_indivisible_batch_raises(parts):
  with pytest.raises(ValueError, match="1 or more" if not parts else "does not divide"):
    step = make_train_step(
      lambda w, b, a: w["w"] * a, F.mse_loss, optax.sgd(1.0), microbatches=parts
    )
    x = torch.ones(6, device="jax")
    step({"w": torch.ones(6, device="jax")}, {}, (), x, x)


def test_remat_draws_once():
  def block(x):
    return F.dropout(torch.sin(x), 0.5)

  x = torch.ones(64, device="jax")
  _, gradient = jax_value_and_grad(lambda x: remat(block)(x).sum())(x)
  torch.manual_seed(0)
  assert torch.equal(gradient != 0, block(x) != 0)


def test_mark_sharding_keeps_values_and_gradients():
  mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  x = torch.ones(4, device="jax", requires_grad=True)
  out = jax_jit(lambda x: mark_sharding(x * 2, sharding))(x)
  assert out.tolist() == [2.0] * 4
  out.sum().backward()
  assert x.grad.tolist() == [2.0] * 4
