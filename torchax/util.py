"""Small helpers on lists."""

from collections.abc import Callable
from typing import Any


def partition(
  original: list[Any], func: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
  """Splits a list in two of the same length, for `merge` to join again.

  Args:
    original: any list.
    func: tells which elements belong to the first list.

  Returns:
    Two lists as long as `original`; each holds its own elements at their places
    and None at the others.

  >>> partition([1, "a", 2], lambda value: isinstance(value, int))
  ([1, None, 2], [None, 'a', None])
  """
  truths = [bool(func(value)) for value in original]
  first = [value if true else None for value, true in zip(original, truths)]
  second = [None if true else value for value, true in zip(original, truths)]
  return first, second


def merge(list1: list[Any], list2: list[Any]) -> list[Any]:
  """Joins what `partition` split; where both lists have a value, the first one's.

  Raises:
    AssertionError: the lists differ in length.

  >>> merge([1, None, 2], [None, 'a', None])
  [1, 'a', 2]
  """
  if len(list1) != len(list2):
    raise AssertionError(
      f"merge expects two lists of one length, but got {len(list1)} and {len(list2)}."
    )
  return [second if first is None else first for first, second in zip(list1, list2)]
