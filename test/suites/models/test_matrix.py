"""Real models on jax equal the CPU's in each way to run them.

docs/models.md shows the matrix; `tools/model_table.py` writes it from a report of these
tests.
"""

import functools
import operator

import pytest
import torch
from compare import assert_close
from models.ways import WAYS, Run, run_on_cpu
from models.zoo import MODELS, VARIANTS

ROWS = MODELS | VARIANTS
loss_of = operator.itemgetter("loss")

each_way = pytest.mark.parametrize("way", WAYS)
each_model = pytest.mark.parametrize("name", MODELS)


def _assert_alike(actual: Run, expected: Run) -> None:
  for what in ("results", "gradients", "buffers"):
    have, want = getattr(actual, what), getattr(expected, what)
    assert have.keys() == want.keys(), what
    for name, value in want.items():
      if value is None:
        assert have[name] is None, f"{what} {name}"
      else:
        assert_close(have[name], value, f"{what} {name}")


@each_way
@each_model
def test_results_in_evaluation_equal_the_cpu(name, way):
  row = ROWS[name]
  model = row.model(dropout=0.5).eval()
  (expected,) = run_on_cpu(model, row.inputs(), None)
  (actual,) = WAYS[way](model, row.inputs(), None)
  _assert_alike(actual, expected)


@each_way
@pytest.mark.parametrize("name", ROWS)
def test_gradients_in_training_equal_the_cpu(name, way):
  row = ROWS[name]
  model = row.model(dropout=0.0).train()
  (expected,) = run_on_cpu(model, row.inputs(), loss_of)
  (actual,) = WAYS[way](model, row.inputs(), loss_of)
  _assert_alike(actual, expected)


@functools.cache
def _drawn(name: str, way: str) -> list[Run]:
  """Return training runs that draw: with a seed, another one, and the first again."""
  row = ROWS[name]
  model = row.model(dropout=0.3).train()
  return WAYS[way](model, row.undrawn_inputs(), loss_of, (1, 2, 1))


@each_way
@each_model
def test_a_seed_gives_the_same_draws_in_each_way(name, way):
  runs, expected = _drawn(name, way), _drawn(name, "eager")
  for run, eager in zip(runs, expected, strict=True):
    _assert_alike(run, eager)
    assert torch.equal(run.next_draw, eager.next_draw)
  first, other, again = (run.results["loss"] for run in runs)
  assert torch.equal(first, again)
  assert not torch.allclose(first, other)
