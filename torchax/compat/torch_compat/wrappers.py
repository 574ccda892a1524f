"""Wrapper subclasses of tensors: creation, metadata and dispatch keys."""

import contextlib
import functools

import torch

from torchax.compat import private
from torchax.compat.torch_compat.mode_state import without_dispatch

_WRAPPERS = "the class of its tensors, which have no memory that torch knows"
_make_wrapper = private.essential("torch.Tensor._make_wrapper_subclass", _WRAPPERS)
_key_set = private.essential("torch._C.DispatchKeySet", _WRAPPERS)
_meta_key = private.essential("torch._C.DispatchKey.Meta", _WRAPPERS)

# Device of a wrapper in C++; Python sees "jax". Factories that C++ calls for a wrapper
# use the kernels of this device, which are ours (`functions/factories.py`). Autograd
# runs on the calling thread for it. Meta has that property too, but there the values of
# such factories would be lost.
HIDDEN_DEVICE = torch.device("lazy")
HIDDEN_KEY = "Lazy"
# Key of a wrapper under `without_dispatch`: torch's meta kernels run for it.
SHAPE_KEY = "Meta"


@classmethod
def _call_without_overrides(cls, func, types, args=(), kwargs=None):
  # As for a plain tensor: results keep their class.
  return torch.Tensor.__torch_function__(func, (), args, kwargs)


# Class attribute value that keeps torch functions from calling into Python.
disabled_torch_function = private.find(
  "torch._C._disabled_torch_function_impl",
  "calls of torch functions at their full speed",
  instead=_call_without_overrides,
)


AUTOCAST = 'torch.autocast("jax")'
_autocast_key = private.find(
  "torch._C.DispatchKey.AutocastPrivateUse1", AUTOCAST, instead=None
)
# Key of `torch.autocast("jax")`, masked while autocast is disabled.
AUTOCAST_KEYS = _key_set(_autocast_key) if _autocast_key else None
_KEYS = _key_set(_meta_key)
_KEYS = _KEYS | AUTOCAST_KEYS if AUTOCAST_KEYS else _KEYS

# (cls, size, *, strides, storage_offset, dtype, requires_grad) -> a wrapper subclass,
# without memory, whose operations go to `cls.__torch_dispatch__`.
make_wrapper = functools.partial(
  _make_wrapper, device=HIDDEN_DEVICE, _extra_dispatch_keys=_KEYS
)


# (tensor, bool): set the conjugate or negative bit of a wrapper, so that
# `resolve_conj`, `is_conj` and `imag` act as on the CPU.
set_conj = private.find("torch._C._set_conj", "conjugate views")
set_neg = private.find("torch._C._set_neg", "negative views")

# (func, args, kwargs, out) -> out, with the storage and identity of arguments that the
# operation's schema aliases.
correct_aliasing = private.find(
  "torch.utils._python_dispatch.return_and_correct_aliasing",
  "changes in place in a graph that torch captures",
)


def _parse_to(
  *args,
  device=None,
  dtype=None,
  non_blocking=False,
  copy=False,
  memory_format=None,
):
  positional = list(args)
  if positional and isinstance(positional[0], torch.Tensor):
    device, dtype = positional[0].device, positional.pop(0).dtype
  elif positional and isinstance(positional[0], torch.dtype):
    dtype = positional.pop(0)
  elif positional:
    device = positional.pop(0)
    dtype = positional.pop(0) if positional else dtype
  non_blocking = positional[0] if positional else non_blocking
  device = None if device is None else torch.device(device)
  return device, dtype, non_blocking, memory_format


# (*args, **kwargs) -> (device, dtype, non_blocking, memory format) of `Tensor.to`.
parse_to = private.find(
  "torch._C._nn._parse_to", "torch's own errors of Tensor.to", instead=_parse_to
)


_data = torch.Tensor.data


def set_metadata(tensor: torch.Tensor, source: torch.Tensor) -> None:
  """Give `tensor` the shape, strides and dtype of `source`, keeping its identity."""
  # The setter calls an operation that wrappers would dispatch to Python.
  with without_dispatch():
    _data.__set__(tensor, source)


def mark_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
  """Make `isinstance(tensor, torch.nn.Parameter)` true."""
  tensor._is_param = True
  return tensor


def is_parameter(tensor: torch.Tensor) -> bool:
  """Return True for a parameter."""
  return isinstance(tensor, torch.nn.Parameter)


_IN_TRANSFORMS = "moves and batched gradients inside the transforms of `torch.func`"
_is_wrapped = private.find(
  "torch._C._functorch.is_functorch_wrapped_tensor",
  _IN_TRANSFORMS,
  instead=lambda tensor: False,
)
_unwrapped = private.find(
  "torch._C._functorch.get_unwrapped", _IN_TRANSFORMS, instead=lambda tensor: tensor
)

# Context in which tensors are not wrapped for the transforms of `torch.func`.
outside_transforms = private.find(
  "torch._C._DisableFuncTorch", _IN_TRANSFORMS, instead=contextlib.nullcontext
)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
  """Return the tensor inside the wrappers of `torch.func`'s transforms."""
  while _is_wrapped(tensor):
    tensor = _unwrapped(tensor)
  return tensor
