"""Outcomes of another project's tests, and the file of expected failures.

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
  """Error of a folder of tests or a file of expectations that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Verdict on a row.

  Attributes:
    row: "test_ops.py::TestOps::test_add", or the file alone if it did not run.
    verdict: "passed", "skipped" or one of `FAILED`.
    message: first line of the error.
    seconds: duration.
  """

  row: str
  verdict: str
  message: str = ""
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Expectation:
  """Rows that are expected to fail.

  Attributes:
    row: pattern of their names.
    reason: reason of the failure.
    message: pattern of their messages.
  """

  row: str
  reason: str
  message: str = "*"

  def matches(self, outcome: Outcome) -> bool:
    """Return True if this expectation explains the failure."""
    pairs = ((outcome.row, self.row), (outcome.message, self.message))
    # Brackets in names are not patterns.
    return all(fnmatch.fnmatchcase(t, p.replace("[", "[[]")) for t, p in pairs)


def read_expectations(path: pathlib.Path) -> list[Expectation]:
  """Return the rows of a file of expectations.

  Raises:
    InputError: the file cannot be read, or a table has no reason or is repeated.
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
      raise InputError(f"{path}: {row} is listed twice.")
    found[key] = expected
  return list(found.values())


def judge(
  outcomes: list[Outcome], expectations: list[Expectation]
) -> tuple[list[Outcome], list[Expectation]]:
  """Return failures without an expectation, and expectations without a failure."""
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
