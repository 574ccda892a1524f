"""Serving programs: weights placed once, one compiled step, caches of arrays.

They resemble vLLM's package for TPUs. A torch model is called functionally inside of
`jax.jit`, with layers that call JAX for their matrix products and attention.
"""

import contextlib
import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_close, assert_same
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import torchax
from torchax.interop import call_jax, jax_view, shard_map, torch_view
from torchax.ops.mappings import j2t_dtype, t2j, t2j_dtype

F = torch.nn.functional


@pytest.fixture(name="mesh")
def _mesh():
  return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def _placed(tensor, mesh, *spec):
  """Return a CPU tensor as a jax tensor with a sharding."""
  array = t2j(tensor.detach(), use_dlpack=False)
  return torch_view(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))))


class Context:
  """Context of a step for layers: the caches, which they replace while it is traced."""

  current = None

  def __init__(self, caches):
    self.caches = caches

  @classmethod
  @contextlib.contextmanager
  def of(cls, caches):
    cls.current, before = cls(caches), cls.current
    try:
      yield cls.current
    finally:
      cls.current = before


@functools.partial(jax.jit, static_argnames="scale")
def _paged(q, k, v, cache, at, *, scale):
  """Write keys and values at their slots, and attend to all of the cache."""
  cache = cache.at[0, at].set(k).at[1, at].set(v)
  scores = jnp.einsum("td,sd->ts", q, cache[0]) * scale
  scores = jnp.where(jnp.arange(cache.shape[1]) <= at[:, None], scores, -jnp.inf)
  return cache, jax.nn.softmax(scores) @ cache[1]


class Attention(torch.nn.Module):
  def __init__(self, place):
    super().__init__()
    self.place = place

  def forward(self, q, k, v, at):
    caches = Context.current.caches
    q, k, v, at = jax_view((q, k, v, at))
    caches[self.place], out = _paged(q, k, v, caches[self.place], at, scale=0.5)
    return torch_view(out)


class Layer(torch.nn.Module):
  def __init__(self, place):
    super().__init__()
    self.qkv = torch.nn.Linear(4, 12, bias=False)
    self.attention = Attention(place)
    self.register_buffer("scale", torch.tensor(2.0), persistent=False)

  def forward(self, x, at):
    return x + self.attention(*self.qkv(x).chunk(3, -1), at) * self.scale


class Model(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.embed = torch.nn.Embedding(8, 4)
    self.layers = torch.nn.ModuleList(Layer(place) for place in range(2))
    self.head = torch.nn.Linear(4, 8, bias=False)
    self.head.weight = self.embed.weight

  def forward(self, input_ids, at):
    x = self.embed(input_ids)
    for layer in self.layers:
      x = layer(x, at)
    return x

  def compute_logits(self, hidden):
    return self.head(hidden)


@pytest.fixture(name="model")
def _model():
  torch.manual_seed(0)
  return Model().requires_grad_(False)


def _reference(model, ids):
  """Return the logits of the last token, computed for all tokens on the CPU."""
  x = model.embed(ids)
  for layer in model.layers:
    q, k, v = layer.qkv(x).chunk(3, -1)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
    x = x + out[0] * layer.scale
  return model.head(x)[-1]


def test_a_step_threads_caches_through_a_functional_call(model, mesh):
  """Weights and buffers are operands; caches are donated and returned."""
  ids = torch.tensor([1, 5, 2, 7])
  expected = _reference(model, ids)
  placed = {}
  for name, tensor in [
    *model.named_parameters(remove_duplicate=False),
    *model.named_buffers(),
  ]:
    owner, _, leaf = name.rpartition(".")
    if tensor not in placed:
      on_jax = _placed(tensor, mesh)
      is_parameter = isinstance(tensor, torch.nn.Parameter)
      placed[tensor] = torch.nn.Parameter(on_jax, False) if is_parameter else on_jax
    setattr(model.get_submodule(owner), leaf, placed[tensor])
  state = jax_view({**dict(model.named_parameters()), **dict(model.named_buffers())})

  @functools.partial(jax.jit, donate_argnames=("caches",))
  def step(state, caches, ids, at):
    with torchax.default_env(), Context.of(caches) as context:
      args = torch_view((ids, at))
      hidden = torch.func.functional_call(
        model, torch_view(state), args, tie_weights=False
      )
      return context.caches, jax_view(hidden)

  @jax.jit
  def logits(state, hidden):
    with torchax.default_env():
      run = functools.partial(torch.func.functional_call, _Logits(model))
      named = {f"model.{k}": v for k, v in torch_view(state).items()}
      return jax_view(run(named, (torch_view(hidden),)))

  caches = [jnp.zeros((2, 8, 4)) for _ in model.layers]
  caches, _ = step(state, caches, jnp.array([1, 5, 2]), jnp.arange(3))
  caches, hidden = step(state, caches, jnp.array([7]), jnp.array([3]))
  assert_same(torch_view(logits(state, hidden))[0], expected)


class _Logits(torch.nn.Module):
  def __init__(self, model):
    super().__init__()
    self.model = model

  def forward(self, hidden):
    return self.model.compute_logits(hidden)


def test_a_quantized_linear_goes_down_to_jax(mesh):
  weight, x = torch.randn(8, 4), torch.randn(3, 4)
  scale = weight.abs().amax(1) / 127
  quantized = (weight / scale[:, None]).round().to(torch.int8)

  class Int8Linear(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.weight = torch.nn.Parameter(_placed(quantized, mesh), requires_grad=False)
      self.scale = torch.nn.Parameter(_placed(scale, mesh), requires_grad=False)

    def forward(self, x):
      x, w, s = jax_view((x, self.weight, self.scale))
      out = jax.lax.dot_general(x, w.astype(x.dtype), (((1,), (1,)), ((), ())))
      return torch_view(out * s)

  with torchax.default_env():
    layer = Int8Linear()
    assert layer.weight.dtype == torch.int8
    found = jax.jit(jax_view(layer))(jax_view(x.to("jax")))
  assert_same(torch_view(found), x @ (quantized * scale[:, None]).T)


def test_a_fused_weight_is_split_into_a_list_of_parameters(mesh):
  fused = torch.randn(6, 4)
  layer = torch.nn.Linear(4, 6, bias=False)
  delattr(layer, "weight")
  parts = [torch_view(part) for part in jnp.split(t2j(fused), 3)]
  layer.weight = torch.nn.ParameterList(
    [torch.nn.Parameter(part, requires_grad=False) for part in parts]
  )
  x = torch.randn(2, 4)
  with torchax.default_env():
    out = torch.cat([F.linear(x.to("jax"), part) for part in layer.weight], -1)
  assert_same(out, x @ fused.T)
  assert [name for name, _ in layer.named_parameters()] == [
    f"weight.{place}" for place in range(3)
  ]


def test_experts_are_computed_in_a_shard_map(mesh):
  x, experts, gate = torch.randn(5, 4), torch.randn(2, 4, 4), torch.randn(5, 2)

  def fused(x, experts, gate):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(gate), 1)
    picked = jnp.einsum("td,tdf->tf", x, experts[chosen[:, 0]])
    return jax.lax.psum(picked * weights, "model")

  spec = PartitionSpec()
  sharded = shard_map(
    fused,
    mesh=mesh,
    in_specs=(spec, PartitionSpec(None, "model"), spec),
    out_specs=spec,
  )
  out = call_jax(sharded, *(t.to("jax") for t in (x, experts, gate)))
  weights, chosen = gate.softmax(-1).max(-1, True)
  assert_same(out, torch.einsum("td,tdf->tf", x, experts[chosen[:, 0]]) * weights)


def test_adapters_are_written_into_slices_of_a_stack():
  stack = torch.zeros(3, 1, 4, 8, device="jax")
  adapter = torch.randn(2, 8)
  stack[1].zero_()
  stack[1, 0, :2, :8].copy_(adapter, non_blocking=True)
  expected = torch.zeros(3, 1, 4, 8)
  expected[1, 0, :2] = adapter
  assert_same(stack, expected)


def test_a_tensor_of_a_dtype_that_numpy_lacks_is_moved():
  for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    tensor = torch.tensor([0.5, -2.0]).to(dtype)
    array = t2j(tensor, use_dlpack=False)
    assert array.dtype == t2j_dtype(dtype) and j2t_dtype(array.dtype) == dtype
    assert torch_view(array).dtype == dtype
    assert array.astype(jnp.float32).tolist() == [0.5, -2.0]


def test_a_model_on_jax_is_copied_with_its_own_weights(model):
  model = model.to("jax")
  copied = copy.deepcopy(model)
  copied.embed.weight.zero_()
  assert copied.head.weight is copied.embed.weight
  assert model.embed.weight.abs().sum() > 0


def test_sampling_is_compiled_with_its_parameters_as_operands():
  logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.1, 0.2]])

  @jax.jit
  def sample(key, logits, temperature, top_k):
    scaled = logits / jnp.maximum(temperature, 1e-5)[:, None]
    ranks = jnp.argsort(jnp.argsort(-scaled, -1), -1)
    scaled = jnp.where(ranks < top_k[:, None], scaled, -jnp.inf)
    return jax.random.categorical(key, scaled)

  env = torchax.default_env()
  tokens = torch_view(
    sample(
      env.get_and_rotate_prng_key(),
      jax_view(logits.to("jax")),
      jnp.array([0.0, 1.0]),
      jnp.array([3, 1]),
    )
  )
  assert tokens.tolist() == [1, 0]


def test_host_buffers_are_filled_and_moved_at_once():
  """Steps are prepared in numpy, moved as a tree and padded to a bucket."""
  ids, at = np.zeros(8, np.int32), np.zeros(8, np.int32)
  ids[:3], at[:3] = [3, 1, 2], [0, 1, 2]
  on_jax = torch_view(jax.device_put((ids, at)))
  assert [t.device.type for t in on_jax] == ["jax", "jax"]
  with torchax.default_env():
    table = torch.arange(16.0).reshape(8, 2).to("jax")
    picked = table[on_jax[0]][: int(at.max()) + 1]
    selected = torch.index_select(picked, 0, torch.tensor([2]).to("jax"))
  assert_close(selected.cpu(), torch.tensor([[4.0, 5.0]]))
