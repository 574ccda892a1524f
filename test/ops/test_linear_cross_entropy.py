"""Cross entropies of linear layers by chunks of rows."""

import jax
import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

LinearCrossEntropyOptions = pytest.importorskip(
  "torch.nn.modules.linear_cross_entropy_options",
  reason="torch has linear_cross_entropy since 2.13",
).LinearCrossEntropyOptions
ROWS, MATRIX, BIAS = floats(7, 4), floats(5, 4, seed=1), floats(5, seed=2)
TARGET = ints(7, high=5)
IGNORED = torch.where(TARGET == 2, -100, TARGET)
WEIGHT = floats(5, low=0.1, seed=3)


def chunked(rows, matrix, bias=None, target=TARGET, weight=None, reduction="mean"):
  """The weight of the classes is no input, as it has no gradient."""
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
) + (Case(chunked, ROWS, MATRIX, grad=True),)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_what_cpu_torch_gives(case):
  """torch goes by chunks where targets are int64."""
  with jax.enable_x64(True):
    check(case)
