"""`UntypedStorage`: result of `tensor.untyped_storage()`, a `Storage` in torch's API.

Libraries compare storages to find tied weights; `torch.save` and `torch.load` read and
write them. It behaves like device memory: the host has no pointer to it. A storage made
by `torch.load` holds plain bytes until the first tensor on it gives their dtype. The
file formats are in `torch_files.py`.
"""

import copy
import warnings
import weakref
from collections.abc import Sequence

import jax
import numpy as np
import torch

from torchax.compat import torch_compat
from torchax.core import host_memory, mappings
from torchax.core.error_messages import no_numbers
from torchax.core.storage import Storage
from torchax.devices import placement, shards


class UntypedStorage(torch.UntypedStorage):
  """Bytes of a jax tensor's storage.

  Attributes:
    storage: the storage that the tensors share. Its array is a numpy array of bytes
      until their dtype is known.
    index: index of the jax device for such bytes; None for the current device.
    typed: weak references to the typed storages for files, by dtype.
  """

  storage: Storage
  index: int | None
  typed: dict[torch.dtype, weakref.ref]
  _dtype: torch.dtype | None

  def __new__(cls, storage: Storage, index: int | None = None, *, device=None):
    if device is not None:
      raise NotImplementedError(
        f"torch asks for a storage on {device} to copy one of a jax tensor into it, as "
        "`torch.distributed.checkpoint.async_save` does. Call `init_device_mesh("
        '"jax", (1,))` before it, or pass tensors on the CPU.'
      )
    made = super().__new__(cls, storage.nbytes, device="meta")
    made.storage = storage
    made.index = index
    made._dtype = None
    made._nbytes_in_file = storage.nbytes
    made.typed = {}
    return made

  def __init__(self, *args, **kwargs):
    # Also called with the arguments of `torch.UntypedStorage`; see `register`.
    pass

  @staticmethod
  def of(storage: Storage) -> "UntypedStorage":
    """Return the object of a storage; the same one while it is referenced."""
    storage = storage.root
    untyped = getattr(storage, "untyped", None)
    untyped = None if untyped is None else untyped()
    if untyped is None:
      untyped = UntypedStorage(storage)
      storage.untyped = weakref.ref(untyped)
    return untyped

  @staticmethod
  def of_bytes(content: np.ndarray, index: int | None) -> "UntypedStorage":
    """Create a storage from bytes whose dtype is not known yet.

    Args:
      content: uint8 array of shape (n,).
      index: index of the target jax device; None for the current device.
    """
    storage = Storage(content)
    made = UntypedStorage(storage, index)
    storage.untyped = weakref.ref(made)
    return made

  @property
  def is_plain(self) -> bool:
    """True if the storage holds bytes whose dtype is not known yet."""
    return isinstance(self.storage.array, np.ndarray)

  def count(self, dtype: torch.dtype) -> int:
    """Return the number of elements of a dtype that the storage holds."""
    array = self.storage.array
    if self.is_plain:
      return array.size // dtype.itemsize
    return self.storage.nbytes // mappings.t2j_dtype(dtype).itemsize

  def decide(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    """Convert plain bytes to an array of a dtype; do nothing for typed storages.

    Args:
      dtype: dtype of the elements; JAX's may be narrower.
      shape: shape of the array; None for a flat one.

    Raises:
      OverflowError: 64-bit integers do not fit JAX's 32 bits.
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
    """Replace all bytes; `content` is a uint8 array of shape (n,)."""
    array = self.storage.array
    if self.is_plain:
      self.storage.array = content
      return
    if self._dtype is None:
      self._dtype = mappings.j2t_dtype(array.dtype)
    replacement = self._array(content, array.shape)
    sharding = placement.committed_sharding(array)
    if sharding is not None:
      replacement = placement.restore_sharding(replacement, sharding)
    self.storage.write(replacement)

  def host(self) -> np.ndarray:
    """Return the bytes as uint8 of shape (n,); read-only, the memory may be shared.

    Raises:
      TracedStateError: inside a compiled function, where the storage has no values.
    """
    array = self.storage.read()
    if isinstance(array, jax.core.Tracer):
      raise no_numbers("Reading its bytes (to save, pickle or copy it)")
    if not shards.is_readable(array):
      raise shards.not_addressable_error(array, "A copy on the host")
    return np.asarray(array).ravel().view(np.uint8)

  # API of torch.UntypedStorage -----------------------------------------------------

  @property
  def device(self) -> torch.device:
    if self.is_plain:
      index = placement.current_index() if self.index is None else self.index
      return placement.torch_device(index)
    return placement.device_of(self.storage.array)

  def nbytes(self) -> int:
    return self.storage.nbytes

  size = __len__ = nbytes

  def data_ptr(self) -> int:
    """Return a number in place of an address; see `Storage.address`."""
    return self.storage.address

  def is_shared(self) -> bool:
    """Return False: other processes get copies."""
    return False

  def share_memory_(self) -> "UntypedStorage":
    """Warn and do nothing: JAX has no memory that processes share."""
    warnings.warn(
      "share_memory_() does nothing for jax tensors: another process gets a copy of "
      "their values, and changes do not come back. Keep what processes share on the "
      "CPU.",
      UserWarning,
      stacklevel=2,
    )
    return self

  def is_pinned(self, device=None) -> bool:
    """Return False: only CPU memory can be pinned."""
    return False

  def resizable(self) -> bool:
    """Return False: resize the tensor instead."""
    return False

  def cpu(self) -> torch.UntypedStorage:
    return torch.from_numpy(np.array(self.host())).untyped_storage()

  def to(self, *, device, non_blocking: bool = False) -> torch.UntypedStorage:
    """Return a copy on the CPU, or this storage for any other device."""
    return self.cpu() if torch.device(device).type == "cpu" else self

  def __reduce__(self):
    return UntypedStorage.of_bytes, (np.array(self.host()), self.device.index)

  def clone(self) -> "UntypedStorage":
    return UntypedStorage.of_bytes(np.array(self.host()), self.device.index)

  def __deepcopy__(self, memo) -> "UntypedStorage":
    """Copy it; copies of tensors with the same `memo` share the copy."""
    if self.is_plain:
      return self.clone()
    return UntypedStorage.of(copy.deepcopy(self.storage, memo))

  def copy_(self, source, non_blocking: bool | None = None) -> "UntypedStorage":
    """Copy the bytes of another storage into this one.

    Raises:
      RuntimeError: the sizes differ.
    """
    if source.nbytes() != self.nbytes():
      raise RuntimeError(
        f"copy_() expects a storage of {self.nbytes()} bytes, but got "
        f"{source.nbytes()}."
      )
    self.fill(np.array(bytes_of(source.cpu())))
    return self

  def fill_(self, value):
    """Set all bytes to a number."""
    self.fill(np.full(self.nbytes(), value, np.uint8))
    return self

  def resize_(self, size):
    """Raise NotImplementedError: resize the tensor instead."""
    raise NotImplementedError(
      "The storage of a jax tensor is not resized by itself. Call `tensor.resize_`, or "
      "assign `tensor.data`."
    )

  def __getitem__(self, index):
    return self.cpu()[index]

  def __setitem__(self, index, value):
    content = np.array(self.host())
    content[index] = value
    self.fill(content)

  def __iter__(self):
    return iter(self.host().tolist())

  def tolist(self) -> list[int]:
    """Return the bytes as numbers."""
    return self.host().tolist()

  def __repr__(self):
    return f"[torchax.UntypedStorage(device={self.device}) of size {self.nbytes()}]"

  # Hooks of torch's older file format ----------------------------------------------

  def _write_file(self, *args):
    torch_compat.write_storage(self.cpu(), *args)

  def _set_from_file(self, *args):
    content = torch.UntypedStorage(self._nbytes_in_file)
    torch_compat.read_storage(content, *args)
    self.fill(bytes_of(content))
    return self


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
  """Return the bytes of a CPU storage as uint8 of shape (n,), sharing its memory."""
  tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
  return host_memory.array_of(tensor)


def _construct(size=0, *, device) -> UntypedStorage:
  """Implement `torch.UntypedStorage(size, device="jax")`.

  Args:
    size: number of bytes, or a sequence of the bytes as numbers.
    device: a jax device.

  Raises:
    NoSuchDeviceError: the device does not exist.
  """
  content = torch.UntypedStorage(size, device="cpu")
  if not isinstance(size, Sequence):
    content.fill_(0)
  index = placement.checked_index(device)
  return UntypedStorage.of_bytes(np.array(bytes_of(content)), index)


def register() -> None:
  """Register jax with the constructor `torch.UntypedStorage`."""
  torch_compat.make_storages(_construct)
