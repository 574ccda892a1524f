"""torch's own list of operators, `op_db`, with the inputs it suggests for each.

An operator is named as torch names it, with its variant: `linalg.matrix_norm`,
`std.unbiased`. Inputs are made on the CPU from a fixed seed.
"""

import functools
import os

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# All suggested inputs for `make test-opinfo`, or a few for the quick form.
IS_FULL = os.environ.get("TORCHAX_OPINFO") == "full"

DTYPES = (
  torch.float32,
  torch.int64,
  torch.bool,
  torch.bfloat16,
  torch.complex64,
  torch.float64,
)


def name_of(op: OpInfo) -> str:
  """Return the operator's name with its variant."""
  return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@functools.cache
def operators() -> dict[str, OpInfo]:
  """Return all of `op_db` by name."""
  return {name_of(op): op for op in op_db}


def cases(dtypes=DTYPES) -> list[tuple[str, torch.dtype]]:
  """Return (operator, dtype) for all that torch supports on the CPU."""
  return [
    (name, dtype)
    for name, op in operators().items()
    for dtype in dtypes
    if op.supports_dtype(dtype, "cpu")
  ]


def samples(op: OpInfo, dtype: torch.dtype, most: int | None) -> list[SampleInput]:
  """Return at most `most` of the suggested inputs, spread over all of them."""
  with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    suggested = list(op.sample_inputs("cpu", dtype, requires_grad=False))
  if most is None or len(suggested) <= most:
    return suggested
  return [suggested[place * len(suggested) // most] for place in range(most)]


def error_inputs(op: OpInfo) -> list:
  """Return the wrong calls that torch suggests, each with its error."""
  with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    return list(op.error_inputs("cpu"))
