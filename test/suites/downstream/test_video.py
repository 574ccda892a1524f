"""Pipelines of diffusion models: parts compiled one by one, weights sharded.

They resemble scripts that run video models on TPUs. Functions of JAX replace attention
and convolution, models of a pipeline are wrapped, and schedulers keep tensors in their
attributes.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import torchax
from torchax.interop import JittableModule, jax_jit, jax_view, shard_map, torch_view
from torchax.ops import ops_registry
from torchax.ops.jaten import op
from torchax.registry import operators

F = torch.nn.functional


@pytest.fixture(name="mesh")
def _mesh():
  return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))


@pytest.fixture(name="env")
def _env():
  """Return the default environment; restore its operators afterwards."""
  env = torchax.default_env()
  functions = (F.scaled_dot_product_attention, F.conv2d)
  before = {function: env._ops[function] for function in functions}
  yield env
  for function, operator in before.items():
    env._ops[function] = operator


class Block(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.to_q = torch.nn.Linear(8, 8)
    self.to_out = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Dropout(0.0)])
    self.norm = torch.nn.LayerNorm(8, elementwise_affine=False)

  def forward(self, x):
    q = self.to_q(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.0, is_causal=False)
    return x + self.to_out[0](out.transpose(1, 2).flatten(2))


@dataclasses.dataclass
class Output:
  sample: torch.Tensor


class Transformer(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.config = {"in_channels": 8}
    self.blocks = torch.nn.ModuleList([Block(), Block()])
    self.register_buffer("freqs", torch.linspace(0, 1, 8), persistent=False)

  @property
  def dtype(self):
    return next(self.parameters()).dtype

  def forward(self, hidden_states, timestep=None, return_dict=True):
    x = hidden_states + (timestep[:, None, None] * self.freqs).cos()
    for block in self.blocks:
      x = block(x)
    return Output(x) if return_dict else (x,)


class Decoder(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.conv = torch.nn.Conv2d(4, 3, 3, padding=1)

  def decode(self, latents, scale=1.0):
    return F.interpolate(self.conv(latents), scale_factor=2.0, mode="nearest") * scale

  def forward(self, latents):
    raise AssertionError("the pipeline decodes")


X, T = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)), torch.ones(2)


@pytest.fixture(name="transformer")
def _transformer():
  torch.manual_seed(0)
  return Transformer().eval()


SHARDINGS = {
  r"blocks.*.to_q.weight": ("tp", None),
  r"blocks.*.to_q.bias": ("tp",),
  r"blocks.*.to_out.*.weight": (None, "tp"),
}


def _shard(weights, mesh):
  found = {}
  for name, weight in weights.items():
    spec = next((s for k, s in SHARDINGS.items() if re.fullmatch(k, name)), ())
    found[name] = weight.apply_jax(
      jax.device_put, NamedSharding(mesh, PartitionSpec(*spec))
    )
  return found


def test_a_wrapped_model_replaces_the_one_of_the_pipeline(transformer, mesh, env):
  expected = transformer(X, T, return_dict=False)[0].detach()
  with env, mesh:
    model = torchax.compile(
      transformer.to("jax"),
      torchax.CompileOptions(jax_jit_kwargs={"static_argnames": ("return_dict",)}),
    )
    model.params = _shard(model.params, mesh)
    model.buffers = _shard(model.buffers, mesh)
    with torch.no_grad():
      out = model(X.to("jax"), timestep=T.to("jax"), return_dict=False)[0]
  assert_same(out, expected)
  assert model.config == {"in_channels": 8} and model.dtype == torch.float32
  spec = jax_view(model.params["blocks.0.to_q.weight"]).sharding.spec
  assert spec == PartitionSpec("tp", None)


def test_an_output_class_is_registered_as_a_tree(transformer, env):
  jax.tree_util.register_dataclass(Output, ["sample"], [])
  model = JittableModule(
    transformer.to("jax"), extra_jit_args={"static_argnames": ("return_dict",)}
  )
  out = model(X.to("jax"), timestep=T.to("jax"), return_dict=True)
  assert isinstance(out, Output)
  assert_same(out.sample.detach(), transformer.cpu()(X, T).sample.detach())


def _flash(q, k, v, *, scale, mesh):
  """Attention on shards of the heads."""

  def on_shard(q, k, v):
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * scale
    return jax.nn.softmax(scores) @ v

  spec = PartitionSpec("dp", "tp", None, None)
  sharded = shard_map(on_shard, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
  return jax.lax.with_sharding_constraint(
    sharded(q, k, v), NamedSharding(mesh, PartitionSpec("dp", None, "tp"))
  )


@pytest.mark.parametrize(
  ("how", "is_compiled"),
  [("override", False), ("override", True), ("table", False), ("update", True)],
)
def test_attention_on_shards_replaces_torchs(transformer, mesh, env, how, is_compiled):
  expected = transformer(X, T, return_dict=False)[0].detach()
  calls = []

  def attention(query, key, value, *args, env=None, scale=None, **kwargs):
    calls.append(kwargs)
    q, k, v = env.t2j_iso((query, key, value))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return env.j2t_iso(_flash(q, k, v, scale=scale, mesh=mesh))

  function = F.scaled_dot_product_attention
  if how == "override":
    env.override_op_definition(function, functools.partial(attention, env=env))
  else:
    operator = ops_registry.Operator(
      function,
      functools.partial(attention, env=env),
      is_jax_function=False,
      is_user_defined=True,
      needs_env=False,
      is_view_op=False,
    )
    if how == "table":
      env._ops[function] = operator
    else:
      env._ops.update({function: operator})
  with env, mesh, torch.no_grad():
    model = transformer.to("jax")
    run = jax_jit(lambda x, t: model(x, t, return_dict=False)) if is_compiled else model
    out = (
      run(X.to("jax"), T.to("jax"))
      if is_compiled
      else run(X.to("jax"), T.to("jax"), return_dict=False)
    )
  assert_same(out[0], expected)
  assert len(calls) == 2 and calls[0]["is_causal"] is False


def test_a_convolution_of_ones_own_is_used_for_the_decoder(env):
  decoder = Decoder()
  latents = torch.randn(1, 4, 6, 6)
  expected = decoder.decode(latents, scale=2.0).detach()
  seen = []

  def conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, env
  ):
    seen.append(padding)
    x, w, b = env.t2j_iso((input, weight, bias))
    pad = [(p, p) for p in padding]
    out = jax.lax.conv_general_dilated(
      x, w, stride, pad, rhs_dilation=dilation, feature_group_count=groups
    )
    return env.j2t_iso(out if b is None else out + b[:, None, None])

  env.override_op_definition(F.conv2d, functools.partial(conv2d, env=env))
  with env, torch.no_grad():
    options = torchax.CompileOptions(
      methods_to_compile=["decode"], jax_jit_kwargs={"static_argnames": ("scale",)}
    )
    compiled = torchax.compile(decoder.to("jax"), options)
    out = compiled.decode(latents.to("jax"), scale=2.0)
  assert_same(out, expected)
  assert seen == [(1, 1)]


class Scheduler:
  def __init__(self):
    self.sigmas = torch.linspace(1.0, 0.0, 4)
    self.timesteps = (self.sigmas[:-1] * 1000).long()
    self.step_index = 0

  def step(self, noise, sample):
    sigma, after = self.sigmas[self.step_index], self.sigmas[self.step_index + 1]
    self.step_index += 1
    return (sample.float() + (after - sigma) * noise).to(noise.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scheduler_is_moved_by_its_attributes(transformer, env, dtype):
  def denoise(model, device):
    scheduler = Scheduler()
    for name, value in scheduler.__dict__.items():
      if isinstance(value, torch.Tensor):
        setattr(scheduler, name, value.to(device))
    latents = X.to(device, dtype=dtype)
    for t in scheduler.timesteps:
      guided = torch.cat([latents] * 2)
      noise = model(guided, (t / 1000).expand(4).to(dtype), return_dict=False)[0]
      uncond, cond = noise.chunk(2)
      latents = scheduler.step(uncond + 1.0 * (cond - uncond), latents)
    return latents

  transformer = transformer.to(dtype)
  with torch.no_grad():
    expected = denoise(transformer, "cpu")
    with env:
      found = denoise(transformer.to("jax"), "jax")
  assert found.dtype == dtype and found.device.type == "jax"
  tolerance = 1e-4 if dtype == torch.float32 else 0.1
  torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_noise_comes_from_a_generator_of_the_cpu(env):
  generator = torch.Generator().manual_seed(42)
  expected = torch.randn(2, 3, generator=torch.Generator().manual_seed(42))
  with env:
    latents = torch.randn(2, 3, generator=generator, device="cpu").to("jax")
  assert_same(latents, expected)


def test_weights_are_made_on_meta_and_assigned_on_jax(transformer):
  state = transformer.state_dict()
  with torch.device("meta"):
    model = Transformer()
  model.freqs = transformer.freqs.to("jax")
  on_jax = jax.tree.map(lambda t: t.to("jax"), dict(state))
  model.load_state_dict(on_jax, assign=True)
  assert {p.device.type for p in model.parameters()} == {"jax"}
  with torchax.default_env(), torch.no_grad():
    found = model.eval()(X.to("jax"), T.to("jax"), return_dict=False)[0]
    assert_same(found, transformer(X, T, return_dict=False)[0])


def test_the_default_dtype_is_that_of_the_weights(env):
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.bfloat16)
  try:
    with env:
      layer = torch.nn.Linear(2, 2).to("jax")
      made = torch.zeros(2, device="jax") + torch.arange(2, device="jax") / 2
      assert layer(made).dtype == made.dtype == torch.bfloat16
  finally:
    torch.set_default_dtype(before)


def test_an_operator_is_registered_for_all_environments():
  before = ops_registry.all_aten_ops[torch.ops.aten.softplus]

  @op(torch.ops.aten.softplus, is_user_defined=True)
  def softplus(x, beta=1, threshold=20):
    return jnp.logaddexp(x * beta, 0) / beta + 1

  try:
    assert_same(F.softplus(X.to("jax"), 2), F.softplus(X, 2) + 1)
    assert ops_registry.all_aten_ops[torch.ops.aten.softplus].replaced is before
  finally:
    ops_registry.all_aten_ops[torch.ops.aten.softplus] = before
    operators._generation += 1


def test_results_are_waited_for_and_leave_as_numpy(transformer, env):
  with env, torch.no_grad():
    out = transformer.to("jax")(X.to("jax"), T.to("jax"), return_dict=False)[0]
    jax.block_until_ready(jax_view(out))
    pixels = (out / 2 + 0.5).clamp(0, 1).float().cpu().numpy()
  assert pixels.shape == X.shape and torch_view(jnp.asarray(pixels)).shape == X.shape
