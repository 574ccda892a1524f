"""Why a compiled function was compiled anew: what each of its traces was made for.

`TORCHAX_LOGS=recompiles` shows it as it happens (`torchax/logs.py`), and
`torchax.explain` what is known of the last one.
"""

import logging
from collections import deque

from torchax import logs

logger = logging.getLogger("torchax.recompiles")

# Earlier traces that the next one is compared with.
MOST_TRACES = 8

# What a program was compiled for: what Python decides by, by name.
Form = dict[str, str]

_ABSENT = "not there"


class History:
  """The traces of one function.

  Attributes:
    count: how many there were.
    reasons: what told the last one from the most similar one before.
  """

  def __init__(self, name: str):
    self._name = name
    self.count = 0
    self.reasons: tuple[str, ...] = ()
    self._forms: deque[Form] = deque(maxlen=MOST_TRACES)

  @property
  def form(self) -> Form:
    """What the last trace was made for; {} before the first."""
    return self._forms[-1] if self._forms else {}

  def note(self, form: Form) -> None:
    """Adds a trace.

    Args:
      form: what it was made for.
    """
    self.count += 1
    self.reasons = self._compared(form)
    self._forms.append(form)
    if self.count > 1 and logs.are_on("recompiles"):
      reasons = "\n".join([f"  {reason}" for reason in self.reasons])
      logger.info("%s is compiled for the %s time:\n%s", *self._named(), reasons)

  def _named(self) -> tuple[str, str]:
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = self.count % 100 in (11, 12, 13)
    ending = "th" if is_teen else endings.get(self.count % 10, "th")
    return self._name, f"{self.count}{ending}"

  def _compared(self, form: Form) -> tuple[str, ...]:
    if not self._forms:
      return ()
    # Of equally similar ones the last.
    fewest = min(reversed(self._forms), key=lambda before: len(_changes(before, form)))
    changes = _changes(fewest, form)
    if not changes:
      return ("what was compiled for the same was dropped",)
    return tuple(
      [
        f"{name}: {form.get(name, _ABSENT)}, before {fewest.get(name, _ABSENT)}"
        for name in changes
      ]
    )


def _changes(before: Form, now: Form) -> list[str]:
  return [name for name in {**now, **before} if before.get(name) != now.get(name)]
