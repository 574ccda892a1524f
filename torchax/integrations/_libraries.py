"""Optional libraries, imported with one error for what is missing or too old."""

import importlib
import importlib.metadata
import types

from torch.torch_version import TorchVersion


def load(module: str, minimum: str) -> types.ModuleType:
  """Imports a module of an optional library.

  Args:
    module: dotted name; its first part is the name of the distribution.
    minimum: the lowest version that is tested.

  Raises:
    ImportError: the library is missing or older than that.
  """
  library = module.partition(".")[0]
  advice = f"Install it with `pip install 'torchax[ecosystem]' '{library}>={minimum}'`."
  try:
    version = importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:
    raise ImportError(
      f"torchax.integrations.{library} needs {library} {minimum} or newer, and it is "
      f"not installed. {advice}",
      name=library,
    ) from None
  if TorchVersion(version) < minimum:
    raise ImportError(
      f"torchax.integrations.{library} needs {library} {minimum} or newer, but "
      f"{version} is installed. {advice}",
      name=library,
    )
  return importlib.import_module(module)
