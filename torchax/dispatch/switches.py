"""Switches of `Configuration` by which a function decides while it is traced.

It is traced anew when one has changed.
"""

import dataclasses

from torchax.config import Configuration
from torchax.core.static_values import Identity
from torchax.core.storage import active


@dataclasses.dataclass(frozen=True)
class _Switch:
  """One field of a configuration: what a function that is traced decides by."""

  config: Identity
  name: str

  def now(self):
    return getattr(self.config.value, self.name)

  def describe(self) -> str:
    return str(self.now())

  def __str__(self):
    return f"Configuration.{self.name}"


def note(config: Configuration, name: str) -> None:
  """Has the functions that are being traced depend on a switch."""
  if active.boundary is not None:
    for guards in active.boundary.guards_around():
      guards.guard_on_number(_Switch(Identity(config), name))
