"""Chains of view steps: how a view reads from its base and writes back to it.

A `Chain` holds the steps from a base to a view. It is immutable and interned, because
the chains of the arguments are part of an operation's cache key. So an operation reads
its views inside its own XLA program. The steps are in `view_steps.py`.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
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


@dataclasses.dataclass(frozen=True)
class MovingInfo(ViewInfo):
  """Slice of known length along one dimension, whose start is an operand.

  A traced index outside the dimension reads and writes `out_of_range.fill_value`. A
  slice must be inside.

  Attributes:
    dim: the dimension.
    length: length of the slice; None for a single element, which removes the dimension.
    is_traced: the start is a tracer, and the index may be out of range.
    start: the start, which is not compared; None in a `MovingChain`.
  """

  dim: int
  length: int | None
  is_traced: bool = False
  start: Any = dataclasses.field(default=None, compare=False)
  view_info_type: ClassVar = ViewInfoType.SELECT

  @property
  def picks(self) -> bool:
    """True unless the index may be out of range."""
    return not self.is_traced

  def at(self, start) -> "MovingInfo":
    """Return the slice with another start."""
    return MovingInfo(self.dim, self.length, self.is_traced, start)

  def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
    if self.length is None:
      row = lax.dynamic_index_in_dim(jax_array, self.start, self.dim, keepdims=False)
      return self._fill_invalid(row, jax_array)
    return lax.dynamic_slice_in_dim(jax_array, self.start, self.length, self.dim)

  def view_numpy(self, array: np.ndarray) -> np.ndarray:
    start, length = self.start, self.length
    part = start if length is None else slice(start, start + length)
    return array[(slice(None),) * self.dim + (part, ...)]

  def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
    if self.length is None:
      new_value = self._fill_invalid(new_value, jax_array)
      new_value = jnp.expand_dims(new_value, self.dim)
    if 0 in new_value.shape:
      return jax_array
    return put_slice(jax_array, new_value, self.dim, jnp.asarray(self.start))

  def _fill_invalid(self, row, jax_array) -> jax.Array:
    if not self.is_traced:
      return row
    size = jax_array.shape[self.dim]
    return out_of_range.fill_invalid(
      row, out_of_range.is_out_of_range(self.start, size, wraps=True)
    )


def _moving(info: ViewInfo) -> MovingInfo | None:
  """Return a step as a `MovingInfo`; None if it is no plain slice."""
  if isinstance(info, MovingInfo):
    return info
  if isinstance(info, IndexInfo) and info.index in _INT32:
    return MovingInfo(info.dim, None, start=info.index)
  if isinstance(info, NarrowInfo):
    *before, (start, stop, step) = info.slices
    is_plain = step == 1 and all(part == (None, None, None) for part in before)
    if is_plain and start is not None and stop is not None and start in _INT32:
      return MovingInfo(len(before), stop - start, start=start)
  return None


def _write_through(infos: Sequence, base: jax.Array, value: jax.Array) -> jax.Array:
  """Return `base` after writing `value` to the view of it.

  If a step repeats an element, that step and all later ones are written as one.
  Otherwise the other copies of the element would overwrite the new value.

  Args:
    infos: the steps.
    base: the array that the first step reads.
    value: an array with the shape of the view.
  """
  sources = [base]
  for info in infos[:-1]:
    sources.append(info.transform_tensor(sources[-1]))
  end = len(infos)
  while end:
    first = _first_of_write(infos, end)
    if first == end - 1:
      value = infos[first].update_tensor(value, sources[first])
    else:
      value = _write_picked(infos[first:end], sources[first], value)
    end = first
  return value


def _first_of_write(infos: Sequence, end: int) -> int:
  """Return the index of the first step before `end` that must be merged into one."""
  first = end - 1
  for index in range(end - 1, -1, -1):
    if not (infos[index].picks or isinstance(infos[index], StopGradientInfo)):
      break
    first = index if infos[index].overlaps else first
  return first


def _write_picked(infos: Sequence, source: jax.Array, value: jax.Array) -> jax.Array:
  picked = jnp.arange(source.size).reshape(source.shape)
  for info in infos:
    picked = info.transform_tensor(picked)
  flat = source.ravel()
  if any(isinstance(info, StopGradientInfo) for info in infos):
    value = grad_mode.with_derivative_of(flat[picked], value)
  return flat.at[picked].set(value).reshape(source.shape)


class MovingChain:
  """Chain whose slices take their starts as operands: one program for all starts.

  Its methods take (base array, starts) in place of a base array; see `Chain`.
  """

  __slots__ = ("infos",)

  def __init__(self, infos: tuple):
    self.infos = infos

  def _at(self, starts) -> "Chain":
    return Chain(
      tuple(
        [
          info.at(starts[index]) if isinstance(info, MovingInfo) else info
          for index, info in enumerate(self.infos)
        ]
      )
    )

  def read(self, base_and_starts) -> jax.Array:
    base, starts = base_and_starts
    return self._at(starts).read(base)

  def view_numpy(self, base_and_starts) -> np.ndarray:
    base, starts = base_and_starts
    return self._at(starts).view_numpy(base)

  def write_numpy(self, base_and_starts, value: np.ndarray) -> np.ndarray | None:
    base, starts = base_and_starts
    return self._at(starts).write_numpy(base, value)

  def write(self, base_and_starts, value: jax.Array) -> jax.Array:
    base, starts = base_and_starts
    return self._at(starts).write(base, value)

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
  LIMIT = 4
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
    if self.moving is not None or type(info) is MovingInfo:
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
    return _write_through(self.infos, base, value)

  def write_numpy(self, base: np.ndarray, value: np.ndarray) -> np.ndarray | None:
    """Do as `write` on the host; None if numpy copies the view or the base is large."""
    if not numpy_fallback.is_small([base]):
      return None
    written = base.copy()
    view = self.view_numpy(written)
    if not (view.flags.writeable and np.may_share_memory(view, written)):
      return None
    view[...] = value
    return written

  def __repr__(self):
    return f"Chain{self.infos}"


def can_write_numpy(chain: Chain | MovingChain) -> bool:
  """Return True unless a step converts elements or makes a detour through JAX."""
  return all(info.picks and info.is_of_numpy for info in chain.infos)


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
  found = [(info, _moving(info)) for info in infos]
  return tuple([info if moving is None else moving.at(None) for info, moving in found])


def _as_moving(infos: tuple[ViewInfo, ...]) -> tuple[MovingChain, Any]:
  starts = [0 if moving is None else moving.start for moving in map(_moving, infos)]
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
    return np.array(view) if numpy_fallback.is_small([view]) else None

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
