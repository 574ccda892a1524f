"""Saving, loading and pickling of jax tensors.

A file of `torch.save` holds jax tensors as CPU tensors in torch's own format, so any
process can open it. It also records each tensor's device: `torch.load` moves the tensor
back if torchax is imported and no `map_location` is given. In a pickle, which processes
send to each other, tensors are on jax.

`torch.save` writes storages through a hook that `pickle` does not have. One storage
object can therefore be CPU memory for `torch.save` and jax memory for `pickle`.
"""

import pickle
import re
import sys
import weakref
import zipfile
from collections.abc import Callable

import jax
import numpy as np
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import mappings
from torchax.core.chains import WHOLE
from torchax.core.error_messages import no_numbers
from torchax.core.storage import Storage
from torchax.core.view_steps import ConjugateInfo, NegateInfo, contiguous_strides
from torchax.devices import placement
from torchax.saving.untyped_storage import UntypedStorage, bytes_of

# Attributes of a jax tensor that are not the user's state.
OWN = frozenset(
  {
    "_asked_dtype",
    "_beside",
    "_chain",
    "_device_mesh",
    "_env",
    "_has_hidden_base",
    "_is_param",
    "_kept_shell",
    "_placements",
    "_storage",
    "_untyped",
  }
)

# Ahead of torch's own entries: the one for our backend would look for memory in C++.
_PRIORITY = 7


def reduce(tensor) -> tuple:
  """Return the result of `Tensor.__reduce_ex__`.

  Raises:
    TracedStateError: inside a compiled function, where the tensor has no values.
  """
  if isinstance(tensor._storage.read(), jax.core.Tracer):
    raise no_numbers("Saving or pickling")
  torch.utils.hooks.warn_if_has_hooks(tensor)
  state = {name: v for name, v in tensor.__dict__.items() if name not in OWN}
  if torch_compat.is_parameter(tensor):
    # A file stores the values of a parameter as a plain tensor.
    return torch_compat.parameter_in_files_format(
      tensor.data, tensor.requires_grad, state
    )
  made = torch_compat.in_files_format(*_file_parts(tensor))
  return torch_compat.with_state_in_files_format(made, state) if state else made


def _file_parts(tensor) -> tuple:
  """Return (storage, tensor, layout, marks) of a tensor, for a file.

  torch ignores marks that it does not know, such as the name of the jax device.
  """
  device_mark = {str(tensor.device): True}
  dtype = torch_compat.storage_dtype(tensor.dtype)
  if _is_whole_storage(tensor) or _is_strided(tensor):
    storage = UntypedStorage.of(tensor._storage)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return _typed_storage(storage, dtype), tensor, layout, device_mark | _marks(tensor)
  storage = UntypedStorage.of(Storage(tensor.jax()))
  layout = (0, tuple(tensor.shape), tuple(contiguous_strides(tensor.shape)))
  return _typed_storage(storage, dtype), tensor, layout, device_mark


def _is_whole_storage(tensor) -> bool:
  """Return True if the tensor is its whole storage, contiguous."""
  return (
    tensor._chain is WHOLE
    and tensor.is_contiguous()
    and not tensor.storage_offset()
    and tensor.nbytes == tensor._storage.nbytes
  )


def _is_strided(tensor) -> bool:
  """Return True if the view's strides over its storage's bytes give the view's values.

  A storage is written in the order of its array's dimensions. The base may have other
  strides, and views derive their strides from it.
  """
  chain, root = tensor._chain, tensor._storage.root
  if chain is WHOLE or chain.is_traced or not tensor.numel():
    return False
  memory = np.asarray(root.read()).ravel()
  if memory.dtype.kind == "c" and not tensor.is_complex():
    memory = memory.view(memory.real.dtype)
  dtype = mappings.t2j_dtype(tensor.dtype)
  memory = memory[: memory.nbytes // dtype.itemsize * dtype.itemsize // memory.itemsize]
  memory = memory.view(dtype)
  shape, strides = tensor.shape, tensor.stride()
  last = sum((length - 1) * step for length, step in zip(shape, strides))
  if tensor.storage_offset() + last >= memory.size:
    return False
  view = np.lib.stride_tricks.as_strided(
    memory[tensor.storage_offset() :],
    shape,
    [step * dtype.itemsize for step in strides],
  )
  view = np.conj(view) if tensor.is_conj() else view
  view = np.negative(view) if tensor.is_neg() else view
  return view.tobytes() == np.asarray(tensor.jax()).tobytes()


def _marks(tensor) -> dict[str, bool]:
  marks = {"conj": tensor.is_conj(), "neg": tensor.is_neg()}
  return {name: True for name, is_set in marks.items() if is_set}


class _Saved(torch_compat.TypedStorage):
  """Storage for a file, as CPU memory, or for a pickle, as jax memory."""

  def __init__(self, untyped: UntypedStorage, dtype: torch.dtype):
    super().__init__(untyped, dtype)
    self._jax = untyped

  def __reduce__(self):
    return _storage_of, (np.array(self._jax.host()), self.dtype, str(self._jax.device))


def _typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> _Saved:
  """Return one object per storage and dtype while a pickler holds it: shared memory."""
  reference = storage.typed.get(dtype)
  typed = None if reference is None else reference()
  if typed is None:
    typed = _Saved(storage, dtype)
    storage.typed[dtype] = weakref.ref(typed)
  return typed


def _storage_of(content: np.ndarray, dtype: torch.dtype, device: str):
  """Unpickle a storage onto jax. Pickles contain the name of this function."""
  untyped = UntypedStorage.of_bytes(content, placement.checked_index(device))
  return torch_compat.typed_storage(untyped, dtype)


def _to_jax(storage: torch.UntypedStorage, device: torch.device) -> UntypedStorage:
  """Move a CPU storage to a jax device; a jax storage is returned as it is.

  The bytes reach the device once their dtype is known.

  Raises:
    NoSuchDeviceError: the device does not exist.
  """
  index = placement.checked_index(device)
  if isinstance(storage, UntypedStorage):
    return storage
  if torch_compat.is_read_later(storage):
    return UntypedStorage.of_bytes(np.zeros(storage.nbytes(), np.uint8), index)
  return UntypedStorage.of_bytes(bytes_of(storage), index)


_JAX = re.compile(r"jax(:\d+)?")


def _mark(tensor, metadata: dict[str, bool]) -> None:
  """Set the conjugate and negative bits of a tensor that was loaded onto jax."""
  if metadata.get("conj"):
    tensor._chain = tensor._chain.append(ConjugateInfo())
    torch_compat.set_conj(tensor, True)
  if metadata.get("neg"):
    tensor._chain = tensor._chain.append(NegateInfo())
    torch_compat.set_neg(tensor, True)


def _saved_device(tensor, metadata: dict[str, bool]) -> torch.device | None:
  """Return the jax device that a loaded CPU tensor was saved from; None to leave it."""
  name = next((name for name in metadata if _JAX.fullmatch(name)), None)
  if name is None or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
    return None
  is_placed = torch_compat.has_map_location()
  if is_placed or torch_compat.is_read_later(tensor.untyped_storage()):
    return None
  device = torch.device(name)
  exists = device.index is not None and device.index < placement.count()
  return device if exists else placement.torch_device()


def _restore_on_jax(tensor: torch.Tensor, device: torch.device, metadata) -> None:
  """Turn a CPU tensor that was just loaded into the jax tensor that was saved."""
  on_cpu = tensor.untyped_storage()
  # Tensors that share memory in the file get one jax storage.
  storage = getattr(on_cpu, "on_jax", None)
  if storage is None:
    storage = on_cpu.on_jax = _to_jax(on_cpu, device)
  made = torch.empty(0, dtype=tensor.dtype, device=device)
  made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
  _mark(made, metadata)
  torch_compat.swap_tensors(tensor, made.requires_grad_(tensor.requires_grad))


def register(cls: type, is_jax: Callable[[str], bool]) -> None:
  """Register the saving and loading of jax storages with torch.

  Args:
    cls: class of jax tensors.
    is_jax: returns True if a location such as "cuda:0" currently means jax.
  """

  def restore(storage, location: str):
    if _JAX.fullmatch(location):
      return _to_jax(storage, torch.device(location))
    if location.startswith("cuda") and is_jax(location):
      return _to_jax(storage, placement.torch_device(torch.device(location).index))
    return None

  def mark(tensor, metadata) -> bool:
    if isinstance(tensor, cls):
      _mark(tensor, metadata)
      return True
    device = _saved_device(tensor, metadata)
    if device is not None:
      _restore_on_jax(tensor, device, metadata)
    return device is not None

  def tag(storage) -> str | None:
    """Return "cpu", which every process has, as the location of jax storages."""
    return "cpu" if isinstance(storage, UntypedStorage) else None

  torch.serialization.register_package(_PRIORITY, tag, restore)
  torch_compat.watch_marks(mark)
  torch_compat.watch_moves_of_storages(_to_jax)
  torch_compat.watch_late_reads()


# States, loaded without running code of the file --------------------------------------

_SCALARS = tuple(mappings.NUMPY_UNSUPPORTED_DTYPES.values())
# Classes and functions in pickles of arrays.
_ARRAY_PARTS = (
  *(np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], *_SCALARS),
  *filter(None, (jax_compat.rebuilt_array,)),
  *{type(np.dtype(dtype)) for dtype in mappings.JAX_DTYPE_TO_TORCH if dtype},
)


def load_state(path):
  """Load the state in a file, with its tensors on jax.

  The file may hold arrays of numpy and JAX, and named tuples of imported modules.

  Raises:
    UnpicklingError: the file holds other objects.
  """
  try:
    return torch.load(path, map_location="jax", weights_only=True)
  except pickle.UnpicklingError:
    if not zipfile.is_zipfile(path):
      raise
  names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
  allowed = [*_ARRAY_PARTS, *filter(_is_tuple_class, map(_find_imported, names))]
  with torch.serialization.safe_globals(allowed):
    return torch.load(path, map_location="jax", weights_only=True)


def _find_imported(name: str):
  """Return the object of that name if its module is imported, else None."""
  module, _, attribute = name.rpartition(".")
  return getattr(sys.modules.get(module), attribute, None)


def _is_tuple_class(cls) -> bool:
  is_tuple = isinstance(cls, type) and issubclass(cls, tuple)
  return is_tuple and hasattr(cls, "_fields")
