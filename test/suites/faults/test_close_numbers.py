"""Another number takes no other program, unless a table here has a reason.

`close_numbers.py` calls each operation with numbers that keep the shapes of its
results. The first number may be compiled as a constant; the second compiles the program
of all others. The quick form takes some operators, `make test-close-numbers` all.
"""

import os

import pytest
import torch
from faults import close_numbers
from opinfo import database

_AXES = "an axis: a tensor has few, and what is done along one follows from it"
_WINDOWS = "windows: how far they reach decides what is padded and how often is added"
_SIZES = "a size, which follows from those of the tensors"
_CHOICES = "one of a few choices that torch numbers"

# Name of the argument -> (reason, an operator that shows it).
NAMES: dict[str, tuple[str, str]] = {
  "dim": (_AXES, "cumsum"),
  "dims": (_AXES, "roll"),
  "sumdim": (_AXES, "nn.functional.bilinear"),
  "expand1": (_AXES, "nn.functional.bilinear"),
  "expand3": (_AXES, "nn.functional.bilinear"),
  "kernel_size": (_WINDOWS, "nn.functional.fractional_max_pool2d"),
  "stride": (_WINDOWS, "nn.functional.conv3d"),
  "dilation": (_WINDOWS, "nn.functional.conv3d"),
  "output_padding": (_WINDOWS, "nn.functional.conv1d"),
  "step": (_WINDOWS, "unfold_copy"),
  "groups": (_SIZES, "nn.functional.channel_shuffle"),
  "size": (_SIZES, "unfold"),
  "split_size": (_SIZES, "unsafe_split"),
  "bias_sizes": (_SIZES, "nn.functional.conv1d"),
  "HxW": (_SIZES, "native_group_norm"),
  "reduction": (_CHOICES, "nn.functional.binary_cross_entropy"),
  "padding_mode": (_CHOICES, "nn.functional.grid_sample"),
  "interpolation_mode": (_CHOICES, "nn.functional.grid_sample"),
}

_INTERNAL = "torch's decompositions alone call it, with one fill each"
_REACH = "how far it reaches into the memory is checked for each program"

# (operation, argument) -> (reason, an operator that shows it).
EXCEPTIONS: dict[tuple[str, str], tuple[str, str]] = {
  ("aten.mvlgamma", "p"): ("a sum of p terms", "mvlgamma.mvlgamma_p_1"),
  ("aten.rot90", "k"): ("quarter turns, of which there are four", "rot90"),
  ("aten._unsafe_masked_index", "fill"): (_INTERNAL, "_unsafe_masked_index"),
  ("_unsafe_masked_index", "argument 3"): (_INTERNAL, "_unsafe_masked_index"),
  ("aten.as_strided_copy", "storage_offset"): (_REACH, "as_strided_copy"),
  ("aten.as_strided_scatter", "storage_offset"): (_REACH, "as_strided_scatter"),
}

# Calls with which CPU torch ends the process by a signal.
CRASHES = {
  ("aten._fft_c2r", "last_dim_size"),
  ("aten._embedding_bag_backward", "num_weights"),
  ("aten._embedding_bag_dense_backward", "num_weights"),
  ("aten._ctc_loss_backward", "blank"),
  ("aten._ctc_loss_backward", "input_lengths"),
  ("aten._ctc_loss_backward", "target_lengths"),
}

OPERATORS = [
  name
  for name, op in sorted(database.operators().items())
  if torch.float32 in op.dtypes and not name.startswith(("sparse", "item"))
]
QUICK = OPERATORS[3::24]
IS_FULL = os.environ.get("TORCHAX_CLOSE_NUMBERS") == "all"
SAMPLES = 3 if IS_FULL else 1

# (operation, argument) that this process has seen: operators share operations.
_known: set = set()


def _places(name, samples=3):
  op = database.operators()[name]
  for sample in database.samples(op, torch.float32, samples):
    yield from close_numbers.places(close_numbers.calls_of(op, sample))


@pytest.mark.parametrize("name", OPERATORS if IS_FULL else QUICK)
def test_close_numbers_share_a_program(name):
  growing = []
  for call, argument in _places(name, SAMPLES):
    place = (call.name, argument)
    if argument in NAMES or place in EXCEPTIONS or place in CRASHES:
      continue
    if (call.key, argument) in _known:
      continue
    is_growing = close_numbers.is_growing(call, argument)
    if is_growing is not None:
      _known.add((call.key, argument))
    if is_growing:
      growing.append(f"{call.name}, {argument}={call.number(argument)}")
  assert not growing, f"a program for each number: {'; '.join(growing)}"


ROWS = {name: (None, *row) for name, row in NAMES.items()} | {
  f"{operation}, {name}": (operation, *row)
  for (operation, name), row in EXCEPTIONS.items()
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_needed(row):
  """The number of a row must take programs; otherwise the row is not needed."""
  operation, _, operator = ROWS[row]
  argument = row.rpartition(", ")[2]
  assert any(
    close_numbers.is_growing(call, name)
    for call, name in _places(operator)
    if name == argument and operation in (None, call.name)
  )
