"""Storage shared by tensors: an array, and the boundary of the trace it was born in.

`Storage` corresponds to torch's storage. Views and detached tensors share one, and an
in-place operation replaces its array.

While a wrapper traces a function, a `Boundary` (`boundary.py`) is active. The trace
never changes a storage born outside. Its reads and writes go to a `Shadow`, a copy that
the boundary owns, and the wrapper returns the written shadows. So no tracer reaches a
tensor that outlives the trace.
"""

import math
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax.compat import jax_compat
from torchax.core.deferred import active as active  # other modules take it from here
from torchax.core.recorder import Pending
from torchax.errors import MutationError, TracedStateError


class Rebindings:
  """Number of times that a tensor of this process switched to another storage.

  Callers that keep the storages of tensors look them up again if it has changed.
  """

  count = 0

  @classmethod
  def count_one(cls) -> None:
    """Count one."""
    cls.count += 1


class _Addresses:
  """Allocator of fictitious memory addresses, whose ranges never overlap."""

  # No process has memory there, so that dereferencing such an address fails at once.
  _next = 1 << 60
  _lock = threading.Lock()

  @classmethod
  def reserve(cls, storage: "Storage", size: int) -> None:
    """Give a storage a range of `size` bytes, aligned to 64 bytes as torch's memory."""
    with cls._lock:
      if getattr(storage, "range", (0, 0))[1] < size:
        storage.range = (cls._next, size)
        cls._next += -(-size // 64) * 64


class Storage:
  """Array shared by tensors; `version` counts its replacements.

  `range` and `untyped` are set on first use: the range of `address`, and a weak
  reference to the `untyped_storage()` object of torch's API.
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
    """Return the array as seen by the active trace; `tensor` is the reading tensor."""
    boundary = active.boundary
    return self.array if boundary is None else boundary.read(self, tensor)

  def write(self, array: jax.Array, tensor=None) -> None:
    """Replace the array, for all tensors that share the storage.

    Args:
      array: the new array.
      tensor: the tensor that is changed in place.
    """
    boundary = active.boundary
    if boundary is None or self.birth is boundary:
      if type(array) is Pending:
        if type(self) in (Storage, LazyZeros, Deferred):
          self.__class__ = Deferred
        else:
          array = array.read()
      self.array = array
      self.version += 1
    else:
      boundary.write(self, array, tensor)

  def __deepcopy__(self, memo):
    # With an array of its own: donating one array would invalidate the other.
    return Storage(jnp.copy(self.read()))

  @property
  def operand(self) -> Any:
    """The array, or its `Pending`: for `deferred.run`, and for shape and device."""
    return self.array

  @property
  def root(self) -> "Storage":
    """Storage that holds the elements: this one, unless it is a `Prefix`."""
    return self

  @property
  def nbytes(self) -> int:
    """Size of the array in bytes."""
    return self.array.size * self.array.dtype.itemsize

  @property
  def address(self) -> int:
    """Fictitious memory address; 0 for an empty array.

    Different storages have ranges of `nbytes` that do not overlap. The array's real
    address would not do: JAX may reuse it after the next in-place change.
    """
    size = self.nbytes
    if not size:
      return 0
    if getattr(self, "range", (0, 0))[1] < size:
      _Addresses.reserve(self, size)
    return self.range[0]

  def become_prefix_of(self, grown: "Storage") -> None:
    """Make this storage an alias of the first elements of a larger one.

    Args:
      grown: storage of a 1-d array that starts with this one's elements.
    """
    shape = self.array.shape
    self.__class__ = Prefix
    _array_slot.__set__(self, (grown, shape))


_array_slot = Storage.__dict__["array"]  # subclasses override it by a property


class Prefix(Storage):
  """Storage that aliases the first elements of another storage.

  Inside a traced function the alias to the larger storage is not followed.
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


class LazyZeros(Storage):
  """Storage of zeros that are created on the first read.

  `tensor.to("jax")` overwrites a new tensor at once, so its zeros are never created.
  """

  __slots__ = ()

  @classmethod
  def of(cls, shape, dtype, device) -> "LazyZeros":
    """Create zeros on a `jax.Device`; None for JAX's default device."""
    zeros: Any = (shape, dtype, device)
    return cls(zeros)

  @property
  def device(self):
    """`jax.Device` of the zeros; None for JAX's default device."""
    return _array_slot.__get__(self)[2]

  @property
  def array(self) -> jax.Array:
    shape, dtype, device = _array_slot.__get__(self)
    with jax_compat.outside_of_traces():
      zeros = jax_compat.with_64_bits(np.zeros(shape, dtype))
      self.array = jax.device_put(zeros, device)
    return self.array

  @array.setter
  def array(self, array):
    if type(array) is not tuple:
      self.__class__ = Storage
    _array_slot.__set__(self, array)


class Deferred(Storage):
  """Storage whose array is computed when it is read; see `core/recorder.py`."""

  __slots__ = ()

  @property
  def operand(self) -> Any:
    pending = _array_slot.__get__(self)
    return pending if pending.segment.is_open else self.array

  @property
  def array(self) -> jax.Array:
    # Reading ends the segment, so it may be that of another thread.
    pending = _array_slot.__get__(self)
    if type(pending) is Pending:
      with jax_compat.outside_of_traces():
        self.array = pending.read()
    return _array_slot.__get__(self)

  @array.setter
  def array(self, array):
    if type(array) is not Pending:
      self.__class__ = Storage
    _array_slot.__set__(self, array)


class WithoutDevice(Storage):
  """Storage of values that torch created without a device.

  They may be combined with tensors on any device; other values may not.
  """

  __slots__ = ()


class Excerpt(Storage):
  """Storage of an argument with gaps in memory: the gaps are shorter, and zero."""

  __slots__ = ()


class Payload:
  """Opaque payload for `__tensor_flatten__`; all are equal, so Dynamo adds no guard."""

  __slots__ = ("storage", "chain", "env")

  def __init__(self, storage, chain, env):
    self.storage, self.chain, self.env = storage, chain, env

  def __eq__(self, other):
    return isinstance(other, Payload)

  def __hash__(self):
    return 0

  def __deepcopy__(self, memo):
    return Payload(None, None, None)


class ReadOnly(Storage):
  """Storage of a copy: an in-place change would not reach the original."""

  __slots__ = ()

  def write(self, array, tensor=None):
    """Raise `MutationError`."""
    raise MutationError(
      "`x[i]` with a traced index `i` is a copy where a gradient is recorded, so a "
      "change of it in place would not reach x. Write `x[i] = …` instead."
    )


class Escaped(Storage):
  """Storage born in a trace that has ended; it never had values."""

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
