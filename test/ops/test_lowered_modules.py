"""Operations of real models: each lowers to the expected XLA operations only."""

import collections
import re

import jax
import pytest
import torch
import torch.nn.functional as F
from accelerators import ON_CPU
from ops.harness import floats, ints

import torchax
from torchax.interop import jax_view

IMAGE, KERNEL = floats(2, 3, 8, 8), floats(4, 3, 3, 3)
TOKENS, WEIGHT = floats(2, 4, 8), floats(5, 8)
HEADS = floats(2, 2, 4, 8)
IDS, TABLE = ints(2, 4, high=5), floats(5, 8)
LABELS = ints(5, high=8)
LSTM = torch.nn.LSTM(8, 8)


def gradient(function):
  """Return the gradients of the summed results for all floating-point inputs."""

  def compute(*tensors):
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(function(*leaves).sum(), wanted)

  return compute


def lstm(x):
  parameters = {name: p.to("jax") for name, p in LSTM.named_parameters()}
  return torch.func.functional_call(LSTM, parameters, (x,))[0]


# name: (function, inputs, counts of operations in the module)
ROWS = {
  "linear": (F.linear, (TOKENS, WEIGHT), {"dot_general": 1, "transpose": 0}),
  "linear, gradient": (gradient(F.linear), (TOKENS, WEIGHT), {"dot_general": 2}),
  "bmm": (torch.bmm, (TOKENS, floats(2, 8, 3)), {"dot_general": 1, "transpose": 0}),
  "matmul": (lambda q: q @ q.mT, (HEADS,), {"dot_general": 1}),
  "attention": (
    lambda q: F.scaled_dot_product_attention(q, q, q),
    (HEADS,),
    {"dot_general": 2, "exponential": 1},
  ),
  "conv2d": (F.conv2d, (IMAGE, KERNEL), {"convolution": 1, "transpose": 0}),
  "conv2d, gradient": (gradient(F.conv2d), (IMAGE, KERNEL), {"convolution": 2}),
  "conv_transpose2d": (
    F.conv_transpose2d,
    (IMAGE, floats(3, 4, 3, 3)),
    {"convolution": 1, "transpose": 0},
  ),
  "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (IMAGE,), {"reduce_window": 1}),
  "max_pool2d": (
    lambda x: F.max_pool2d(x, 2),
    (IMAGE,),
    {"gather": 0, "scatter": 0, "while": 0},
  ),
  "batch_norm": (
    lambda x: F.batch_norm(x, None, None, training=True),
    (IMAGE,),
    {"reduce": 2, "rsqrt": 1},
  ),
  "layer_norm": (
    lambda x: F.layer_norm(x, (8,)),
    (TOKENS,),
    {"reduce": 2, "rsqrt": 1},
  ),
  "softmax": (lambda x: x.softmax(-1), (TOKENS,), {"reduce": 2, "exponential": 1}),
  "embedding": (F.embedding, (IDS, TABLE), {"gather": 1, "dot_general": 0}),
  "embedding, gradient": (
    gradient(F.embedding),
    (IDS, TABLE),
    {"scatter": 1, "dot_general": 0},
  ),
  "index_select": (lambda t, i: t.index_select(0, i[0]), (TABLE, IDS), {"gather": 1}),
  "gather": (lambda t, i: t.gather(1, i), (TABLE, IDS), {"gather": 1, "scatter": 0}),
  "scatter_add": (
    lambda t, i: t.scatter_add(1, i, t[:2, :4]),
    (TABLE, IDS),
    {"scatter": 1, "gather": 0},
  ),
  "index_put": (
    lambda t, i: t.index_put((i[0],), t[:4]),
    (TABLE, IDS),
    {"scatter": 1, "gather": 0},
  ),
  "cross_entropy": (
    F.cross_entropy,
    (TABLE, LABELS),
    {"exponential": 1, "log": 1, "dot_general": 0},
  ),
  "interpolate, nearest": (
    lambda x: F.interpolate(x, scale_factor=2),
    (IMAGE,),
    {"broadcast_in_dim": 2, "gather": 0},
  ),
  # JAX has another algorithm for GPUs.
  "cumsum": (lambda x: x.cumsum(-1), (TOKENS,), {"reduce_window": 1} if ON_CPU else {}),
  "sort": (lambda x: x.sort(-1), (TOKENS,), {"sort": 1}),
  "masked_fill": (
    lambda x: x.masked_fill(x > 0, 0.0),
    (TOKENS,),
    {"select": 1, "scatter": 0},
  ),
  # One product for all inputs before the loop, one for the state inside.
  "lstm": (lstm, (TOKENS,), {"while": 1, "dot_general": 2}),
}


@pytest.mark.parametrize("name", ROWS)
def test_module_has_the_expected_operations(name):
  function, inputs, expected = ROWS[name]
  with torchax.default_env():
    arrays = [tensor.to("jax").jax() for tensor in inputs]
    text = jax.jit(jax_view(function)).lower(*arrays).as_text()
  counts = collections.Counter(re.findall(r"(?<!#)stablehlo\.(\w+)", text))
  assert {operation: counts[operation] for operation in expected} == expected
