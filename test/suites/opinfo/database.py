"""torch's own list of operators, `op_db`, with the inputs it suggests for each.

An operator is named as torch names it, with its variant: `linalg.matrix_norm`,
`std.unbiased`. Inputs are made on the CPU from a fixed seed.
"""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent import futures

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


def _generated(generate: Callable[[], Iterable]) -> list:
  """Return what torch generates from a fixed seed.

  For each input torch looks through the whole stack, which is deep inside pytest. That
  of a new thread is short.
  """
  with torch.random.fork_rng(devices=()), futures.ThreadPoolExecutor(1) as thread:
    torch.manual_seed(0)
    return thread.submit(lambda: list(generate())).result()


@functools.lru_cache(maxsize=1)
def _suggested(name: str, dtype: torch.dtype) -> list[SampleInput]:
  """Return all suggested inputs; every check of a test takes some of them."""
  return _generated(lambda: operators()[name].sample_inputs("cpu", dtype))


def samples(op: OpInfo, dtype: torch.dtype, most: int | None) -> list[SampleInput]:
  """Return at most `most` of the suggested inputs, spread over all of them."""
  suggested = _suggested(name_of(op), dtype)
  if most is None or len(suggested) <= most:
    return suggested
  return [suggested[place * len(suggested) // most] for place in range(most)]


def error_inputs(op: OpInfo) -> list:
  """Return the wrong calls that torch suggests, each with its error."""
  return _generated(lambda: op.error_inputs("cpu"))
