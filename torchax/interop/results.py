"""Results of a compiled function that are no tensors: constants of the trace."""

import torch

# Of these no number depends on an argument: they are what Python made of them when the
# function was traced.
CONSTANTS = frozenset(
  {type(None), bool, int, float, complex, str, bytes}
  | {torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout}
)


def require_constant(leaf, name: str) -> None:
  """Raises TypeError for a result that is neither a tensor nor a constant."""
  if type(leaf) not in CONSTANTS:
    kind = type(leaf)
    raise TypeError(
      f"{name} returns a {kind.__module__}.{kind.__qualname__}. A compiled function "
      "returns tensors and constants (numbers, strings, dtypes, devices, None) in "
      "containers that torch's pytrees know: register a class of yours with "
      "`torch.export.register_dataclass`, or return "
      "its tensors in a tuple or dict."
    )
