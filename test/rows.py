"""Rows of parametrized tests, in parts: `make test ARGS="--rows=1/3"` runs the second.

A machine with little time runs one part of the rows. Every test function is in each
part, and all parts together have every row.
"""

import argparse
import zlib
from collections import defaultdict
from collections.abc import Iterable


def part_of(text: str) -> tuple[int, int]:
  """Return (number of the part, count of parts) of a text such as "1/3"."""
  number, _, count = text.partition("/")
  if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
    raise argparse.ArgumentTypeError(
      f"expected the number of a part, from 0, and the count of parts, such as 1/3; "
      f"got {text!r}"
    )
  return int(number), int(count)


def in_part(names: Iterable[str], part: tuple[int, int]) -> set[str]:
  """Return the names in a part; the rows of a test function are dealt in turn.

  Args:
    names: pytest's names of tests, "file::test[row]".
    part: number of the part, from 0, and count of parts.
  """
  number, count = part
  rows = defaultdict(list)
  for name in names:
    rows[name.partition("[")[0]].append(name)
  chosen = set()
  for group in rows.values():
    # Neighbors are alike: a hash mixes them.
    group.sort(key=lambda name: zlib.crc32(name.encode()))
    chosen.update(group[number % len(group) :: count])
  return chosen
