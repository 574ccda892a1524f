"""Inputs that CPU torch refuses are refused on jax by every operator, by error class.

`bad_inputs.py` makes inputs wrong; CPU torch decides which are wrong. If it only lacks
a kernel for a dtype, JAX may have one. All other inputs are refused in time, with
torch's error class and a message that a user understands. The quick form takes some
operators of each kind, `make test-bad-inputs` all.
"""

import os

import pytest
import torch
from faults import bad_inputs
from opinfo import database
from opinfo.checks import copied

import torchax

NAMES = [
  name
  for name, op in sorted(database.operators().items())
  if torch.float32 in op.dtypes
  and name not in bad_inputs.CRASHES
  and not name.startswith(("sparse", "item"))
]
QUICK = NAMES[7::16]
IS_FULL = os.environ.get("TORCHAX_BAD_INPUTS") == "all"


def _copied(given, device):
  """Copy arguments to a device; return None if 32 bits do not hold them."""
  try:
    return copied(given, device)
  except OverflowError:
    return None


def _raised(call, given):
  args, kwargs = given
  torch.manual_seed(0)
  try:
    with bad_inputs.in_time():
      call(*args, **kwargs)
  except Exception as error:
    return error
  return None


@pytest.mark.parametrize("name", NAMES if IS_FULL else QUICK)
def test_bad_inputs_raise_torchs_class_with_a_message(name):
  op = database.operators()[name]
  sample = next(iter(database.samples(op, torch.float32, 1)), None)
  if sample is None:
    pytest.skip("op_db has no sample of it in float32")
  faults = []
  for mutation, given in bad_inputs.of(sample):
    moved = _copied(given, "jax")
    expected = _raised(op, _copied(given, "cpu"))
    if expected is None or moved is None:
      continue
    with torchax.default_env():
      found = _raised(op, moved)
    fault = bad_inputs.fault(expected, found)
    if fault and (name, mutation) not in bad_inputs.EXCEPTIONS:
      faults.append(
        f"{mutation}: {fault}: {type(found).__name__}: {found}; "
        f"torch: {type(expected).__name__}: {expected}"
      )
  assert not faults, "\n".join(faults)
