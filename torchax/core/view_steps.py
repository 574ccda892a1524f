"""View steps, each a `ViewInfo`: how a view reads from its source and writes back.

Steps are immutable and hashable; `chains.py` joins them to chains.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import grad_mode, narrowing


class ViewInfoType(enum.Enum):
  """Kinds of view steps.

  >>> row = torch.ones(2, 2, device="jax")[0]
  >>> row.get_transformation_chain()[0].view_info_type.name
  'SELECT'
  """

  INVALID = 0
  NARROW = 1
  NO_OP = 2
  PERMUTE = 3
  RESHAPE = 4
  RESIZE = 5
  SELECT = 6
  AS_STRIDED = 7
  DIAGONAL = 8
  EXPAND = 9
  DTYPE = 10
  UNFOLD = 11
  CONJUGATE = 12
  NEGATE = 13


class ViewInfo:
  """One step from an array to a view of it.

  Subclasses define `transform_tensor`. `update_tensor` works for any view that picks
  elements; subclasses with a cheaper inverse override it.

  Args:
    view_info_type: kind of the step.
  """

  view_info_type: ClassVar[ViewInfoType] = ViewInfoType.INVALID
  # True if it selects elements unchanged; False if it converts them.
  picks: ClassVar[Any] = True

  # True if the view may contain an element several times.
  overlaps: ClassVar[Any] = False

  def __init__(self, view_info_type: ViewInfoType = ViewInfoType.INVALID):
    object.__setattr__(self, "view_info_type", view_info_type)

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    """Return the view of an array.

    Args:
      jax_array: array of any shape and dtype.

    >>> DiagonalInfo().transform_tensor(jnp.eye(2))
    Array([1., 1.], dtype=float32)
    """
    raise NotImplementedError(f"{type(self).__name__} does not say what it shows.")

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    """Return the array with `new_value` written to its view.

    Args:
      new_value: array of the view's shape.
      jax_array: array of any shape.

    Returns:
      A new array of the shape and dtype of `jax_array`.

    >>> DiagonalInfo().update_tensor(jnp.array([3, 4]), jnp.zeros((2, 2)))
    Array([[3., 0.],
           [0., 4.]], dtype=float32)
    """
    indices = np.arange(math.prod(jax_array.shape)).reshape(jax_array.shape)
    picked = self.view_numpy(indices).ravel()
    flat = jax_array.ravel().at[picked].set(new_value.ravel())
    return flat.reshape(jax_array.shape)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    """Return the view of a numpy array; subclasses avoid the detour through JAX.

    Args:
      array: numpy array of any shape.
    """
    with jax.ensure_compile_time_eval():  # also while JAX is tracing
      return np.asarray(self.transform_tensor(jnp.asarray(array)))

  @property
  def is_of_numpy(self) -> bool:
    """True if `view_numpy` makes no detour through JAX."""
    return type(self).view_numpy is not ViewInfo.view_numpy

  def calculate_output_shape(self, source: jax.Array) -> list[int]:
    """Return the shape of the view of an array.

    Args:
      source: array of any shape, or a `jax.ShapeDtypeStruct`.

    >>> DiagonalInfo().calculate_output_shape(jnp.ones((2, 3)))
    [2]
    """
    return list(jax.eval_shape(self.transform_tensor, source).shape)


def put_slice(array: jax.Array, value: jax.Array, dim: int, start) -> jax.Array:
  """Return the array with `value` at its elements from `start` on along `dim`.

  On the CPU avoid `dynamic_update_slice`. XLA (as of jaxlib 0.10.2) runs it in place,
  even if the same loop computes the value from elements it has just overwritten:
  `d = x[idx]; d = d.at[1:4].set(d[0:3])` under `jax.jit`.
  """
  if jax.default_backend() != "cpu":
    return lax.dynamic_update_slice_in_dim(array, value, start, dim)
  if isinstance(start, jax.Array):
    return _select_into(array, value, dim, start)
  before = lax.slice_in_dim(array, 0, start, axis=dim)
  after = lax.slice_in_dim(array, start + value.shape[dim], None, axis=dim)
  parts = [part for part in (before, value, after) if part.shape[dim]]
  return lax.concatenate(parts, dim) if len(parts) > 1 else value


def _select_into(array, value, dim: int, start) -> jax.Array:
  """Compute `put_slice` for a traced start; clamp the start to fit, as JAX does."""
  length, size = value.shape[dim], array.shape[dim]
  start = jnp.clip(jnp.where(start < 0, start + size, start), 0, size - length)
  offsets = lax.iota(jnp.int32, size) - start.astype(jnp.int32)
  spread = jnp.take(value, jnp.clip(offsets, 0, length - 1), dim)
  inside = (offsets >= 0) & (offsets < length)
  return jnp.where(lax.broadcast_in_dim(inside, array.shape, (dim,)), spread, array)


@dataclasses.dataclass(frozen=True)
class NarrowInfo(ViewInfo):
  """Slices: `array[slices]`, one `slice` per leading dimension.

  Args:
    slices: a slice, or one for each leading dimension.

  >>> NarrowInfo(slice(1, 3)).transform_tensor(jnp.arange(4))
  Array([1, 2], dtype=int32)
  """

  slices: tuple[tuple[int | None, int | None, int | None], ...] = ()
  view_info_type: ClassVar = ViewInfoType.NARROW

  def __init__(self, slices: slice | tuple[slice, ...]):
    slices = slices if isinstance(slices, tuple) else (slices,)
    bounds = tuple((s.start, s.stop, s.step) for s in slices)
    object.__setattr__(self, "slices", bounds)

  def _index(self):
    return tuple(slice(*part) for part in self.slices)

  def transform_tensor(self, jax_array):
    return jax_array[self._index()]

  view_numpy = transform_tensor

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    start = self._single_slice(jax_array.shape)
    if start is None:
      return jax_array.at[self._index()].set(new_value)
    if 0 in new_value.shape:
      return jax_array
    return put_slice(jax_array, new_value, *start)

  def _single_slice(self, shape) -> tuple[int, int] | None:
    """Return (dim, start) if one dimension alone is sliced, contiguously."""
    *before, last = self.slices
    if any(part != (None, None, None) for part in before):
      return None
    start, stop, step = slice(*last).indices(shape[len(before)])
    return (len(before), start) if step == 1 or stop - start <= step else None


def slice_of(dim: int, start: int, stop: int, step: int) -> NarrowInfo:
  """Return the step `array[:, …, start:stop:step]` at dimension `dim`."""
  return NarrowInfo((slice(None),) * dim + (slice(start, stop, step),))


@dataclasses.dataclass(frozen=True)
class SelectInfo(ViewInfo):
  """Slice of every `stride`-th element of [start, end) along `dim`.

  Attributes:
    dim: dimension, counted from 0.
    start: first index.
    end: end of the indices, exclusive.
    stride: distance of the indices; 0 means 1.

  >>> SelectInfo(dim=0, start=1, end=6, stride=2).transform_tensor(jnp.arange(6))
  Array([1, 3, 5], dtype=int32)
  """

  dim: int = 0
  start: int = 0
  end: int = 0
  stride: int = 0
  view_info_type: ClassVar = ViewInfoType.SELECT

  def _index(self):
    return (slice(None),) * self.dim + (slice(self.start, self.end, self.stride or 1),)

  def transform_tensor(self, jax_array):
    return jax_array[self._index()]

  view_numpy = transform_tensor

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return jax_array.at[self._index()].set(new_value)


@dataclasses.dataclass(frozen=True)
class IndexInfo(ViewInfo):
  """One element along `dim`, which is removed."""

  dim: int
  index: int
  view_info_type: ClassVar = ViewInfoType.SELECT

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.index_in_dim(jax_array, self.index, self.dim, keepdims=False)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return array[(slice(None),) * self.dim + (self.index, ...)]

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return put_slice(
      jax_array, jnp.expand_dims(new_value, self.dim), self.dim, self.index
    )


@dataclasses.dataclass(frozen=True)
class AsStridedInfo(ViewInfo):
  """Elements of the flattened array at `offset + index · stride`.

  Attributes:
    stride: elements to move per index, for each dimension.
    offset: position of the first element.
    size: shape of the view; None for the array's own.

  >>> AsStridedInfo(stride=(1, 1), size=(2, 2)).transform_tensor(jnp.arange(3))
  Array([[0, 1],
         [1, 2]], dtype=int32)
  """

  stride: tuple[int, ...] = ()
  offset: int = 0
  size: tuple[int, ...] | None = None
  view_info_type: ClassVar = ViewInfoType.AS_STRIDED

  def __init__(self, stride, offset: int = 0, size=None):
    object.__setattr__(self, "stride", tuple(stride))
    object.__setattr__(self, "offset", offset)
    object.__setattr__(self, "size", None if size is None else tuple(size))

  @property
  def overlaps(self) -> bool:
    reach = 0
    for stride, length in sorted(zip(self.stride, self.size or ())):
      if length > 1 and stride <= reach:
        return True
      reach += stride * (length - 1)
    return False

  def _indices(self, source_shape) -> np.ndarray:
    size = tuple(source_shape) if self.size is None else self.size
    indices = np.full(size, self.offset)
    for dim, (length, stride) in enumerate(zip(size, self.stride)):
      shape = [1] * len(size)
      shape[dim] = length
      indices = indices + (np.arange(length) * stride).reshape(shape)
    return indices

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return jax_array.ravel()[self._indices(jax_array.shape)]

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    flat = jax_array.ravel().at[self._indices(jax_array.shape)].set(new_value)
    return flat.reshape(jax_array.shape)


@dataclasses.dataclass(frozen=True)
class DiagonalInfo(ViewInfo):
  """Diagonal of two dimensions, as the last dimension.

  Attributes:
    offset: 0 for the main diagonal, above 0 for those over it.
    dim1: first dimension of the matrices.
    dim2: second dimension.

  >>> DiagonalInfo(offset=1).transform_tensor(jnp.arange(4).reshape(2, 2))
  Array([1], dtype=int32)
  """

  offset: int = 0
  dim1: int = 0
  dim2: int = 1
  view_info_type: ClassVar = ViewInfoType.DIAGONAL

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return jnp.diagonal(jax_array, self.offset, self.dim1, self.dim2)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return np.diagonal(array, self.offset, self.dim1, self.dim2)


@dataclasses.dataclass(frozen=True)
class UnfoldInfo(ViewInfo):
  """Windows of `size` elements, `step` apart, along `dim`: a new last dimension."""

  dim: int
  size: int
  step: int
  view_info_type: ClassVar = ViewInfoType.UNFOLD

  @property
  def overlaps(self) -> bool:
    return self.step < self.size

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return self._windows(jnp, jax_array)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return self._windows(np, array)

  def _windows(self, numpy, source):
    array = source.reshape(source.shape or (1,))
    count = (array.shape[self.dim] - self.size) // self.step + 1
    indices = np.arange(count)[:, None] * self.step + np.arange(self.size)
    windows = numpy.moveaxis(numpy.take(array, indices, self.dim), self.dim + 1, -1)
    return windows if source.shape else windows[0]


@dataclasses.dataclass(frozen=True)
class ReshapeInfo(ViewInfo):
  """Reshape: the same elements in the same order."""

  size: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.RESHAPE

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.reshape(jax_array, self.size)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return array.reshape(self.size)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return lax.reshape(new_value, jax_array.shape)


@dataclasses.dataclass(frozen=True)
class PermuteInfo(ViewInfo):
  """Permutation of the dimensions."""

  dims: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.PERMUTE

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.transpose(jax_array, self.dims)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return array.transpose(self.dims)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return lax.transpose(new_value, tuple(int(d) for d in np.argsort(self.dims)))


@dataclasses.dataclass(frozen=True)
class ExpandInfo(ViewInfo):
  """Broadcast of dimensions of size 1 and of new leading ones, without a copy.

  A write to a repeated element keeps one of the values. So does torch, which rejects
  such writes in most operations.
  """

  size: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.EXPAND

  overlaps = True

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jax_array, self.size)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array, self.size)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    if not new_value.size:  # a dimension expanded to 0
      return jax_array
    lead = new_value.ndim - jax_array.ndim
    index = (0,) * lead + tuple(slice(0, length) for length in jax_array.shape)
    return new_value[index]


@dataclasses.dataclass(frozen=True)
class DtypeInfo(ViewInfo):
  """Bytes viewed as another dtype (`Tensor.view(dtype)`)."""

  dtype: np.dtype
  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return _same_bytes(jax_array, self.dtype)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return _same_bytes(new_value, jax_array.dtype)


def _same_bytes(array, dtype):
  """View the bytes of an array as another dtype.

  `jax.Array.view` builds complex numbers by arithmetic, which changes NaN, infinities
  and denormal numbers.
  """
  if not array.ndim:
    return _same_bytes(array[None], dtype)[0]
  if jnp.issubdtype(array.dtype, jnp.complexfloating):
    array = _REAL_PAIRS.transform_tensor(array)
    array = array.reshape(*array.shape[:-2], 2 * array.shape[-2])
  if jnp.issubdtype(dtype, jnp.complexfloating):
    array = array.view(jnp.finfo(dtype).dtype)
    return _COMPLEX.transform_tensor(
      array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
    )
  with narrowing.uint64_kept((array, dtype)):
    return array.view(dtype)


@dataclasses.dataclass(frozen=True)
class ComplexAsRealInfo(ViewInfo):
  """Complex array as pairs of reals along a new last dimension."""

  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return jnp.stack([jax_array.real, jax_array.imag], axis=-1)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return lax.complex(new_value[..., 0], new_value[..., 1])


@dataclasses.dataclass(frozen=True)
class RealAsComplexInfo(ViewInfo):
  """Pairs of reals along the last dimension as a complex array."""

  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.complex(jax_array[..., 0], jax_array[..., 1])

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return jnp.stack([new_value.real, new_value.imag], axis=-1)


_REAL_PAIRS, _COMPLEX = ComplexAsRealInfo(), RealAsComplexInfo()


@dataclasses.dataclass(frozen=True)
class ConjugateInfo(ViewInfo):
  """Complex conjugate of the elements."""

  view_info_type: ClassVar = ViewInfoType.CONJUGATE
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.conj(jax_array)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return lax.conj(new_value)


@dataclasses.dataclass(frozen=True)
class NegateInfo(ViewInfo):
  """Negation of the elements."""

  view_info_type: ClassVar = ViewInfoType.NEGATE
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.neg(jax_array)

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    return lax.neg(new_value)


@dataclasses.dataclass(frozen=True)
class StopGradientInfo(ViewInfo):
  """Identity with `stop_gradient`: JAX sees no derivative through it."""

  view_info_type: ClassVar = ViewInfoType.NO_OP
  picks = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    return lax.stop_gradient(jax_array)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    return array

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    # torch does not record a write to a detached tensor.
    return grad_mode.with_derivative_of(jax_array, new_value)


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
  """Return the dimensions by decreasing stride.

  Dimensions of size 1 have arbitrary strides and keep their positions. All do if the
  tensor is empty or repeats elements.
  """
  dims = range(len(sizes))
  if 0 in sizes or any(s == 0 and n > 1 for s, n in zip(strides, sizes)):
    return tuple(dims)
  order = iter(sorted((d for d in dims if sizes[d] > 1), key=lambda d: -strides[d]))
  return tuple(next(order) if n > 1 else d for d, n in enumerate(sizes))


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
  """Return the strides of a contiguous tensor."""
  strides = [1] * len(sizes)
  for dim in range(len(sizes) - 2, -1, -1):
    strides[dim] = strides[dim + 1] * max(1, sizes[dim + 1])
  return strides
