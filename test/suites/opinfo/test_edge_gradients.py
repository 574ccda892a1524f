"""Gradients where a derivative is a convention: eager and by JAX, against CPU torch.

The quick form takes the edge points of one suggested input, `make test-opinfo` those of
two. The latter also fails for a row of `edge_expectations.py` that no operator needs,
unless the processor decides that.
"""

import warnings

import pytest
import torch
from opinfo import database, edge_expectations, edge_points
from opinfo.checks import Checks, NotComparable
from torch.testing._internal.opinfo.core import SampleInput

OPERATORS = [
  name
  for name, op in database.operators().items()
  if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
]


def _samples(op) -> list[SampleInput]:
  # The first one is often the simplest: a number, no options.
  first_and_middle = database.samples(op, torch.float32, 2)
  return first_and_middle if database.IS_FULL else first_and_middle[-1:]


def _failures(name: str):
  """Return (point, check, error) of each difference."""
  checks = Checks(name, database.operators()[name], x64=False)
  for sample in _samples(checks.op):
    points = edge_points.edge_points(name, sample)
    for point, given in [("as suggested", sample), *points]:
      for check in edge_expectations.CHECKS:
        try:
          getattr(checks, check)(given)
        except NotComparable:
          break
        except Exception as error:
          yield point, check, error


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_at_edge_points_equal_cpu_torch(name):
  failures, needed = [], set()
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of experimental and renamed functions
    for point, check, error in _failures(name):
      row = edge_expectations.expected(name, check, point, error)
      needed.add(row)
      if row is None:
        error.add_note(f"{name}: {check} at {point}")
        failures.append(error)
  if failures:
    raise ExceptionGroup(name, failures)
  if database.IS_FULL:
    rows = [row for row in edge_expectations.DIFFERENCES if row.names(name)]
    strict = [row for row in rows if not row.by_processor]
    assert not [row.reason for row in strict if row not in needed]


def test_the_operators_are_not_empty():
  assert len(OPERATORS) > 500


@pytest.mark.parametrize(
  "row", edge_expectations.DIFFERENCES, ids=lambda row: row.reason
)
def test_row_names_existing_operators_and_points(row):
  for pattern in row.operators:
    assert any(row.names(name) for name in OPERATORS), pattern
  assert set(row.points) <= set(edge_points.NAMES)


# Generator of edge points ------------------------------------------------------------


def _points(name, *args, **kwargs) -> dict[str, SampleInput]:
  sample = SampleInput(args[0], args=args[1:], kwargs=kwargs)
  return dict(edge_points.edge_points(name, sample))


def test_numbers_of_the_call_are_among_the_bounds():
  points = _points("clamp", torch.zeros(8), 0.25, max=7.0)
  assert points["bounds"].input[:4].tolist() == [0.25, -0.25, 7.0, -7.0]


def test_equal_operands_and_distances_go_by_the_second_tensor():
  second = torch.tensor([5.0, 6.0])
  points = _points("maximum", torch.zeros(2), second)
  assert points["equal operands"].input.tolist() == [5.0, 6.0]
  assert points["bounds apart"].input.tolist() == [5.0, 7.0]
  assert points["bounds apart"].args[0] is second


def test_indices_repeat_and_are_padding():
  index, table = torch.tensor([1, 2, 3]), torch.ones(4, 2)
  points = _points("nn.functional.embedding", index, table, padding_idx=2)
  assert points["repeated indices"].input.tolist() == [1, 1, 1]
  assert points["padding"].input.tolist() == [2, 2, 2]
  points = _points("nn.functional.embedding", index, table, padding_idx=0)
  assert points["padding"].input.tolist() == [0, 2, 0]
  assert "padding" not in _points("nn.functional.embedding", index, table)


def test_labels_are_ignored_where_an_operator_ignores_any():
  labels = torch.tensor([1, 2, 3])
  points = _points("nn.functional.cross_entropy", torch.ones(3, 4), labels)
  assert points["ignored labels"].args[0].tolist() == [-100, 2, -100]
  assert "ignored labels" not in _points("gather", torch.ones(3), labels)


def test_a_change_that_does_not_concern_an_input_makes_no_point():
  points = _points("where", torch.tensor([True, False]), torch.zeros(2), torch.ones(2))
  assert points["all masked"].input.tolist() == [True, True]
  assert "repeated indices" not in points
  assert points["empty"].input.shape == (0,)
