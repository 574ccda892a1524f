"""Chains of view steps: how a view reads from its base and writes back to it.

A `Chain` holds the steps from a base to a view. It is immutable and interned, because
the chains of the arguments are part of an operation's cache key. So an operation reads
its views inside its own XLA program. The steps are in `view_steps.py`.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.compat import jax_compat
from torchax.core import (
  explicit_axes,
  grad_mode,
  numpy_fallback,
  out_of_range,
  program_limit,
)
from torchax.core.bounded_cache import BoundedCache
from torchax.core.program_limit import Program
from torchax.core.view_steps import (
  ConjugateInfo,
  DtypeInfo,
  IndexInfo,
  NarrowInfo,
  NegateInfo,
  ReshapeInfo,
  StopGradientInfo,
  ViewInfo,
  ViewInfoType,
  put_slice,
)

_INT32 = range(-(2**31), 2**31)  # starts that can be operands


@dataclasses.dataclass(frozen=True, eq=False)
class TracedIndexInfo(ViewInfo):
  """One element along `dim` at a traced index, or a slice that starts there.

  An index outside the dimension reads and writes `out_of_range.fill_value`. A slice
  must be inside.
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
  """Slice of known length along one dimension, whose start is an operand.

  Attributes:
    dim: the dimension.
    length: length of the slice; None for a single element, which removes the dimension.
    is_traced: the index is a tracer and may be out of range.
  """

  dim: int
  length: int | None
  is_traced: bool = False
  overlaps: ClassVar[bool] = False

  @property
  def picks(self) -> bool:
    """True unless the index may be out of range."""
    return not self.is_traced

  def transform_tensor(self, jax_array: jax.Array, start: jax.Array) -> jax.Array:
    """Return the slice of an array."""
    if self.length is None:
      row = lax.dynamic_index_in_dim(jax_array, start, self.dim, keepdims=False)
      return self._fill_invalid(row, jax_array, start)
    return lax.dynamic_slice_in_dim(jax_array, start, self.length, self.dim)

  def view_numpy(self, array: np.ndarray, start) -> np.ndarray:
    """Return the slice of a numpy array."""
    part = start if self.length is None else slice(start, start + self.length)
    return array[(slice(None),) * self.dim + (part,)]

  def update_tensor(self, new_value, jax_array, start) -> jax.Array:
    """Return the array with `new_value` in its slice."""
    if self.length is None:
      new_value = self._fill_invalid(new_value, jax_array, start)
      new_value = jnp.expand_dims(new_value, self.dim)
    if 0 in new_value.shape:
      return jax_array
    return put_slice(jax_array, new_value, self.dim, jnp.asarray(start))

  def _fill_invalid(self, row, jax_array, start) -> jax.Array:
    if not self.is_traced:
      return row
    size = jax_array.shape[self.dim]
    return out_of_range.fill_invalid(
      row, out_of_range.is_out_of_range(start, size, wraps=True)
    )


def _moving(info: ViewInfo) -> tuple[MovingInfo, Any] | None:
  """Return a step as a `MovingInfo` and its start; None if it is no plain slice."""
  if isinstance(info, TracedIndexInfo):
    return MovingInfo(info.dim, info.length, is_traced=True), info.index
  if isinstance(info, IndexInfo):
    return (MovingInfo(info.dim, None), info.index) if info.index in _INT32 else None
  if isinstance(info, NarrowInfo):
    *before, (start, stop, step) = info.slices
    is_whole = all(part == (None, None, None) for part in before)
    if is_whole and step == 1 and start is not None and stop is not None:
      info_of_slice = MovingInfo(len(before), stop - start)
      return (info_of_slice, start) if start in _INT32 else None
  return None


def _write_through(steps: list, base: jax.Array, value: jax.Array) -> jax.Array:
  """Return `base` after writing `value` to the view of it.

  If a step repeats an element, that step and all later ones are written as one.
  Otherwise the other copies of the element would overwrite the new value.

  Args:
    steps: pairs of a `ViewInfo` and its starts; only a `MovingInfo` has starts.
    base: the array that the first step reads.
    value: an array with the shape of the view.
  """
  sources = [base]
  for info, start in steps[:-1]:
    sources.append(info.transform_tensor(sources[-1], *start))
  end = len(steps)
  while end:
    first = _first_of_write(steps, end)
    info, start = steps[first]
    if first == end - 1:
      value = info.update_tensor(value, sources[first], *start)
    else:
      value = _write_picked(steps[first:end], sources[first], value)
    end = first
  return value


def _first_of_write(steps: list, end: int) -> int:
  """Return the index of the first step before `end` that must be merged into one."""
  first = end - 1
  for index in range(end - 1, -1, -1):
    info, _ = steps[index]
    if not (info.picks or isinstance(info, StopGradientInfo)):
      break
    first = index if info.overlaps else first
  return first


def _write_picked(steps: list, source: jax.Array, value: jax.Array) -> jax.Array:
  picked = jnp.arange(source.size).reshape(source.shape)
  for info, start in steps:
    picked = info.transform_tensor(picked, *start)
  flat = source.ravel()
  if any(isinstance(info, StopGradientInfo) for info, _ in steps):
    value = grad_mode.with_derivative_of(flat[picked], value)
  return flat.at[picked].set(value).reshape(source.shape)


class MovingChain:
  """Chain whose slices take their starts as operands: one program for all starts.

  Reads and writes take (base array, starts) for the base.
  """

  __slots__ = ("infos",)

  def __init__(self, infos: tuple):
    self.infos = infos

  def _steps(self, starts):
    for index, info in enumerate(self.infos):
      yield info, ((starts[index],) if isinstance(info, MovingInfo) else ())

  def read(self, base_and_starts) -> jax.Array:
    """Return the view of a base array."""
    base, starts = base_and_starts
    for info, start in self._steps(starts):
      base = info.transform_tensor(base, *start)
    return base

  def view_numpy(self, base_and_starts) -> np.ndarray:
    """Return the view of a numpy array; the starts are concrete."""
    base, starts = base_and_starts
    for info, start in self._steps(starts):
      base = info.view_numpy(base, *start)
    return base

  def write(self, base_and_starts, value: jax.Array) -> jax.Array:
    """Return the base array after writing `value` to the view."""
    base, starts = base_and_starts
    return _write_through(list(self._steps(starts)), base, value)

  def __hash__(self):
    return hash(self.infos)

  def __eq__(self, other):
    return type(other) is MovingChain and self.infos == other.infos


class Chain:
  """Steps from a base array to a view of it. Interned: compare by identity.

  If many slices differ only in their starts (`for row in x`), later chains are not
  interned. They have `moving`, a pair of a `MovingChain` and the starts. The same holds
  for chains with a traced index; their starts are a tuple.
  """

  __slots__ = (
    "infos", "moving", "is_marked", "_longer", "_shorter", "__weakref__"
  )  # fmt: skip

  # Chains that differ only in their starts and still get a program each.
  LIMIT = 8
  # Largest number of forms (chains without their starts) that are counted.
  MOST_FORMS = 1024
  _counts: ClassVar[dict[tuple, int]] = {}

  def __init__(
    self,
    infos: tuple[ViewInfo, ...] = (),
    moving: bool = False,
    shorter: "Chain | None" = None,
  ):
    self.infos = infos
    # Keeps the parent's entry for this chain alive. Without it the same steps would
    # give another chain, and programs would be compiled again.
    self._shorter = shorter
    self.moving = _as_moving(infos) if moving else None
    # torch's conjugate or negative bit may be set.
    self.is_marked = any(isinstance(i, ConjugateInfo | NegateInfo) for i in infos)
    # Weak: a chain lives as long as a tensor or a program uses it.
    self._longer: dict[ViewInfo, weakref.ref[Chain]] = {}

  def append(self, info: ViewInfo) -> "Chain":
    """Return this chain with one more step; two reshapes or two dtypes become one."""
    reference = self._longer.get(info)
    longer = None if reference is None else reference()
    if longer is not None:
      return longer
    if self.moving is not None or type(info) is TracedIndexInfo:
      return Chain((*self.infos, info), moving=True)
    if _moving(info) is not None and self._is_frequent(info):
      return Chain((*self.infos, info), moving=True)
    longer = self._append(info)
    self._longer[info] = weakref.ref(longer, _forget_callback(self, info))
    return longer

  def _is_frequent(self, info: ViewInfo) -> bool:
    """Count one more chain of this form; return True over the limit."""
    counts = self._counts
    if len(counts) >= self.MOST_FORMS:
      counts.clear()
    form = _forms((*self.infos, info))
    counts[form] = counts.get(form, 0) + 1
    return counts[form] > self.LIMIT

  def _append(self, info: ViewInfo) -> "Chain":
    last = self.infos[-1] if self.infos else None
    if info == last and isinstance(info, ConjugateInfo | NegateInfo):
      return chain_of(*self.infos[:-1])
    if isinstance(info, DtypeInfo) and isinstance(last, DtypeInfo):
      return chain_of(*self.infos[:-1], info)  # both read the same bytes
    if isinstance(info, ReshapeInfo) and isinstance(last, ReshapeInfo):
      return chain_of(*self.infos[:-1], info)
    return Chain((*self.infos, info), shorter=self)

  @property
  def is_traced(self) -> bool:
    """True if an index is a tracer."""
    return self.moving is not None and type(self.moving[1]) is tuple

  def read(self, base: jax.Array) -> jax.Array:
    """Return the view of a base array."""
    for info in self.infos:
      base = info.transform_tensor(base)
    return base

  def view_numpy(self, base: np.ndarray) -> np.ndarray:
    """Return the view of a numpy array, without a copy if numpy can."""
    for info in self.infos:
      base = info.view_numpy(base)
    return base

  def write(self, base: jax.Array, value: jax.Array) -> jax.Array:
    """Return the base array after writing `value`, of the view's shape, to the view."""
    return _write_through([(info, ()) for info in self.infos], base, value)

  def __repr__(self):
    return f"Chain{self.infos}"


def _forget_callback(chain: Chain, info: ViewInfo) -> Callable:
  """Return a weakref callback that removes a dead longer chain from `chain._longer`."""
  shorter = weakref.ref(chain)

  def forget(reference: weakref.ref) -> None:
    chain = shorter()
    if chain is not None and chain._longer.get(info) is reference:
      del chain._longer[info]

  return forget


def _forms(infos: tuple[ViewInfo, ...]) -> tuple:
  """Return the steps without the starts of their slices."""
  forms = map(_moving, infos)
  return tuple(form[0] if form else info for form, info in zip(forms, infos))


def _as_moving(infos: tuple[ViewInfo, ...]) -> tuple[MovingChain, Any]:
  forms = map(_moving, infos)
  starts = [form[1] if form else 0 for form in forms]
  if any(isinstance(start, jax.Array) for start in starts):
    return MovingChain(_forms(infos)), tuple(starts)
  return MovingChain(_forms(infos)), np.array(starts, np.int32)


WHOLE = Chain()
"""Chain of a tensor that covers its whole storage."""


def chain_of(*infos: ViewInfo) -> Chain:
  """Return the interned chain of the given steps."""
  chain = WHOLE
  for info in infos:
    chain = chain.append(info)
  return chain


# Reads in one compiled call. While the shape of a base is new, numpy reads views that
# only move elements (`numpy_fallback.py`).


def _read(array, chain):
  return explicit_axes.call(chain.read, (array,), "a view", (_read, chain))


@functools.cache
def _reading() -> Program:
  """Return the compiled function (base array, chain) -> view."""
  return program_limit.jit(_read, static_argnums=1)


# Compiled read of each chain, with numpy as fallback while shapes are new.
_readers: BoundedCache[Chain | MovingChain, Program] = BoundedCache(4096)


def _reader(chain: Chain | MovingChain) -> Program:
  """Return the function (base array or (base, starts)) -> view of a chain.

  It may run in numpy if the steps only move elements.
  """

  def read(operand):
    return _reading()(operand, chain)

  def on_host(operands):
    view = chain.view_numpy(*operands)
    return np.array(view) if numpy_fallback.is_small(view) else None

  program: Any = read
  program.in_traces = lambda operand: _reading().in_traces(operand, chain)
  if any(type(info).view_numpy is ViewInfo.view_numpy for info in chain.infos):
    return program
  return numpy_fallback.with_warmup(program, on_host)


def read_chain(array: jax.Array, chain: Chain) -> jax.Array:
  """Return the view of a base array, in one compiled call."""
  if isinstance(array, jax.core.Tracer):
    return _read(array, chain)
  reader, operand = reader_of(array, chain)
  return (reader if jax_compat.is_top_level() else reader.in_traces)(operand)


def reader_of(array, chain: Chain) -> tuple[Program, Any]:
  """Return the program that reads a view, and its operand.

  Args:
    array: base array; it may be `Pending`.
    chain: chain of the view.
  """
  operand: Any = array
  form: Chain | MovingChain = chain
  if chain.moving is not None:
    form, starts = chain.moving
    operand = (array, starts)
  reader = _readers.get(form)
  if reader is None:
    reader = _readers[form] = _reader(form)
  return reader, operand
