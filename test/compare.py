"""What "the same result" means: CPU torch is the oracle, tolerances go by dtype."""

import torch
from ops.harness import NARROWED, TOLERANCE
from torch.utils import _pytree as pytree

from torchax.tensor import Tensor


def assert_same(actual, expected, what: str = "") -> None:
  """A tree on jax has the structure, shapes, dtypes and numbers of one on the CPU."""
  actual_leaves, actual_spec = pytree.tree_flatten(actual)
  expected_leaves, expected_spec = pytree.tree_flatten(expected)
  assert len(actual_leaves) == len(expected_leaves), (what, actual_spec, expected_spec)
  for have, want in zip(actual_leaves, expected_leaves):
    if not isinstance(want, torch.Tensor):
      assert have == want, (what, have, want)
      continue
    assert isinstance(have, Tensor), f"{what}: {type(have)} is not on jax"
    assert_close(have.detach().cpu(), want, what)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
  """Two CPU tensors agree within the tolerance of their dtype."""
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
  """The tensors of a tree as new tensors on jax, leaves that require grad as such."""

  def move(value):
    if not isinstance(value, torch.Tensor):
      return value
    return value.detach().to("jax").requires_grad_(value.requires_grad)

  return pytree.tree_map(move, tree)
