"""CTC loss against CPU torch."""

import pytest
import torch
import torch.nn.functional as F
from compare import to_jax
from ops.harness import Case, check, floats, ints

SUMS = dict(atol=1e-5, rtol=1e-5, why="log-sums of many paths, in another order")

SCORES = floats(9, 3, 5, low=-2.0, high=2.0)
LABELS = ints(3, 4, low=1, high=5)
LABELS[0, :2] = 2  # a repeated label needs the blank between
INPUT_LENGTHS, TARGET_LENGTHS = torch.tensor([9, 7, 8]), torch.tensor([4, 2, 0])
# Three equal labels need five steps: this input has no path.
TOO_SHORT = torch.tensor([4, 7, 8])


def ctc(scores, *args, **kwargs):
  return F.ctc_loss(F.log_softmax(scores, -1), *args, **kwargs)


CASES = (
  *(
    Case(
      ctc,
      SCORES,
      LABELS,
      INPUT_LENGTHS,
      TARGET_LENGTHS,
      reduction=reduction,
      grad=True,
      **SUMS,
    )
    for reduction in ("none", "mean", "sum")
  ),
  Case(ctc, SCORES, LABELS, (9, 9, 9), (4, 2, 1), grad=True, **SUMS),
  Case(ctc, SCORES, LABELS - 1, (9, 9, 9), (4, 2, 1), blank=4, grad=True, **SUMS),
  Case(ctc, SCORES, LABELS.reshape(-1)[:7], (9, 8, 9), (4, 2, 1), grad=True, **SUMS),
  Case(ctc, SCORES[:, 0], LABELS[0, :3], (9,), (3,), grad=True, **SUMS),
  Case(ctc, SCORES, LABELS, INPUT_LENGTHS[:, None], TARGET_LENGTHS, **SUMS),
  Case(
    ctc,
    SCORES,
    torch.full((3, 3), 2),
    TOO_SHORT,
    torch.tensor([3, 3, 1]),
    zero_infinity=True,
    grad=True,
    **SUMS,
  ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ctc(case):
  check(case)


def test_unknown_reduction_raises_as_in_torch():
  arguments = (torch.zeros(5, 1, 3), torch.ones(1, 2, dtype=torch.long), (5,), (2,))
  for device in ("cpu", "jax"):
    log_probs, targets = (tensor.to(device) for tensor in arguments[:2])
    with pytest.raises(ValueError, match="bad is not a valid value for reduction"):
      F.ctc_loss(log_probs, targets, *arguments[2:], reduction="bad")


REFUSED = {
  "float input lengths": (SCORES, LABELS, INPUT_LENGTHS.float(), TARGET_LENGTHS),
  "float target lengths": (SCORES, LABELS, INPUT_LENGTHS, TARGET_LENGTHS.float()),
  "bool lengths": (SCORES, LABELS, INPUT_LENGTHS.bool(), TARGET_LENGTHS),
  "too few input lengths": (SCORES, LABELS, INPUT_LENGTHS[:1], TARGET_LENGTHS),
  "too few target lengths": (SCORES, LABELS, INPUT_LENGTHS, TARGET_LENGTHS[:1]),
  "too few lengths in a tuple": (SCORES, LABELS, (9, 9, 9), (4,)),
  "lengths of a batch": (SCORES[:, 0], LABELS, INPUT_LENGTHS, TARGET_LENGTHS),
  "integer scores": (SCORES.int(), LABELS, INPUT_LENGTHS, TARGET_LENGTHS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_torchs_type(name):
  with pytest.raises(Exception) as on_cpu:
    F.ctc_loss(*REFUSED[name])
  with pytest.raises(on_cpu.type):
    F.ctc_loss(*to_jax(REFUSED[name]))
