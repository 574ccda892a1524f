"""Shrinking of a program that fails to the fewest lines that still fail."""

import dataclasses
from collections.abc import Callable, Iterator

from tools.fuzz.program import Program


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
  """Leave out statements, lines and results as long as the program fails.

  Args:
    program: program that fails.
    fails: returns True for a program that runs on CPU torch and fails in the same way.
  """
  while True:
    smaller = next(filter(fails, _candidates(program)), None)
    if smaller is None:
      return program
    program = smaller


def _candidates(program: Program) -> Iterator[Program]:
  """Yield smaller programs, the smallest first."""
  for left in _without_parts(program.statements):
    yield dataclasses.replace(program, statements=left)
  if len(program.results) > 1:
    for left in _without_parts(program.results, most=1):
      yield dataclasses.replace(program, results=left)
  for index, statement in enumerate(program.statements):
    lines = statement.split("\n")
    for changed in _simpler(lines):
      statements = list(program.statements)
      statements[index] = changed
      yield dataclasses.replace(program, statements=tuple(statements))


def _simpler(lines: list[str]) -> Iterator[str]:
  """Yield a block without one of its lines, then its body alone."""
  if len(lines) > 1:
    for left in _without_parts(tuple(lines), most=1):
      yield "\n".join(left)
    yield "\n".join(line.removeprefix("  ") for line in lines[1:])


def _without_parts(parts: tuple, most: int = 8) -> Iterator[tuple]:
  size = most
  while size:
    for start in range(max(0, len(parts) - size), -1, -size):
      if size < len(parts):
        yield parts[:start] + parts[start + size :]
    size //= 2
