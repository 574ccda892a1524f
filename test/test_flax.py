"""`FlaxNNModule`: values, gradients and updates equal linen's."""

import copy
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import torchax
from torchax.errors import MixedDeviceError, MutationError, TracedDrawError
from torchax.interop import gradient_checkpoint, jax_jit, jax_value_and_grad, jax_view

nn = pytest.importorskip("flax.linen", reason="the flax extra is not installed")

from torchax.flax import FlaxNNModule  # noqa: E402


class Net(nn.Module):
  """Linen module with parameters, a mutable collection and two rng collections."""

  @nn.compact
  def __call__(self, x, train: bool, noise: bool = False):
    x = jnp.tanh(nn.Dense(32)(x))
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    if noise:
      x = x + jax.random.normal(self.make_rng("noise"), x.shape)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    self.sow("intermediates", "hidden", x)
    return nn.Dense(4, name="forward")(x)

  def double(self, x):
    return 2 * x


class Mask(nn.Module):
  """Linen module that returns a dropout mask, scaled by a parameter."""

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, x.shape)
    return nn.Dropout(0.25, deterministic=False)(scale * x)


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


@pytest.fixture(autouse=True)
def typed_keys_only():
  """Pass a typed key; Flax raises for a legacy one."""
  with jax.legacy_prng_key("error"):
    yield


@pytest.fixture
def env():
  return torchax.default_env()


@pytest.fixture(scope="module")
def made():
  """Create the modules once, because each has its own compiled functions."""
  env = torchax.default_env()
  torch.manual_seed(0)
  x = torch.from_numpy(X).to("jax")
  net = FlaxNNModule(env, Net(), (x,), {"train": False})
  mask = FlaxNNModule(env, Mask(), (torch.ones(4096).to("jax"),))
  return {m: copy.deepcopy(m.state_dict()) for m in (net, mask)}


def _fresh(made, place):
  module, state = list(made.items())[place]
  module.load_state_dict(state)
  module.train()
  module.zero_grad()
  torch.manual_seed(0)
  return module


@pytest.fixture
def net(made):
  return _fresh(made, 0)


@pytest.fixture
def mask(made):
  return _fresh(made, 1)


@pytest.fixture
def x():
  return torch.from_numpy(X).to("jax")


@pytest.fixture
def ones():
  return torch.ones(4096).to("jax")


def _variables(module):
  """Return the module's tensors as variables of linen."""
  flat = {name: tensor.detach().jax() for name, tensor in module.state_dict().items()}
  nested: dict = {}
  for name, array in flat.items():
    *path, last = name.split(".")
    level = nested
    for part in path:
      level = level.setdefault(part, {})
    level[last] = array
  return nested


def _key(index, seed=0):
  return torchax.RngState.from_seed(seed).draw_key(index)


# Variables ---------------------------------------------------------------------------


def test_variables_equal_linen_init_with_environment_key(made, env):
  state = list(made.values())[0]
  expected = Net().init(torchax.RngState.from_seed(0).key, X, train=False)
  names = {
    ".".join(part.key for part in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected)
  }
  assert set(state) == set(names) and len(names) == 8
  assert all(jnp.array_equal(state[name].jax(), leaf) for name, leaf in names.items())


def test_params_are_parameters_and_the_other_collections_buffers(net):
  params = {name for name, _ in net.named_parameters()}
  buffers = {name for name, _ in net.named_buffers()}
  assert params == {
    *("params.Dense_0.kernel", "params.Dense_0.bias"),
    *("params.BatchNorm_0.scale", "params.BatchNorm_0.bias"),
    *("params.forward.kernel", "params.forward.bias"),
  }
  assert buffers == {"batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var"}
  assert all(p.requires_grad and p.device.type == "jax" for p in net.parameters())


def test_a_nested_dict_survives_encoding(net):
  nested = {"layer": {"kernel": jnp.ones((2, 3)), "empty": {}}, "bias": jnp.zeros(3)}
  decoded = net._decode_nested_dict(net._encode_nested_dict(nested))
  arrays = torchax.checkpoint.structure.to_jax(decoded)
  assert jax.tree.structure(arrays) == jax.tree.structure(nested)
  assert all(map(jnp.array_equal, jax.tree.leaves(arrays), jax.tree.leaves(nested)))


def test_two_modules_have_different_parameters(env, x):
  first, second = (FlaxNNModule(env, nn.Dense(2), (x,)).params.kernel for _ in range(2))
  assert not torch.equal(first, second)


# Calls -------------------------------------------------------------------------------


def test_deterministic_call_equals_linen_and_draws_nothing(net, x, env):
  net.eval()
  out = net(x, train=False)
  expected = Net().apply(_variables(net), X, train=False)
  torch.testing.assert_close(out.cpu(), torch.from_numpy(np.array(expected)))
  assert env.rng.state.count == 0


def test_random_call_draws_one_key_per_collection(net, x, env):
  expected, updates = Net().apply(
    _variables(net),
    X,
    train=True,
    noise=True,
    rngs={"noise": _key(0), "dropout": _key(1)},
    mutable=["batch_stats"],
  )
  out = net(x, train=True, noise=True)
  assert env.rng.state.count == 2
  torch.testing.assert_close(out.detach().cpu(), torch.from_numpy(np.array(expected)))
  for name, value in updates["batch_stats"]["BatchNorm_0"].items():
    buffer = net.get_buffer(f"batch_stats.BatchNorm_0.{name}")
    np.testing.assert_allclose(buffer.numpy(), value, rtol=1e-6)


def test_each_call_draws_a_new_key_determined_by_the_seed(mask, ones):
  first, second = mask(ones), mask(ones)
  assert not torch.equal(first, second)
  torch.manual_seed(0)
  assert torch.equal(mask(ones), first) and torch.equal(mask(ones), second)
  torch.manual_seed(1)
  assert not torch.equal(mask(ones), first)


def test_masks_keep_their_rate_and_are_independent(mask, ones):
  masks = np.stack([mask(ones).detach().numpy() != 0 for _ in range(20)])
  n = masks.size
  assert abs(masks.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / n)
  correlations = np.corrcoef(masks) - np.eye(len(masks))
  assert np.abs(correlations).max() < 5 / np.sqrt(ones.numel())


def test_compiled_calls_draw_as_eager_ones(mask, ones, env):
  eager = [mask(ones) for _ in range(4)]
  traces = []

  def twice(x):
    traces.append(1)
    return mask(x), mask(x)

  compiled = jax_jit(twice)
  torch.manual_seed(7)
  other = compiled(ones)
  compilations = len(traces)
  torch.manual_seed(0)  # the key is an operand: nothing is compiled again
  again = [*compiled(ones), *compiled(ones)]
  assert len(traces) == compilations
  assert all(map(torch.equal, eager, again))
  assert not torch.equal(other[0], eager[0])
  assert env.rng.state.count == 4


def test_linen_scan_draws_per_iteration(env, ones):
  class Turn(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
      kept = nn.Dropout(0.5, deterministic=False)(jnp.ones_like(carry))
      return carry, kept

  scanned = nn.scan(
    Turn, variable_broadcast="params", split_rngs={"dropout": True}, length=3
  )
  env.prng_key = env.prng_key  # params takes it, and the stream counts from it
  module = FlaxNNModule(env, scanned(), (ones, None))
  assert env.rng.state.count == 2, "linen asks for two collections here"
  _, masks = module(ones, None)
  assert np.abs(np.corrcoef(masks.numpy()) - np.eye(3)).max() < 5 / np.sqrt(4096)


def test_keys_passed_by_the_user_are_used(mask, ones, env):
  given = mask(ones, rngs={"dropout": jax.random.key(3)})
  assert env.rng.state.count == 0
  assert torch.equal(given, mask(ones, rngs={"dropout": jax.random.key(3)}))
  assert not torch.equal(given, mask(ones, rngs={"dropout": jax.random.key(4)}))


def test_methods_and_static_arguments_reach_linen(net, x):
  net.eval()
  assert torch.equal(net(x, method="double"), 2 * x)
  assert torch.equal(net(x, method=Net.double), 2 * x)

  # 1 == True and their hashes agree; the compiled functions must not be confused.
  class Kind(nn.Module):
    def __call__(self, x, flag):
      return x * (2 if flag is True else 3)

  kind = FlaxNNModule(net._env, Kind(), (x, True))
  assert torch.equal(kind(x, True), 2 * x) and torch.equal(kind(x, 1), 3 * x)


# Gradients ---------------------------------------------------------------------------


def _loss(module, x):
  return module(x, train=True).square().sum()


def _linen_gradients(net):
  variables = _variables(net)

  def loss(params):
    out, _ = Net().apply(
      {"params": params, "batch_stats": variables["batch_stats"]},
      X,
      train=True,
      rngs={"dropout": _key(0)},
      mutable=["batch_stats"],
    )
    return jnp.square(out).sum()

  # Compiled, as ours is: op by op, the batch variance of linen rounds differently.
  return jax.jit(jax.grad(loss))(variables["params"])


def _eager(net, x):
  _loss(net, x).backward()
  return {name: p.grad for name, p in net.named_parameters()}


def _compiled(net, x):
  def step(x):
    _loss(net, x).backward()

  jax_jit(step)(x)
  return {name: p.grad for name, p in net.named_parameters()}


def _value_and_grad(net, x):
  def loss(params, x):
    return torch.func.functional_call(net, params, (x,), {"train": True}).square().sum()

  params = {name: p.detach() for name, p in net.named_parameters()}
  return jax_value_and_grad(loss)(params, x)[1]


@pytest.mark.parametrize("differentiate", [_eager, _compiled, _value_and_grad])
def test_gradients_equal_linen_gradients(differentiate, net, x):
  expected = _linen_gradients(net)
  found = differentiate(net, x)
  for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
    name = "params." + ".".join(part.key for part in path)
    np.testing.assert_allclose(found[name].numpy(), leaf, rtol=1e-4, atol=1e-5)
  assert len(found) == 6


def _backward(function, x):
  x = x.clone().requires_grad_()
  out = function(x)
  return out.detach(), *torch.autograd.grad(out.sum(), x)


def _torch_checkpointed(function, x):
  checkpoint = torch.utils.checkpoint.checkpoint
  return _backward(lambda x: checkpoint(function, x, use_reentrant=False), x)


def _jax_checkpointed(function, x):
  def loss(x):
    out = gradient_checkpoint(function)(x)
    return out.sum(), out

  (_, out), gradient = jax_value_and_grad(loss, {"has_aux": True})(x)
  return out, gradient


@pytest.mark.parametrize(
  "differentiate",
  [
    _backward,
    lambda function, x: jax_jit(lambda x: _backward(function, x))(x),
    _torch_checkpointed,
    _jax_checkpointed,
  ],
  ids=["eager", "jit", "torch checkpoint", "gradient_checkpoint"],
)
def test_backward_uses_the_forward_mask(differentiate, mask, ones):
  def twice(x):
    return mask(mask(x))

  out, gradient = differentiate(twice, ones)
  assert torch.equal(out != 0, gradient != 0)
  torch.manual_seed(0)
  assert torch.equal(out != 0, twice(ones) != 0), "and that of the plain run"


def test_compiled_training_step_equals_eager_step(net, x, env):
  def train(module, step):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def one(x):
      optimizer.zero_grad()
      loss = _loss(module, x)
      loss.backward()
      optimizer.step()
      return loss.detach()

    one = step(one)
    torch.manual_seed(4)
    return [one(x).item() for _ in range(3)], env.rng.state

  twin = copy.deepcopy(net)
  eager, state = train(net, lambda step: step)
  compiled, its_state = train(twin, jax_jit)
  np.testing.assert_allclose(eager, compiled, rtol=1e-5)
  assert state.state_dict() == its_state.state_dict()
  for name, tensor in net.state_dict().items():
    torch.testing.assert_close(twin.state_dict()[name].cpu(), tensor.cpu())


# Mutable collections -----------------------------------------------------------------


def test_buffers_change_in_train_mode_only(net, x):
  mean = net.get_buffer("batch_stats.BatchNorm_0.mean")
  start = mean.clone()
  net.eval()
  net(x, train=False)
  assert torch.equal(mean, start)
  net.train()
  net(x, train=True)
  assert not torch.equal(mean, start)


def test_mutable_returns_updates_and_writes_buffers(net, x):
  out, updates = net(x, train=True, mutable=["intermediates", "batch_stats"])
  (hidden,) = updates["intermediates"]["hidden"]
  (gradient,) = torch.autograd.grad(hidden.sum(), net.params.Dense_0.bias)
  assert out.shape == (8, 4) and hidden.shape == (8, 32) and gradient.shape == (32,)
  mean = updates["batch_stats"]["BatchNorm_0"]["mean"]
  assert torch.equal(net.get_buffer("batch_stats.BatchNorm_0.mean"), mean)


def test_backward_uses_buffers_of_its_forward(net, x):
  """Buffers change between the two passes; backward must use the old ones."""

  def gradient(between):
    loss = net(x, train=False).sum()
    between()
    return torch.autograd.grad(loss, net.params.Dense_0.kernel)[0]

  expected = gradient(lambda: None)
  assert torch.equal(gradient(lambda: net(x, train=True)), expected)
  assert not torch.allclose(gradient(lambda: None), expected), "they did change"


class Counter(nn.Module):
  @nn.compact
  def __call__(self, x, by):
    total = self.variable("cache", "total", jnp.zeros, (), jnp.int32)
    self.sow("losses", "size", jnp.square(x).sum())
    if not self.is_initializing():
      total.value += by
    return x * total.value


def test_mutable_updates_a_cache_in_eval_mode(env, x):
  counter = FlaxNNModule(env, Counter(), (x, 0)).eval()
  assert list(counter.state_dict()) == ["cache.total"], "what is sown is not kept"
  out, updates = counter(x, 3, mutable=["cache", "losses"])
  assert torch.equal(out, 3 * x) and counter.get_buffer("cache.total") == 3
  assert updates["losses"]["size"][0] == x.square().sum()
  counter.train()
  assert torch.equal(jax_jit(lambda x: counter(x, 4))(x), 7 * x)
  assert counter.get_buffer("cache.total") == 7


# As a torch module -------------------------------------------------------------------


@pytest.mark.parametrize(
  "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_is_independent_and_draws_the_same(duplicate, mask, ones):
  mask(ones)
  torch.manual_seed(0)
  twin = duplicate(mask)
  first = mask(ones)
  with torch.no_grad():
    mask.params.scale.fill_(0.0)
  torch.manual_seed(0)
  assert torch.equal(twin(ones), first) and not mask(ones).any()


def test_operand_dtype_reaches_linen(mask, ones):
  half = copy.deepcopy(mask).to(torch.bfloat16)
  out = half(ones.to(torch.bfloat16))
  assert out.dtype == torch.bfloat16 and 0.7 < (out != 0).float().mean() < 0.8


def test_next_call_uses_a_loaded_state_dict(net, x):
  net.eval()
  before = net(x, train=False)
  state = {name: 2 * tensor for name, tensor in net.state_dict().items()}
  net.load_state_dict(state)
  assert not torch.allclose(net(x, train=False), before)


# Mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "sample, match",
  [
    ((), "missing a required argument: 'x'"),
    ((X, True, False, 1), "too many positional arguments"),
    (X, r"such as `\(x,\)`"),
  ],
)
def test_wrong_sample_arguments_raise_and_draw_nothing(sample, match, env):
  torch.manual_seed(0)
  with pytest.raises(TypeError, match=match):
    FlaxNNModule(env, Net(), sample)
  assert env.rng.state.count == 0


def test_module_that_is_not_linen_raises(env, x):
  nnx = pytest.importorskip("flax.nnx")
  with pytest.raises(TypeError, match=r"flax\.linen\.Module.*Linear.*nnx\.Rngs"):
    FlaxNNModule(env, nnx.Linear(3, 2, rngs=nnx.Rngs(jax.random.key(0))), (x,))


def test_variables_that_torch_cannot_hold_raise(env, x):
  class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
      return self.param("pair", lambda key: (jnp.ones(3), jnp.ones(3)))[0] * x

  with pytest.raises(TypeError, match=r"params\.pair is of type tuple"):
    FlaxNNModule(env, Pair(), (x,))

  class Dotted(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2, name="a.b")(x)

  with pytest.raises(ValueError, match=r"params\.a\.b has one"):
    FlaxNNModule(env, Dotted(), (x,))


@pytest.mark.parametrize(
  "call, error",
  [
    (lambda net, x: net(x, True, unknown=1), TypeError),
    (lambda net, x: net(x[:, :2], True), Exception),
    (lambda net, x: net(x.cpu(), True), MixedDeviceError),
    (lambda net, x: net(x, bytearray(2)), TypeError),
  ],
  ids=["keyword", "shape", "device", "unhashable"],
)
def test_failing_call_draws_nothing(call, error, net, x, env):
  with pytest.raises(error):
    call(net, x)
  assert env.rng.state.count == 0


def test_variable_missing_from_the_sample_raises(env, x):
  class Late(nn.Module):
    @nn.compact
    def __call__(self, x, late):
      self.variable("state", "early", jnp.zeros, ())
      if late:
        self.variable("state", "late", jnp.zeros, ())
      return x

  module = FlaxNNModule(env, Late(), (x, False))
  with pytest.raises(RuntimeError, match=r"state\.late"):
    module(x, True)


def test_raw_transformation_raises_for_draws_and_updates(mask, net, ones, x, env):
  with pytest.raises(TracedDrawError, match="dropout"):
    jax.jit(jax_view(mask))(ones.jax())
  frozen = jax.jit(jax_view(mask))
  one, two = (frozen(ones.jax(), rng=jax.random.key(seed)) for seed in (1, 2))
  assert not jnp.array_equal(one, two)
  with pytest.raises(MutationError):
    jax.jit(jax_view(lambda x: net(x, True)))(x.jax(), rng=jax.random.key(0))
  assert env.rng.state.count == 0


def test_missing_flax_raises_import_error(env, x, monkeypatch):
  monkeypatch.setitem(sys.modules, "flax", None)
  with pytest.raises(ImportError, match='pip install "flax>='):
    FlaxNNModule(env, Net(), (x,))
