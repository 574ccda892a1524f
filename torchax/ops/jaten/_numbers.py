"""What becomes of numbers before they are operands of a compiled lowering.

Each function takes the arguments of an operation by name and changes them. It looks at
numbers alone: tensors of any dtype and shape follow. A number whose value leads to code
of its own becomes a `StaticValue`, of which there are few; one that is computed with is
computed on the host, in Python's precision.
"""

import math
from collections.abc import Callable

from torchax.core.static_values import StaticValue
from torchax.rng import units

# Of these a program may be made; others share one.
_PLAIN_PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)


def _is_real(value) -> bool:
  return type(value) in (int, float)


def probability(name: str, is_kept: bool = False, scales: bool = False) -> Callable:
  """Makes a probability the `units.steps_below` of what a mask is drawn with.

  Args:
    name: of the argument. Where it is no number it stays as it is.
    is_kept: it is the probability of True; otherwise of False.
    scales: what is kept is divided by the probability to keep: (steps, scale).
  """

  def prepare(given: dict) -> None:
    p = given.get(name)
    if not _is_real(p):
      return
    keep = p if is_kept else 1.0 - p
    steps = units.steps_below(keep)
    if steps is None or keep in _PLAIN_PROBABILITIES:
      given[name] = StaticValue(p)
    else:
      given[name] = (steps, 1.0 / keep) if scales else steps

  return prepare


def integers(low: str, high: str) -> Callable:
  """Makes the upper bound of a range of integers a (low, span) for `integers_from`.

  Args:
    low, high: names of the bounds; without a lower one it is 0, and where the upper one
      is no number, or there are none between, both stay as they are.
  """

  def prepare(given: dict) -> None:
    first, end = given.get(low, 0), given.get(high)
    if type(first) is int and type(end) is int and first < end:
      given[high] = range_operands(first, end)
      if low in given:
        given[low] = None

  return prepare


def range_operands(low: int, high: int) -> tuple:
  """`low` and `span` for `samplers.integers_from`; numbers if 32 bits hold them.

  A span that is a power of two, or more than 2**32, has code of its own.
  """
  span = high - low
  return (
    low if -(2**31) <= low < 2**31 else StaticValue(low),
    StaticValue(span)
    if span & (span - 1) == 0 or span > 2**32
    else (span + 2**31) % 2**32 - 2**31,
  )


def as_they_are(given: dict) -> None:
  """Changes nothing: each number that is named `static` is an operand as it is."""


def static_if(name: str, *, is_static: Callable[[float], bool]) -> Callable:
  """Makes a number static where a function says so of its value.

  Args:
    name: of the argument.
    is_static: `number -> bool`; what is no number stays as it is.
  """

  def prepare(given: dict) -> None:
    value = given.get(name)
    if isinstance(value, int | float) and is_static(value):
      given[name] = StaticValue(value)

  return prepare


# Exponents of products and roots, and integers that JAX's powers of integers hold.
_SIMPLE_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)
_EXPONENTS = range(2**31)


def power(given: dict) -> None:
  """Makes an exponent static that has code of its own, or that integers refuse."""
  exponent = given["exponent"]
  is_far = type(exponent) is int and exponent not in _EXPONENTS
  if not _is_real(exponent) or exponent in _SIMPLE_POWERS or is_far:
    given["exponent"] = StaticValue(exponent)


_PLAIN_ORDERS = (0, 1, 2)


def norm_order(name: str) -> Callable:
  """Makes the order of a norm a pair: the order, and one by it.

  0, 1, 2 and the infinities have code of their own and stay what they are.
  """

  def prepare(given: dict) -> None:
    order = given.get(name)
    if not _is_real(order):
      return
    is_plain = order in _PLAIN_ORDERS or not math.isfinite(order)
    given[name] = StaticValue(order) if is_plain else (float(order), 1.0 / order)

  return prepare


def scales(names: tuple[str, ...]) -> Callable:
  """Makes each scale of an image a pair: the scale, and one by it.

  Whole numbers, and one by such, have code of their own: these follow from the sizes.
  """

  def prepare(given: dict) -> None:
    for name in names:
      scale = given.get(name)
      if not _is_real(scale):
        continue
      is_plain = not 0 < scale < math.inf or scale % 1 == 0 or (1 / scale) % 1 == 0
      given[name] = StaticValue(scale) if is_plain else (float(scale), 1.0 / scale)

  return prepare


def parts(order) -> tuple:
  """An order of a norm or a scale, prepared or not, and one by it."""
  return order if isinstance(order, tuple) else (order, 1.0 / order)
