"""Parts of the tests, for machines with little time."""

import argparse

import parts
import pytest

ROWS = [f"a.py::test_many[{n}-{n % 3}]" for n in range(10)]
ALONE = [f"a.py::test_{n}" for n in range(5)]


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_parts_have_every_test_once(count):
  """Each part has a row of each parametrized test, and a test of each file."""
  found = [parts.in_part([*ROWS, *ALONE], (k, count)) for k in range(count)]
  assert set().union(*found) == {*ROWS, *ALONE}
  for group in (ROWS, ALONE):
    sizes = [len(part.intersection(group)) for part in found]
    assert min(sizes) >= 1
    assert sum(sizes) == max(len(group), count)


@pytest.mark.parametrize("text", ["3", "2/2", "-1/2", "1/x", ""])
def test_a_part_that_is_none_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match="such as 1/3"):
    parts.part_of(text)
