"""What tensors share: an array, and the compiled function it was born in.

A `Storage` is to a torchax tensor what torch's storage is to a torch tensor: views and
detached tensors hold the same one, and an in-place operation replaces its array.

While a function is being traced by one of our wrappers, a `Boundary` (`boundary.py`) is
active. A storage born outside is never touched by the trace: reads and writes of it go
to the boundary's own copy, a `Shadow`, from which the wrapper takes what has to come
back. So no tracer ever reaches a tensor that outlives the trace.
"""

import math
import threading
import weakref
from typing import Any

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.errors import MutationError, TracedStateError


class _Active(threading.local):
  boundary: Any = None  # a `Boundary`


active = _Active()


class Rebindings:
  """Counts how often a tensor of this process took another storage.

  Whoever keeps the storages of tensors looks them up again when the count has changed.
  """

  count = 0

  @classmethod
  def note(cls) -> None:
    """Counts one more."""
    cls.count += 1


class _Addresses:
  """Hands out numbers that stand for addresses of memory; no range comes twice."""

  # No program has memory there: who takes it for an address fails at once.
  _next = 1 << 60
  _lock = threading.Lock()

  @classmethod
  def reserve(cls, storage: "Storage", size: int) -> None:
    """Gives a storage a range of `size` bytes, aligned as torch aligns memory."""
    with cls._lock:
      if getattr(storage, "range", (0, 0))[1] < size:
        storage.range = (cls._next, size)
        cls._next += -(-size // 64) * 64


class Storage:
  """An array shared by tensors; `version` counts its replacements.

  `range` and `untyped` are set when they are asked for: the range of `address`, and a
  weak reference to what stands for the storage in torch's API.
  """

  __slots__ = ("array", "version", "birth", "range", "untyped", "__weakref__")
  range: tuple[int, int]
  untyped: weakref.ref

  def __init__(self, array: jax.Array):
    self.array = array
    self.version = 0
    self.birth = boundary = active.boundary
    if boundary is not None:
      boundary.born.append(weakref.ref(self))

  def read(self, tensor=None) -> jax.Array:
    """The array as the function being traced sees it; `tensor` is the one that asks."""
    boundary = active.boundary
    return self.array if boundary is None else boundary.read(self, tensor)

  def write(self, array: jax.Array, tensor=None) -> None:
    """Replaces the array, for all tensors that share the storage.

    Args:
      array: the new one.
      tensor: by which it is replaced.
    """
    boundary = active.boundary
    if boundary is None or self.birth is boundary:
      self.array = array
      self.version += 1
    else:
      boundary.write(self, array, tensor)

  @property
  def root(self) -> "Storage":
    """The storage that has the elements of this one."""
    return self

  @property
  def nbytes(self) -> int:
    """The size of the array in bytes."""
    return self.array.size * self.array.dtype.itemsize

  @property
  def address(self) -> int:
    """A number in place of the address of its memory, 0 where there is none.

    Different storages have ranges of `nbytes` that do not overlap; JAX may give the
    array's own address to another one after the next change in place.
    """
    size = self.nbytes
    if not size:
      return 0
    if getattr(self, "range", (0, 0))[1] < size:
      _Addresses.reserve(self, size)
    return self.range[0]

  def become_start_of(self, grown: "Storage") -> None:
    """Lets the tensors that stay on this storage follow one that took its place.

    Args:
      grown: holds a 1-d array that starts with this one's elements.
    """
    shape = self.array.shape
    self.__class__ = Start
    _array_slot.__set__(self, (grown, shape))


_array_slot = Storage.__dict__["array"]  # which subclasses cover by a property


class Start(Storage):
  """A storage whose elements are the first ones of another storage.

  Only the alias to the larger one inside a single traced function is not followed.
  """

  __slots__ = ()

  @property
  def root(self) -> Storage:
    return _array_slot.__get__(self)[0].root

  @property
  def array(self) -> jax.Array:
    grown, shape = _array_slot.__get__(self)
    return grown.read()[: math.prod(shape)].reshape(shape)

  @array.setter
  def array(self, array: jax.Array):
    grown, shape = _array_slot.__get__(self)
    grown.write(grown.read().at[: math.prod(shape)].set(array.ravel()))


class Blank(Storage):
  """A storage of zeros that are made when they are first read.

  `tensor.to("jax")` overwrites a new tensor at once, so its zeros are never made.
  """

  __slots__ = ()

  @classmethod
  def of(cls, shape, dtype, device) -> "Blank":
    """Zeros of a shape and dtype on a `jax.Device`; None leaves the device to JAX."""
    zeros: Any = (shape, dtype, device)
    return cls(zeros)

  @property
  def device(self):
    """The `jax.Device` of the zeros; None leaves it to JAX."""
    return _array_slot.__get__(self)[2]

  @property
  def array(self) -> jax.Array:
    shape, dtype, device = _array_slot.__get__(self)
    with jax_compat.outside_of_traces():
      self.array = jax.device_put(np.zeros(shape, dtype), device)
    return self.array

  @array.setter
  def array(self, array):
    if type(array) is not tuple:
      self.__class__ = Storage
    _array_slot.__set__(self, array)


class Unplaced(Storage):
  """A storage of numbers that torch itself made, on no device that anybody named.

  They may meet tensors of any device, which other numbers may not.
  """

  __slots__ = ()


class Content:
  """What a jax tensor holds besides its shape. To torch's tracers all are the same."""

  __slots__ = ("storage", "chain", "env")

  def __init__(self, storage, chain, env):
    self.storage, self.chain, self.env = storage, chain, env

  def __eq__(self, other):
    return isinstance(other, Content)

  def __hash__(self):
    return 0

  def __deepcopy__(self, memo):
    return Content(None, None, None)


class ReadOnly(Storage):
  """A storage of numbers whose change could not reach where they come from."""

  __slots__ = ()

  def write(self, array, tensor=None):
    """Refuses.

    Raises:
      MutationError: always.
    """
    raise MutationError(
      "`x[i]` with a traced index `i` is a copy where a gradient is recorded, so a "
      "change of it in place would not reach x. Write `x[i] = …` instead."
    )


class Ended(Storage):
  """A storage of a trace that has ended: its numbers never existed."""

  __slots__ = ()

  @property
  def array(self) -> jax.Array:
    if self.birth.is_trace or jax_compat.is_top_level():
      raise self._error()
    return _array_slot.__get__(self)

  @array.setter
  def array(self, array: jax.Array):
    raise self._error()

  def _error(self) -> TracedStateError:
    aval = _array_slot.__get__(self)
    return TracedStateError(
      f"This tensor of shape {list(aval.shape)} and {aval.dtype} was made while "
      f"`{self.birth.name}` was being traced, and kept: it stood for a value of each "
      "later call, and has none itself. Return it from the function; or, if an "
      "optimizer or a module made it on first use, run one step eagerly before."
    )
