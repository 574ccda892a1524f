"""`partition` splits a list, `merge` merges it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchax import util

VALUES = st.lists(st.integers() | st.text())


@given(VALUES, st.integers(-5, 5))
def test_merge_undoes_partition(values, bound):
  def belongs(value):
    return isinstance(value, int) and value > bound

  first, second = util.partition(values, belongs)
  assert len(first) == len(second) == len(values)
  assert [value for value in first if value is not None] == list(
    filter(belongs, values)
  )
  assert util.merge(first, second) == values
  assert util.merge(second, first) == values


def test_merge_of_lists_of_different_length_raises():
  with pytest.raises(AssertionError, match="2 and 1"):
    util.merge([1, None], [None])


def test_merge_takes_the_first_of_two_values():
  assert util.merge([1, 2], [None, 3]) == [1, 2]


def test_merge_keeps_falsy_values():
  assert util.merge([0, None], [None, ""]) == [0, ""]
  assert util.merge([0], [1]) == [0]
