"""Public name of `registry/operators.py`: operators and their implementations."""

from torchax.registry.operators import (
  Operator,
  all_aten_ops,
  all_torch_functions,
  register,
  register_torch_dispatch_op,
  register_torch_function_op,
)

__all__ = [
  "Operator",
  "all_aten_ops",
  "all_torch_functions",
  "register",
  "register_torch_dispatch_op",
  "register_torch_function_op",
]
