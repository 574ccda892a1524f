"""What "the same result" means: CPU torch is the oracle, tolerances go by dtype."""

import torch
from ops.harness import NARROWED, TOLERANCE
from torch.utils import _pytree as pytree

from torchax.tensor import Tensor


def assert_same(actual, expected, what: str = "") -> None:
  """A tree on jax has the structure, shapes, dtypes and numbers of one on the CPU."""
  if isinstance(expected, torch.Tensor):
    assert isinstance(actual, Tensor), f"{what}: {type(actual)} is not on jax"
    assert_close(actual.detach().cpu(), expected, what)
  elif isinstance(expected, dict):
    assert set(actual) == set(expected), what
    for key, value in expected.items():
      assert_same(actual[key], value, f"{what}[{key!r}]")
  elif isinstance(expected, list | tuple):
    assert len(actual) == len(expected), what
    for place, (have, want) in enumerate(zip(actual, expected)):
      assert_same(have, want, f"{what}[{place}]")
  else:
    assert actual == expected, what


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
