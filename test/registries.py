"""Registries of operators that are afterwards what they were."""

import contextlib
from collections.abc import Iterator

from torchax.registry import operators


@contextlib.contextmanager
def restored() -> Iterator[None]:
  """What is registered inside is forgotten at the end."""
  tables = (operators.all_aten_ops, operators.all_torch_functions)
  before = [dict(table) for table in tables]
  try:
    yield
  finally:
    for table, entries in zip(tables, before):
      table.clear()
      table.update(entries)
    operators._generation += 1
