"""How a view reads from its base and writes back to it, on arrays.

A `ViewInfo` is one step; a `Chain` is the steps from a base to a view. Both are
immutable and hashable, chains are interned: a compiled operation is cached by the
chains of its arguments, and so reads its views as part of one XLA computation.
The tensors are in `tensor.py` and `view.py`.
"""

import dataclasses
import enum
import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import chain_writes, grad_mode, out_of_range


class ViewInfoType(enum.Enum):
  """The kinds of view steps."""

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


@dataclasses.dataclass(frozen=True)
class ViewInfo:
  """One step from an array to a view of it.

  Subclasses give `transform_tensor`; `update_tensor` follows for any view that picks
  elements. Those that have a cheaper inverse give that.
  """

  view_info_type: ViewInfoType = ViewInfoType.INVALID
  # It shows elements as they are; False where it changes what an element is.
  picks: ClassVar[bool] = True

  # One element may show several times.
  overlaps: ClassVar[Any] = False

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    """The view of an array."""
    raise NotImplementedError(f"{type(self).__name__} does not say what it shows.")

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    """The array after `new_value` was written to the view of it."""
    places = np.arange(math.prod(jax_array.shape)).reshape(jax_array.shape)
    picked = self.picked(places).ravel()
    flat = jax_array.ravel().at[picked].set(new_value.ravel())
    return flat.reshape(jax_array.shape)

  def picked(self, places: np.ndarray) -> np.ndarray:
    """The view of a numpy array; some have a quicker way than through JAX."""
    return _on_host(self.transform_tensor, places)

  def calculate_output_shape(self, source: jax.Array) -> list[int]:
    """The shape of the view of an array."""
    return list(jax.eval_shape(self.transform_tensor, source).shape)


def _on_host(function, places: np.ndarray) -> np.ndarray:
  """Runs a view on the numbers of the elements, also while JAX is tracing."""
  with jax.ensure_compile_time_eval():
    return np.asarray(function(jnp.asarray(places)))


def put_slice(array: jax.Array, value: jax.Array, dim: int, start) -> jax.Array:
  """The array with `value` in place of its elements from `start` on along `dim`.

  Not an update of a slice on the CPU: XLA (as of jaxlib 0.10.2) runs that in place even
  where the value is made, in the same loop, of elements it has just overwritten
  (`d = x[idx]; d = d.at[1:4].set(d[0:3])` under `jax.jit`).
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
  """`put_slice` from a traced start; as in JAX, what would not fit is moved in."""
  length, size = value.shape[dim], array.shape[dim]
  start = jnp.clip(jnp.where(start < 0, start + size, start), 0, size - length)
  offsets = lax.iota(jnp.int32, size) - start.astype(jnp.int32)
  spread = jnp.take(value, jnp.clip(offsets, 0, length - 1), dim)
  inside = (offsets >= 0) & (offsets < length)
  return jnp.where(lax.broadcast_in_dim(inside, array.shape, (dim,)), spread, array)


@dataclasses.dataclass(frozen=True)
class NarrowInfo(ViewInfo):
  """Slices: `array[slices]`, one `slice` per leading dimension."""

  slices: tuple[tuple[int | None, int | None, int | None], ...] = ()
  view_info_type: ClassVar = ViewInfoType.NARROW

  def __init__(self, slices: slice | tuple[slice, ...]):
    slices = slices if isinstance(slices, tuple) else (slices,)
    parts = tuple((s.start, s.stop, s.step) for s in slices)
    object.__setattr__(self, "slices", parts)

  def _index(self):
    return tuple(slice(*part) for part in self.slices)

  def transform_tensor(self, jax_array):
    return jax_array[self._index()]

  picked = transform_tensor

  def update_tensor(self, new_value, jax_array):
    place = self._only(jax_array.shape)
    if place is None:
      return jax_array.at[self._index()].set(new_value)
    if 0 in new_value.shape:
      return jax_array
    return put_slice(jax_array, new_value, *place)

  def _only(self, shape) -> tuple[int, int] | None:
    """(dim, start) where one dimension alone is cut, in one piece."""
    *before, last = self.slices
    if any(part != (None, None, None) for part in before):
      return None
    start, stop, step = slice(*last).indices(shape[len(before)])
    return (len(before), start) if step == 1 or stop - start <= step else None


def slice_of(dim: int, start: int, stop: int, step: int) -> NarrowInfo:
  """`array[:, …, start:stop:step]` at dimension `dim`."""
  return NarrowInfo((slice(None),) * dim + (slice(start, stop, step),))


@dataclasses.dataclass(frozen=True)
class SelectInfo(ViewInfo):
  """Every `stride`-th element of [start, end) along `dim`."""

  dim: int = 0
  start: int = 0
  end: int = 0
  stride: int = 0
  view_info_type: ClassVar = ViewInfoType.SELECT

  def _index(self):
    return (slice(None),) * self.dim + (slice(self.start, self.end, self.stride or 1),)

  def transform_tensor(self, jax_array):
    return jax_array[self._index()]

  picked = transform_tensor

  def update_tensor(self, new_value, jax_array):
    return jax_array.at[self._index()].set(new_value)


@dataclasses.dataclass(frozen=True)
class IndexInfo(ViewInfo):
  """One element along `dim`, which disappears."""

  dim: int
  index: int
  view_info_type: ClassVar = ViewInfoType.SELECT

  def transform_tensor(self, jax_array):
    return lax.index_in_dim(jax_array, self.index, self.dim, keepdims=False)

  def picked(self, places):
    return places[(slice(None),) * self.dim + (self.index,)]

  def update_tensor(self, new_value, jax_array):
    return put_slice(
      jax_array, jnp.expand_dims(new_value, self.dim), self.dim, self.index
    )


@dataclasses.dataclass(frozen=True)
class AsStridedInfo(ViewInfo):
  """Elements of the flattened array at `offset + index · stride`."""

  stride: tuple[int, ...] = ()
  offset: int = 0
  size: tuple[int, ...] | None = None
  view_info_type: ClassVar = ViewInfoType.AS_STRIDED

  def __init__(self, stride, offset: int = 0, size=None):
    object.__setattr__(self, "stride", tuple(stride))
    object.__setattr__(self, "offset", offset)
    object.__setattr__(self, "size", None if size is None else tuple(size))

  @property
  def overlaps(self):
    reach = 0
    for stride, length in sorted(zip(self.stride, self.size or ())):
      if length > 1 and stride <= reach:
        return True
      reach += stride * (length - 1)
    return False

  def _places(self, source_shape) -> np.ndarray:
    size = tuple(source_shape) if self.size is None else self.size
    places = np.full(size, self.offset)
    for dim, (length, stride) in enumerate(zip(size, self.stride)):
      shape = [1] * len(size)
      shape[dim] = length
      places = places + (np.arange(length) * stride).reshape(shape)
    return places

  def transform_tensor(self, jax_array):
    return jax_array.ravel()[self._places(jax_array.shape)]

  def update_tensor(self, new_value, jax_array):
    flat = jax_array.ravel().at[self._places(jax_array.shape)].set(new_value)
    return flat.reshape(jax_array.shape)


@dataclasses.dataclass(frozen=True)
class DiagonalInfo(ViewInfo):
  """The diagonal of two dimensions, as the last dimension."""

  offset: int = 0
  dim1: int = 0
  dim2: int = 1
  view_info_type: ClassVar = ViewInfoType.DIAGONAL

  def transform_tensor(self, jax_array):
    return jnp.diagonal(jax_array, self.offset, self.dim1, self.dim2)

  def picked(self, places):
    return np.diagonal(places, self.offset, self.dim1, self.dim2)


@dataclasses.dataclass(frozen=True)
class UnfoldInfo(ViewInfo):
  """Windows of `size` elements, `step` apart, along `dim`: a new last dimension."""

  dim: int
  size: int
  step: int
  view_info_type: ClassVar = ViewInfoType.UNFOLD

  @property
  def overlaps(self):
    return self.step < self.size

  def transform_tensor(self, jax_array):
    return self._windows(jnp, jax_array)

  def picked(self, places):
    return self._windows(np, places)

  def _windows(self, numpy, source):
    array = source.reshape(source.shape or (1,))
    count = (array.shape[self.dim] - self.size) // self.step + 1
    places = np.arange(count)[:, None] * self.step + np.arange(self.size)
    windows = numpy.moveaxis(numpy.take(array, places, self.dim), self.dim + 1, -1)
    return windows if source.shape else windows[0]


@dataclasses.dataclass(frozen=True)
class ReshapeInfo(ViewInfo):
  """The same elements in the same order under another shape."""

  size: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.RESHAPE

  def transform_tensor(self, jax_array):
    return lax.reshape(jax_array, self.size)

  def picked(self, places):
    return places.reshape(self.size)

  def update_tensor(self, new_value, jax_array):
    return lax.reshape(new_value, jax_array.shape)


@dataclasses.dataclass(frozen=True)
class PermuteInfo(ViewInfo):
  """Dimensions in another order."""

  dims: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.PERMUTE

  def transform_tensor(self, jax_array):
    return lax.transpose(jax_array, self.dims)

  def picked(self, places):
    return places.transpose(self.dims)

  def update_tensor(self, new_value, jax_array):
    return lax.transpose(new_value, tuple(int(d) for d in np.argsort(self.dims)))


@dataclasses.dataclass(frozen=True)
class ExpandInfo(ViewInfo):
  """Dimensions of size 1, and new leading ones, repeated without a copy.

  A write to an element that shows several times keeps one of the values, as torch,
  which refuses such writes to most of its operations.
  """

  size: tuple[int, ...]
  view_info_type: ClassVar = ViewInfoType.EXPAND

  overlaps = True

  def transform_tensor(self, jax_array):
    return jnp.broadcast_to(jax_array, self.size)

  def picked(self, places):
    return np.broadcast_to(places, self.size)

  def update_tensor(self, new_value, jax_array):
    lead = new_value.ndim - jax_array.ndim
    index = (0,) * lead + tuple(slice(0, length) for length in jax_array.shape)
    return new_value[index]


@dataclasses.dataclass(frozen=True)
class DtypeInfo(ViewInfo):
  """The same bytes as another dtype (`Tensor.view(dtype)`)."""

  dtype: np.dtype
  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array):
    return _same_bytes(jax_array, self.dtype)

  def update_tensor(self, new_value, jax_array):
    return _same_bytes(new_value, jax_array.dtype)


def _same_bytes(array, dtype):
  """The bytes of an array as another dtype.

  `jax.Array.view` adds and multiplies complex numbers, which changes NaN, infinities
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
  return array.view(dtype)


@dataclasses.dataclass(frozen=True)
class ComplexAsRealInfo(ViewInfo):
  """A complex array as pairs of reals along a new last dimension."""

  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array):
    return jnp.stack([jax_array.real, jax_array.imag], axis=-1)

  def update_tensor(self, new_value, jax_array):
    return lax.complex(new_value[..., 0], new_value[..., 1])


@dataclasses.dataclass(frozen=True)
class RealAsComplexInfo(ViewInfo):
  """Pairs of reals along the last dimension as a complex array."""

  view_info_type: ClassVar = ViewInfoType.DTYPE
  picks = False

  def transform_tensor(self, jax_array):
    return lax.complex(jax_array[..., 0], jax_array[..., 1])

  def update_tensor(self, new_value, jax_array):
    return jnp.stack([new_value.real, new_value.imag], axis=-1)


_REAL_PAIRS, _COMPLEX = ComplexAsRealInfo(), RealAsComplexInfo()


@dataclasses.dataclass(frozen=True)
class ConjugateInfo(ViewInfo):
  """The complex conjugates of the elements."""

  view_info_type: ClassVar = ViewInfoType.CONJUGATE
  picks = False

  def transform_tensor(self, jax_array):
    return lax.conj(jax_array)

  def update_tensor(self, new_value, jax_array):
    return lax.conj(new_value)


@dataclasses.dataclass(frozen=True)
class NegateInfo(ViewInfo):
  """The elements with the other sign."""

  view_info_type: ClassVar = ViewInfoType.NEGATE
  picks = False

  def transform_tensor(self, jax_array):
    return lax.neg(jax_array)

  def update_tensor(self, new_value, jax_array):
    return lax.neg(new_value)


@dataclasses.dataclass(frozen=True)
class StopGradientInfo(ViewInfo):
  """The same elements, through which JAX's transformations see no derivative."""

  view_info_type: ClassVar = ViewInfoType.NO_OP
  picks = False

  def transform_tensor(self, jax_array):
    return lax.stop_gradient(jax_array)

  def picked(self, places):
    return places

  def update_tensor(self, new_value, jax_array):
    # torch records nothing of a write to a detached tensor.
    return grad_mode.with_derivative_of(jax_array, new_value)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedIndexInfo(ViewInfo):
  """One element along `dim`, at an index that is being traced; or a slice from there.

  An index outside of the dimension reads and writes `out_of_range.no_number`. A slice
  has to lie inside.
  """

  dim: int
  index: jax.Array
  length: int | None = None
  view_info_type: ClassVar = ViewInfoType.SELECT
  picks = False

  def transform_tensor(self, jax_array):
    moving = MovingInfo(self.dim, self.length, is_traced=True)
    return moving.transform_tensor(jax_array, self.index)

  def update_tensor(self, new_value, jax_array):
    moving = MovingInfo(self.dim, self.length, is_traced=True)
    return moving.update_tensor(new_value, jax_array, self.index)


@dataclasses.dataclass(frozen=True)
class MovingInfo:
  """A slice of known length along one dimension whose start is an operand.

  Attributes:
    dim: the dimension.
    length: of the slice; None for a single element, whose dimension disappears.
    is_traced: nobody knows whether there is such an element.
  """

  dim: int
  length: int | None
  is_traced: bool = False
  overlaps: ClassVar[bool] = False

  @property
  def picks(self) -> bool:
    """True unless the index may be outside of the dimension."""
    return not self.is_traced

  def transform_tensor(self, jax_array: jax.Array, start: jax.Array) -> jax.Array:
    """The slice of an array."""
    if self.length is None:
      row = lax.dynamic_index_in_dim(jax_array, start, self.dim, keepdims=False)
      return self._spoiled(row, jax_array, start)
    return lax.dynamic_slice_in_dim(jax_array, start, self.length, self.dim)

  def picked(self, places: np.ndarray, start) -> np.ndarray:
    """The slice of a numpy array."""
    part = start if self.length is None else slice(start, start + self.length)
    return places[(slice(None),) * self.dim + (part,)]

  def update_tensor(self, new_value, jax_array, start) -> jax.Array:
    """The array after `new_value` was written to the slice of it."""
    if self.length is None:
      new_value = self._spoiled(new_value, jax_array, start)
      new_value = jnp.expand_dims(new_value, self.dim)
    if 0 in new_value.shape:
      return jax_array
    return put_slice(jax_array, new_value, self.dim, jnp.asarray(start))

  def _spoiled(self, row, jax_array, start) -> jax.Array:
    if not self.is_traced:
      return row
    size = jax_array.shape[self.dim]
    return out_of_range.spoiled(row, out_of_range.outside(start, size, wraps=True))


def _moving(info: ViewInfo) -> tuple[MovingInfo, Any] | None:
  """A step as a moving one and its start; None for one that is no plain slice."""
  if isinstance(info, TracedIndexInfo):
    return MovingInfo(info.dim, info.length, is_traced=True), info.index
  if isinstance(info, IndexInfo):
    return MovingInfo(info.dim, None), info.index
  if isinstance(info, NarrowInfo):
    *before, (start, stop, step) = info.slices
    if step == 1 and start is not None and all(p == (None,) * 3 for p in before):
      return MovingInfo(len(before), stop - start), start
  return None


class MovingChain:
  """A chain whose slices start where an operand says: one program for all places.

  Reads and writes take (base array, starts) for the base.
  """

  __slots__ = ("infos",)

  def __init__(self, infos: tuple):
    self.infos = infos

  def _steps(self, starts):
    for place, info in enumerate(self.infos):
      yield info, ((starts[place],) if isinstance(info, MovingInfo) else ())

  def read(self, base_and_starts) -> jax.Array:
    """The view of a base array."""
    base, starts = base_and_starts
    for info, start in self._steps(starts):
      base = info.transform_tensor(base, *start)
    return base

  def picked(self, base_and_starts) -> np.ndarray:
    """The view of a numpy array; of starts that Python knows."""
    base, starts = base_and_starts
    for info, start in self._steps(starts):
      base = info.picked(base, *start)
    return base

  def write(self, base_and_starts, value: jax.Array) -> jax.Array:
    """The base array after `value` was written to the view."""
    base, starts = base_and_starts
    return chain_writes.write(list(self._steps(starts)), base, value)

  def __hash__(self):
    return hash(self.infos)

  def __eq__(self, other):
    return type(other) is MovingChain and self.infos == other.infos


class Chain:
  """The steps from a base array to a view of it. Interned: compare by identity.

  Where many slices of one form are taken (`for row in x`), the later ones are
  `moving`: (a `MovingChain`, the starts), and are not interned. So are those with an
  index that is being traced: their starts are a tuple.
  """

  __slots__ = (
    "infos", "moving", "is_marked", "_longer", "_shorter", "__weakref__"
  )  # fmt: skip

  # How many chains of one form get a program of their own, whatever their places.
  LIMIT = 8
  # Of how many forms that is counted.
  MOST_FORMS = 1024
  _taken: ClassVar[dict[tuple, int]] = {}

  def __init__(
    self,
    infos: tuple[ViewInfo, ...] = (),
    moving: bool = False,
    shorter: "Chain | None" = None,
  ):
    self.infos = infos
    # The one that knows this one: without it there would be another of these steps,
    # for which everything is compiled again.
    self._shorter = shorter
    self.moving = _as_moving(infos) if moving else None
    # torch's bits for conjugate and negative may be set.
    self.is_marked = any(isinstance(i, ConjugateInfo | NegateInfo) for i in infos)
    # Those that a tensor or a program has: they go with the last one.
    self._longer: dict[ViewInfo, weakref.ref[Chain]] = {}

  def append(self, info: ViewInfo) -> "Chain":
    """This chain and one more step; two reshapes or two dtypes become one."""
    reference = self._longer.get(info)
    longer = None if reference is None else reference()
    if longer is not None:
      return longer
    if self.moving is not None or type(info) is TracedIndexInfo:
      return Chain((*self.infos, info), moving=True)
    if _moving(info) is not None and self._is_often_taken(info):
      return Chain((*self.infos, info), moving=True)
    longer = self._append(info)
    self._longer[info] = weakref.ref(longer, _forgetting(self, info))
    return longer

  def _is_often_taken(self, info: ViewInfo) -> bool:
    """Count one more chain of this form; True over the limit."""
    taken = self._taken
    if len(taken) >= self.MOST_FORMS:
      taken.clear()
    form = _forms((*self.infos, info))
    taken[form] = taken.get(form, 0) + 1
    return taken[form] > self.LIMIT

  def _append(self, info: ViewInfo) -> "Chain":
    last = self.infos[-1] if self.infos else None
    if info == last and isinstance(info, ConjugateInfo | NegateInfo):
      return chain_of(*self.infos[:-1])
    if isinstance(info, DtypeInfo) and isinstance(last, DtypeInfo):
      return chain_of(*self.infos[:-1], info)  # the bytes are those before both
    if isinstance(info, ReshapeInfo) and isinstance(last, ReshapeInfo):
      return chain_of(*self.infos[:-1], info)
    return Chain((*self.infos, info), shorter=self)

  @property
  def is_traced(self) -> bool:
    """True where an index has no value yet."""
    return self.moving is not None and type(self.moving[1]) is tuple

  def read(self, base: jax.Array) -> jax.Array:
    """The view of a base array."""
    for info in self.infos:
      base = info.transform_tensor(base)
    return base

  def picked(self, base: np.ndarray) -> np.ndarray:
    """The view of a numpy array, without a copy where numpy has it."""
    for info in self.infos:
      base = info.picked(base)
    return base

  def write(self, base: jax.Array, value: jax.Array) -> jax.Array:
    """The base array after `value`, of the view's shape, was written to the view."""
    return chain_writes.write([(info, ()) for info in self.infos], base, value)

  def __repr__(self):
    return f"Chain{self.infos}"


def _forgetting(chain: Chain, info: ViewInfo) -> Callable:
  """Drops what a chain knows of a longer one that is gone; does not keep the chain."""
  shorter = weakref.ref(chain)

  def forget(reference: weakref.ref) -> None:
    chain = shorter()
    if chain is not None and chain._longer.get(info) is reference:
      del chain._longer[info]

  return forget


def _forms(infos: tuple[ViewInfo, ...]) -> tuple:
  """Return the steps without the places at which slices start."""
  forms = map(_moving, infos)
  return tuple(form[0] if form else info for form, info in zip(forms, infos))


def _as_moving(infos: tuple[ViewInfo, ...]) -> tuple[MovingChain, Any]:
  forms = map(_moving, infos)
  starts = [form[1] if form else 0 for form in forms]
  if any(isinstance(start, jax.Array) for start in starts):
    return MovingChain(_forms(infos)), tuple(starts)
  return MovingChain(_forms(infos)), np.array(starts, np.int32)


WHOLE = Chain()
"""The chain of a tensor that shows all of its storage."""


def chain_of(*infos: ViewInfo) -> Chain:
  """The interned chain of the given steps."""
  chain = WHOLE
  for info in infos:
    chain = chain.append(info)
  return chain
