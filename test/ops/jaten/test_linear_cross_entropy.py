"""Cross entropies of linear layers, computed by chunks of rows."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

from torchax.ops import mappings
from torchax.ops.jaten.linear_cross_entropy import (
  _linear_cross_entropy_batch_chunked,
  _linear_cross_entropy_batch_chunked_no_reduction,
)

LinearCrossEntropyOptions = pytest.importorskip(
  "torch.nn.modules.linear_cross_entropy_options",
  reason="torch has linear_cross_entropy since 2.13",
).LinearCrossEntropyOptions
ROWS, MATRIX, BIAS = floats(7, 4), floats(5, 4, seed=1), floats(5, seed=2)
TARGET = ints(7, high=5)
IGNORED = torch.where(TARGET == 2, -100, TARGET)
WEIGHT = floats(5, low=0.1, seed=3)
PROBABILITIES = floats(7, 5, low=0.0, seed=4)


def chunked(rows, matrix, bias=None, target=TARGET, weight=None, reduction="mean"):
  """Return a loss of the inputs; class weights are constants without a gradient."""
  return F.linear_cross_entropy(
    rows,
    matrix,
    target.to(rows.device),
    linear_bias=bias,
    weight=None if weight is None else weight.to(rows.device),
    reduction=reduction,
    options=LinearCrossEntropyOptions(batch_chunk_size=3),
  )


CASES = tuple(
  Case(
    lambda rows, matrix, bias, r=reduction, w=weight: chunked(
      rows, matrix, bias, IGNORED, w, r
    ),
    ROWS,
    MATRIX,
    BIAS,
    grad=True,
    name=f"{reduction}-{weight is not None}",
  )
  for reduction in ("mean", "sum", "none")
  for weight in (None, WEIGHT)
) + (
  Case(chunked, ROWS, MATRIX, grad=True),
  # Logits that float16 does not hold; their losses do not exceed it.
  Case(chunked, (ROWS * 300).half(), (MATRIX * 300).half(), name="large-float16"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_equals_cpu_torch(case):
  """torch computes by chunks if targets are int64."""
  with jax.enable_x64(True):
    check(case)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
@pytest.mark.parametrize("weight", (None, WEIGHT), ids=("plain", "weighted"))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_targets_may_be_probabilities(reduction, weight):
  """torch computes by chunks here since 2.15; earlier versions warn and do not."""
  check(
    Case(
      lambda rows, matrix, bias: chunked(
        rows, matrix, bias, PROBABILITIES, weight, reduction
      ),
      ROWS,
      MATRIX,
      BIAS,
      grad=True,
    )
  )


@pytest.mark.parametrize("weight", (None, WEIGHT), ids=("plain", "weighted"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_gradients_of_losses_of_probabilities(reduction, weight):
  """Calls the lowering, because torch 2.13 does not call it with probabilities."""
  leaves = [value.clone().requires_grad_() for value in (ROWS, MATRIX, BIAS)]
  logits = F.linear(*leaves)
  loss = F.cross_entropy(logits, PROBABILITIES, weight, reduction=reduction)
  expected = (loss, *torch.autograd.grad(loss, leaves))
  rows, matrix, bias, target = map(mappings.t2j, (ROWS, MATRIX, BIAS, PROBABILITIES))
  weight = None if weight is None else mappings.t2j(weight)
  actual = _linear_cross_entropy_batch_chunked(
    *(rows, matrix, target, bias, weight, reduction, -100, 0.0, 3),
    *("auto", torch.float32, True, True, True, True),
  )
  for have, want in zip(actual, expected, strict=True):
    torch.testing.assert_close(mappings.j2t(have), want.detach())
  rowwise = _linear_cross_entropy_batch_chunked_no_reduction(
    rows, matrix, target, bias, weight, -100, 3, "auto", torch.float32
  )
  divisor = len(ROWS) if reduction == "mean" else 1
  torch.testing.assert_close(
    mappings.j2t(rowwise.sum() / divisor), expected[0].detach()
  )


def test_mean_over_ignored_rows_is_nan():
  for target in (jnp.full(7, -100), jnp.zeros((0, 5))):
    rows = mappings.t2j(ROWS[: len(target)])
    loss, *_ = _linear_cross_entropy_batch_chunked(
      *(rows, mappings.t2j(MATRIX), target, None, None, "mean", -100, 0.0, 3),
      *("auto", torch.float32, True, True, True, False),
    )
    assert jnp.isnan(loss)
