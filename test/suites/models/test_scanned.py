"""Models of `transformers` whose layers `scan_layers` finds without changes."""

import copy

import pytest
import torch
from models import huggingface

import torchax
from torchax.stacks import LayerStack, scan_layers

MODELS = {
  "gpt2": (huggingface.gpt2, "transformer.h.0"),
  "llama": (huggingface.llama, "model.layers.0"),
  "bert": (huggingface.bert, "bert.encoder.layer.0"),
  "vit": (huggingface.vit, "vit.layers.0"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_scanned(name):
  make, place = MODELS[name]
  config = make("sdpa", 0.1).config
  depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
  setattr(config, depth, 3)
  with torchax.default_env():
    torch.manual_seed(0)
    model = type(make("sdpa", 0.1))(config).train().to("jax")
    given = huggingface.images() if name == "vit" else huggingface.text()
    given = {key: value.to("jax") for key, value in given.items()}
    if name in ("gpt2", "llama"):
      given["use_cache"] = False
    scanned = scan_layers(copy.deepcopy(model), **given)
    assert isinstance(scanned.get_submodule(place), LayerStack)
    losses = []
    for each in (model, scanned):
      torch.manual_seed(1)
      losses.append(each(**given).loss)
    torch.testing.assert_close(losses[0], losses[1])
