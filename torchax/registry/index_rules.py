"""What an operation asks of its indices, labels, lengths and offsets.

A lowering declares it beside itself, `@op(aten.gather, rules=_place_rules)`: a function
of the operation's arguments, tensors or arrays, that gives rules. From these follows
what is looked at before the operation runs, and in compiled functions with
`Configuration.check_indices` (`dispatch/index_checks.py`). What the lowering gives
where nobody looks is its own business, by `core/out_of_range.py`.
"""

from collections.abc import Callable

import numpy as np

_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
_MOST = 2**31  # what is negative is not below it


class Rule:
  """What the numbers of one argument have to be.

  Args:
    numbers: the argument, a tensor or an array.
    error: torch's class for a wrong one.
    message: torch's words, in which `{number}` is the first wrong number and `{place}`
      its flat position.
  """

  __slots__ = ("numbers", "error", "message")

  def __init__(self, numbers, error: type[Exception], message: str):
    self.numbers = numbers
    self.error = error
    self.message = message

  def is_broken(self, numbers):
    """A mask of the wrong places of an array, numpy's or JAX's; of any shape."""
    raise NotImplementedError

  def is_for(self, dtype) -> bool:
    """False for a dtype that the operation refuses for another reason."""
    return True

  def breach(self, numbers: np.ndarray) -> Exception | None:
    """The error that the numbers of the argument are worth; None if they are right."""
    if not self.is_for(numbers.dtype):
      return None
    broken = np.asarray(self.is_broken(numbers))
    if not broken.any():
      return None
    place = int(np.flatnonzero(broken)[0])
    number = numbers.reshape(-1)[place] if broken.size == numbers.size else None
    return self.error(self.text(number, place))

  def text(self, number, place) -> str:
    """The words for a number at a flat position."""
    return self.message.format(number=number, place=place)


class Range(Rule):
  """Integers from `low` to `high`, which is excluded; or the one that is `ignored`.

  The message may name `{high}`, `{last}`, which is one less, and `{dim}`.
  """

  __slots__ = ("low", "high", "ignored", "dim")

  def __init__(self, numbers, low, high, error, message, ignored=None, dim=None):
    self.numbers = numbers
    self.low = low
    self.high = high
    self.error = error
    self.message = message
    self.ignored = ignored
    self.dim = dim

  def is_for(self, dtype):
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

  def breach(self, numbers):
    if not numbers.size:
      return None
    # The usual case, in passes that allocate nothing; as unsigned, negatives are large.
    unsigned = _UNSIGNED.get(numbers.dtype) if self.low == 0 else None
    if unsigned is not None:
      if numbers.view(unsigned).max() < self.high <= _MOST:
        return None
    elif numbers.max() < self.high and numbers.min() >= self.low:
      return None
    return super().breach(numbers)

  def text(self, number, place):
    return self.message.format(
      number=number, place=place, high=self.high, last=self.high - 1, dim=self.dim
    )


class Condition(Rule):
  """Anything else.

  Args:
    condition: array -> mask of the wrong places, as `Rule.is_broken`.
  """

  __slots__ = ("condition",)

  def __init__(self, numbers, condition: Callable, error, message):
    super().__init__(numbers, error, message)
    self.condition = condition

  def is_broken(self, numbers):
    return self.condition(numbers)


_OUT_OF_BOUNDS = "index {number} is out of bounds for dimension {dim} with size {high}"


def along(index, size: int, dim: int, error: type = IndexError, wraps=False) -> Range:
  """The places of a dimension, in torch's usual words; with `wraps`, from its end."""
  return Range(index, -size if wraps else 0, size, error, _OUT_OF_BOUNDS, dim=dim)
