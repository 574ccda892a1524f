"""Equality of Python values as parts of keys."""

import copy
import enum
import math

import numpy as np
import pytest
import torch

from torchax.core.static_values import (
  StaticValue,
  describe_value,
  key_of,
  static_number,
)


class Color(enum.Enum):
  RED = 1


DIFFERENT = {
  "types_of_numbers": (1, 1.0),
  "a_flag_and_a_number": (1, True),
  "signs_of_zero": (0.0, -0.0),
  "signs_of_a_complex_zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
  "a_number_and_text": (1, "1"),
  "a_list_and_a_tuple": ([1, 2], (1, 2)),
  "inside_of_a_dict": ({"a": 1}, {"a": True}),
  "names_of_a_dict": ({"a": 1}, {"b": 1}),
  "numbers_of_numpy": (np.float32(1), np.float64(1)),
  "types_of_torch": (torch.float32, torch.float64),
  "functions": (lambda: 1, lambda: 1),
}

SAME = {
  "nan": (math.nan, float("nan")),
  "nan_inside_of_a_list": ([math.nan], [float("nan")]),
  "numbers_of_numpy": (np.float32(0.1), np.float32(0.1)),
  "sets": ({1, 2}, {2, 1}),
  "shapes": (torch.Size([2]), torch.Size([2])),
  "members_of_an_enumeration": (Color.RED, Color(1)),
  "functions": (math.sin, math.sin),
}


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_programs_tell_apart_have_keys_of_their_own(values):
  first, second = values
  assert key_of(first) is not None
  assert key_of(first) != key_of(second)


@pytest.mark.parametrize("values", SAME.values(), ids=SAME)
def test_equal_static_values_have_one_key(values):
  first, second = values
  assert key_of(first) == key_of(second)
  assert hash(key_of(first)) == hash(key_of(second))


@pytest.mark.parametrize("wrap", [StaticValue, static_number])
def test_numbers_differ_by_type_and_sign_and_nan_is_itself(wrap):
  assert wrap(1) != wrap(1.0)
  assert wrap(1) != wrap(True)
  assert wrap(0.0) != wrap(-0.0)
  assert len({wrap(math.nan), wrap(float("nan")), wrap(1), wrap(1)}) == 2


def test_a_number_that_was_met_is_the_same_object_again():
  assert static_number(2.5) is static_number(2.5)


def test_a_value_of_another_type_is_compared_by_its_own_equality():
  assert key_of(slice(1, 2)) is None
  value = StaticValue(np.dtype("float32"))
  assert value == StaticValue(copy.deepcopy(np.dtype("float32")))


def test_unhashable_values_are_not_static():
  with pytest.raises(TypeError, match="unhashable"):
    StaticValue(np.ones(2))


def test_words_for_a_value_take_one_line():
  assert len(describe_value("x" * 500)) <= 80
  assert describe_value(math.sin) == "sin"
