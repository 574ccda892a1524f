"""Public names of the torch functions that are intercepted above ATen.

The functions are in `torchax/functions/`; importing this module registers them all.
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

# Names in google/torchax of functions that have other names here.
_UPSTREAMS = {
  "functional_linear": "_linear",
  "one_hot": "_one_hot",
  "unravel_index": "_unravel_index",
  "scaled_dot_product_attention": "_scaled_dot_product_attention",
  "_sdpa_reference": "_scaled_dot_product_attention",
}


def __getattr__(name: str):
  """Look up a registered function by its name here or in google/torchax.

  An example is `jtorch._corrcoef`. Arrays give arrays, tensors give tensors.
  """
  themes_name = _UPSTREAMS.get(name, name)
  function = lookup(themes_name, _themes, all_torch_functions.values())
  if function is None:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return function
