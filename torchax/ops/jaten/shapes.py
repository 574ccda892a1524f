"""Rearrangement of elements: concatenation, repetition, diagonals, windows, strides.

Results are new arrays. The view operations (`aten.view`, `aten.slice`, …) belong to
the core; here are their `*_copy` and `*_scatter` variants and their backwards. Slices
are in `slices.py`, indexing with tensors in `indexing.py`, padding in `padding.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import mappings, out_of_range
from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers, _on_host
from torchax.ops.jaten._arguments import dim_of
from torchax.ops.promotion import promote
from torchax.registry.index_rules import Range
from torchax.registry.names import aten, prims


def _as_tuple(value) -> tuple:
  return (value,) if isinstance(value, int) else tuple(value)


# --- Concatenation and repetition ------------------------------------------------


def _cat_on_host(tensors, dim=0):
  first, *others = tensors
  if any(array.dtype != first.dtype or array.ndim != first.ndim for array in others):
    return None
  return np.concatenate(tensors, dim)


def _stack_on_host(tensors, dim=0):
  is_one = len({array.dtype for array in tensors}) == 1
  return np.stack(tensors, dim) if is_one else None


@op(aten.cat, on_host=_cat_on_host)
def _aten_cat(tensors, dim=0):
  """Concatenate tensors; as in torch, empty 1-d tensors are ignored."""
  arrays = promote(*tensors)
  joined = [array for array in arrays if array.shape != (0,)]
  if not joined:
    return arrays[0]
  dim = dim_of(dim, joined[0].ndim)
  return joined[0] if len(joined) == 1 else lax.concatenate(joined, dim)


@op(aten.stack, on_host=_stack_on_host)
def _aten_stack(tensors, dim=0):
  return jnp.stack(promote(*tensors), dim)


@op(aten.block_diag)
def _aten_block_diag(tensors):
  return jax.scipy.linalg.block_diag(*promote(*tensors))


@op(aten.repeat)
def _aten_repeat(self, repeats):
  return jnp.tile(self, repeats)


def _has_known_length(args, kwargs) -> bool:
  repeats = args[-1] if len(args) < 2 else args[1]
  return isinstance(repeats, int) or kwargs.get("output_size") is not None


def _repeats_rule(repeats):
  if not isinstance(repeats, int):
    yield Range(repeats, 0, 2**31, RuntimeError, "repeats can not be negative")


@op(
  aten.repeat_interleave.self_Tensor,
  aten.repeat_interleave.self_int,
  compiled=_has_known_length,
  rules=lambda self, repeats, *rest, **named: _repeats_rule(repeats),
  on_host=_on_host.repeat_interleave,
)
def repeat_interleave(self, repeats, dim=None, *, output_size=None):
  """Repeat each slice along `dim`, or each element without `dim`.

  Raises:
    TracedStateError: `repeats` is traced and `output_size` is missing.
  """
  _require_length(repeats, output_size)
  repeated = jnp.repeat(self, repeats, dim, total_repeat_length=output_size)
  return out_of_range.fill_invalid(repeated, jnp.any(jnp.asarray(repeats) < 0))


def _require_length(repeats, output_size) -> None:
  """Raise for negative repeats and for an unknown length of the result.

  Traced repeats have no values to check; their length is `output_size`.
  """
  if not isinstance(repeats, jax.core.Tracer) and np.any(np.asarray(repeats) < 0):
    raise RuntimeError("repeats can not be negative")
  if output_size is None and isinstance(repeats, jax.core.Tracer):
    raise TracedStateError(
      "repeat_interleave: the length of the result depends on the values of `repeats`, "
      "and these are unknown inside a JAX transformation such as jax.jit. Pass "
      "`output_size=`. If `repeats` is a Python number, name its position in "
      "`static_argnums` of `jax_jit`."
    )


@op(
  aten.repeat_interleave.Tensor,
  compiled=_has_known_length,
  rules=lambda repeats, **named: _repeats_rule(repeats),
  on_host=_on_host.repeat_interleave_positions,
)
def _aten_repeat_interleave_tensor(repeats, *, output_size=None):
  """Return each position repeated `repeats` times, in the dtype of `repeats`."""
  _require_length(repeats, output_size)
  positions = jnp.arange(repeats.shape[0], dtype=repeats.dtype)
  repeated = jnp.repeat(positions, repeats, total_repeat_length=output_size)
  return out_of_range.fill_invalid(repeated, jnp.any(repeats < 0))


@op(aten.flip, on_host=_on_host.flip)
def _aten_flip(self, dims):
  dims = [dim_of(dim, self.ndim) for dim in dims]
  return lax.rev(self, dims) if self.ndim else self


@op(aten.roll, dynamic=("shifts",))
def _aten_roll(self, shifts, dims=()):
  """Roll along `dims`; without `dims`, roll the flattened array."""
  shifts, dims = _as_tuple(shifts), _as_tuple(dims)
  return jnp.roll(self, shifts, dims) if dims else jnp.roll(self, shifts[0])


@op(aten.rot90)
def _aten_rot90(self, k=1, dims=(0, 1)):
  return jnp.rot90(self, k, dims)


# --- Channels and pixels ---------------------------------------------------------


def _check_divisible(name, size, factor):
  if factor <= 0 or size % factor:
    raise RuntimeError(
      f"{name} expects a size divisible by {factor}, but got {size} channels or pixels."
    )


@op(aten.pixel_shuffle)
def _aten_pixel_shuffle(self, upscale_factor):
  """Rearrange (*, C r², H, W) to (*, C, H r, W r)."""
  *batch, channels, height, width = self.shape
  r = upscale_factor
  _check_divisible("pixel_shuffle", channels, r * r)
  blocks = self.reshape(*batch, channels // (r * r), r, r, height, width)
  spread = jnp.moveaxis(blocks, (-4, -3), (-3, -1))
  return spread.reshape(*batch, channels // (r * r), height * r, width * r)


@op(aten.pixel_unshuffle)
def _aten_pixel_unshuffle(self, downscale_factor):
  """Rearrange (*, C, H r, W r) to (*, C r², H, W)."""
  *batch, channels, height, width = self.shape
  r = downscale_factor
  _check_divisible("pixel_unshuffle", height, r)
  _check_divisible("pixel_unshuffle", width, r)
  blocks = self.reshape(*batch, channels, height // r, r, width // r, r)
  gathered = jnp.moveaxis(blocks, (-3, -1), (-4, -3))
  return gathered.reshape(*batch, channels * r * r, height // r, width // r)


@op(aten.channel_shuffle, aten.native_channel_shuffle)
def _aten_channel_shuffle(self, groups):
  batch, channels, *space = self.shape
  _check_divisible("channel_shuffle", channels, groups)
  grouped = self.reshape(batch, groups, channels // groups, *space)
  return jnp.swapaxes(grouped, 1, 2).reshape(self.shape)


# --- Windows ---------------------------------------------------------------------


def _window_positions(length, size, step):
  """Return the positions that each window covers, of shape (windows, size)."""
  if size > length or step <= 0:
    raise RuntimeError(
      f"unfold expects size <= {length} and step > 0, but got size={size} and "
      f"step={step}."
    )
  starts = jnp.arange((length - size) // step + 1) * step
  return starts[:, None] + jnp.arange(size)


@op(aten.unfold_copy)
def _aten_unfold(self, dimension, size, step):
  """Return the windows along `dimension`, with their elements as last dimension."""
  axis = dim_of(dimension, self.ndim)
  length = self.shape[axis] if self.ndim else 1
  positions = _window_positions(length, size, step)
  if self.ndim == 0:
    return jnp.full((size,), self)
  windows = jnp.take(self, positions, axis, mode="clip")
  return jnp.moveaxis(windows, axis + 1, -1)


@op(aten.unfold_backward)
def _aten_unfold_backward(grad_in, input_sizes, dim, size, step):
  if not input_sizes:  # a 0-d tensor has at most one window, itself
    return grad_in.sum()
  axis = dim_of(dim, len(input_sizes))
  positions = _window_positions(input_sizes[axis], size, step)
  windows = jnp.moveaxis(grad_in, (axis, -1), (0, 1))
  other_sizes = input_sizes[:axis] + input_sizes[axis + 1 :]
  total = jnp.zeros((input_sizes[axis], *other_sizes), grad_in.dtype).at[positions]
  # A bool comes from a write to windows that do not overlap: there is no sum of bools.
  total = total.max(windows) if windows.dtype == bool else total.add(windows)
  return jnp.moveaxis(total, 0, axis)


def _strided_slice(array, axis, start, count, step):
  """Return `count` elements of an axis, `step` apart."""
  return lax.slice_in_dim(array, start, start + (count - 1) * step + 1, step, axis)


@op(aten.im2col)
def _aten_im2col(self, kernel_size, dilation, padding, stride):
  """Arrange patches as columns: (N, C, H, W) becomes (N, C kh kw, patches).

  It uses strided slices; a convolution with an identity kernel would round.
  """
  images = self if self.ndim == 4 else self[None]
  pads = [(0, 0), (0, 0), *((pad, pad) for pad in padding)]
  padded = jnp.pad(images, pads)
  counts = [
    (padded.shape[2 + d] - dilation[d] * (kernel_size[d] - 1) - 1) // stride[d] + 1
    for d in range(2)
  ]
  shifted = [
    _strided_slice(
      _strided_slice(padded, 2, top, counts[0], stride[0]),
      3,
      left,
      counts[1],
      stride[1],
    )
    for top in range(0, dilation[0] * kernel_size[0], dilation[0])
    for left in range(0, dilation[1] * kernel_size[1], dilation[1])
  ]
  batch, channels = images.shape[:2]
  columns = jnp.stack(shifted, 2).reshape(
    batch, channels * len(shifted), math.prod(counts)
  )
  return columns if self.ndim == 4 else columns[0]


@op(aten.col2im)
def _aten_col2im(self, output_size, kernel_size, dilation, padding, stride):
  """Compute the transpose of `im2col`: overlapping patches are summed."""
  *batch, rows, _ = self.shape
  channels = rows // math.prod(kernel_size)
  images = jax.ShapeDtypeStruct((*batch, channels, *output_size), self.dtype)
  transposed = jax.linear_transpose(
    lambda x: _aten_im2col(x, kernel_size, dilation, padding, stride), images
  )
  return transposed(self)[0]


# --- Diagonals -------------------------------------------------------------------


def _diagonal_length(rows, columns, offset) -> int:
  return max(min(rows - max(-offset, 0), columns - max(offset, 0)), 0)


def _put_diagonal(self, src, offset, dim1, dim2):
  """Write `src` to a diagonal of two dimensions; a traced `offset` must fit `src`."""
  matrices = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
  rows, columns = matrices.shape[-2:]
  is_known = isinstance(offset, int)
  length = _diagonal_length(rows, columns, offset) if is_known else src.shape[-1]
  steps = jnp.arange(length)
  indices = steps + jnp.maximum(-offset, 0), steps + jnp.maximum(offset, 0)
  written = matrices.at[..., *indices].set(src.astype(matrices.dtype))
  return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


@op(aten.diagonal_copy)
def _aten_diagonal(self, offset=0, dim1=0, dim2=1):
  return jnp.diagonal(self, offset, dim1, dim2)


def _check_diagonal(self, src, offset=0, dim1=0, dim2=1):
  dims = dim_of(dim1, self.ndim), dim_of(dim2, self.ndim)
  if dims[0] == dims[1]:
    raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
  other_sizes = [size for dim, size in enumerate(self.shape) if dim not in dims]
  length = _diagonal_length(*[self.shape[dim] for dim in dims], offset)
  if list(src.shape) != [*other_sizes, length]:
    raise RuntimeError(
      "expected src to have a size equal to the slice of self. src size = "
      f"{list(src.shape)}, slice size = {[*other_sizes, length]}"
    )


_OFFSET: dict = {"static": ("offset",), "prepare": _numbers.as_they_are}


@op(aten.diagonal_scatter, shape_check=_check_diagonal, **_OFFSET)
def _aten_diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
  if isinstance(offset, int):
    _check_diagonal(self, src, offset, dim1, dim2)
  return _put_diagonal(self, src, offset, dim1, dim2)


@op(aten.diagonal_backward, **_OFFSET)
def _aten_diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
  zeros = jnp.zeros(input_sizes, grad_output.dtype)
  return _put_diagonal(zeros, grad_output, offset, dim1, dim2)


@op(aten.diag_embed)
def _aten_diag_embed(self, offset=0, dim1=-2, dim2=-1):
  size = self.shape[-1] + abs(offset)
  zeros = jnp.zeros((*self.shape[:-1], size, size), self.dtype)
  matrices = _put_diagonal(zeros, self, offset, -2, -1)
  return jnp.moveaxis(matrices, (-2, -1), (dim1, dim2))


@op(aten.diag)
def _aten_diag(self, diagonal=0):
  return jnp.diag(self, diagonal)


@op(aten.diagflat)
def _aten_diagflat(self, offset=0):
  return jnp.diagflat(self, offset)


# --- Strides ---------------------------------------------------------------------


def _strided_indices(length, size, stride, storage_offset):
  """Return indices into a flat array of `length`, in the shape `size`."""
  last = storage_offset + sum((n - 1) * step for n, step in zip(size, stride))
  if math.prod(size) and not 0 <= last < length:
    raise RuntimeError(
      f"as_strided with size={size}, stride={stride} and storage_offset="
      f"{storage_offset} reaches element {last} of a tensor that has {length}."
    )
  indices = jnp.full(size, storage_offset or 0, jnp.int32)
  for axis, step in enumerate(stride):
    indices += lax.broadcasted_iota(jnp.int32, size, axis) * step
  return indices


def _is_contiguous(size, stride) -> bool:
  expected = 1
  for n, step in zip(reversed(size), reversed(stride)):
    if n != 1 and step != expected:
      return False
    expected *= n
  return True


def as_strided(array, size, stride, storage_offset=0):
  """Copy the elements of `torch.as_strided` from a contiguous tensor.

  Args:
    array: an array of any shape, read as flat memory in row-major order.
    size: the shape of the result.
    stride: the step in elements, for each dimension of `size`.
    storage_offset: index of the first element.

  Raises:
    RuntimeError: an element is outside of the array.
  """
  flat = array.reshape(-1)
  offset = storage_offset or 0
  if _is_contiguous(size, stride) and offset + math.prod(size) <= flat.size:
    return lax.slice_in_dim(flat, offset, offset + math.prod(size)).reshape(size)
  indices = _strided_indices(flat.size, size, stride, offset)
  return flat.at[indices].get(mode="promise_in_bounds")


@op(aten.as_strided_copy)
def _aten_as_strided(self, size, stride, storage_offset=None):
  return as_strided(self, size, stride, storage_offset or 0)


@op(aten.as_strided_scatter)
def _aten_as_strided_scatter(self, src, size, stride, storage_offset=None):
  """Write `src` to a strided view; of overlapping elements, one value remains."""
  flat = self.reshape(-1)
  indices = _strided_indices(flat.size, size, stride, storage_offset or 0)
  values = src.astype(self.dtype)
  return flat.at[indices].set(values, mode="promise_in_bounds").reshape(self.shape)


# --- Copies of views -------------------------------------------------------------


@op(aten.view_copy.default, aten._unsafe_view, aten._reshape_copy)
def _aten_unsafe_view(self, size):
  return jnp.reshape(self, size)


@op(aten.view_copy.dtype)
def _aten_view_dtype(self, dtype):
  return self.view(mappings.t2j_dtype(dtype))


@op(aten.permute_copy)
def permute(self, dims):
  return jnp.transpose(self, dims)


@op(aten.transpose_copy)
def _aten_transpose(self, dim0, dim1):
  return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@op(aten.t_copy)
def _aten_t(self):
  return self.T


@op(aten.expand_copy)
def _aten_expand(self, size, *, implicit=False):
  """Broadcast to `size`; -1 keeps the size of a dimension."""
  aligned = (1,) * (len(size) - self.ndim) + self.shape
  return jnp.broadcast_to(self, [n if m == -1 else m for m, n in zip(size, aligned)])


@op(aten.squeeze_copy)
def _aten_squeeze_dim(self, dim=None):
  """Remove dimensions of size 1; named dimensions of other sizes stay."""
  named = range(self.ndim) if dim is None else _as_tuple(dim)
  axes = {dim_of(axis, self.ndim) for axis in named} if self.ndim else ()
  return jnp.squeeze(self, tuple(a for a in axes if self.shape[a] == 1))


@op(aten.unsqueeze_copy)
def _aten_unsqueeze(self, dim):
  return jnp.expand_dims(self, dim)


@op(aten.detach_copy, aten.alias_copy)
def _aten_detach(self):
  return self


@op(aten.view_as_real_copy)
def _aten_view_as_real(self):
  return jnp.stack([lax.real(self), lax.imag(self)], -1)


@op(aten.view_as_complex_copy)
def _aten_view_as_complex(self):
  return lax.complex(self[..., 0], self[..., 1])


@op(
  aten.split_copy,
  aten.split_with_sizes_copy,
  aten.unsafe_split,
  aten.unsafe_split_with_sizes,
)
def split_with_sizes(self, split_sizes, dim=0):
  """Split into pieces of the given sizes, or of one size with a shorter last piece."""
  dim = dim_of(dim, self.ndim)
  length = self.shape[dim]
  if isinstance(split_sizes, int):
    size = split_sizes or length
    pieces = max(-(-length // size), 1) if size else 1
    split_sizes = [min(size, length - piece * size) for piece in range(pieces)]
  return lax.split(self, split_sizes, dim)


@op(aten.unbind_copy)
def _aten_unbind(self, dim=0):
  dim = dim_of(dim, self.ndim)
  length = self.shape[dim]
  return [lax.index_in_dim(self, i, dim, keepdims=False) for i in range(length)]


@op(prims.broadcast_in_dim)
def _prims_broadcast_in_dim(a, shape, broadcast_dimensions):
  return lax.broadcast_in_dim(a, shape, broadcast_dimensions)


@op(aten.sparse_dim, compiled=False)
def _aten_sparse_dim(self):
  return 0


@op(aten.dense_dim, compiled=False)
def _aten_dense_dim(self):
  return self.ndim
