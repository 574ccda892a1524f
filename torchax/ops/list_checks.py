"""Checks of lists of tensors, as `_foreach` operations and optimizers take them."""

from collections.abc import Sequence


def require_same_length(lists: Sequence[Sequence]) -> None:
  """Raise torch's error for lists of different lengths.

  Raises:
    RuntimeError: the first list is empty, or another differs from it in length.
  """
  lengths = [len(one) for one in lists]
  if not lengths[0]:
    raise RuntimeError("Tensor list must have at least one tensor.")
  for length in lengths[1:]:
    if length != lengths[0]:
      raise RuntimeError(
        "Tensor lists must have the same number of tensors, and as many scalars, got "
        f"{lengths[0]} and {length}."
      )
