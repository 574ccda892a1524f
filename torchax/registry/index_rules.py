"""Rules for the values of indices, labels, lengths and offsets.

A lowering declares them, as in `@op(aten.gather, rules=_place_rules)`: a function of
the operation's arguments, tensors or arrays, that yields rules.
`dispatch/index_checks.py` checks them before the operation runs, and in compiled
functions with `Configuration.check_indices`. Without a check, the lowering decides the
result by `core/out_of_range.py`.
"""

from collections.abc import Callable

import numpy as np

_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
_UNSIGNED_LIMIT = 2**31  # negative numbers are at least this large as unsigned ones


class Rule:
  """Rule for the values of one argument.

  Args:
    numbers: the argument, a tensor or an array.
    error: torch's class of error for a wrong value.
    message: torch's message; `{number}` is the first wrong value and `{position}` its
      flat position.
  """

  __slots__ = ("numbers", "error", "message")

  def __init__(self, numbers, error: type[Exception], message: str):
    self.numbers = numbers
    self.error = error
    self.message = message

  def is_broken(self, numbers):
    """Return a mask of the wrong values of a numpy or JAX array; of any shape."""
    raise NotImplementedError

  def applies_to(self, dtype) -> bool:
    """Return False for a dtype that the operation refuses for another reason."""
    return True

  def error_for(self, numbers: np.ndarray) -> Exception | None:
    """Return the error for the values of the argument; None if they are valid."""
    if not self.applies_to(numbers.dtype):
      return None
    broken = np.asarray(self.is_broken(numbers))
    if not broken.any():
      return None
    position = int(np.flatnonzero(broken)[0])
    number = numbers.reshape(-1)[position] if broken.size == numbers.size else None
    return self.error(self.text(number, position))

  def text(self, number, position) -> str:
    """Return the message for a wrong value and its flat position."""
    return self.message.format(number=number, position=position)


class Range(Rule):
  """Rule for integers: `low <= number < high`, or equal to `ignored`.

  The message may use `{high}`, `{last}` (`high - 1`) and `{dim}`.
  """

  __slots__ = ("low", "high", "ignored", "dim")

  def __init__(self, numbers, low, high, error, message, ignored=None, dim=None):
    super().__init__(numbers, error, message)
    self.low, self.high = low, high
    self.ignored, self.dim = ignored, dim

  def applies_to(self, dtype):
    return np.issubdtype(dtype, np.integer)

  def is_broken(self, numbers):
    if self.high <= self.low:
      return numbers == numbers
    if numbers.dtype.itemsize < 4:
      numbers = numbers.astype(np.int32)
    limits = np.iinfo(numbers.dtype)
    low, most = max(self.low, limits.min), min(self.high - 1, limits.max)
    broken = (numbers < low) | (numbers > most)
    return broken if self.ignored is None else broken & (numbers != self.ignored)

  def error_for(self, numbers):
    if not numbers.size:
      return None
    # Fast path without allocation; as unsigned numbers, negative ones are large.
    unsigned = _UNSIGNED.get(numbers.dtype) if self.low == 0 else None
    if unsigned is not None:
      if numbers.view(unsigned).max() < self.high <= _UNSIGNED_LIMIT:
        return None
    elif numbers.max() < self.high and numbers.min() >= self.low:
      return None
    return super().error_for(numbers)

  def text(self, number, position):
    return self.message.format(
      number=number, position=position, high=self.high, last=self.high - 1, dim=self.dim
    )


class Condition(Rule):
  """Rule given by a function.

  Args:
    condition: array -> mask of the wrong values, as `Rule.is_broken`.
  """

  __slots__ = ("condition",)

  def __init__(self, numbers, condition: Callable, error, message):
    super().__init__(numbers, error, message)
    self.condition = condition

  def is_broken(self, numbers):
    return self.condition(numbers)


_OUT_OF_BOUNDS = "index {number} is out of bounds for dimension {dim} with size {high}"


def dimension_rule(
  index, size: int, dim: int, error: type = IndexError, wraps=False
) -> Range:
  """Return the rule for indices of a dimension, with torch's usual message.

  Args:
    index: the indices, a tensor or an array.
    size: size of the dimension.
    dim: the dimension, for the message.
    error: class of the error.
    wraps: accept negative indices, which count from the end.
  """
  return Range(index, -size if wraps else 0, size, error, _OUT_OF_BOUNDS, dim=dim)
