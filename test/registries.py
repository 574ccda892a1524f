"""Restoring of the operator registries after a test."""

import contextlib
from collections.abc import Iterator

from torchax.registry import operators


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
