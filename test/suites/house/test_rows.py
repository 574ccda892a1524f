"""Parts of the rows of parametrized tests, for machines with little time."""

import argparse

import pytest
import rows

NAMES = ["a.py::test_one", *(f"a.py::test_many[{n}-{n % 3}]" for n in range(10))]


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_parts_have_every_row_once_and_every_function(count):
  parts = [rows.in_part(NAMES, (number, count)) for number in range(count)]
  for part in parts:
    assert {name.partition("[")[0] for name in part} == {
      "a.py::test_one",
      "a.py::test_many",
    }
  assert set().union(*parts) == set(NAMES)
  many = [name for part in parts for name in part if "[" in name]
  assert len(many) == max(10, count)


@pytest.mark.parametrize("text", ["3", "2/2", "-1/2", "1/x", ""])
def test_a_part_that_is_none_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match="such as 1/3"):
    rows.part_of(text)
