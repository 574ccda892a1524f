"""Rounding of quantization-aware training against CPU torch."""

import pytest
import torch
from compare import assert_same
from ops.harness import Case, check, floats

from torchax.interop import jax_value_and_grad

X = floats(4, 6, low=-3.0, high=3.0)
X[1, 1] = 100
SCALES = floats(6, low=0.01, high=0.1, seed=1)
ZEROS = torch.tensor([-3, 0, 2, 4, -1, 0], dtype=torch.int32)
per_tensor = torch.fake_quantize_per_tensor_affine
per_channel = torch.fake_quantize_per_channel_affine


def by_tensors(x):
  return per_tensor(x, SCALES[:1].to(x.device), ZEROS[:1].to(x.device), -8, 7)


def by_columns(x):
  return per_channel(x, SCALES.to(x.device), ZEROS.to(x.device), 1, -8, 7)


def by_rows_from_float_zeros(x):
  zeros = ZEROS[:4].to(x.device).float() + 0.5
  return per_channel(x, SCALES[:4].to(x.device), zeros, 0, 0, 15)


CASES = (
  Case(per_tensor, X, 0.05, 3, -128, 127, grad=True),
  Case(per_tensor, X.bfloat16(), 0.05, 0, 0, 255, grad=True),
  Case(by_tensors, X, grad=True),
  Case(by_columns, X, grad=True),
  Case(by_rows_from_float_zeros, X.half(), grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounding(case):
  check(case)


def test_jax_uses_the_gradient_of_the_identity():
  leaf = X.clone().requires_grad_()
  per_tensor(leaf, 0.05, 3, -128, 127).sum().backward()
  rounded = jax_value_and_grad(lambda x: per_tensor(x, 0.05, 3, -128, 127).sum())
  assert_same(rounded(X.to("jax"))[1], leaf.grad)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("limits", [(-128, 127), (0, 255)], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_rounding_to_the_moving_average_of_the_range(is_symmetric, limits, per_row):
  found = []
  for device in ("cpu", "jax"):
    ends = torch.tensor([float("inf"), -float("inf")], device=device)
    low, high = ends[: not per_row].clone(), ends[1 : 1 + (not per_row)].clone()
    scale = torch.ones(1, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    results, off = [], torch.zeros(1, dtype=torch.int64, device=device)
    for observes, rounds in ((1, 1), (0, 1), (1, 1), (1, 0)):
      x = X.to(device) * (1 + len(results))
      x = x.requires_grad_()
      flags = off + observes, off + rounds
      rest = 0.1, *limits, 0, per_row, is_symmetric
      rounded = torch.fused_moving_avg_obs_fake_quant(
        x, *flags, low, high, scale, zero, *rest
      )
      rounded.sum().backward()
      results += [rounded.detach(), x.grad]
    found.append([*results, low, high, scale, zero])
  assert_same(found[1], found[0])


def test_a_model_prepared_for_quantization_trains():
  layers = torch.nn.Linear(6, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
  model = torch.nn.Sequential(*layers)
  model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
  torch.ao.quantization.prepare_qat(model.train(), inplace=True)
  model.to("jax")
  with torch.no_grad():
    model(X.to("jax"))
  model(X.to("jax")).sum().backward()
  assert all(p.grad is not None for p in model.parameters())
