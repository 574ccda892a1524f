"""Reasons for recompilations, from the program keys of a function's traces.

`TORCHAX_LOGS=recompiles` logs each one (`torchax/logs.py`); `torchax.explain` shows the
last one. `program_keys.py` builds the keys.
"""

import logging
from collections import deque

from torchax import logs

logger = logging.getLogger("torchax.recompiles")

# Number of earlier traces that a new one is compared with.
MOST_TRACES = 8

# Text of each static value and guard of a program, by name.
ProgramKey = dict[str, str]

_ABSENT = "not there"


class History:
  """Traces of one function.

  Attributes:
    count: number of traces.
    reasons: differences between the last trace and the most similar earlier one.
  """

  def __init__(self, name: str):
    self._name = name
    self.count = 0
    self.reasons: tuple[str, ...] = ()
    self._keys: deque[ProgramKey] = deque(maxlen=MOST_TRACES)

  def record(self, key: ProgramKey) -> None:
    """Add a trace with this key, and log why it was needed."""
    self.count += 1
    self.reasons = self._differences(key)
    self._keys.append(key)
    if self.count > 1 and logs.is_enabled("recompiles"):
      reasons = "\n".join([f"  {reason}" for reason in self.reasons])
      ordinal = _ordinal(self.count)
      logger.info("%s is compiled for the %s time:\n%s", self._name, ordinal, reasons)

  def _differences(self, key: ProgramKey) -> tuple[str, ...]:
    if not self._keys:
      return ()
    # Among equally similar traces, take the latest.
    fewest = min(reversed(self._keys), key=lambda before: len(_changes(before, key)))
    changes = _changes(fewest, key)
    if not changes:
      return ("what was compiled for the same was dropped",)
    return tuple(
      [
        f"{name}: {key.get(name, _ABSENT)}, before {fewest.get(name, _ABSENT)}"
        for name in changes
      ]
    )


def _ordinal(number: int) -> str:
  is_teen = number % 100 in (11, 12, 13)
  ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
  return f"{number}th" if is_teen else f"{number}{ending}"


def _changes(before: ProgramKey, now: ProgramKey) -> list[str]:
  return [name for name in {**now, **before} if before.get(name) != now.get(name)]
