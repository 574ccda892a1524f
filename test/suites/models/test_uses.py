"""Uses of the library's models other than training steps."""

import copy
import functools

import pytest
import torch
import transformers
from compare import assert_close, assert_same
from models import huggingface
from models.ways import WAYS, run_on_cpu
from models.zoo import LOOP_OVER_EXPERTS, MODELS
from transformers.integrations.executorch import register_dynamic_cache_export_support

import torchax
from torchax.errors import TracedStateError
from torchax.integrations import flex_attention as integration
from torchax.interop import JittableModule

NEW_WORDS = 4


def _llama(dropout: float = 0.0):
  """Return a model on the CPU and the same model on jax."""
  model = MODELS["Llama"].model(dropout).eval()
  return model, copy.deepcopy(model).to("jax")


def _generate(model, device: str, **options) -> torch.Tensor:
  words = huggingface.words().to(device)
  mask = torch.ones_like(words)
  options = {"max_new_tokens": NEW_WORDS, "pad_token_id": 0, **options}
  return model.generate(words, attention_mask=mask, **options)


@pytest.mark.parametrize("use_cache", [False, True])
def test_greedy_decoding_equals_the_cpu(use_cache):
  cpu, model = _llama()
  expected = _generate(cpu, "cpu", do_sample=False, use_cache=use_cache)
  with torchax.default_env():
    actual = _generate(model, "jax", do_sample=False, use_cache=use_cache)
  assert_same(actual, expected)


def test_sampled_tokens_depend_on_the_seed_only():
  _, model = _llama()
  drawn = []
  with torchax.default_env():
    for seed in (1, 1, 2):
      torch.manual_seed(seed)
      drawn.append(_generate(model, "jax", do_sample=True, use_cache=True).cpu())
  first, again, other = drawn
  assert torch.equal(first, again)
  assert not torch.equal(first, other)


def test_compiled_model_returns_a_cache_and_accepts_it():
  register_dynamic_cache_export_support()  # registers caches as pytrees of torch
  cpu, model = _llama()
  words = huggingface.words()

  def two_calls(call, words):
    first = call(words, use_cache=True)
    cache = first.past_key_values
    second = call(words[:, :1], past_key_values=cache, use_cache=True)
    return second.logits, second.past_key_values.get_seq_length()

  with torch.no_grad():
    expected, length = two_calls(cpu, words)
    with torchax.default_env():
      flags = {"static_argnames": ("use_cache",)}
      actual, actual_length = two_calls(JittableModule(model, flags), words.to("jax"))
  assert_close(actual.cpu(), expected)
  assert actual_length == length


def _checkpointed_gradients() -> list[list[torch.Tensor]]:
  _, model = _llama(dropout=0.3)
  model.train()
  found = []
  with torchax.default_env():
    inputs = {name: x.to("jax") for name, x in huggingface.text().items()}
    for checkpoints in (False, True):
      if checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
      torch.manual_seed(1)
      found.append(_backward(model, inputs))
  return found


def _backward(model, inputs) -> list[torch.Tensor]:
  loss = model(**inputs).loss
  return list(torch.autograd.grad(loss, list(model.parameters())))


def test_checkpointing_redraws_the_same_masks():
  plain, recomputed = _checkpointed_gradients()
  for have, want in zip(recomputed, plain, strict=True):
    assert_close(have.cpu(), want.cpu())


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_over_experts_runs_where_there_are_numbers(way):
  """The loop looks up the words of an expert; their number is a shape.

  torch.compile breaks its graphs there.
  """
  row = LOOP_OVER_EXPERTS
  model, inputs = row.model(dropout=0.0).eval(), row.inputs()
  if way in ("eager", "compile"):
    (expected,) = run_on_cpu(model, inputs, None)
    (actual,) = WAYS[way](model, inputs, None)
    assert_close(actual.results["logits"], expected.results["logits"])
  else:
    with pytest.raises(TracedStateError, match="nonzero: the shape of the result"):
      WAYS[way](model, inputs, None)


@pytest.fixture
def flex_attention_on_jax(monkeypatch):
  """Let transformers run `flex_attention` on jax, during a test."""
  flex, masks = transformers.integrations.flex_attention, transformers.masking_utils
  monkeypatch.setattr(
    *(flex, "compile_friendly_flex_attention", flex.compile_friendly_flex_attention)
  )
  for module in (flex, masks):
    monkeypatch.setattr(module, "create_block_mask", module.create_block_mask)
  integration.use_jax()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", ("eager", "jit", "compile"))
@pytest.mark.parametrize("family", (huggingface.llama, huggingface.mistral))
def test_flex_attention_equals_sdpa(flex_attention_on_jax, family, way):
  """The first words of one sentence are padding.

  Not in `jax_jit`: transformers branches there on the values of the mask.
  """
  torch.manual_seed(0)
  cpu = family("sdpa", 0.0).eval()
  model = family("flex_attention", 0.0).eval()
  model.load_state_dict(cpu.state_dict())
  words = huggingface.words()
  inputs, mask = {"input_ids": words, "labels": words}, torch.ones_like(words)
  if way != "jit":
    mask[1, :3] = 0
    inputs["attention_mask"] = mask
  expected = cpu(**inputs)
  gradients = torch.autograd.grad(expected.loss, list(cpu.parameters()))
  model = model.to("jax")
  call = {
    "eager": lambda model: model,
    "jit": JittableModule,
    "compile": functools.partial(torch.compile, backend="jax"),
  }[way](model)
  with torchax.default_env():
    found = call(**{name: tensor.to("jax") for name, tensor in inputs.items()})
  seen = mask.bool()
  assert_close(found.logits.cpu()[seen], expected.logits[seen])
  for have, want in zip(
    torch.autograd.grad(found.loss, list(model.parameters())), gradients, strict=True
  ):
    assert_close(have.cpu(), want)
