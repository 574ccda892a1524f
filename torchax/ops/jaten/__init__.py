"""Lowerings of ATen operations, one file per theme; importing this registers them all.

Files that start with `_` hold helpers and register nothing.
"""

import functools
import importlib
import pkgutil

from torchax.compat import torch_compat
from torchax.ops.register import op
from torchax.registry.operators import all_aten_ops as all_ops
from torchax.registry.schema import functional_form, is_in_place, schema_of
from torchax.upstream.aliases import lookup, of_aten

THEMES = tuple(
  module.name
  for module in pkgutil.iter_modules(__path__)
  if not module.name.startswith("_")
)
_themes = [importlib.import_module(f"{__name__}.{theme}") for theme in THEMES]

__all__ = [
  "THEMES",
  "all_ops",
  "mutation_needs_env",
  "mutation_ops_to_functional",
  "op",
]


@functools.cache
def _mutations() -> dict:
  """Map each in-place packet of ATen to the packet of its functional variant."""
  mutations = {}
  for packet in torch_compat.aten_packets():
    for overload in [getattr(packet, name) for name in packet.overloads()]:
      functional = functional_form(overload) if is_in_place(overload) else None
      if functional is not None:
        mutations[packet] = functional.overloadpacket
  return mutations


def _random_mutations() -> set:
  """Return the in-place packets that draw random numbers."""
  return {
    packet
    for packet in _mutations()
    if any(schema_of(getattr(packet, name)).is_random for name in packet.overloads())
  }


def __getattr__(name: str):
  """Return a lowering or helper by its name, such as `jaten._aten_silu`.

  A lowering takes arrays, and its arguments have upstream's order. A sampler draws its
  own key.
  """
  # Computed on request: reading all of torch's schemas would slow down the import.
  if name == "mutation_ops_to_functional":
    return _mutations()
  if name == "mutation_needs_env":
    return _random_mutations()
  value = lookup(name, _themes, all_ops.values()) or of_aten(name)
  if value is not None:
    return value
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
