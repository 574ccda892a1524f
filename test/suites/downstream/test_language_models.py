"""Programs with Hugging Face models: outputs and caches are pytrees of JAX.

Models are made from small configurations; nothing is downloaded.
"""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import torchax
from torchax import interop
from torchax.interop import JittableModule, jax_jit, jax_view, torch_view

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is optional")

from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

LENGTH, LAYERS = 12, 2
IDS = torch.tensor([[1, 7, 3, 5]])


def _config():
  return transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    attn_implementation="sdpa",
  )


@pytest.fixture(name="model", scope="module")
def _model():
  torch.manual_seed(0)
  return transformers.LlamaForCausalLM(_config()).eval().requires_grad_(False)


@pytest.fixture(name="expected", scope="module")
def _expected(model):
  """Return the logits of the CPU, and the tokens that it generates greedily."""
  with torch.no_grad():
    logits = model(IDS).logits
    return logits, model.generate(IDS, max_new_tokens=4, do_sample=False)[0].tolist()


@pytest.fixture(name="on_jax")
def _on_jax(model, expected):
  """Move the model to jax; the expected values are computed before."""
  copied = transformers.LlamaForCausalLM(_config()).eval().requires_grad_(False)
  copied.load_state_dict(model.state_dict())
  with torchax.default_env():
    yield copied.to("jax")


def _flatten_dynamic(cache):
  return [(layer.keys, layer.values) for layer in cache.layers], None


def _unflatten_dynamic(_, layers):
  cache = DynamicCache()
  for place, (keys, values) in enumerate(layers):
    if isinstance(keys, torch.Tensor):
      cache.update(keys, values, place)
    else:  # JAX's placeholders to inspect the structure
      cache.layers.append(_Held(keys, values))
  return cache


class _Held:
  def __init__(self, keys, values):
    self.keys, self.values = keys, values


def _flatten_output(output):
  return tuple(output.values()), tuple(output.keys())


def _unflatten_output(keys, values):
  return CausalLMOutputWithPast(**dict(zip(keys, values)))


@pytest.fixture(name="trees", scope="module", autouse=True)
def _trees():
  for cls, flatten, unflatten in (
    (CausalLMOutputWithPast, _flatten_output, _unflatten_output),
    (DynamicCache, _flatten_dynamic, _unflatten_dynamic),
  ):
    # Another test of this process has registered it.
    with contextlib.suppress(ValueError):
      jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def test_an_output_with_its_cache_leaves_a_compiled_module(on_jax, expected):
  compiled = JittableModule(
    on_jax, extra_jit_args={"static_argnames": ("use_cache", "return_dict")}
  )
  out = compiled(input_ids=IDS.to("jax"), use_cache=True, return_dict=True)
  assert isinstance(out, CausalLMOutputWithPast)
  assert len(out.past_key_values.layers) == LAYERS
  torch.testing.assert_close(out.logits.cpu(), expected[0], rtol=1e-4, atol=1e-5)


def test_weights_are_sharded_by_name_and_passed_to_jax_jit(on_jax, expected):
  mesh = Mesh(np.array(jax.devices()[:1]), ("axis",))
  rows = ("o_proj", "down_proj", "embed_tokens")

  def placed(name, tensor):
    axes = ("axis",) if any(part in name for part in rows) else (None, "axis")
    spec = PartitionSpec(*axes) if tensor.dim() == 2 else PartitionSpec()
    return jax.device_put(jax_view(tensor), NamedSharding(mesh, spec))

  state = dict(on_jax.named_parameters()) | dict(on_jax.named_buffers())
  weights = {name: placed(name, tensor) for name, tensor in state.items()}

  @jax.jit
  def run(weights, ids):
    with torchax.default_env():
      args, options = torch_view((ids,)), {"use_cache": False}
      out = torch.func.functional_call(on_jax, torch_view(weights), args, options)
      return jax_view(out.logits)

  found = torch_view(run(weights, jax_view(IDS.to("jax"))))
  torch.testing.assert_close(found.cpu(), expected[0], rtol=1e-4, atol=1e-5)


def test_a_model_becomes_a_function_of_jax(on_jax, expected):
  weights, function = torchax.extract_jax(on_jax)
  run = jax.jit(lambda weights, ids: function(weights, (ids,)).logits)
  found = run(weights, jnp.asarray(IDS.numpy()))
  np.testing.assert_allclose(found, expected[0].numpy(), 1e-4, 1e-5)
  lowered = run.lower(weights, jax.ShapeDtypeStruct(IDS.shape, jnp.int32))
  assert "dot_general" in lowered.as_text()


def _prefill(model, ids, cache):
  out = model(ids, past_key_values=cache, use_cache=True)
  return out.logits[:, -1].argmax(-1, keepdim=True)


def test_a_loop_decodes_with_a_growing_cache(on_jax, expected):
  cache, ids, tokens = DynamicCache(), IDS.to("jax"), IDS[0].tolist()
  for _ in range(4):
    ids = _prefill(on_jax, ids, cache)
    tokens.append(ids.item())
  assert tokens == expected[1]


def test_a_static_cache_is_an_operand_of_a_compiled_step(on_jax, expected):
  """One program decodes all tokens; the cache comes back from each call."""

  def step(weights, token, position, keys, values):
    cache = StaticCache(config=on_jax.config, max_cache_len=LENGTH)
    for layer, k, v in zip(cache.layers, keys, values):
      layer.lazy_initialization(k, v)
      layer.keys, layer.values = k, v
      if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = position[0]
    out = torch.func.functional_call(
      on_jax,
      weights,
      (token,),
      dict(past_key_values=cache, position_ids=position[None], use_cache=True),
      tie_weights=False,
    )
    keys = [layer.keys for layer in cache.layers]
    values = [layer.values for layer in cache.layers]
    return out.logits[:, -1].argmax(-1, keepdim=True), keys, values

  jitted = jax_jit(step, kwargs_for_jax_jit={"donate_argnums": (3, 4)})
  shape = (1, 2, LENGTH, 4)
  keys = [torch.zeros(shape, device="jax") for _ in range(LAYERS)]
  values = [torch.zeros(shape, device="jax") for _ in range(LAYERS)]
  weights, tokens = dict(on_jax.state_dict()), IDS[0].tolist()
  for place in range(IDS.shape[1] + 3):
    token = torch.tensor([[tokens[place]]]).to("jax")
    position = torch.tensor([place]).to("jax")
    found, keys, values = jitted(weights, token, position, keys, values)
    if place + 1 >= IDS.shape[1]:
      tokens.append(found.item())
  assert tokens == expected[1]


def test_generate_runs_with_the_cache_of_the_library(on_jax, expected):
  for kind in ("dynamic", "static"):
    found = on_jax.generate(
      IDS.to("jax"), max_new_tokens=4, do_sample=False, cache_implementation=kind
    )
    assert found[0].tolist() == expected[1]


def test_a_model_is_trained_through_its_own_loss(model):
  with torchax.default_env():
    trained = transformers.LlamaForCausalLM(_config())
    trained.load_state_dict(model.state_dict())
    expected = trained(IDS, labels=IDS).loss
    expected.backward()
    norm = trained.lm_head.weight.grad.norm().item()
    weights = dict(trained.to("jax").named_parameters())

    def loss(weights, ids):
      out = torch.func.functional_call(trained, weights, (ids,), {"labels": ids})
      return out.loss

    value, gradients = interop.jax_value_and_grad(loss)(weights, IDS.to("jax"))
  assert value.item() == pytest.approx(expected.item(), rel=1e-4)
  assert gradients["lm_head.weight"].norm().item() == pytest.approx(norm, rel=1e-3)
