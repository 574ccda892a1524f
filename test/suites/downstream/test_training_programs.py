"""Training programs: sharded weights, steps of JAX, layers in a scan, optax.

They resemble scripts that train language models on TPUs with torch modules.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from compare import assert_close, assert_same
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils import _pytree as pytree

import torchax
from torchax import interop
from torchax.interop import (
  JittableModule,
  call_jax,
  call_torch,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
  torch_view,
)
from torchax.ops import jtorch, ops_registry
from torchax.registry import operators
from torchax.tensor import Tensor
from torchax.train import ScannedModule, make_train_step, mark_sharding, remat

F = torch.nn.functional


class Net(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.linear = torch.nn.Linear(3, 3)
    self.norm = torch.nn.BatchNorm1d(3)

  def forward(self, x):
    return self.norm(self.linear(x))


X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


@pytest.fixture(name="net")
def _net():
  torch.manual_seed(0)
  return Net()


@pytest.fixture(name="mesh")
def _mesh():
  return Mesh(np.array(jax.devices()[:1]), ("fsdp",))


@pytest.fixture(name="env", autouse=True)
def _env():
  torchax.enable_globally()
  yield torchax.default_env()
  torchax.disable_globally()


def _gradients(net):
  ((net(X) - Y) ** 2).mean().backward()
  return {name: p.grad.clone() for name, p in net.named_parameters()}


def test_weights_are_made_shard_by_shard(net, mesh):
  """The model is made on meta; each shard is cut when its device requests it."""
  state = net.state_dict()

  def placed(tensor):
    array = tensor.numpy()
    axes = ("fsdp",) if tensor.dim() else ()
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    made = jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])
    return torch_view(made)

  with torch.device("meta"):
    model = Net()
  model.load_state_dict({k: placed(v) for k, v in state.items()}, assign=True)
  assert_same(model(X.to("jax")).detach(), net(X).detach())
  assert jax_view(model.linear.weight).sharding.spec == PartitionSpec("fsdp")


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_a_step_is_lowered_and_compiled_ahead(net, policy):
  gradients = _gradients(net)
  expected = {
    name: p.detach() - 0.1 * gradients[name] for name, p in net.named_parameters()
  }
  model = JittableModule(net.to("jax"))

  def run(weights, buffers, args):
    return model.functional_call("forward", weights, buffers, *args)

  optimizer = optax.sgd(0.1)
  step = make_train_step(
    run, lambda out, label: ((out - label) ** 2).mean(), optimizer, policy
  )
  weights, buffers = dict(model.params), dict(model.buffers)
  state = call_jax(optimizer.init, weights)
  args = (weights, buffers, state, (X.to("jax"),), Y.to("jax"))
  function, operands = jax_view((step, args))
  compiled = jax.jit(function, donate_argnums=(0, 2)).lower(*operands).compile()
  loss, weights, state = torch_view(compiled)(*args)
  assert float(loss) > 0 and weights.keys() == expected.keys()
  for name, weight in weights.items():
    assert_same(weight.detach(), expected[name])


def test_gradients_of_a_functional_call_are_torchs(net):
  expected = _gradients(net)
  model = net.to("jax")
  weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

  def loss(weights, buffers, x, y):
    out = torch.func.functional_call(model, (weights, buffers), (x,))
    return F.mse_loss(out, y), out

  step = jax_jit(jax_value_and_grad(loss, kwargs_for_value_and_grad={"has_aux": True}))
  (_, out), gradients = step(weights, buffers, X.to("jax"), Y.to("jax"))
  assert out.shape == X.shape
  for name, gradient in gradients.items():
    torch.testing.assert_close(gradient.cpu(), expected[name], rtol=1e-4, atol=1e-5)


def test_layers_are_scanned_by_jax(net):
  layers = [torch.nn.Linear(3, 3).to("jax") for _ in range(3)]
  stacked = {
    name: torch.stack([layer.get_parameter(name).detach() for layer in layers])
    for name in ("weight", "bias")
  }

  def one(carry, weights):
    out = call_torch(
      functools.partial(torch.func.functional_call, layers[0]), weights, (carry,)
    )
    return checkpoint_name(jnp.tanh(out), "layer"), None

  body = jax.checkpoint(
    one, policy=jax.checkpoint_policies.save_only_these_names("layer")
  )
  x = X.to("jax")
  out, _ = call_jax(functools.partial(jax.lax.scan, body), x, stacked)
  expected = x
  for layer in layers:
    expected = layer(expected).tanh()
  assert_close(out.cpu(), expected.detach().cpu())


def test_a_list_of_layers_becomes_one_scanned_module():
  layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
  expected = X
  for layer in layers:
    expected = layer(expected)
  scanned = ScannedModule(list(layers), jax.checkpoint_policies.nothing_saveable)
  assert_same(scanned.to("jax")(X.to("jax")).detach(), expected.detach())


def test_a_loss_is_checkpointed_with_a_policy():
  weight = torch.ones(3, 3, device="jax")

  def block(w, x):
    return call_jax(lambda h: checkpoint_name(h, "kept"), (x @ w).sin()).cos().sum()

  policy = jax.checkpoint_policies.save_only_these_names("kept")
  saved = gradient_checkpoint(block, kwargs={"policy": policy})
  x = X.to("jax")
  (value, gradient) = jax_value_and_grad(saved)(weight, x)
  plain = jax_value_and_grad(block)(weight, x)
  assert_close(value.cpu(), plain[0].cpu())
  assert_close(gradient.cpu(), plain[1].cpu())
  assert_close(remat(lambda w: (X.to("jax") @ w).sum())(weight).cpu(), X.sum() * 3)


def test_activations_are_constrained_inside_of_a_model(mesh):
  class Constrained(torch.nn.Module):
    def forward(self, x):
      return mark_sharding(x * 2, NamedSharding(mesh, PartitionSpec("fsdp")))

  assert_same(jax_jit(Constrained())(X.to("jax")), X * 2)
  jaxpr = jax.make_jaxpr(jax_view(Constrained()))(jax_view(X.to("jax")))
  (constraint,) = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
  assert constraint.params["sharding"].spec == PartitionSpec("fsdp")


@pytest.mark.parametrize(
  "how", [lambda o, name: functools.partial(call_jax, getattr(o, name)), None]
)
def test_optax_is_called_with_tensors(how):
  optimizer = optax.adamw(0.1)
  if how is None:
    seen = torch_view(optimizer)
    init, update = seen.init, seen.update
  else:
    init, update = how(optimizer, "init"), how(optimizer, "update")
  params, grads = {"w": torch.ones(3).to("jax")}, {"w": torch.ones(3).to("jax")}
  state = init(params)
  updates, state = update(grads, state, params)
  params = call_jax(optax.apply_updates, params, updates)
  assert isinstance(params["w"], Tensor) and isinstance(state[0].mu["w"], Tensor)
  assert (params["w"] < 1).all().item()


def test_an_eager_loop_with_torchs_optimizer_learns(net):
  model = net.to("jax")
  optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
  schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
  losses = []
  for _ in range(4):
    optimizer.zero_grad()
    loss = F.mse_loss(model(X.to("jax")), Y.to("jax"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
  assert losses == sorted(losses, reverse=True)


def test_weights_are_saved_and_restored_as_arrays(net, tmp_path):
  orbax = pytest.importorskip("orbax.checkpoint", reason="orbax is optional")
  weights = jax_view(dict(net.to("jax").named_parameters()))
  saver = orbax.StandardCheckpointer()
  saver.save(tmp_path / "step", weights)
  saver.wait_until_finished()
  restored = torch_view(saver.restore(tmp_path / "step"))
  other = Net().to("jax")
  other.load_state_dict(restored, strict=False)
  assert_same(other.linear.weight.detach(), net.linear.weight.detach().cpu())


def test_a_kernel_with_its_own_gradient_is_used_in_torchs_graph():
  @jax.custom_vjp
  def kernel(x):
    return x * 2

  kernel.defvjp(lambda x: (x * 2, None), lambda _, cotangent: (cotangent * 7,))
  x = X.to("jax").requires_grad_()
  interop.j2t_autograd(kernel)(x).sum().backward()
  assert_same(x.grad, torch.full_like(X, 7.0))


def test_attention_can_be_replaced_globally_and_restored():
  function = F.scaled_dot_product_attention
  ours = ops_registry.all_torch_functions[function]

  def dot_product(q, k, v):
    q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2)

  @jtorch.register_function(
    function, is_jax_function=False, needs_env=True, is_user_defined=True
  )
  def attention(query, key, value, *args, env=None, **kwargs):
    assert env is torchax.default_env()
    return call_jax(dot_product, query, key, value)

  q = torch.randn(1, 2, 4, 8)
  try:
    found = F.scaled_dot_product_attention(*[q.to("jax")] * 3, is_causal=True)
  finally:
    ops_registry.all_torch_functions[function] = ours
    operators._generation += 1
  expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
  torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_rotary_frequencies_are_complex_buffers():
  def rotate(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(-2).type_as(x)

  angles = torch.outer(torch.arange(4.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
  freqs = torch.polar(torch.ones_like(angles), angles)
  x = torch.randn(2, 4, 8)
  found = jax_jit(rotate)(x.to("jax"), freqs.to("jax"))
  torch.testing.assert_close(found.cpu(), rotate(x, freqs), rtol=1e-5, atol=1e-5)


def test_a_batch_of_the_loader_is_moved_as_a_tree():
  data = torch.utils.data.TensorDataset(
    torch.arange(8.0).reshape(4, 2), torch.arange(4)
  )
  seen = []
  for batch in torch.utils.data.DataLoader(data, batch_size=2, shuffle=False):
    x, y = pytree.tree_map_only(torch.Tensor, lambda t: t.to("jax"), batch)
    seen.append((x.sum() + y.sum()).item())
  assert seen == [7.0, 27.0]


def test_dropout_in_a_step_draws_from_the_key_that_is_given(env):
  def step(key, x):
    with env.override_property(prng=jax_view(key)):
      return F.dropout(x, 0.5)

  jitted, x = jax_jit(step), torch.ones(64, device="jax")
  keys = [torch_view(jax.random.PRNGKey(seed)) for seed in (0, 0, 1)]
  first, again, other = (jitted(key, x) for key in keys)
  assert torch.equal(first, again) and not torch.equal(first, other)
  assert set(first.tolist()) == {0.0, 2.0}
