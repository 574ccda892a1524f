"""Criterion for equality of a result on jax and the result of CPU torch.

Structure, shapes and dtypes are equal. Numbers agree within `torch.testing`'s tolerance
for their dtype. Otherwise both are compared with the same computation in double
precision. Ours must be within the tolerance of it, or, if rounding prevents that, no
further from it than CPU torch's.
"""

import dataclasses

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree

from torchax.tensor import Tensor

# Dtypes that JAX narrows without x64: the numbers are compared, the width is
# documented.
NARROWED = {
  torch.int64: torch.int32,
  torch.float64: torch.float32,
  torch.complex128: torch.complex64,
}
WIDE = {
  torch.bfloat16: torch.float64,
  torch.float16: torch.float64,
  torch.float32: torch.float64,
  torch.complex64: torch.complex128,
}
# Bound of our rounding error relative to CPU torch's, which sums in blocks.
ROUNDING = 4.0


def widened(tree):
  """Widen the tensors of a tree to double precision, and dtypes among the values."""

  def widen(value):
    if hasattr(value, "acc_dtype"):  # options of linear_cross_entropy
      return dataclasses.replace(value, acc_dtype=None)
    if isinstance(value, torch.dtype):
      return WIDE.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in WIDE:
      return value.detach().to(WIDE[value.dtype])
    return value

  return pytree.tree_map(widen, tree)


def assert_agree(actual, expected, exact=None, x64=False) -> None:
  """Assert that two trees agree.

  Args:
    actual: tree of jax tensors and values.
    expected: tree of CPU torch.
    exact: None, or a function that computes the tree in double precision; called
      only if numbers differ by more than their dtype's tolerance.
    x64: 64-bit dtypes are kept.

  Raises:
    AssertionError: they do not; the message says where and by how much.
  """
  actual_leaves = pytree.tree_leaves(actual)
  expected_leaves = pytree.tree_leaves(expected)
  assert len(actual_leaves) == len(expected_leaves), (
    f"{len(actual_leaves)} results instead of {len(expected_leaves)}"
  )
  for place, (have, want) in enumerate(zip(actual_leaves, expected_leaves)):
    if not isinstance(want, torch.Tensor):
      assert have == want or (have != have and want != want), f"{have} is not {want}"
      continue
    assert isinstance(have, Tensor), f"result {place} is not on jax: {type(have)}"
    have, want = have.detach().cpu(), plain(want, x64)
    try:
      torch.testing.assert_close(have, want, equal_nan=True)
    except AssertionError:
      if exact is None or have.shape != want.shape or have.dtype not in WIDE:
        raise
      assert have.dtype == want.dtype, f"{have.dtype} instead of {want.dtype}"
      truth = pytree.tree_leaves(exact())[place].detach().resolve_conj().resolve_neg()
      if not is_as_good(have, want, truth):
        raise


def is_as_good(have, want, truth) -> bool:
  """Return True if ours is within tolerance, or no further off than CPU torch's.

  Args:
    have: our result.
    want: CPU torch's result, of the same dtype.
    truth: the result in double precision.
  """
  return _is_exact(have, truth) or _is_rounding(have, want, truth)


def plain(tensor: torch.Tensor, x64: bool) -> torch.Tensor:
  """Return a CPU tensor without lazy conjugation, in the width that jax has."""
  tensor = tensor.detach().resolve_conj().resolve_neg()
  return tensor if x64 else tensor.to(NARROWED.get(tensor.dtype, tensor.dtype))


def _is_exact(have, truth) -> bool:
  """Return True within the tolerance of the computation in double precision."""
  try:
    torch.testing.assert_close(have, truth.to(have.dtype), equal_nan=True)
  except AssertionError:
    return False
  return True


def _is_rounding(have, want, truth) -> bool:
  """Return True if errors beyond it are, sorted by size, no larger than CPU torch's."""
  dtype = have.dtype
  truth = truth.to(WIDE[have.dtype])
  have, want = have.to(truth.dtype), want.to(truth.dtype)
  is_finite = have.isfinite()
  if not torch.equal(is_finite, want.isfinite()):
    return False
  if not torch.equal(have[~is_finite].nan_to_num(), want[~is_finite].nan_to_num()):
    return False
  have, want, truth = have[is_finite], want[is_finite], truth[is_finite]
  rtol, atol = default_tolerances(dtype)
  allowed = atol + rtol * truth.abs()
  ours = ((have - truth).abs() - allowed).clamp(min=0).sort().values
  theirs = (want - truth).abs().sort().values
  return bool((ours <= ROUNDING * theirs).all())
