"""Parts of the tests: `make test ARGS="--part=1/3"` runs the second of three.

A machine with little time runs one part. Each part has rows of every parametrized test
and tests of every file. All parts together have every test.
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
  """Return the names in a part: rows and tests are dealt in turn.

  Args:
    names: pytest's names of tests, "file::test" or "file::test[row]".
    part: number of the part, from 0, and count of parts.
  """
  number, count = part
  groups = defaultdict(list)
  for name in names:
    groups[name.partition("[" if "[" in name else "::")[0]].append(name)
  chosen = set()
  for group in groups.values():
    # Neighbors are alike: a hash mixes them.
    group.sort(key=lambda name: zlib.crc32(name.encode()))
    chosen.update(group[number % len(group) :: count])
  return chosen
