"""Partition of a list by a predicate, and its inverse."""

from collections.abc import Callable
from typing import Any


def partition(
  original: list[Any], func: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
  """Split a list into two of the same length; `merge` is the inverse.

  Args:
    original: any list.
    func: predicate of an element; True selects the first list.

  Returns:
    Two lists as long as `original`: selected elements at their indices, and None at
    the others.

  >>> partition([1, "a", 2], lambda value: isinstance(value, int))
  ([1, None, 2], [None, 'a', None])
  """
  is_first = [bool(func(value)) for value in original]
  first = [x if selected else None for x, selected in zip(original, is_first)]
  second = [None if selected else x for x, selected in zip(original, is_first)]
  return first, second


def merge(list1: list[Any], list2: list[Any]) -> list[Any]:
  """Merge the two lists of `partition`.

  Args:
    list1: any list; its values take precedence.
    list2: list of the same length.

  Returns:
    List of the values of `list1`, or of `list2` where `list1` has None.

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
