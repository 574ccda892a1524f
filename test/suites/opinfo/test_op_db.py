"""Operators of torch's `op_db`, in every dtype, against CPU torch.

The quick form takes few of the suggested inputs. `make test-opinfo` takes many, and
`tools/operator_coverage.py` then lists rows of `expectations.py` that were not needed.
"""

import warnings

import jax
import pytest
import torch
from opinfo import database, expectations
from opinfo.checks import Checks, NotComparable
from packaging import version

# Number of inputs for each check. `test_edge_gradients.py` has more gradients by JAX,
# because one compiled function serves an input and its edge points there.
FULL = {
  "forward": 10,
  "gradient": 10,
  "jax_gradient": 1,
  "jit": 3,
  "in_place": 3,
  "out": 3,
  "error": None,
}
QUICK = {
  torch.float32: {
    "forward": 2,
    "gradient": 2,
    "jit": 1,
    "in_place": 1,
    "out": 1,
    "error": None,
  },
  torch.int64: {"forward": 2, "in_place": 1, "out": 1},
  torch.bool: {"forward": 1},
  torch.bfloat16: {"forward": 1, "gradient": 1},
  torch.complex64: {"forward": 1, "gradient": 1},
  torch.float64: {"forward": 1, "gradient": 1},
}
# Keep 64 bits if the dtype or the error needs them.
X64 = (torch.int64, torch.float64)


def _is_asked(check: str, op, dtype: torch.dtype) -> bool:
  if check in ("gradient", "jax_gradient"):
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
  if check == "in_place":
    return op.inplace_variant is not None
  if check == "error":
    return op.error_inputs_func is not None and dtype is torch.float32
  return op.supports_out if check == "out" else True


def _problems(checks: Checks, check: str, inputs) -> list[Exception] | str:
  """Return all failures, or the reason why nothing could be compared."""
  refused, problems = None, []
  compared = 0
  for given in inputs:
    try:
      getattr(checks, check)(given)
      compared += 1
    except NotComparable as refusal:
      refused = str(refusal)
    except Exception as error:
      problems.append(error)
  return refused if refused and not compared and not problems else problems


def _verdict(name, check, dtype, problems) -> str:
  """Return the verdict on a check for the report.

  Raises:
    AssertionError: there is a problem that is not expected; the first such one.
  """
  row = expectations.expected(name, check, dtype)
  if isinstance(problems, str):
    return f"CPU torch refuses: {problems}"
  for problem in problems:
    if row is None or not row.matches(problem):
      raise AssertionError(f"{check}: {type(problem).__name__}: {problem}") from problem
  return f"differs: {row.reason}" if problems else "right"


CASES = database.cases()


@pytest.mark.parametrize(
  ("name", "dtype"), CASES, ids=[f"{n}-{str(d)[6:]}" for n, d in CASES]
)
def test_agrees_with_cpu_torch(name, dtype, record_property):
  op = database.operators()[name]
  counts = FULL if database.IS_FULL else QUICK[dtype]
  failures = []
  for check, most in counts.items():
    if not _is_asked(check, op, dtype):
      continue
    x64 = dtype in X64 or check == "error"
    with warnings.catch_warnings(), jax.enable_x64(x64):
      # Torch warns of experimental and renamed functions.
      warnings.simplefilter("ignore")
      is_error = check == "error"
      given = (
        database.error_inputs(op) if is_error else database.samples(op, dtype, most)
      )
      problems = _problems(Checks(name, op, x64), check, given)
    try:
      record_property(check, _verdict(name, check, dtype, problems))
    except AssertionError as failure:
      record_property(check, "wrong")
      failures.append(failure)
  if failures:
    raise ExceptionGroup(f"{name} {dtype}", failures)


def test_the_sweep_is_not_empty():
  assert len(CASES) > 3000


@pytest.mark.parametrize("row", expectations.DIFFERENCES, ids=lambda row: row.reason)
def test_every_row_names_operators_that_exist(row):
  if row.since and version.parse(torch.__version__) < version.parse(row.since):
    pytest.skip(f"the tests of torch before {row.since} may lack {row.operators}")
  for pattern in row.operators:
    assert any(row.names(name) for name in database.operators()), pattern
