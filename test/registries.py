"""Registries of operators that are afterwards what they were."""

import contextlib
from collections.abc import Iterator

from torchax.ops import ops_registry


@contextlib.contextmanager
def restored() -> Iterator[None]:
  """What is registered inside is forgotten at the end."""
  tables = (ops_registry.all_aten_ops, ops_registry.all_torch_functions)
  before = [dict(table) for table in tables]
  try:
    yield
  finally:
    for table, entries in zip(tables, before):
      table.clear()
      table.update(entries)
    ops_registry._generation += 1
