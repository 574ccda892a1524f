"""`UntypedStorage`: a `Storage` in torch's API, as `tensor.untyped_storage()` gives it.

Libraries compare storages to find tied weights, and `torch.save` and `torch.load` read
and write them. It answers as the memory of a device does, to which the host has no
pointer. One that `torch.load` has made holds plain bytes, until the first tensor on it
says what they are. `files.py` has the formats.
"""

import warnings
import weakref
from collections.abc import Sequence

import jax
import numpy as np
import torch

from torchax.compat import torch_compat
from torchax.core import host_memory, mappings
from torchax.core.explanations import no_numbers
from torchax.core.storage import Storage
from torchax.devices import parts, placement


class UntypedStorage(torch.UntypedStorage):
  """The bytes of a jax tensor's storage.

  Attributes:
    storage: what the tensors share. Its array is a numpy array of bytes as long as
      their dtype is not known.
    index: of the jax device that such bytes go to; None for the current one.
  """

  storage: Storage
  index: int | None
  typed: dict[torch.dtype, weakref.ref]
  _dtype: torch.dtype | None

  def __new__(cls, storage: Storage, index: int | None = None):
    made = super().__new__(cls, storage.nbytes, device="meta")
    made.storage = storage
    made.index = index
    made._dtype = None
    made._nbytes_in_file = storage.nbytes
    # Weak references to what files know it as, by dtype.
    made.typed = {}
    return made

  def __init__(self, *args, **kwargs):
    # Also called with the arguments of `torch.UntypedStorage`; see `register`.
    pass

  @staticmethod
  def of(storage: Storage) -> "UntypedStorage":
    """The one that stands for a storage, which is the same as long as it is used."""
    storage = storage.root
    known = getattr(storage, "untyped", None)
    known = None if known is None else known()
    if known is None:
      known = UntypedStorage(storage)
      storage.untyped = weakref.ref(known)
    return known

  @staticmethod
  def of_bytes(content: np.ndarray, index: int | None) -> "UntypedStorage":
    """A new one of bytes whose dtype is not known yet.

    Args:
      content: uint8 of shape (n,).
      index: of the jax device that they go to; None for the current one.
    """
    storage = Storage(content)
    made = UntypedStorage(storage, index)
    storage.untyped = weakref.ref(made)
    return made

  @property
  def is_plain(self) -> bool:
    """True for bytes whose dtype is not known yet."""
    return isinstance(self.storage.array, np.ndarray)

  def count(self, dtype: torch.dtype) -> int:
    """How many elements of a dtype it has."""
    array = self.storage.array
    if self.is_plain:
      return array.size // dtype.itemsize
    return self.storage.nbytes // mappings.t2j_dtype(dtype).itemsize

  def decide(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    """Says what plain bytes are.

    Args:
      dtype: of the elements. JAX's may be narrower.
      shape: of all of them; None for a flat array.

    Raises:
      OverflowError: 64-bit integers that do not fit JAX's 32 bits.
    """
    if self.is_plain:
      content = self.storage.array
      self._dtype = dtype
      self.storage.array = self._array(content, shape)

  def _array(self, content: np.ndarray, shape) -> jax.Array:
    whole = content.size // self._dtype.itemsize * self._dtype.itemsize
    if whole:
      elements = torch.from_numpy(content[:whole]).view(self._dtype)
    else:
      elements = torch.empty(0, dtype=self._dtype, device="cpu")
    elements = elements if shape is None else elements.reshape(shape)
    target = placement.target_of(self.index)
    return placement.make(lambda: mappings.t2j(elements), target)

  def fill(self, content: np.ndarray) -> None:
    """Replaces all bytes; `content` is uint8 of shape (n,)."""
    array = self.storage.array
    if self.is_plain:
      self.storage.array = content
      return
    if self._dtype is None:
      self._dtype = mappings.j2t_dtype(array.dtype)
    made = self._array(content, array.shape)
    place = placement.place_of(array)
    self.storage.write(made if place is None else placement.put_back(made, place))

  def host(self) -> np.ndarray:
    """The bytes as uint8 of shape (n,), perhaps of memory that is not ours to change.

    Raises:
      TracedStateError: inside a compiled function, where they have no values.
    """
    array = self.storage.read()
    if isinstance(array, jax.core.Tracer):
      raise no_numbers("Reading its bytes (to save, pickle or copy it)")
    if not parts.is_whole(array):
      raise parts.elsewhere(array, "A copy on the host")
    return np.asarray(array).ravel().view(np.uint8)

  # What torch and libraries ask ---------------------------------------------------

  @property
  def device(self) -> torch.device:
    if self.is_plain:
      index = placement.current_index() if self.index is None else self.index
      return placement.torch_device(index)
    return placement.device_of(self.storage.array)

  def nbytes(self) -> int:
    """The number of bytes."""
    return self.storage.nbytes

  def size(self) -> int:
    """The number of bytes."""
    return self.storage.nbytes

  __len__ = size

  def data_ptr(self) -> int:
    """A number in place of an address: see `Storage.address`."""
    return self.storage.address

  def is_shared(self) -> bool:
    """False: other processes see copies."""
    return False

  def share_memory_(self) -> "UntypedStorage":
    """Warns: JAX has no memory that processes share."""
    warnings.warn(
      "share_memory_() does nothing for jax tensors: another process gets a copy of "
      "their values, and changes do not come back. Keep what processes share on the "
      "CPU.",
      UserWarning,
      stacklevel=2,
    )
    return self

  def is_pinned(self, device=None) -> bool:
    """False: only memory of the CPU can be pinned."""
    return False

  def resizable(self) -> bool:
    """False: tensors are resized."""
    return False

  def cpu(self) -> torch.UntypedStorage:
    """A copy on the CPU."""
    return torch.from_numpy(np.array(self.host())).untyped_storage()

  def to(self, *, device, non_blocking: bool = False) -> torch.UntypedStorage:
    """A copy on the CPU, or this one."""
    return self.cpu() if torch.device(device).type == "cpu" else self

  def clone(self) -> "UntypedStorage":
    """A copy on the same device."""
    return UntypedStorage.of_bytes(np.array(self.host()), self.device.index)

  def copy_(self, source, non_blocking: bool | None = None) -> "UntypedStorage":
    """Replaces the bytes by those of another storage of the same size.

    Raises:
      RuntimeError: another size.
    """
    if source.nbytes() != self.nbytes():
      raise RuntimeError(
        f"copy_() expects a storage of {self.nbytes()} bytes, but got "
        f"{source.nbytes()}."
      )
    self.fill(np.array(bytes_of(source.cpu())))
    return self

  def fill_(self, value):
    """Fills all bytes with a number."""
    self.fill(np.full(self.nbytes(), value, np.uint8))
    return self

  def resize_(self, size):
    """Refuses.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(
      "The storage of a jax tensor is not resized by itself. Call `tensor.resize_`, or "
      "assign `tensor.data`."
    )

  def __getitem__(self, place):
    return self.cpu()[place]

  def __setitem__(self, place, value):
    content = np.array(self.host())
    content[place] = value
    self.fill(content)

  def __iter__(self):
    return iter(self.host().tolist())

  def tolist(self) -> list[int]:
    """The bytes as numbers."""
    return self.host().tolist()

  def __repr__(self):
    return f"[torchax.UntypedStorage(device={self.device}) of size {self.nbytes()}]"

  # How torch's older format reads and writes --------------------------------------

  def _write_file(self, *args):
    torch_compat.write_storage(self.cpu(), *args)

  def _set_from_file(self, *args):
    content = torch.UntypedStorage(self._nbytes_in_file)
    torch_compat.read_storage(content, *args)
    self.fill(bytes_of(content))
    return self


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
  """The bytes of a storage on the CPU, of the same memory; uint8 of shape (n,)."""
  tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
  return host_memory.array_of(tensor)


def _made(size=0, *, device) -> UntypedStorage:
  """What `torch.UntypedStorage(size, device="jax")` makes.

  Args:
    size: in bytes, or the bytes as numbers.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  content = torch.UntypedStorage(size, device="cpu")
  if not isinstance(size, Sequence):
    content.fill_(0)
  index = placement.checked_index(device)
  return UntypedStorage.of_bytes(np.array(bytes_of(content)), index)


def register() -> None:
  """Has `torch.UntypedStorage` make storages of jax."""
  torch_compat.make_storages(_made)
