"""`nn.TransformerEncoder` with padded sequences, beside CPU torch's nested tensors."""

import contextlib
import copy

import pytest
import torch
from ops.harness import floats
from torch import nn

from torchax.interop import jax_jit

SEQUENCES, LENGTH, WIDTH = 3, 5, 4
X = floats(SEQUENCES, LENGTH, WIDTH)
AT_THE_END = torch.arange(LENGTH) >= torch.tensor([[5], [3], [1]])
PADDINGS = {
  "at the end": AT_THE_END,
  "at the start": AT_THE_END.flip(1),
  "no full sequence": AT_THE_END | (torch.arange(LENGTH) > 2),
  "a whole sequence": torch.arange(LENGTH) >= torch.tensor([[5], [3], [0]]),
  "added": torch.zeros(AT_THE_END.shape).masked_fill(AT_THE_END, -torch.inf),
}
MASKS = {"mask": torch.arange(LENGTH).expand(LENGTH, -1) == LENGTH - 1}
pytestmark = pytest.mark.filterwarnings(
  "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"
)


def _encoder(heads=2, norm=None, **options):
  torch.manual_seed(0)
  layer = nn.TransformerEncoderLayer(WIDTH, heads, 8, batch_first=True)
  return nn.TransformerEncoder(layer, 2, norm, **options).eval()


def _check(encoder, padding, compiles, **masks):
  on_jax = copy.deepcopy(encoder).to("jax")
  run = jax_jit(lambda *args, **kwargs: on_jax(*args, **kwargs)) if compiles else on_jax
  expected = encoder(X, src_key_padding_mask=padding, **masks)
  masks = {name: mask.to("jax") for name, mask in masks.items()}
  actual = run(X.to("jax"), src_key_padding_mask=padding.to("jax"), **masks)
  torch.testing.assert_close(actual.cpu(), expected)
  return expected


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("row", PADDINGS)
def test_encoder_in_eval_mode_pads_with_zeros_like_torch(row, compiles):
  with torch.no_grad():
    _check(_encoder(norm=nn.LayerNorm(WIDTH, bias=False)), PADDINGS[row], compiles)


# Calls with padding at the end: options, gradient mode, other masks, zeros expected.
CALLS = {
  "nested": ({}, torch.inference_mode, {}, True),
  "with gradients": ({}, contextlib.nullcontext, {}, False),
  "two masks": ({}, torch.no_grad, MASKS, False),
  "unchecked mask": ({"mask_check": False}, torch.no_grad, {}, True),
  "not enabled": ({"enable_nested_tensor": False}, torch.no_grad, {}, False),
  "odd heads": ({"heads": 1}, torch.no_grad, {}, False),
}


@pytest.mark.parametrize("row", CALLS)
def test_encoder_pads_with_zeros_only_where_torch_does(row):
  options, mode, masks, has_zeros = CALLS[row]
  with mode():
    expected = _check(_encoder(**options), AT_THE_END, compiles=False, **masks)
  assert bool((expected[AT_THE_END] == 0).all()) == has_zeros


def test_encoder_on_the_cpu_can_be_scripted():
  encoder = _encoder()
  with torch.no_grad():
    expected = encoder(X, src_key_padding_mask=AT_THE_END)
    scripted = torch.jit.script(encoder)(X, None, AT_THE_END)
  assert torch.equal(scripted, expected)
