"""What tensors share: an array, and the compiled function it was born in.

A `Storage` is to a torchax tensor what torch's storage is to a torch tensor: views and
detached tensors hold the same one, and an in-place operation replaces its array.

While a function is being traced by one of our wrappers, a `Boundary` is active. A
storage born outside is never touched by the trace: reads and writes of it go to the
boundary's own copy (a `Shadow`), from which the wrapper takes what has to come back.
So no tracer ever reaches a tensor that outlives the trace.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.errors import MutationError, TracedStateError


class _Active(threading.local):
  boundary: "Boundary | None" = None


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
    self.__class__ = _Start
    _array_slot.__set__(self, (grown, shape))


_array_slot = Storage.array  # the slot, which `_Start` covers


class _Start(Storage):
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

  `tensor.to("jax")` fills a new tensor at once, so it needs none.
  """

  __slots__ = ()

  @classmethod
  def of(cls, shape, dtype, device) -> "Blank":
    """Zeros of a shape and dtype on a `jax.Device`; None leaves the device to JAX."""
    return cls((shape, dtype, device))

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


class Shadow:
  """What a traced function sees of a storage that was born outside of it.

  Attributes:
    storage: the storage.
    tensor: by which it was reached.
    array: what it holds, as far as the function has come.
    written: the function has changed it.
    is_touched: the function has read or changed it.
  """

  __slots__ = ("storage", "tensor", "array", "written", "is_touched")

  def __init__(self, storage: Storage, array: jax.Array, tensor=None):
    self.storage = storage
    self.tensor = tensor
    self.array = array
    self.written = self.is_touched = False


def _leaf_of(tensor, storage: Storage):
  """The leaf that a tensor is, or is a view of; None for any other tensor.

  Only leaves are kept beyond a trace: others hold a graph of traced values.
  """
  for candidate in (tensor, tensor._base):
    if candidate is None or not candidate.is_leaf:
      continue
    if candidate._storage is storage and not candidate._chain.infos:
      return candidate
  return None


def _hashable(value):
  return tuple(value) if isinstance(value, list) else value


class Boundary:
  """A function that is being traced.

  Attributes:
    parent: the boundary around it on this thread.
    shadows: the outer storages it has touched, by identity.
    closed: True once the trace has ended; tensors born in it have no value then.
    roots: outer tensors that were read and need a gradient, by identity; None where
      no gradient is recorded.
    plain: outer tensors without a graph that were changed in place, by identity.
    reshapes: by identity, tensors whose shape was changed in place, and how.
    guards: of the function (`tracing/guards.py`), which note what it decides by; None
      where another boundary's stand for it.
    attributes: what modules had when the trace began (`tracing/module_attributes.py`);
      None where nothing is handed out.
    made: by identity, tensors on the CPU that were made in the trace.
    numbers: what stands for numbers of the host, by the expression of each.
    missing: expressions that are no operands yet; None where none become operands.
    made_state: optimizers, each with the parameters whose state was made in the trace.
    stepped: by identity, the state that optimizers had before their first step in it
      (`tracing/optimizer_state.py`).
    undo: called when the trace ends, the last one first.
    name: of the function, for messages.
    is_trace: a trace of JAX ends with it; else it is a part of a larger one.
    born: references to the storages that were made in it.
  """

  def __init__(
    self,
    records: bool = False,
    name: str = "a function",
    is_trace: bool = True,
    guards=None,
  ):
    self.parent = active.boundary
    self.name = name
    self.is_trace = is_trace
    self.born: list[weakref.ref] = []
    self.shadows: dict[int, Shadow] = {}
    self.closed = False
    self.roots: dict[int, object] | None = {} if records else None
    self.plain: dict[int, object] = {}
    self.reshapes: dict[int, tuple[object, list]] = {}
    self.guards = guards
    self.attributes = None
    self.made: dict[int, object] = {}
    self.numbers: dict = {}
    self.missing: list | None = None
    self.made_state: list = []
    self.stepped: dict = {}
    self.undo: list = []

  def read(self, storage: Storage, tensor=None) -> jax.Array:
    """The array of any storage, inside this boundary."""
    if storage.birth is self:
      return storage.array
    if self.roots is not None and tensor is not None and tensor.requires_grad:
      base = tensor._base
      root = tensor if base is None or not base.requires_grad else base
      self.roots[id(root)] = root
    return self._shadow(storage, tensor).array

  def write(self, storage: Storage, array: jax.Array, tensor=None) -> None:
    """Changes this boundary's copy of an outer storage."""
    shadow = self._shadow(storage, None)
    shadow.array = array
    shadow.written = True
    if tensor is not None and tensor.grad_fn is None:
      self.plain[id(tensor)] = tensor

  def note_host(self, value) -> None:
    """Notes a tensor on the CPU, or a numpy array, whose numbers are constants."""
    boundary: Boundary | None = self
    while boundary is not None and id(value) not in boundary.made:
      if boundary.guards is not None:
        boundary.guards.note_host(value)
      boundary = boundary.parent

  def guards_around(self) -> Iterator:
    """The guards of this function and of those around it, which decide by the same."""
    boundary: Boundary | None = self
    while boundary is not None:
      if boundary.guards is not None:
        yield boundary.guards
      boundary = boundary.parent

  def number(self, expression):
    """What stands for a number of the host: an operand of the function."""
    found = self.numbers.get(expression)
    if found is None:
      if self.missing is not None:
        self.missing.append(expression)
        found = expression.now()
      elif self.parent is not None:
        found = self.parent.number(expression)
      else:
        found = expression.now()
      self.numbers[expression] = found
    return found

  def record_reshape(self, tensor, op, args, kwargs) -> None:
    """Record a change of shape in place, to replay it on the caller's tensor.

    Args:
      tensor: the changed tensor.
      op: the operation.
      args, kwargs: of the operation after the tensor; lists of integers and integers.
    """
    _, steps = self.reshapes.setdefault(id(tensor), (tensor, []))
    named = [(name, _hashable(value)) for name, value in kwargs.items()]
    steps.append((op, tuple(map(_hashable, args)), tuple(named)))

  def lift(self, storage: Storage, array: jax.Array, tensor) -> None:
    """Shows an outer storage as `array`, an operand of the traced function."""
    self.shadows[id(storage)] = Shadow(storage, array, tensor)

  def written(self) -> list[Shadow]:
    """The outer storages that the function has changed."""
    return [shadow for shadow in self.shadows.values() if shadow.written]

  def _shadow(self, storage: Storage, tensor) -> Shadow:
    shadow = self.shadows.get(id(storage))
    if shadow is None:
      if storage.birth is not None and storage.birth.closed:
        raise TracedStateError(
          f"A tensor that was made while `{storage.birth.name}` was being traced is "
          "used after the trace: it may be another one in each call. Return it from "
          "the function; or, if an optimizer or a module made it on first use, run one "
          "step eagerly before."
        )
      outer = (
        storage.array if self.parent is None else self.parent.read(storage, tensor)
      )
      shadow = self.shadows[id(storage)] = Shadow(storage, outer)
    shadow.is_touched = True
    if tensor is not None and (
      shadow.tensor is None or not shadow.tensor.requires_grad
    ):
      leaf = _leaf_of(tensor, storage)
      shadow.tensor = shadow.tensor if leaf is None else leaf
    return shadow

  @contextlib.contextmanager
  def enter(self) -> Iterator["Boundary"]:
    """Makes this the active boundary of the thread for the block."""
    active.boundary = self
    try:
      yield self
    finally:
      while self.undo:
        self.undo.pop()()
      active.boundary = self.parent
      self.closed = True
      self._end()

  def _end(self) -> None:
    """Lets any use of what was made here, and is still there, say what it is."""
    for reference in self.born:
      storage = reference()
      if type(storage) is not _Start and isinstance(
        getattr(storage, "array", None), jax.core.Tracer
      ):
        storage.__class__ = Ended
    self.born.clear()
