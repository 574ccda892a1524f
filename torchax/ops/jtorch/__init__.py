"""Torch functions that are better caught above ATen, a file a theme.

Where the environment is suspended, torch's composite forms run, which draw the same
random numbers. Importing this registers them all.
"""

import importlib
import pkgutil

from torchax.ops.faces import lookup
from torchax.ops.jtorch import _upstream
from torchax.ops.jtorch._register import register_function
from torchax.ops.ops_registry import all_torch_functions, register_torch_function_op

THEMES = tuple(
  module.name
  for module in pkgutil.iter_modules(__path__)
  if not module.name.startswith("_")
)
_themes = [importlib.import_module(f"{__name__}.{theme}") for theme in THEMES]

__all__ = ["THEMES", "register_function", "register_torch_function_op"]

# Upstream's names of functions that are caught here under other ones.
_UPSTREAMS = {
  "functional_linear": "_linear",
  "one_hot": "_one_hot",
  "unravel_index": "_unravel_index",
  "scaled_dot_product_attention": "_scaled_dot_product_attention",
  "_sdpa_reference": "_scaled_dot_product_attention",
}


def __getattr__(name: str):
  """What a theme registers by its name, as `jtorch._corrcoef`, or by upstream's.

  Arrays give arrays, tensors give tensors.
  """
  found = _upstream.FACES.get(name)
  themes_name = _UPSTREAMS.get(name, name)
  found = found or lookup(themes_name, _themes, all_torch_functions.values())
  if found is None:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return found
