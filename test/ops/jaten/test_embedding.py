"""Embeddings and bags of embeddings against CPU torch."""

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

import torchax

TABLE = floats(7, 5)
WORDS = ints(2, 6, high=7)
STREAM = torch.tensor([1, 3, 3, 6, 0, 2, 1])
OFFSETS = torch.tensor([0, 2, 2, 7])


def bag(weight, indices, offsets=None, **kwargs):
  return F.embedding_bag(indices, weight, offsets, **kwargs)


def look_up(weight, indices, **kwargs):
  return F.embedding(indices, weight, **kwargs)


def renormalized(weight, indices, **kwargs):
  """Return the rows and the table, which the look-up renormalizes in place."""
  weight = weight.detach().clone()
  return F.embedding(indices, weight, **kwargs), weight


CASES = (
  Case(look_up, TABLE, WORDS, grad=True),
  Case(look_up, TABLE, WORDS.int(), grad=True),
  Case(look_up, TABLE, torch.tensor(3), grad=True),
  Case(look_up, TABLE, WORDS, padding_idx=3, grad=True),
  Case(look_up, TABLE, WORDS, scale_grad_by_freq=True, grad=True),
  Case(look_up, TABLE.bfloat16(), WORDS, grad=True),
  Case(renormalized, TABLE, WORDS[:, :3], max_norm=1.0),
  Case(renormalized, TABLE, WORDS[:, :3], max_norm=0.5, norm_type=1.0),
  Case(renormalized, TABLE, WORDS, max_norm=0.5, norm_type=float("inf")),
  *(
    Case(bag, TABLE, STREAM, OFFSETS, mode=mode, grad=True, **kwargs)
    for mode in ("sum", "mean", "max")
    for kwargs in ({}, {"padding_idx": 3}, {"include_last_offset": True})
  ),
  *(Case(bag, TABLE, WORDS, mode=mode, grad=True) for mode in ("sum", "mean", "max")),
  Case(
    bag,
    TABLE,
    STREAM,
    OFFSETS,
    mode="sum",
    per_sample_weights=floats(7, seed=2),
    grad=True,
  ),
  Case(
    bag,
    TABLE,
    STREAM,
    OFFSETS,
    mode="sum",
    per_sample_weights=floats(7, seed=2),
    padding_idx=1,
    grad=True,
  ),
  Case(bag, TABLE.half(), STREAM, OFFSETS, mode="mean", grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_embedding(case):
  check(case)


def test_bag_scales_gradients_by_frequency():
  """Not compared with the CPU: torch 2.13 reads the wrong row's count there."""
  plain = TABLE.clone().requires_grad_()
  bag(plain, STREAM, OFFSETS, mode="sum").square().sum().backward()
  counts = torch.bincount(STREAM, minlength=len(TABLE)).clamp(min=1)
  with torchax.default_env():
    scaled = TABLE.clone().to("jax").requires_grad_()
    stream, offsets = STREAM.to("jax"), OFFSETS.to("jax")
    output = bag(scaled, stream, offsets, mode="sum", scale_grad_by_freq=True)
    output.square().sum().backward()
    gradient = scaled.grad.cpu()
  torch.testing.assert_close(gradient, plain.grad / counts[:, None])
