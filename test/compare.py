"""Comparison of results with CPU torch, with tolerances by dtype."""

import torch
from ops.harness import NARROWED, TOLERANCE
from torch.utils import _pytree as pytree

from torchax.tensor import Tensor


def assert_same(actual, expected, what: str = "") -> None:
  """Assert that a tree on jax has the structure, dtypes and values of a CPU tree."""
  if isinstance(expected, torch.Tensor):
    assert isinstance(actual, Tensor), f"{what}: {type(actual)} is not on jax"
    assert_close(actual.detach().cpu(), expected, what)
  elif isinstance(expected, dict):
    assert set(actual) == set(expected), what
    for key, value in expected.items():
      assert_same(actual[key], value, f"{what}[{key!r}]")
  elif isinstance(expected, list | tuple):
    assert len(actual) == len(expected), what
    for index, (have, want) in enumerate(zip(actual, expected)):
      assert_same(have, want, f"{what}[{index}]")
  else:
    assert actual == expected, what


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
  """Assert that two CPU tensors agree within the tolerance of their dtype."""
  expected = expected.detach().resolve_conj().resolve_neg()
  expected = expected.to(NARROWED.get(expected.dtype, expected.dtype))
  rtol, atol = TOLERANCE.get(expected.dtype, (0, 0))
  torch.testing.assert_close(
    actual,
    expected,
    rtol=rtol,
    atol=atol,
    equal_nan=True,
    msg=lambda message: f"{what}: {message}" if what else message,
  )


def to_jax(tree):
  """Copy the tensors of a tree to jax; keep `requires_grad`."""

  def move(value):
    if not isinstance(value, torch.Tensor):
      return value
    return value.detach().to("jax").requires_grad_(value.requires_grad)

  return pytree.tree_map(move, tree)
