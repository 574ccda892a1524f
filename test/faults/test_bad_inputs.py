"""What CPU torch refuses of every operator is refused on jax in a class that says so.

Inputs are made wrong by `bad_inputs.py`. Where CPU torch refuses one, ours may take it:
JAX has kernels that torch lacks. But it never raises what a user cannot make sense of:
an error of Python's or JAX's own, without a word of the operation. The quick form takes
every twentieth operator, `TORCHAX_OPINFO=full` all.
"""

import pytest
import torch
from faults import bad_inputs
from opinfo import database
from opinfo.checks import copied

import torchax

EVERY = 1 if database.IS_FULL else 20
NAMES = [
  name
  for name, op in sorted(database.operators().items())
  if torch.float32 in op.dtypes
  and name not in bad_inputs.CRASHES
  and not name.startswith(("sparse", "item"))
][::EVERY]
# Words that say nothing of what was wrong.
SENSELESS = (
  "tuple index out of range",
  "unsupported operand",
  "Tracer",
  "maximum recursion",
  "SmallVector",
)


def _raised(call, given, device):
  args, kwargs = copied(given, device)
  torch.manual_seed(0)
  try:
    call(*args, **kwargs)
  except Exception as error:
    return error
  return None


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_input_is_refused_in_words(name):
  op = database.operators()[name]
  sample = next(iter(database.samples(op, torch.float32, 1)), None)
  if sample is None:
    pytest.skip("op_db has no sample of it in float32")
  for mutation, given in bad_inputs.of(sample):
    expected = _raised(op, given, "cpu")
    if expected is None:
      continue
    with torchax.default_env():
      found = _raised(op, given, "jax")
    if found is None:
      continue
    said = f"{name}, {mutation}: {type(found).__name__}: {found}; torch: {expected}"
    assert isinstance(found, RuntimeError | IndexError | ValueError | TypeError), said
    first = str(found).split("\n")[0]
    assert not any(words in first for words in SENSELESS), said
    # JAX's own; ours has the name of the operation and is a RuntimeError as well.
    assert not (type(found) is TypeError and "does not accept dtype" in first), said
