"""Outcomes of another project's tests, and the file that says which may fail.

A file of expectations is a list of `[[expected]]` tables with a row (`*` matches any
characters), a reason, and optionally a pattern of the message. Both directions are
checked: a failure without an expectation, and an expectation without a failure.
"""

import dataclasses
import fnmatch
import pathlib
import tomllib

FAILED = ("failed", "did not load", "took too long", "crashed")


class InputError(Exception):
  """The tests or the file of expectations cannot be used."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Verdict on a row.

  Attributes:
    row: "test_ops.py::TestOps::test_add", or the file alone where it did not run.
    verdict: "passed", "skipped" or one of `FAILED`.
    message: first line of the error.
    seconds: how long it took.
  """

  row: str
  verdict: str
  message: str = ""
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Expectation:
  """Rows that fail, and why.

  Attributes:
    row: pattern of their names.
    reason: why they fail.
    message: pattern of their messages.
  """

  row: str
  reason: str
  message: str = "*"

  def matches(self, outcome: Outcome) -> bool:
    """Whether it explains this failure."""
    pairs = ((outcome.row, self.row), (outcome.message, self.message))
    # Names have brackets, which are no patterns.
    return all(fnmatch.fnmatchcase(t, p.replace("[", "[[]")) for t, p in pairs)


def read_expectations(path: pathlib.Path) -> list[Expectation]:
  """Rows of a file of expectations.

  Raises:
    InputError: it cannot be read, or a table has no reason or is there twice.
  """
  try:
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("expected", [])
  except (OSError, tomllib.TOMLDecodeError) as error:
    raise InputError(f"{path} is no file of expectations: {error}") from None
  found: dict[tuple[str, str], Expectation] = {}
  for table in tables:
    row, reason = table.get("row"), table.get("reason")
    if not row or not reason:
      raise InputError(f"{path}: [[expected]] has a row and a reason, but got {table}.")
    expected = Expectation(row, reason, table.get("message", "*"))
    key = (expected.row, expected.message)
    if key in found:
      raise InputError(f"{path}: {row} stands there twice.")
    found[key] = expected
  return list(found.values())


def judged(
  outcomes: list[Outcome], expectations: list[Expectation]
) -> tuple[list[Outcome], list[Expectation]]:
  """Failures without an expectation, and expectations without a failure."""
  failed = [outcome for outcome in outcomes if outcome.verdict in FAILED]
  unexpected = [
    outcome
    for outcome in failed
    if not any(expected.matches(outcome) for expected in expectations)
  ]
  stale = [
    expected
    for expected in expectations
    if not any(expected.matches(outcome) for outcome in failed)
  ]
  return unexpected, stale
