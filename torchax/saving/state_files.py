"""Loading of states from files of `torch.save`, without running code of the file."""

import pickle
import sys
import zipfile

import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.core import mappings

_SCALARS = tuple(mappings.NUMPY_UNSUPPORTED_DTYPES.values())
# Classes and functions in pickles of arrays.
_ARRAY_PARTS = (
  *(np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], *_SCALARS),
  *filter(None, (jax_compat.rebuilt_array,)),
  *{type(np.dtype(dtype)) for dtype in mappings.JAX_DTYPE_TO_TORCH if dtype},
)


def load_state(path):
  """Load the state in a file, with its tensors on jax.

  The file may hold arrays of numpy and JAX, and named tuples of imported modules.

  Raises:
    UnpicklingError: the file holds other objects.
  """
  try:
    return torch.load(path, map_location="jax", weights_only=True)
  except pickle.UnpicklingError:
    if not zipfile.is_zipfile(path):
      raise
  names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
  allowed = [*_ARRAY_PARTS, *filter(_is_tuple_class, map(_imported, names))]
  with torch.serialization.safe_globals(allowed):
    return torch.load(path, map_location="jax", weights_only=True)


def _imported(name: str):
  """Return the object of that name if its module is imported, else None."""
  module, _, attribute = name.rpartition(".")
  return getattr(sys.modules.get(module), attribute, None)


def _is_tuple_class(found) -> bool:
  is_tuple = isinstance(found, type) and issubclass(found, tuple)
  return is_tuple and hasattr(found, "_fields")
