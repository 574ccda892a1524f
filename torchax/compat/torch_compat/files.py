"""Private pieces of `torch.save` and `torch.load`; used by `torchax/saving`."""

import collections
import functools

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.device_backend import BACKEND

_FEATURE = "torch.save and torch.load of jax tensors"
_STORAGES = "storages of jax tensors"
_new_dtypes = private.find("torch.storage._new_dtypes", _FEATURE)
_rebuild_tensor_v2 = private.find("torch._utils._rebuild_tensor_v2", _FEATURE)
_rebuild_tensor_v3 = private.find("torch._utils._rebuild_tensor_v3", _FEATURE)
_rebuild_parameter_with_state = private.find(
  "torch._utils._rebuild_parameter_with_state", _FEATURE
)
_rebuild_parameter = private.find("torch._utils._rebuild_parameter", _FEATURE)
_rebuild_from_type_v2 = private.find("torch._tensor._rebuild_from_type_v2", _FEATURE)
# State of the `torch.load` in progress on this thread.
_loading = private.find(
  "torch.serialization._serialization_tls", _FEATURE, instead=None
)
# Without it, marks of loaded tensors are only set on the wrapper.
_set_marks = private.find(
  "torch._utils.set_tensor_metadata",
  "torch.load without map_location, and conjugate views in files",
  instead=None,
)
_read = private.find(
  "torch.UntypedStorage._set_from_file",
  "moving storages that pickle has read",
  instead=None,
)


def in_files_format(
  storage: torch.TypedStorage, tensor: torch.Tensor, layout: tuple, metadata: dict
) -> tuple:
  """Return (function, arguments) that rebuild a plain tensor in torch's file format.

  Args:
    storage: storage in the file.
    tensor: tensor with the dtype and `requires_grad`.
    layout: offset, size and strides.
    metadata: marks such as {"conj": True}.
  """
  args = (storage, *layout, tensor.requires_grad, collections.OrderedDict())
  if tensor.dtype in _new_dtypes():
    return _rebuild_tensor_v3, (*args, tensor.dtype, metadata)
  return _rebuild_tensor_v2, ((*args, metadata) if metadata else args)


def parameter_in_files_format(
  data: torch.Tensor, requires_grad: bool, state: dict
) -> tuple:
  """Return (function, arguments) that rebuild a parameter in torch's file format.

  `state` holds attributes that the user has set.
  """
  args = (data, requires_grad, collections.OrderedDict())
  if state:
    return _rebuild_parameter_with_state, (*args, state)
  return _rebuild_parameter, args


def with_state_in_files_format(rebuild: tuple, state: dict) -> tuple:
  """Return (function, arguments) that rebuild a plain tensor with attributes.

  `rebuild` is the result of `in_files_format`.
  """
  return subclass_in_files_format(rebuild, torch.Tensor, state)


def subclass_in_files_format(rebuild: tuple, cls: type, state: dict) -> tuple:
  """Return (function, arguments) that rebuild a tensor of a subclass."""
  function, args = rebuild
  return _rebuild_from_type_v2, (function, cls, args, state)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
  """Return the dtype of a tensor's storage in a file."""
  return torch.uint8 if dtype in _new_dtypes() else dtype


class TypedStorage(torch.TypedStorage):
  """Base of storages that `torch.save` stores itself instead of pickling them."""

  def __new__(cls, *args, **kwargs):
    return object.__new__(cls)

  def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype):
    super().__init__(wrap_storage=untyped, dtype=dtype, _internal=True)


def typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype):
  """Return a `torch.TypedStorage`, without torch's deprecation warning."""
  return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def write_storage(storage: torch.UntypedStorage, *args) -> None:
  """Write a CPU storage to a file of torch's legacy format."""
  storage._write_file(*args)


def read_storage(storage: torch.UntypedStorage, *args) -> None:
  """Fill a CPU storage from a file of torch's legacy format."""
  storage._set_from_file(*args)


def is_read_later(storage: torch.UntypedStorage) -> bool:
  """Return True if `torch.load` reads the bytes after it has created the tensors."""
  return getattr(storage, "_torch_load_uninitialized", False)


def watch_late_reads() -> None:
  """Clear `is_read_later` once the bytes are read; torch does not reset its mark."""
  if _read is None:
    return

  @functools.wraps(_read)
  def _set_from_file(self, *args):
    _read(self, *args)
    self._torch_load_uninitialized = False
    return self

  patch(torch.UntypedStorage, "_set_from_file", _set_from_file, _FEATURE)


def has_map_location() -> bool:
  """Return True inside a `torch.load` with `map_location`, or if that is unknown."""
  return _loading is None or getattr(_loading, "map_location", None) is not None


def watch_marks(mark) -> None:
  """Call `mark(tensor, metadata)` when torch has loaded a tensor with marks.

  `metadata` is as in `in_files_format`. If `mark` returns False, torch sets the marks.
  """
  if _set_marks is None:
    return

  @functools.wraps(_set_marks)
  def set_tensor_metadata(tensor, metadata):
    if not mark(tensor, metadata):
      _set_marks(tensor, metadata)

  utils = private.resolve("torch._utils")
  patch(utils, "set_tensor_metadata", set_tensor_metadata, _FEATURE)


def watch_moves_of_storages(move) -> None:
  """Make `storage.to(device="jax")` and `storage.jax()` call `move`."""
  to = torch.UntypedStorage.to

  @functools.wraps(to)
  def to_device(self, *, device, non_blocking=False):
    if torch.device(device).type == BACKEND:
      return move(self, torch.device(device))
    return to(self, device=device, non_blocking=non_blocking)

  def to_jax(self, device=None):
    """Return a copy of the storage on a jax device."""
    return move(self, torch.device(BACKEND if device is None else device))

  patch(torch.UntypedStorage, "to", to_device, _STORAGES)
  patch(torch.UntypedStorage, "jax", to_jax, _STORAGES)


def make_storages(make) -> None:
  """Make `torch.UntypedStorage(…, device="jax")` call `make(…, device=device)`.

  C++ has no memory of this backend and would abort the process.
  """
  cls = torch.UntypedStorage
  new = cls.__new__

  def of_any_device(kind, *args, **kwargs):
    device = kwargs.get("device")
    if device is None or kind is not cls or torch.device(device).type != BACKEND:
      return new(kind, *args, **kwargs)
    return make(*args, **kwargs)

  patch(cls, "__new__", staticmethod(of_any_device), _STORAGES)


# (tensor) -> DLPack capsule of the memory of a CPU tensor.
dlpack_capsule = private.find(
  "torch._C._to_dlpack_versioned",
  "copies to the CPU, which are quicker with it",
  instead=lambda tensor: tensor.__dlpack__(max_version=(1, 0)),
)
