"""Lowerings of ATen operations, a file a theme. Importing this registers them all."""

import importlib
import pkgutil

from torchax.ops.op_base import op
from torchax.ops.ops_registry import all_aten_ops as all_ops

THEMES = tuple(
  module.name
  for module in pkgutil.iter_modules(__path__)
  if not module.name.startswith("_")
)
for _theme in THEMES:
  importlib.import_module(f"{__name__}.{_theme}")

__all__ = ["THEMES", "all_ops", "op"]
