"""Reasons of recompilations: the keys for which a function was traced.

`TORCHAX_LOGS=recompiles` shows it as it happens (`torchax/logs.py`), and
`torchax.explain` what is known of the last one.
"""

import logging
from collections import deque

from torchax import logs

logger = logging.getLogger("torchax.recompiles")

# Earlier traces that the next one is compared with.
MOST_TRACES = 8

# All that Python decides by in a program, described by name.
ProgramKey = dict[str, str]

_ABSENT = "not there"


class History:
  """Traces of one function.

  Attributes:
    count: how many there were.
    reasons: differences of the last one from the most similar one before.
  """

  def __init__(self, name: str):
    self._name = name
    self.count = 0
    self.reasons: tuple[str, ...] = ()
    self._keys: deque[ProgramKey] = deque(maxlen=MOST_TRACES)

  def record(self, key: ProgramKey) -> None:
    """Add a trace that was made for this key."""
    self.count += 1
    self.reasons = self._compared(key)
    self._keys.append(key)
    if self.count > 1 and logs.are_on("recompiles"):
      reasons = "\n".join([f"  {reason}" for reason in self.reasons])
      logger.info("%s is compiled for the %s time:\n%s", *self._named(), reasons)

  def _named(self) -> tuple[str, str]:
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = self.count % 100 in (11, 12, 13)
    ending = "th" if is_teen else endings.get(self.count % 10, "th")
    return self._name, f"{self.count}{ending}"

  def _compared(self, key: ProgramKey) -> tuple[str, ...]:
    if not self._keys:
      return ()
    # Of equally similar ones the last.
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


def _changes(before: ProgramKey, now: ProgramKey) -> list[str]:
  return [name for name in {**now, **before} if before.get(name) != now.get(name)]
