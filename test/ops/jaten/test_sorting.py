"""Sorting, top-k, searching, distinct elements."""

import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

TIES = ints(3, 6, high=4)
NANS = torch.tensor([[2.0, float("nan"), 1.0, 3.0], [0.5, 1.5, float("nan"), -1.0]])
TINY = torch.tensor([1e-40, 0.0, -1e-40, -0.0, 1e-38, -0.0, 0.0])
EDGES = torch.tensor([3, -(2**31), 2**31 - 1, -1], dtype=torch.int32)
SORTED = floats(7).sort().values
SORTED_ROWS = floats(2, 3, 7).sort().values
QUERIES = torch.cat([floats(2, 3, 3, seed=1), SORTED_ROWS[..., 2:3]], -1)
COUNT = "the number of distinct elements depends on the data"

SORTS = (
  Case(torch.sort, floats(3, 6), grad=True),
  Case(torch.sort, TIES, stable=True),
  Case(torch.sort, TIES, dim=0, descending=True, stable=True, name="descending"),
  Case(torch.sort, NANS),
  Case(torch.sort, NANS, -1, True, name="sort-descending-nan"),
  Case(torch.sort, TINY, stable=True, name="sort-subnormal-and-zeros"),
  Case(torch.sort, TINY, stable=True, descending=True, name="descending-subnormal"),
  Case(torch.sort, EDGES),
  Case(torch.sort, EDGES, descending=True, name="sort-descending-edges"),
  Case(torch.sort, floats(3, 6, dtype=torch.bfloat16), dim=0, stable=True),
  Case(torch.sort, TIES.to(torch.int8), stable=True, descending=True, name="int8"),
  Case(torch.sort, TIES > 1, stable=True),
  Case(torch.sort, torch.tensor(2.0)),
  Case(torch.argsort, floats(3, 6), 0, True),
  Case(torch.msort, floats(3, 6), grad=True),
)
TOPS = (
  Case(torch.topk, floats(3, 6), 2, grad=True),
  Case(torch.topk, floats(3, 6), 2, 0, False, name="topk-smallest"),
  Case(torch.topk, NANS, 2),
  Case(torch.topk, NANS, 4, -1, False, name="topk-smallest-nan"),
  Case(torch.topk, EDGES, 2),
  Case(torch.topk, EDGES, 2, -1, False, name="topk-smallest-edges"),
  Case(torch.topk, floats(8, dtype=torch.bfloat16), 3),
)
SEARCHES = (
  Case(torch.searchsorted, SORTED, QUERIES),
  Case(torch.searchsorted, SORTED, 0.3),
  Case(torch.searchsorted, SORTED_ROWS, QUERIES),
  Case(torch.searchsorted, SORTED_ROWS, QUERIES, right=True, out_int32=True),
  Case(torch.searchsorted, SORTED_ROWS, QUERIES, side="right"),
  Case(torch.searchsorted, SORTED[:0], QUERIES),
  Case(torch.searchsorted, SORTED_ROWS, QUERIES[..., :0]),
  Case(torch.bucketize, QUERIES, SORTED[:0]),
  Case(torch.bucketize, QUERIES, SORTED),
  Case(torch.bucketize, SORTED, SORTED, right=True),
)
DISTINCT = (
  Case(torch.unique, TIES, jit=False, why=COUNT),
  Case(torch.unique, TIES, True, True, True, jit=False, why=COUNT),
  Case(torch.unique, NANS, True, True, True, jit=False, why=COUNT),
  Case(torch.unique, TIES.bfloat16(), jit=False, why=COUNT),
  Case(torch.unique, TIES % 2, True, True, True, 1, jit=False, why=COUNT),
  Case(torch.unique_consecutive, TIES, True, True, jit=False, why=COUNT),
  Case(torch.unique_consecutive, TIES // 3, True, True, 1, jit=False, why=COUNT),
)


@pytest.mark.parametrize("case", (*SORTS, *TOPS, *SEARCHES, *DISTINCT), ids=str)
def test_sorting(case):
  check(case)


def test_unique_raises_inside_a_trace():
  with torchax.default_env(), pytest.raises(TracedStateError, match="distinct"):
    jax_jit(torch.unique)(torch.ones(3, device="jax"))


def test_topk_raises_for_k_above_the_size():
  with torchax.default_env(), pytest.raises(RuntimeError):
    torch.topk(torch.ones(3, device="jax"), 4)
