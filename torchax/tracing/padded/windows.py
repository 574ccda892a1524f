"""Rules for convolutions and for reductions of windows, such as pooling.

Both read zeros, or the neutral value, beyond the true elements.
"""

from torchax.tracing.padded.program import (
  Operation,
  Size,
  differs,
  fill,
  is_sized,
  rule,
)
from torchax.tracing.padded.rules import neutral


@rule("conv_general_dilated", sized=("padding",))
def _convolve(operation: Operation, left, right) -> list:
  _require_static_starts(operation)
  _require_whole_groups(operation)
  left, right = [
    fill(array, shape, range(array.ndim), 0)
    for array, shape in zip((left, right), operation.inputs)
  ]
  return operation.bind(left, right)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", sized=("padding",))
def _reduce_windows(operation: Operation, operand) -> list:
  _require_static_starts(operation)
  if differs(operation.params["window_dimensions"]):
    raise operation.refuse("its window depends on the size")
  value = neutral(operation.name, operand.dtype)
  shape = operation.inputs[0]
  return operation.bind(fill(operand, shape, range(operand.ndim), value))


def _require_static_starts(operation: Operation) -> None:
  """Refuse padding in front that depends on sizes: it would move all results."""
  if any(isinstance(low, Size) for low, _ in operation.params["padding"]):
    raise operation.refuse("its padding in front depends on the size")


def _require_whole_groups(operation: Operation) -> None:
  """Refuse groups of channels whose number depends on sizes: they would be split."""
  params, (left, right) = operation.params, operation.inputs
  numbers = params["dimension_numbers"]
  split = []
  if params["feature_group_count"] > 1:
    split += [left[numbers.lhs_spec[1]], right[numbers.rhs_spec[0]]]
  if params["batch_group_count"] > 1:
    split += [left[numbers.lhs_spec[0]], right[numbers.rhs_spec[0]]]
  if is_sized(split):
    raise operation.refuse("its groups of channels depend on the size")
