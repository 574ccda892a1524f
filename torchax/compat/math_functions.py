"""Functions of Python's `math` on numbers that are operands of a compiled function.

They would take the value of such a number, and an optimizer that counts its steps, with
`math.sqrt(1 - beta ** step)`, would be compiled at each step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torchax.compat.patches import patch

_NAMES = ("sqrt", "exp", "log", "log2", "log10", "pow", "cos", "sin", "tanh")
_REASON = "numbers of optimizers in a trace"


def patch_math(kind: type, calculate: Callable[..., Any]) -> Callable[[], None]:
  """Patch `math` for numbers of one class; return the function to undo that.

  Args:
    kind: class of the numbers.
    calculate: takes a function of `math` and its arguments, and returns the result.
  """

  def on_numbers(function):
    @functools.wraps(function)
    def call(*args):
      if any([isinstance(arg, kind) for arg in args]):
        return calculate(function, *args)
      return function(*args)

    return call

  made = [patch(math, n, on_numbers(getattr(math, n)), _REASON) for n in _NAMES]

  def undo() -> None:
    for each in made:
      each.undo()

  return undo
