"""Fractional max pooling: max pooling with windows at random positions.

torch draws `random_samples`, one for each plane and dimension; nothing is drawn here
(Graham 2014, https://arxiv.org/abs/1412.6071). The index of a maximum is its position
in the flattened spatial dimensions of the input.
"""

import math

import jax.numpy as jnp
import torch

from torchax.core import mappings
from torchax.ops.jaten._arguments import expand_sizes
from torchax.ops.jaten.pooling import _max_pool_backward, register


def _starts(sample, size: int, pooled: int, kernel: int):
  """Return the starts of the windows along a dimension: samples (…) to (…, pooled)."""
  last = size - kernel
  windows = jnp.arange(pooled)
  if pooled == 1:
    return jnp.full((*sample.shape, 1), last)
  step = jnp.asarray(last / (pooled - 1), sample.dtype)
  first = sample[..., None]
  starts = ((windows + first) * step).astype(jnp.int32)
  starts -= (first * step).astype(jnp.int32)
  return jnp.where(windows == pooled - 1, last, starts)


def _fractional_max_pool(self, kernel_size, output_size, random_samples, rank: int):
  kernel, pooled = expand_sizes(kernel_size, rank), expand_sizes(output_size, rank)
  if min(kernel) < 1:
    raise RuntimeError(f"fractional_max_pool{rank}d(): got kernel_size={kernel}.")
  spatial = self.shape[-rank:]
  planes = self.reshape(math.prod(self.shape[:-rank]), math.prod(spatial))
  # Without a batch dimension, torch uses the samples of the first image.
  samples = random_samples.reshape(-1, rank)[: len(planes)]
  # In two dimensions the first sample is for the width; in three, for the depth.
  samples = samples[:, ::-1] if rank == 2 else samples
  cells = jnp.zeros((len(planes), *[1] * (2 * rank)), jnp.int32)
  for axis, (size, k, out) in enumerate(zip(spatial, kernel, pooled)):
    start = _starts(samples[:, axis], size, out, k)
    cell = start[:, :, None] + jnp.arange(k)
    shape = [len(planes)] + [1] * (2 * rank)
    shape[1 + axis], shape[1 + rank + axis] = out, k
    cells = cells * size + cell.reshape(shape)
  windows = (len(planes), math.prod(pooled), math.prod(kernel))
  return _maxima(planes, cells.reshape(windows), self, pooled)


def _maxima(planes, cells, self, pooled):
  """Return the maximum of each window and its index; cells (plane, window, cell)."""
  flat = cells.reshape(len(planes), math.prod(cells.shape[1:]))
  windows = jnp.take_along_axis(planes, flat, axis=1)
  windows = windows.reshape(cells.shape)
  best = jnp.argmax(windows, axis=-1, keepdims=True)
  shape = self.shape[: self.ndim - len(pooled)] + pooled
  values = jnp.take_along_axis(windows, best, axis=-1).reshape(shape)
  indices = jnp.take_along_axis(cells, best, axis=-1).reshape(shape)
  return values, indices.astype(mappings.t2j_dtype(torch.int64))


register("fractional_max_pool{}d", _fractional_max_pool)
register("fractional_max_pool{}d_backward", _max_pool_backward)
