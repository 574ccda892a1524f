"""Most used operators, each against the same computation in jitted plain JAX.

The goal for an eager call is 1.5 times the compiled computation plus the dispatch goal,
three times `jnp.add` on 32×32 numbers.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

from benchmarks.timing import Row, compare, measure

# Shapes of a mini-batch of token vectors and of one of images.
TOKENS = (32, 128, 256)
IMAGES = (8, 16, 56, 56)
CLASSES = 1000

COMPUTE_FACTOR = 1.5
DISPATCH_FACTOR = 3.0


def _normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _integers(high, *shape):
  return np.random.default_rng(1).integers(0, high, shape)


X, Y = _normal(*TOKENS), _normal(*TOKENS, seed=1)
POSITIVE = np.abs(X) + 0.1
SCALE = np.ones(TOKENS[-1], np.float32)
W = _normal(1024, TOKENS[-1]) / 16
HEADS = _normal(8, 8, 128, 32)
IMAGE = _normal(*IMAGES)
KERNEL = _normal(32, IMAGES[1], 3, 3) / 12
CHANNELS = np.ones(IMAGES[1], np.float32)
LOGITS = _normal(512, CLASSES)
LABELS = _integers(CLASSES, 512)
TABLE = _normal(5000, 256)
IDS = _integers(5000, 32, 128)
ROWS = _integers(32 * 128, 2048)
MATRIX = X.reshape(-1, TOKENS[-1])
MASK = X > 0
PICKS = _integers(256, 4096, 16)


def _layer_norm(x, w, b):
  centred = x - x.mean(-1, keepdims=True)
  return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b


def _rms_norm(x, w):
  return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def _batch_norm(x, w, b):
  mean = x.mean((0, 2, 3), keepdims=True)
  variance = ((x - mean) ** 2).mean((0, 2, 3), keepdims=True)
  scale = w.reshape(1, -1, 1, 1) * lax.rsqrt(variance + 1e-5)
  return (x - mean) * scale + b.reshape(1, -1, 1, 1)


def _group_norm(x, w, b):
  grouped = x.reshape(x.shape[0], 4, -1)
  centred = grouped - grouped.mean(-1, keepdims=True)
  scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
  return scaled.reshape(x.shape) * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)


def _conv(x, w):
  return lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (1, 1)])


def _conv_strided(x, w):
  return lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)])


def _conv_transposed(x, w):
  flipped = jnp.flip(w, (2, 3)).swapaxes(0, 1)
  return lax.conv_general_dilated(x, flipped, (1, 1), [(1, 1), (1, 1)], (2, 2))


def _conv_transposed_4(x, w):
  """Convolve with a kernel as long as its stride: each element gives one block."""
  blocks = jnp.einsum("nihw,ioab->nohawb", x, w)
  return blocks.reshape(*blocks.shape[:2], 4 * x.shape[2], 4 * x.shape[3])


def _conv_depthwise(x, w):
  height, width = x.shape[2:]
  padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
  return sum(
    padded[:, :, i : i + height, j : j + width] * w[:, 0, i, j, None, None]
    for i in range(3)
    for j in range(3)
  )


def _window(x, start, operation):
  return lax.reduce_window(x, start, operation, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _cross_entropy(x, labels):
  chosen = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1)
  return -chosen.mean()


def _bce(x, y):
  return (jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))).mean()


def _attention(q):
  scores = jnp.einsum("bhqd,bhkd->bhqk", q, q) / np.sqrt(q.shape[-1])
  return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), q)


def _put(x, rows):
  return x.at[rows].set(1.0)


# name -> (torch function, JAX function, inputs)
OPERATORS = {
  "add": (torch.add, jnp.add, (X, Y)),
  "sub": (torch.sub, jnp.subtract, (X, Y)),
  "mul": (torch.mul, jnp.multiply, (X, Y)),
  "div": (torch.div, jnp.divide, (X, Y)),
  "pow": (lambda x: x**2, lambda x: x**2, (X,)),
  "sqrt": (torch.sqrt, jnp.sqrt, (POSITIVE,)),
  "rsqrt": (torch.rsqrt, lax.rsqrt, (POSITIVE,)),
  "exp": (torch.exp, jnp.exp, (X,)),
  "log": (torch.log, jnp.log, (POSITIVE,)),
  "tanh": (torch.tanh, jnp.tanh, (X,)),
  "sigmoid": (torch.sigmoid, jax.nn.sigmoid, (X,)),
  "relu": (torch.relu, jax.nn.relu, (X,)),
  "gelu": (F.gelu, lambda x: jax.nn.gelu(x, approximate=False), (X,)),
  "silu": (F.silu, jax.nn.silu, (X,)),
  "abs": (torch.abs, jnp.abs, (X,)),
  "clamp": (lambda x: x.clamp(-1, 1), lambda x: jnp.clip(x, -1, 1), (X,)),
  "where": (torch.where, jnp.where, (MASK, X, Y)),
  "lt": (torch.lt, jnp.less, (X, Y)),
  "maximum": (torch.maximum, jnp.maximum, (X, Y)),
  "masked_fill": (
    lambda x, m: x.masked_fill(m, 0.0),
    lambda x, m: jnp.where(m, 0.0, x),
    (X, MASK),
  ),
  "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1), (X,)),
  "mean": (lambda x: x.mean(1), lambda x: x.mean(1), (X,)),
  "var": (lambda x: x.var(-1), lambda x: x.var(-1, ddof=1), (X,)),
  "max": (
    lambda x: x.max(-1),
    lambda x: (x.max(-1), jnp.argmax(x, -1)),
    (X,),
  ),
  "argmax": (lambda x: x.argmax(-1), lambda x: x.argmax(-1), (X,)),
  "cumsum": (lambda x: x.cumsum(1), lambda x: jnp.cumsum(x, 1), (X,)),
  "norm": (
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda x: jnp.linalg.norm(x, axis=-1),
    (X,),
  ),
  "softmax": (lambda x: x.softmax(-1), lambda x: jax.nn.softmax(x, -1), (X,)),
  "log_softmax": (
    lambda x: x.log_softmax(-1),
    lambda x: jax.nn.log_softmax(x, -1),
    (X,),
  ),
  "layer_norm": (
    lambda x, w, b: F.layer_norm(x, (256,), w, b),
    _layer_norm,
    (X, SCALE, SCALE),
  ),
  "rms_norm": (lambda x, w: F.rms_norm(x, (256,), w, 1e-5), _rms_norm, (X, SCALE)),
  "batch_norm": (
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    _batch_norm,
    (IMAGE, CHANNELS, CHANNELS),
  ),
  "group_norm": (
    lambda x, w, b: F.group_norm(x, 4, w, b),
    _group_norm,
    (IMAGE, CHANNELS, CHANNELS),
  ),
  "linear": (
    F.linear,
    lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((), ()))),
    (X, W),
  ),
  "mm": (torch.mm, jnp.matmul, (MATRIX, np.ascontiguousarray(W.T))),
  "bmm": (torch.bmm, jnp.matmul, (X, np.ascontiguousarray(Y.swapaxes(1, 2)))),
  "matmul": (
    lambda q: q @ q.mT,
    lambda q: jnp.einsum("bhqd,bhkd->bhqk", q, q),
    (HEADS,),
  ),
  "einsum": (
    lambda x, w: torch.einsum("btd,ed->bte", x, w),
    lambda x, w: jnp.einsum("btd,ed->bte", x, w),
    (X, W),
  ),
  "scaled_dot_product_attention": (
    lambda q: F.scaled_dot_product_attention(q, q, q),
    _attention,
    (HEADS,),
  ),
  "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), _conv, (IMAGE, KERNEL)),
  "conv2d, stride 2": (
    lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    _conv_strided,
    (IMAGE, KERNEL),
  ),
  "conv2d, depthwise": (
    lambda x, w: F.conv2d(x, w, padding=1, groups=len(w)),
    _conv_depthwise,
    (IMAGE, _normal(IMAGES[1], 1, 3, 3)),
  ),
  "conv_transpose2d": (
    lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
    _conv_transposed,
    (IMAGE, np.ascontiguousarray(KERNEL.swapaxes(0, 1))),
  ),
  "conv_transpose2d, stride 4": (
    lambda x, w: F.conv_transpose2d(x, w, stride=4),
    _conv_transposed_4,
    (IMAGE, _normal(IMAGES[1], 8, 4, 4)),
  ),
  "conv3d": (
    lambda x, w: F.conv3d(x, w, padding=1),
    lambda x, w: lax.conv_general_dilated(x, w, (1, 1, 1), [(1, 1)] * 3),
    (_normal(1, 8, 8, 32, 32), _normal(16, 8, 3, 3, 3)),
  ),
  "max_pool2d": (
    lambda x: F.max_pool2d(x, 2),
    lambda x: _window(x, -np.inf, lax.max),
    (IMAGE,),
  ),
  "avg_pool2d": (
    lambda x: F.avg_pool2d(x, 2),
    lambda x: _window(x, 0.0, lax.add) / 4,
    (IMAGE,),
  ),
  "adaptive_avg_pool2d": (
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: x.mean((2, 3), keepdims=True),
    (IMAGE,),
  ),
  "interpolate": (
    lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    lambda x: jnp.repeat(jnp.repeat(x, 2, 2), 2, 3),
    (IMAGE,),
  ),
  "embedding": (
    lambda i, t: F.embedding(i, t),
    lambda i, t: t.at[i].get(mode="clip"),
    (IDS, TABLE),
  ),
  "index_select": (
    lambda x, i: x.index_select(0, i),
    lambda x, i: x.at[i].get(mode="clip"),
    (MATRIX, ROWS),
  ),
  "gather": (
    lambda x, i: x.gather(1, i),
    lambda x, i: jnp.take_along_axis(x, i, 1, mode="clip"),
    (MATRIX, PICKS),
  ),
  "scatter_add": (
    lambda x, i, s: x.scatter_add(1, i, s),
    lambda x, i, s: x.at[jnp.arange(len(x))[:, None], i].add(s),
    (MATRIX, PICKS, _normal(4096, 16)),
  ),
  "scatter_add, rows": (
    lambda x, i, s: x.scatter_add(0, i[:, None].expand_as(s), s),
    lambda x, i, s: x.at[i].add(s),
    (MATRIX, ROWS, _normal(2048, 256)),
  ),
  "index_put": (
    lambda x, i: x.index_put((i,), torch.ones((), device="jax")),
    _put,
    (MATRIX, ROWS),
  ),
  "cat": (
    lambda x, y: torch.cat([x, y], -1),
    lambda x, y: jnp.concatenate([x, y], -1),
    (X, Y),
  ),
  "stack": (lambda x, y: torch.stack([x, y]), lambda x, y: jnp.stack([x, y]), (X, Y)),
  "transpose": (
    lambda x: x.transpose(1, 2).contiguous(),
    lambda x: x.swapaxes(1, 2),
    (X,),
  ),
  "slice": (lambda x: x[:, 1:, ::2].clone(), lambda x: x[:, 1:, ::2], (X,)),
  "pad": (
    lambda x: F.pad(x, (1, 1, 1, 1)),
    lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))),
    (IMAGE,),
  ),
  "repeat": (lambda x: x.repeat(2, 1, 1), lambda x: jnp.tile(x, (2, 1, 1)), (X,)),
  "tril": (torch.tril, jnp.tril, (X,)),
  "flip": (lambda x: x.flip(1), lambda x: jnp.flip(x, 1), (X,)),
  "topk": (lambda x: x.topk(8), lambda x: lax.top_k(x, 8), (LOGITS,)),
  "sort": (
    lambda x: x.sort(-1),
    lambda x: lax.sort_key_val(x, lax.broadcasted_iota(jnp.int32, x.shape, 1), 1),
    (LOGITS,),
  ),
  "one_hot": (
    lambda i: F.one_hot(i, CLASSES),
    lambda i: jax.nn.one_hot(i, CLASSES, dtype=jnp.int32),
    (LABELS,),
  ),
  "cross_entropy": (F.cross_entropy, _cross_entropy, (LOGITS, LABELS)),
  "mse_loss": (F.mse_loss, lambda x, y: ((x - y) ** 2).mean(), (X, Y)),
  "binary_cross_entropy_with_logits": (
    F.binary_cross_entropy_with_logits,
    _bce,
    (X, np.asarray(MASK, np.float32)),
  ),
}


def rows() -> Iterator[Row]:
  """Yield a row for each operator, its goal as a ratio to the baseline."""
  small = jnp.ones((32, 32))
  dispatch_us = DISPATCH_FACTOR * measure(lambda: jnp.add(small, small))
  for name, (function, plain, inputs) in OPERATORS.items():
    tensors = [torch.as_tensor(value).to("jax") for value in inputs]
    arrays = [tensor.jax() for tensor in tensors]
    jitted = jax.jit(plain)
    row = compare(
      f"operator {name}",
      lambda function=function, tensors=tensors: function(*tensors),
      lambda jitted=jitted, arrays=arrays: jitted(*arrays),
      None,
    )
    row.goal = COMPUTE_FACTOR + dispatch_us / row.baseline_us
    yield row
