"""Lowerings of ATen operations, a file a theme. Importing this registers them all."""

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
  """In-place packets of ATen, each with the packet of its functional form."""
  found = {}
  for packet in torch_compat.aten_packets():
    for overload in [getattr(packet, name) for name in packet.overloads()]:
      functional = functional_form(overload) if is_in_place(overload) else None
      if functional is not None:
        found[packet] = functional.overloadpacket
  return found


def _random_mutations() -> set:
  """The in-place packets that draw numbers, from a stream of the environment."""
  return {
    packet
    for packet in _mutations()
    if any(schema_of(getattr(packet, name)).is_random for name in packet.overloads())
  }


def __getattr__(name: str):
  """A lowering or helper by its name, as `jaten._aten_silu`.

  It takes arrays, and the arguments that upstream's takes, in their order. A sampler
  draws its key by itself.
  """
  # torch's schemas say both; looking at all of them takes a moment, so it is not done
  # on import.
  if name == "mutation_ops_to_functional":
    return _mutations()
  if name == "mutation_needs_env":
    return _random_mutations()
  found = lookup(name, _themes, all_ops.values()) or of_aten(name)
  if found is not None:
    return found
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
