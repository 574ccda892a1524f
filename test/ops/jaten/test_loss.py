"""Losses against CPU torch."""

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

REDUCTIONS = ("none", "mean", "sum")
SUMS = dict(atol=1e-5, rtol=1e-5, why="sums of many terms, in another order")

PREDICTION, TARGET = floats(4, 6, low=-3.0, high=3.0), floats(4, 6, seed=1)
# Values on both branches of smooth_l1 and huber, and at the kink between them.
PREDICTION[0, 0] = TARGET[0, 0]
CHANCES, LABELS = floats(4, 6, low=0.0), ints(4, 6, high=2).float()
SURE = torch.tensor([0.0, 1.0, 0.0, 1.0])
LOGS = F.log_softmax(floats(4, 6, seed=2), 1)
CLASSES = torch.tensor([0, 5, 2, 2])
LABEL_LISTS = torch.tensor(
  [[3, 0, -1, 4, -1, 1], [5, 4, 3, 2, 1, 0], [-1] * 6, [2, 2, -1, 0, 0, 0]]
)
CLASS_WEIGHTS = floats(6, seed=3, low=0.1)
PIXELS, PIXEL_CLASSES = floats(2, 3, 4, 5), ints(2, 4, 5, high=3)


def soft_margin_loss(input, target, **kwargs):
  """torch has no gradient for the target."""
  return F.soft_margin_loss(input, target.detach(), **kwargs)


def multi_margin_loss(input, target, weight=None, **kwargs):
  """torch has no gradient for the class weights."""
  weight = None if weight is None else weight.detach()
  return F.multi_margin_loss(input, target, weight=weight, **kwargs)


def nll_loss(input, target, weight, **kwargs):
  """torch has no gradient for the class weights."""
  weight = None if weight is None else weight.detach()
  return F.nll_loss(input, target, weight, **kwargs)


CASES = (
  *(
    Case(function, PREDICTION, TARGET, reduction=reduction, grad=True, **SUMS)
    for function in (
      F.mse_loss,
      F.l1_loss,
      F.smooth_l1_loss,
      F.huber_loss,
      soft_margin_loss,
      F.kl_div,
    )
    for reduction in REDUCTIONS
  ),
  Case(F.smooth_l1_loss, PREDICTION, TARGET, beta=0.3, grad=True, **SUMS),
  Case(F.smooth_l1_loss, PREDICTION, TARGET, beta=0.0, grad=True, **SUMS),
  Case(F.huber_loss, PREDICTION, TARGET, delta=0.3, grad=True, **SUMS),
  Case(F.kl_div, PREDICTION, LOGS, log_target=True, grad=True, **SUMS),
  Case(F.kl_div, PREDICTION, LABELS, reduction="batchmean", **SUMS),
  Case(F.mse_loss, PREDICTION.half(), TARGET.half(), reduction="none", grad=True),
  Case(F.mse_loss, torch.tensor(2.0), torch.tensor(0.5), grad=True),
  *(
    Case(F.binary_cross_entropy, CHANCES, LABELS, reduction=reduction, **SUMS)
    for reduction in REDUCTIONS
  ),
  Case(F.binary_cross_entropy, CHANCES, LABELS, floats(6, low=0.0), **SUMS),
  Case(lambda p: F.binary_cross_entropy(p, LABELS.to(p.device)), CHANCES, grad=True),
  Case(lambda p: F.binary_cross_entropy(p, 1 - SURE.to(p.device)), SURE, grad=True),
  *(
    Case(
      F.binary_cross_entropy_with_logits,
      PREDICTION,
      LABELS,
      reduction=reduction,
      grad=True,
      **SUMS,
    )
    for reduction in REDUCTIONS
  ),
  Case(
    F.binary_cross_entropy_with_logits,
    PREDICTION,
    LABELS,
    floats(6, low=0.0),
    pos_weight=floats(6, low=0.5, high=2.0),
    **SUMS,
  ),
  *(
    Case(nll_loss, LOGS, CLASSES, weight, reduction=reduction, grad=True, **SUMS)
    for weight in (None, CLASS_WEIGHTS)
    for reduction in REDUCTIONS
  ),
  *(
    Case(F.nll_loss, LOGS, CLASSES, ignore_index=2, reduction=reduction, grad=True)
    for reduction in REDUCTIONS
  ),
  Case(F.nll_loss, LOGS, CLASSES, ignore_index=-100, grad=True),
  Case(F.nll_loss, LOGS, torch.full((4,), -100), grad=True),
  Case(F.nll_loss, LOGS[0], torch.tensor(3), grad=True),
  *(
    Case(F.nll_loss, PIXELS, PIXEL_CLASSES, reduction=reduction, grad=True, **SUMS)
    for reduction in REDUCTIONS
  ),
  Case(F.nll_loss, PIXELS, PIXEL_CLASSES, floats(3, low=0.1), ignore_index=1, **SUMS),
  Case(F.nll_loss, floats(2, 3, 4), ints(2, 4, high=3), grad=True, **SUMS),
  *(
    Case(function, PREDICTION, target, reduction=reduction, grad=True, **SUMS)
    for function, target in (
      (multi_margin_loss, CLASSES),
      (F.multilabel_margin_loss, LABEL_LISTS),
    )
    for reduction in REDUCTIONS
  ),
  Case(multi_margin_loss, PREDICTION, CLASSES, CLASS_WEIGHTS, p=2, grad=True, **SUMS),
  Case(F.multilabel_margin_loss, PREDICTION[0], LABEL_LISTS[0], grad=True, **SUMS),
  Case(F.cross_entropy, PREDICTION, CLASSES, grad=True, **SUMS),
  Case(F.cross_entropy, PREDICTION, CLASSES, label_smoothing=0.1, grad=True, **SUMS),
  Case(F.cross_entropy, PREDICTION, LOGS.exp(), grad=True, **SUMS),
  Case(F.cross_entropy, PREDICTION.bfloat16(), CLASSES, grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss(case):
  check(case)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_class_weights_have_the_dtype_of_the_input(device):
  prediction, classes = LOGS.to(device), CLASSES.to(device)
  with pytest.raises(RuntimeError):
    F.nll_loss(prediction, classes, CLASS_WEIGHTS.half().to(device))
