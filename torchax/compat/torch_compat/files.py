"""How torch writes tensors and storages to files, and reads them."""

import collections
import functools

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.backend import BACKEND

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
# The state of the `torch.load` in progress on this thread.
_loading = private.find(
  "torch.serialization._serialization_tls", _FEATURE, instead=None
)
# Without it, marks of loaded tensors are set on the wrapper alone.
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
  """(function, arguments): how torch's files say to make a plain tensor.

  Args:
    storage: of the file.
    tensor: with the dtype and `requires_grad`.
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
  """(function, arguments): how torch's files say to make a parameter.

  `state` has the attributes that a user has given to it.
  """
  args = (data, requires_grad, collections.OrderedDict())
  if state:
    return _rebuild_parameter_with_state, (*args, state)
  return _rebuild_parameter, args


def with_state_in_files_format(made: tuple, state: dict) -> tuple:
  """(function, arguments): a plain tensor as `in_files_format` with attributes."""
  function, args = made
  return _rebuild_from_type_v2, (function, torch.Tensor, args, state)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
  """The dtype that a file gives to the storage of a tensor."""
  return torch.uint8 if dtype in _new_dtypes() else dtype


class TypedStorage(torch.TypedStorage):
  """A base for storages that are files' own to `torch.save`, not to `pickle`."""

  def __new__(cls, *args, **kwargs):
    return object.__new__(cls)

  def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype):
    super().__init__(wrap_storage=untyped, dtype=dtype, _internal=True)


def typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype):
  """`torch.TypedStorage` of a storage, without the warning that it is going away."""
  return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def write_storage(storage: torch.UntypedStorage, *args) -> None:
  """Writes a storage of the CPU to a file of torch's older format."""
  storage._write_file(*args)


def read_storage(storage: torch.UntypedStorage, *args) -> None:
  """Fills a storage of the CPU from a file of torch's older format."""
  storage._set_from_file(*args)


def is_read_later(storage: torch.UntypedStorage) -> bool:
  """True for one whose bytes `torch.load` reads after it has made the tensors."""
  return getattr(storage, "_torch_load_uninitialized", False)


def watch_late_reads() -> None:
  """Makes `is_read_later` false once the bytes are there; torch leaves its mark."""
  if _read is None:
    return

  @functools.wraps(_read)
  def _set_from_file(self, *args):
    _read(self, *args)
    self._torch_load_uninitialized = False
    return self

  patch(torch.UntypedStorage, "_set_from_file", _set_from_file, _FEATURE)


def has_map_location() -> bool:
  """True inside a `torch.load` that was told where tensors go, or may have been."""
  return _loading is None or getattr(_loading, "map_location", None) is not None


def watch_marks(mark) -> None:
  """Calls `mark(tensor, metadata)` when torch has loaded a tensor with marks.

  The marks are those of `in_files_format`. Where it returns False, torch sets them.
  """
  if _set_marks is None:
    return

  @functools.wraps(_set_marks)
  def set_tensor_metadata(tensor, metadata):
    if not mark(tensor, metadata):
      _set_marks(tensor, metadata)

  patch(
    private.walk("torch._utils"), "set_tensor_metadata", set_tensor_metadata, _FEATURE
  )


def watch_moves_of_storages(move) -> None:
  """Has `storage.to(device="jax")` and `storage.jax()` call `move(storage, device)`."""
  to = torch.UntypedStorage.to

  @functools.wraps(to)
  def to_device(self, *, device, non_blocking=False):
    if torch.device(device).type == BACKEND:
      return move(self, torch.device(device))
    return to(self, device=device, non_blocking=non_blocking)

  def to_jax(self, device=None):
    """A copy of the storage on a jax device."""
    return move(self, torch.device(BACKEND if device is None else device))

  patch(torch.UntypedStorage, "to", to_device, _STORAGES)
  patch(torch.UntypedStorage, "jax", to_jax, _STORAGES)


def make_storages(make) -> None:
  """Has `torch.UntypedStorage(…, device="jax")` call `make(…, device=device)`.

  C++, which has no memory of this backend, would end the process.
  """
  cls = torch.UntypedStorage
  new = cls.__new__

  def of_any_device(kind, *args, **kwargs):
    device = kwargs.get("device")
    if device is None or kind is not cls or torch.device(device).type != BACKEND:
      return new(kind, *args, **kwargs)
    return make(*args, **kwargs)

  patch(cls, "__new__", staticmethod(of_any_device), _STORAGES)


def _dlpack_method(tensor: torch.Tensor):
  return tensor.__dlpack__(max_version=(1, 0))


# DLPack capsule of the memory of a CPU tensor.
dlpack_capsule = private.find(
  "torch._C._to_dlpack_versioned",
  "copies to the CPU, which are quicker with it",
  instead=_dlpack_method,
)
