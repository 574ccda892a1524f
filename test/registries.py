"""Operators of the tests' own, and restoring of the registries after a test."""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from torchax.registry import operators

library = torch.library.Library("torchax_test", "DEF")
_numbers = itertools.count()
ONES = torch.ones(3)


def define(signature: str):
  """Return a new packet of the tests' library: `define("(Tensor x) -> Tensor")`."""
  name = f"operation_{next(_numbers)}"
  library.define(name + signature)
  return getattr(torch.ops.torchax_test, name)


def on_jax() -> torch.Tensor:
  return ONES.to("jax")


@contextlib.contextmanager
def restored() -> Iterator[None]:
  """Restore the registries at the end of the block."""
  tables = (operators.all_aten_ops, operators.all_torch_functions)
  before = [dict(table) for table in tables]
  try:
    yield
  finally:
    for table, entries in zip(tables, before):
      table.clear()
      table.update(entries)
    operators._generation += 1
