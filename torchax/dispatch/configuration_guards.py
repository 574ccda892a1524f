"""Guards on fields of `Configuration` that a function reads while it is traced.

The function is retraced when such a field has changed.
"""

import dataclasses

from torchax.config import Configuration
from torchax.core.static_values import Identity
from torchax.core.storage import active


@dataclasses.dataclass(frozen=True)
class _Switch:
  """Guard on one field of a configuration."""

  config: Identity
  name: str

  def now(self):
    return getattr(self.config.value, self.name)

  def describe(self) -> str:
    return str(self.now())

  def __str__(self):
    return f"Configuration.{self.name}"


def guard_on(config: Configuration, name: str) -> None:
  """Guard on a field of the configuration in the functions that are being traced."""
  if active.boundary is not None:
    for guards in active.boundary.guards_around():
      guards.guard_on_number(_Switch(Identity(config), name))
