"""Preparation of Python numbers before they become operands of a compiled lowering.

The functions are the `prepare=` of lowerings: each takes the arguments by name and
changes them in place. It reads numbers only, never tensors. A number that selects a
code path becomes a `StaticValue`; few values may do so, since each compiles a program.
Other numbers are transformed on the host, in Python's precision.
"""

import math
from collections.abc import Callable

from torchax.core.static_values import StaticValue
from torchax.rng import uniform

# Each of these may have its own program; all other probabilities share one.
_PLAIN_PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)


def _is_real(value) -> bool:
  return type(value) in (int, float)


def probability(name: str, is_kept: bool = False, scales: bool = False) -> Callable:
  """Replace a probability by the `uniform.steps_below` that its mask is drawn with.

  Args:
    name: name of the argument; a value other than a number stays unchanged.
    is_kept: the argument is the probability of True; otherwise of False.
    scales: replace it by (steps, 1 / probability to keep), for lowerings that scale.
  """

  def prepare(arguments: dict) -> None:
    p = arguments.get(name)
    if not _is_real(p):
      return
    keep = p if is_kept else 1.0 - p
    steps = uniform.steps_below(keep)
    if steps is None or keep in _PLAIN_PROBABILITIES:
      arguments[name] = StaticValue(p)
    else:
      arguments[name] = (steps, 1.0 / keep) if scales else steps

  return prepare


def integers(low: str, high: str) -> Callable:
  """Replace the upper bound of an integer range by (low, span) for `integers_from`.

  Args:
    low, high: names of the bounds. A missing lower bound is 0. If a bound is not an
      integer, or the range is empty, both stay unchanged.
  """

  def prepare(arguments: dict) -> None:
    first, end = arguments.get(low, 0), arguments.get(high)
    if type(first) is int and type(end) is int and first < end:
      arguments[high] = range_operands(first, end)
      if low in arguments:
        arguments[low] = None

  return prepare


def range_operands(low: int, high: int) -> tuple:
  """Return `low` and `span` for `samplers.integers_from`, as numbers if 32 bits do.

  A span above 2**32 or equal to a power of two is static: it selects a code path.
  """
  span = high - low
  return (
    low if -(2**31) <= low < 2**31 else StaticValue(low),
    StaticValue(span)
    if span & (span - 1) == 0 or span > 2**32
    else (span + 2**31) % 2**32 - 2**31,
  )


def as_they_are(arguments: dict) -> None:
  """Change nothing, so that numbers named in `static=` become operands."""


def static_if(name: str, *, is_static: Callable[[float], bool]) -> Callable:
  """Make a number static if `is_static(number)` is true.

  Args:
    name: name of the argument; a value other than a number stays unchanged.
    is_static: `number -> bool`.
  """

  def prepare(arguments: dict) -> None:
    value = arguments.get(name)
    if isinstance(value, int | float) and is_static(value):
      arguments[name] = StaticValue(value)

  return prepare


# Exponents that select a code path; integer exponents that an int32 operand holds.
_SIMPLE_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)
_EXPONENTS = range(2**31)


def power(arguments: dict) -> None:
  """Make an exponent static if it selects a code path or integers do not accept it."""
  exponent = arguments["exponent"]
  is_far = type(exponent) is int and exponent not in _EXPONENTS
  if not _is_real(exponent) or exponent in _SIMPLE_POWERS or is_far:
    arguments["exponent"] = StaticValue(exponent)


_PLAIN_ORDERS = (0, 1, 2)


def norm_order(name: str) -> Callable:
  """Replace the order of a norm by the pair (order, 1 / order).

  0, 1, 2 and the infinities select a code path and become static. So do negative
  orders, since torch checks that they get no empty tensor.
  """

  def prepare(arguments: dict) -> None:
    order = arguments.get(name)
    if not _is_real(order):
      return
    is_plain = order in _PLAIN_ORDERS or order < 0 or not math.isfinite(order)
    arguments[name] = StaticValue(order) if is_plain else (float(order), 1.0 / order)

  return prepare


def scales(names: tuple[str, ...]) -> Callable:
  """Replace each scale of an image by the pair (scale, 1 / scale).

  Integers and their reciprocals become static: the sizes decide them.
  """

  def prepare(arguments: dict) -> None:
    for name in names:
      scale = arguments.get(name)
      if not _is_real(scale):
        continue
      is_plain = not 0 < scale < math.inf or scale % 1 == 0 or (1 / scale) % 1 == 0
      arguments[name] = StaticValue(scale) if is_plain else (float(scale), 1.0 / scale)

  return prepare


def parts(order) -> tuple:
  """Return (order, 1 / order) of a norm's order or a scale, prepared or not."""
  return order if isinstance(order, tuple) else (order, 1.0 / order)
