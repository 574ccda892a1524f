"""torchmetrics on jax give the CPU's results."""

import importlib

import jax
import pytest
import torch
from ops.harness import floats, ints

torchmetrics = pytest.importorskip(
  "torchmetrics", reason="the extra `ecosystem` is not installed"
)
for part in ("retrieval", "text", "segmentation", "image"):
  importlib.import_module(f"torchmetrics.{part}")

LIBRARY, DISTRIBUTION = "torchmetrics", "torchmetrics"
LINES = '`torchax.enable_globally()`; `metric.to("jax")`'
CLASSES, COUNT = 4, 16


SCORES = floats(COUNT, CLASSES).softmax(-1)
LABELS = ints(COUNT, high=CLASSES)
CHANCES, HITS = floats(COUNT).sigmoid(), ints(COUNT, high=2)
VALUES = floats(COUNT, seed=1)
PICTURES = (floats(1, 1, 16, 16).sigmoid(), floats(1, 1, 16, 16, seed=1).sigmoid())
MASKS = (ints(1, 8, 8, high=3), ints(1, 8, 8, high=3, seed=1))
QUERIES = torch.arange(COUNT) // 4
MULTICLASS = {"task": "multiclass", "num_classes": CLASSES}

ROWS = {
  "Accuracy": (lambda: torchmetrics.Accuracy(**MULTICLASS), SCORES, LABELS),
  "AUROC": (lambda: torchmetrics.AUROC(task="binary"), CHANCES, HITS),
  "ROC": (lambda: torchmetrics.ROC(task="binary", thresholds=5), CHANCES, HITS),
  "ConfusionMatrix": (
    lambda: torchmetrics.ConfusionMatrix(**MULTICLASS),
    SCORES,
    LABELS,
  ),
  "CalibrationError": (
    lambda: torchmetrics.CalibrationError(task="binary"),
    CHANCES,
    HITS,
  ),
  "MeanSquaredError": (torchmetrics.MeanSquaredError, CHANCES, VALUES),
  "PearsonCorrCoef": (torchmetrics.PearsonCorrCoef, CHANCES, VALUES),
  "SpearmanCorrCoef": (torchmetrics.SpearmanCorrCoef, CHANCES, VALUES),
  "MeanMetric": (torchmetrics.MeanMetric, VALUES),
  "CatMetric": (torchmetrics.CatMetric, VALUES),
  "StructuralSimilarity": (
    lambda: torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0),
    *PICTURES,
  ),
  "MeanIoU": (
    lambda: torchmetrics.segmentation.MeanIoU(num_classes=3, input_format="index"),
    *MASKS,
  ),
  "MetricCollection": (
    lambda: torchmetrics.MetricCollection(
      [torchmetrics.Accuracy(**MULTICLASS), torchmetrics.F1Score(**MULTICLASS)]
    ),
    SCORES,
    LABELS,
  ),
}
# They check `dtype == torch.int64`, and jax tensors are as wide as JAX's integers.
WIDE = {
  "Perplexity": (torchmetrics.text.Perplexity, SCORES[None], LABELS[None]),
  "RetrievalMAP": (torchmetrics.retrieval.RetrievalMAP, CHANCES, HITS, QUERIES),
  "RetrievalNormalizedDCG": (
    torchmetrics.retrieval.RetrievalNormalizedDCG,
    CHANCES,
    HITS,
    QUERIES,
  ),
}
pytestmark = [
  pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`"),
  pytest.mark.usefixtures("env"),
]


def _compute(row, device: str):
  make, *arguments = row
  metric = make().to(device)
  for _ in range(2):
    metric.update(*[x.to(device) for x in arguments])
  found = metric.compute()
  leaves = torch.utils._pytree.tree_leaves(found)
  assert {x.device.type for x in leaves} == {device}
  metric.reset()
  return [x.cpu().double() for x in leaves]


@pytest.mark.parametrize("name", ROWS)
def test_a_metric_is_that_of_the_cpu(name):
  expected = _compute(ROWS[name], "cpu")
  torch.testing.assert_close(
    _compute(ROWS[name], "jax"), expected, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("name", WIDE)
def test_int64_metrics_equal_cpu_in_x64_mode_and_raise_otherwise(name):
  expected = _compute(WIDE[name], "cpu")
  with pytest.raises((TypeError, ValueError), match=r"int64|long integers"):
    _compute(WIDE[name], "jax")
  with jax.enable_x64(True):
    actual = _compute(WIDE[name], "jax")
  torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
