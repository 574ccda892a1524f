"""Torch functions that are better caught above ATen, a file a theme.

They are caught inside an enabled environment only. Outside of it torch's composite
forms run, which draw the same random numbers. Importing this registers them all.
"""

import importlib
import pkgutil

from torchax.ops.jtorch._register import register_function

THEMES = tuple(
  module.name
  for module in pkgutil.iter_modules(__path__)
  if not module.name.startswith("_")
)
for _theme in THEMES:
  importlib.import_module(f"{__name__}.{_theme}")

__all__ = ["THEMES", "register_function"]
