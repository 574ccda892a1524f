"""Maximum and average pooling, adaptive pooling, unpooling, and their gradients.

Pooling is separable: dimensions are pooled one by one, the last one first.
Inputs are (N, C, spatial…) or (C, spatial…). Indices of maxima refer to the flattened
spatial plane of the input, as in torch.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import out_of_range
from torchax.core.mappings import limits
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten._arguments import expand_sizes
from torchax.ops.jaten.indexing import add_at, set_at
from torchax.ops.promotion import in_opmath, int64, widen
from torchax.registry.index_rules import Range
from torchax.registry.names import aten

# Index of a padding cell; any cell of the input replaces it.
NO_INDEX = -1


def register(name, function, **options):
  """Register `function(…, rank=)` for 2 and 3 dimensions; return the former."""
  lowerings = []
  for rank in (2, 3):
    lowering = functools.partial(function, rank=rank)
    lowering.__module__ = __name__  # makes it a member of this theme
    lowerings.append(op(getattr(aten, name.format(rank)), **options)(lowering))
  return lowerings[0]


def _window_sizes(rank, kernel_size, stride, padding, dilation):
  """Return kernel, stride, padding and dilation with `rank` entries each."""
  kernel, dilation = expand_sizes(kernel_size, rank), expand_sizes(dilation, rank)
  # An empty stride means the size of the kernel.
  stride = expand_sizes(stride, rank) if stride not in ((), [], None) else kernel
  return kernel, stride, expand_sizes(padding, rank), dilation


def _pooled_size(size, kernel, stride, padding, dilation, ceil_mode) -> int:
  span = size + 2 * padding - dilation * (kernel - 1) - 1
  pooled = (-(-span // stride) if ceil_mode else span // stride) + 1
  # The last window must start inside the input or the padding before it.
  if ceil_mode and (pooled - 1) * stride >= size + padding:
    pooled -= 1
  return pooled


def _index_plane(self, rank):
  """Return the index of each cell in the spatial plane, in the shape of the array."""
  spatial = self.shape[-rank:]
  plane = np.arange(math.prod(spatial)).reshape(spatial)
  return jnp.broadcast_to(jnp.asarray(plane, int64()), self.shape)


# ---- Maximum


def _max_along(values, indices, axis, kernel, stride, padding, dilation, ceil_mode):
  """Pool one axis with a running maximum over the cells of the window."""
  size = values.shape[axis]
  pooled = _pooled_size(size, kernel, stride, padding, dilation, ceil_mode)
  reach = (pooled - 1) * stride + dilation * (kernel - 1) + 1
  widths = [(0, 0, 0)] * values.ndim
  # A negative width crops the cells that no window covers.
  widths[axis] = (padding, reach - size - padding, 0)
  values = lax.pad(values, limits(values.dtype)[0], widths)
  indices = lax.pad(indices, jnp.asarray(NO_INDEX, indices.dtype), widths)

  def cell(array, offset):
    start = offset * dilation
    limit = start + (pooled - 1) * stride + 1
    return lax.slice_in_dim(array, start, limit, stride, axis)

  best, best_index = cell(values, 0), cell(indices, 0)
  for offset in range(1, kernel):
    value, index = cell(values, offset), cell(indices, offset)
    # NaN wins, a tie keeps the first: aten/src/ATen/native/cpu/MaxPoolKernel.cpp.
    wins = (value > best) | (value != value) | (best_index == NO_INDEX)
    best = jnp.where(wins, value, best)
    best_index = jnp.where(wins, index, best_index)
  return best, best_index


def _max_pool(
  self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False, *, rank
):
  windows = _window_sizes(rank, kernel_size, stride, padding, dilation)
  values, indices = self, _index_plane(self, rank)
  for axis, window in enumerate(reversed(list(zip(*windows))), start=1):
    values, indices = _max_along(values, indices, self.ndim - axis, *window, ceil_mode)
  return values, indices


_aten_max_pool2d_with_indices = register(
  "max_pool{}d_with_indices", _max_pool, index_results=(1,)
)


def _flatten_planes(array, rank):
  """Flatten the leading dimensions, and the `rank` spatial ones."""
  return array.reshape(math.prod(array.shape[:-rank]), math.prod(array.shape[-rank:]))


def _write(cells, indices, values, rank, put, **options):
  """Write values to cells (plane, cell) with `put`, at indices into the planes."""
  rows = jnp.arange(cells.shape[0])[:, None]
  flat, count = _flatten_planes(indices, rank), cells.shape[1]
  return out_of_range.write(
    cells,
    (rows, out_of_range.clip(flat, count)),
    _flatten_planes(values, rank),
    put,
    out_of_range.is_out_of_range(flat, count),
    **options,
  )


def _max_pool_backward(grad_output, self, *windows_and_indices, rank):
  """Add each gradient to the cell of its maximum."""
  indices = windows_and_indices[-1]
  cells = jnp.zeros(_flatten_planes(self, rank).shape, widen(grad_output).dtype)
  if cells.shape[1]:
    cells = _write(cells, indices, widen(grad_output), rank, add_at, gathers=True)
  return cells.reshape(self.shape).astype(grad_output.dtype)


max_pool2d_with_indices_backward_custom = register(
  "max_pool{}d_with_indices_backward", _max_pool_backward
)


def _unpool(self, indices, output_size, *windows, rank):
  """Write each value to the cell of its index; only 3-d calls have `windows`."""
  shape = (*self.shape[:-rank], *output_size)
  planes = math.prod(self.shape[:-rank])
  cells = jnp.zeros((planes, math.prod(output_size)), self.dtype)
  return _write(cells, indices, self, rank, set_at).reshape(shape)


def _unpool_rules(self, indices, output_size, *rest, **named):
  message = "Found an invalid max index: {number} (output volumes are of size "
  message += f"{'x'.join(map(str, output_size))})"
  yield Range(indices, 0, math.prod(output_size), RuntimeError, message)


_aten_max_unpoolxd = register("max_unpool{}d", _unpool, rules=_unpool_rules)


# ---- Average


def _divisors(size, pooled, kernel, stride, padding, count_include_pad):
  """Return the number of cells that each window of one dimension averages."""
  start = np.arange(pooled) * stride - padding
  end = np.minimum(start + kernel, size + padding)
  if not count_include_pad:
    start, end = np.maximum(start, 0), np.minimum(end, size)
  return end - start


def _avg_pool(
  self,
  kernel_size,
  stride=(),
  padding=0,
  ceil_mode=False,
  count_include_pad=True,
  divisor_override=None,
  *,
  rank,
):
  divisor = divisor_override
  kernel, stride, padding, _ = _window_sizes(rank, kernel_size, stride, padding, 1)
  spatial = self.shape[-rank:]
  dims = list(zip(spatial, kernel, stride, padding))
  pooled = [_pooled_size(n, k, s, p, 1, ceil_mode) for n, k, s, p in dims]
  leading = self.ndim - rank
  total = lax.reduce_window(
    self,
    np.zeros((), self.dtype),
    lax.add,
    (1,) * leading + kernel,
    (1,) * leading + stride,
    [(0, 0)] * leading
    + [(p, (out - 1) * s + k - n - p) for out, (n, k, s, p) in zip(pooled, dims)],
  )
  if divisor is None:
    divisor = np.ones((), np.int64)
    for out, (n, k, s, p) in zip(pooled, dims):
      counts = _divisors(n, out, k, s, p, count_include_pad)
      divisor = divisor[..., None] * counts
  # lax.div truncates integers, as torch does.
  return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, self.dtype), total.shape))


def _average(self, *windows, **named):
  def pool(array):
    return _avg_pool(array, *windows, **named)

  is_floating = jnp.issubdtype(self.dtype, jnp.floating)
  return in_opmath(pool)(self) if is_floating else pool(self)


def _linear_gradient(function, grad_output, self):
  """Return the gradient of `self` for a function that is linear in it."""
  primal = jax.ShapeDtypeStruct(self.shape, widen(grad_output).dtype)
  (gradient,) = jax.linear_transpose(function, primal)(widen(grad_output))
  return gradient.astype(grad_output.dtype)


_prepare_divisor = _numbers.static_if("divisor_override", is_static=lambda n: n == 0)
_DIVISOR: dict = {"static": ("divisor_override",), "prepare": _prepare_divisor}


def _avg_pool_backward(grad_output, self, *windows, rank):
  return _linear_gradient(
    lambda array: _avg_pool(array, *windows, rank=rank), grad_output, self
  )


op(aten.avg_pool1d)(functools.partial(_average, rank=1))
_aten_avg_pool = register("avg_pool{}d", _average, **_DIVISOR)
register("avg_pool{}d_backward", _avg_pool_backward, **_DIVISOR)


# ---- Adaptive


def _bins(size, pooled):
  """Return the cells of each bin of one dimension and their mask, both (bin, cell).

  Bin i covers floor(i * size / pooled) up to ceil((i + 1) * size / pooled). If
  `pooled` does not divide `size`, bins overlap and differ in length.
  """
  starts = np.arange(pooled) * size // pooled
  ends = -(-(np.arange(pooled) + 1) * size // pooled)
  longest = int((ends - starts).max(initial=1))
  cells = starts[:, None] + np.arange(longest)
  return np.minimum(cells, max(size - 1, 0)), cells < ends[:, None]


def _split_bins(array, axis, pooled):
  """Split `axis` into (bin, cell); also return the mask of valid cells, or None."""
  size = array.shape[axis]
  shape = array.shape
  if pooled and size % pooled == 0:
    split = (*shape[:axis], pooled, size // pooled, *shape[axis + 1 :])
    return array.reshape(split), None
  cells, member = _bins(size, pooled)
  split = (*shape[:axis], *cells.shape, *shape[axis + 1 :])
  binned = jnp.take(array, cells.reshape(-1), axis=axis, mode="clip").reshape(split)
  return binned, member.reshape(*member.shape, *(1,) * (array.ndim - axis - 1))


def _adaptive_sizes(self, output_size, rank):
  if any(size == 0 for size in self.shape[-rank:]):
    raise RuntimeError(
      "adaptive pooling expects non-empty spatial dimensions, but got shape "
      f"{self.shape}."
    )
  return expand_sizes(output_size, rank)


def _adaptive_avg_pool(self, output_size, rank):
  for axis, pooled in enumerate(
    _adaptive_sizes(self, output_size, rank), start=self.ndim - rank
  ):
    binned, member = _split_bins(self, axis, pooled)
    if member is None:
      self = jnp.mean(binned, axis=axis + 1)
    else:
      total = jnp.sum(jnp.where(member, binned, 0), axis=axis + 1)
      self = total / member.sum(axis=1).astype(self.dtype)
  return self


@op(aten._adaptive_avg_pool2d)
@in_opmath
def adaptive_avg_pool2or3d(self, output_size):
  return _adaptive_avg_pool(self, output_size, 2)


@op(aten._adaptive_avg_pool3d)
@in_opmath
def _aten__adaptive_avg_pool3d(self, output_size):
  return _adaptive_avg_pool(self, output_size, 3)


def _adaptive_avg_pool_backward(grad_output, self, *, rank):
  return _linear_gradient(
    lambda array: _adaptive_avg_pool(array, grad_output.shape[-rank:], rank),
    grad_output,
    self,
  )


register("_adaptive_avg_pool{}d_backward", _adaptive_avg_pool_backward)


def _adaptive_max_pool(self, output_size, rank):
  values, indices = self, _index_plane(self, rank)
  sizes = _adaptive_sizes(self, output_size, rank)
  for back, pooled in enumerate(reversed(sizes), start=1):
    axis = self.ndim - back
    binned, member = _split_bins(values, axis, pooled)
    binned_indices, _ = _split_bins(indices, axis, pooled)
    if member is not None:
      binned = jnp.where(member, binned, limits(self.dtype)[0])
    best = jnp.argmax(binned, axis=axis + 1, keepdims=True)
    values = jnp.take_along_axis(binned, best, axis=axis + 1).squeeze(axis + 1)
    indices = jnp.take_along_axis(binned_indices, best, axis=axis + 1).squeeze(axis + 1)
  return values, indices


register("adaptive_max_pool{}d", _adaptive_max_pool, index_results=(1,))
register("adaptive_max_pool{}d_backward", _max_pool_backward)
