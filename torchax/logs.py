"""Logging of recompilations, graphs and draws.

`TORCHAX_LOGS=recompiles,draws python program.py`, or `torchax.set_logs(draws=True)`:

  recompiles  reason why a compiled function was compiled again
  graphs      ATen graphs of `torch.compile`, forward and backward
  operands    inputs of these graphs: name, dtype, shape, and which one holds the key
  draws       random operations of these graphs: number, operation, shape, module, line
  compiles    compilations that take more than a few seconds, while they run
  eager       segments of the fused mode: operations, how they ran, which line read them

Messages go to loggers below "torchax", whose level is INFO while a kind is on.
"""

import logging
import os

KINDS = ("recompiles", "graphs", "operands", "draws", "compiles", "eager")
VARIABLE = "TORCHAX_LOGS"

_root = logging.getLogger("torchax")
_on: set[str] = set()


def set_logs(**kinds: bool) -> None:
  """Turn kinds of log messages on or off.

  Args:
    kinds: `recompiles`, `graphs`, `operands`, `draws`, `compiles`, `eager`; kinds that
      are not named stay unchanged.

  Raises:
    ValueError: a name is not one of these.

  >>> set_logs(draws=True)
  >>> is_enabled("draws"), is_enabled("graphs")
  (True, False)
  >>> set_logs(draws=False)
  """
  unknown = sorted(set(kinds) - set(KINDS))
  if unknown:
    raise ValueError(
      f"{', '.join(unknown)} cannot be logged; {VARIABLE} and set_logs take "
      f"{', '.join(KINDS)}."
    )
  for kind, is_on in kinds.items():
    (_on.add if is_on else _on.discard)(kind)
  if _on:
    _root.setLevel(logging.INFO)
    if not _root.hasHandlers():
      _root.addHandler(logging.StreamHandler())
  else:
    _root.setLevel(logging.NOTSET)


def is_enabled(kind: str) -> bool:
  """Return True if a kind of `KINDS` is logged.

  Args:
    kind: "recompiles", "graphs", "operands", "draws", "compiles" or "eager".

  >>> is_enabled("recompiles")
  False
  """
  return kind in _on


def read_environment() -> None:
  """Turn on the kinds named in the environment variable `TORCHAX_LOGS`.

  Raises:
    ValueError: it names an unknown kind.
  """
  named = [kind.strip() for kind in os.environ.get(VARIABLE, "").split(",")]
  if any(named):
    set_logs(**{kind: True for kind in named if kind})


read_environment()
