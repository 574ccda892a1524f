"""What torchax does behind a program, for who wants to see it.

`TORCHAX_LOGS=recompiles,draws python program.py`, or `torchax.set_logs(draws=True)`:

  recompiles  why a compiled function was compiled once more
  graphs      the ATen graphs of `torch.compile`: of the forward and the backward pass
  operands    their inputs: name, dtype, shape, and which one holds the key
  draws       their random operations: number, operation, shape, module, line of code
  compiles    compilations that take more than a few seconds, while they do

All goes to loggers below "torchax", whose level is INFO while something is on.
"""

import logging
import os

KINDS = ("recompiles", "graphs", "operands", "draws", "compiles")
VARIABLE = "TORCHAX_LOGS"

_root = logging.getLogger("torchax")
_on: set[str] = set()


def set_logs(**kinds: bool) -> None:
  """Says what is logged from now on.

  Args:
    kinds: `recompiles`, `graphs`, `operands`, `draws`, `compiles`; those not named stay
      as they are.

  Raises:
    ValueError: a name that is none of these.
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


def are_on(kind: str) -> bool:
  """Whether a kind of `KINDS` is logged."""
  return kind in _on


def read_environment() -> None:
  """Turns on what the environment variable names.

  Raises:
    ValueError: it names something else.
  """
  named = [kind.strip() for kind in os.environ.get(VARIABLE, "").split(",")]
  if any(named):
    set_logs(**{kind: True for kind in named if kind})


read_environment()
