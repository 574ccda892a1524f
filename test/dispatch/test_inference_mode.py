"""Inference mode: composite operations arrive whole and give the usual results.

torch decomposes them above the dispatch to a subclass, but only while autograd is on.
The operator tests run each of their rows in inference mode too, inside the environment.
Here are calls outside of it, and composites that write or query.
"""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same, to_jax

import torchax
from torchax.interop import jax_jit

X = torch.linspace(-1, 1, 24).reshape(4, 6)
SIGNS = X.sign()
CLASSES = torch.tensor([1, 0, 5, 2])
IMAGE = torch.linspace(-1, 1, 72).reshape(1, 2, 6, 6)
SOME, ONE = torch.nn.Linear(6, 3).requires_grad_(False), torch.tensor(1)
KERNEL = torch.linspace(-1, 1, 54).reshape(3, 2, 3, 3)


def _item(x):
  return x[0, 1].item(), float(x[1, 2]), int(x[3, 5]), bool(x[0, 0])


LOSSES = (
  (F.cross_entropy, X, CLASSES),
  (F.nll_loss, X, CLASSES),
  (F.margin_ranking_loss, X, X * 2, SIGNS),
  (F.hinge_embedding_loss, X, SIGNS),
  (F.cosine_embedding_loss, X, X * X, SIGNS[:, 0]),
  (F.soft_margin_loss, X, SIGNS),
  (F.triplet_margin_loss, X, X + 1, X * X),
  (F.poisson_nll_loss, X, X.exp()),
  (F.multilabel_margin_loss, X, CLASSES[:, None].expand(4, 6).contiguous()),
  (F.l1_loss, X, X * X),
)

FUNCTIONS = {
  "item": (_item, X),
  "narrow": (lambda x, n: x.narrow(0, n, 2), X, ONE),
  "nonzero": (lambda x: (x > 0).nonzero(as_tuple=True), X),
  "cov": (torch.cov, X),
  "corrcoef": (torch.corrcoef, X**2 + X[:, :1]),
  "combinations": (torch.combinations, X[0]),
  "cartesian_prod": (torch.cartesian_prod, X[0], X[1]),
  "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), X, X),
  "tensordot": (lambda x, y: torch.tensordot(x, y, 1), X, X.T),
  "matmul": (torch.matmul, X, X.T),
  "linear": (F.linear, X, SOME.weight, SOME.bias),
  "bilinear": (F.bilinear, X, X, X.new_ones(2, 6, 6)),
  "conv2d": (F.conv2d, IMAGE, KERNEL),
  "conv2d_same": (lambda x, w: F.conv2d(x, w, padding="same"), IMAGE, KERNEL),
  "conv_transpose": (F.conv_transpose2d, IMAGE, KERNEL.transpose(0, 1)),
  "max_pool": (lambda x: F.max_pool2d(x, 2), IMAGE),
  "adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x, 3), IMAGE),
  "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
  "grid_sample": (
    lambda x, g: F.grid_sample(x, g, align_corners=False),
    IMAGE,
    IMAGE.permute(0, 2, 3, 1),
  ),
  "layer_norm": (lambda x: F.layer_norm(x, (6,)), X),
  "rms_norm": (lambda x: F.rms_norm(x, (6,)), X),
  "group_norm": (lambda x: F.group_norm(x, 2), IMAGE),
  "instance_norm": (F.instance_norm, IMAGE),
  "chunk": (lambda x: x.chunk(4, 1), X),
  "tensor_split": (lambda x: torch.tensor_split(x, torch.tensor([1, 3])), X),
  "std": (lambda x: torch.std(x, 1), X),
  "var_mean": (lambda x: torch.var_mean(x, 0), X),
  "where": (lambda x: torch.where(x > 0, x, 0.0), X),
  "meshgrid": (lambda x: torch.meshgrid(x[0], x[1], indexing="xy"), X),
  "pad_circular": (lambda x: F.pad(x, (1, 2), mode="circular"), X),
  "quantile": (lambda x: torch.quantile(x, 0.4, dim=1), X),
  "gradient": (torch.gradient, X),
  "isclose": (torch.isclose, X, X + 1e-9),
  "tensor": (lambda x: x + torch.tensor([1.5], device=x.device), X),
  "detach_": (lambda x: (x * 1).detach_(), X),
  "affine_grid of size 1": (
    lambda x: F.affine_grid(x, (2, 1, 3, 1), align_corners=False),
    IMAGE[0, :, :2, :3],
  ),
  "fill_diagonal_": (lambda x: (x * 1).fill_diagonal_(5.0), X),
  "square_": (lambda x: (x * 1).square_(), X),
  "lstm_cell": (
    lambda x, w, v: torch.lstm_cell(x, (x[:, :2], x[:, 2:4]), w, v),
    X,
    X[:1].expand(8, 6),
    X[:, :2].repeat(2, 1),
  ),
}


def _compare(function, inputs) -> None:
  expected = function(*inputs)
  with torch.inference_mode():
    assert_same(function(*to_jax(inputs)), expected)


@pytest.mark.parametrize("reduction", ["sum", "none", "mean"])
@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row[0].__name__)
def test_losses_follow_reduction(row, reduction):
  function, *inputs = row
  _compare(lambda *tensors: function(*tensors, reduction=reduction), inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_match_cpu_torch(name):
  function, *inputs = FUNCTIONS[name]
  _compare(function, inputs)


NORMS = {
  "batch": lambda: torch.nn.BatchNorm1d(2),
  "instance": lambda: torch.nn.InstanceNorm1d(2, track_running_stats=True),
}
WAYS = {
  "eager": lambda model: model,
  "jax_jit": jax_jit,
  "compile": torchax.compile,
  "torch.compile": lambda model: torch.compile(model, backend="jax"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_update_their_running_statistics(norm, way):
  torch._dynamo.reset()
  model, twin = NORMS[norm](), NORMS[norm]().to("jax")
  runs = WAYS[way](twin)
  x = X.reshape(3, 2, 4)
  with torch.inference_mode():
    for _ in range(2):
      assert_same(runs(to_jax(x)), model(x))
  assert_same(twin.running_mean, model.running_mean)
  assert_same(twin.running_var, model.running_var)
  assert twin.num_batches_tracked.item() == model.num_batches_tracked.item()
  assert model.running_mean.abs().sum() > 0


def test_dropout_draws_the_same_in_inference_mode():
  x = to_jax(X)
  torch.manual_seed(0)
  expected = F.dropout(x)
  torch.manual_seed(0)
  with torch.inference_mode():
    assert torch.equal(F.dropout(x), expected)
