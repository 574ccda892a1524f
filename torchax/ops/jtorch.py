"""Public names of torch functions that are caught above ATen, in `functions/`.

Importing this registers them all.
"""

import importlib
import pkgutil

from torchax import functions
from torchax.functions.register import register_function
from torchax.registry.operators import all_torch_functions, register_torch_function_op
from torchax.upstream.aliases import lookup

THEMES = tuple(module.name for module in pkgutil.iter_modules(functions.__path__))
_themes = [importlib.import_module(f"{functions.__name__}.{name}") for name in THEMES]

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
  themes_name = _UPSTREAMS.get(name, name)
  found = lookup(themes_name, _themes, all_torch_functions.values())
  if found is None:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return found
