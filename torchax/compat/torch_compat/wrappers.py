"""Tensors without memory of their own, and what torch asks them."""

import functools

import torch

from torchax.compat import private
from torchax.compat.torch_compat.modes import without_dispatch

_WRAPPERS = "the class of its tensors, which have no memory that torch knows"
_make_wrapper = private.essential("torch.Tensor._make_wrapper_subclass", _WRAPPERS)
_make_subclass = private.find(
  "torch.Tensor._make_subclass", 'torch.tensor(…, device="jax")'
)
_key_set = private.essential("torch._C.DispatchKeySet", _WRAPPERS)
_meta_key = private.essential("torch._C.DispatchKey.Meta", _WRAPPERS)

# Device of a wrapper as C++ sees it; Python sees "jax". What C++ makes beside a wrapper
# goes to the kernels of this device, which are ours (`functions/factories.py`), and
# autograd runs on the calling thread for it. It does so for meta too, but there the
# numbers of such a tensor are lost.
HIDDEN_DEVICE = torch.device("lazy")
HIDDEN_KEY = "Lazy"
# Key of a wrapper under `without_dispatch`: torch's shape functions run on it.
SHAPE_KEY = "Meta"


@classmethod
def _call_without_overrides(cls, func, types, args=(), kwargs=None):
  # torch's own, as for a plain tensor: results stay of the class that they have.
  return torch.Tensor.__torch_function__(func, (), args, kwargs)


# Class attribute value that keeps torch functions from calling into Python.
disabled_torch_function = private.find(
  "torch._C._disabled_torch_function_impl",
  "calls of torch functions at their full speed",
  instead=_call_without_overrides,
)


class CpuSubclass(torch.Tensor):
  """A tensor on the CPU whose operations go to `cls.__torch_dispatch__`.

  Attributes:
    plain: a tensor of the same memory, without the class.
  """

  __torch_function__ = disabled_torch_function

  @classmethod
  def of(cls, plain: torch.Tensor):
    """A tensor of this class with the memory of a plain one."""
    made = _make_subclass(cls, plain)
    made.plain = plain
    return made


AUTOCAST = 'torch.autocast("jax")'
_autocast_key = private.find(
  "torch._C.DispatchKey.AutocastPrivateUse1", AUTOCAST, instead=None
)
# The key of `torch.autocast("jax")`, which is masked where autocast is off.
AUTOCAST_KEYS = _key_set(_autocast_key) if _autocast_key else None
_KEYS = _key_set(_meta_key)
_KEYS = _KEYS | AUTOCAST_KEYS if AUTOCAST_KEYS else _KEYS

# (cls, size, *, strides, storage_offset, dtype, requires_grad): a tensor without memory
# of its own whose operations go to `cls.__torch_dispatch__`.
make_wrapper = functools.partial(
  _make_wrapper, device=HIDDEN_DEVICE, _extra_dispatch_keys=_KEYS
)


# (tensor, bool): marks a wrapper as the conjugate or the negative of what torch
# believes to be its memory, so that `resolve_conj`, `is_conj`, `imag` act as on the
# CPU.
set_conj = private.find("torch._C._set_conj", "conjugate views")
set_neg = private.find("torch._C._set_neg", "negative views")

# (func, args, kwargs, out) -> out, with the memory and the identity of the arguments
# where the operation's schema says so.
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
  rest = list(args)
  if rest and isinstance(rest[0], torch.Tensor):
    device, dtype = rest[0].device, rest.pop(0).dtype
  elif rest and isinstance(rest[0], torch.dtype):
    dtype = rest.pop(0)
  elif rest:
    device = rest.pop(0)
    dtype = rest.pop(0) if rest else dtype
  non_blocking = rest[0] if rest else non_blocking
  device = None if device is None else torch.device(device)
  return device, dtype, non_blocking, memory_format


# (*args, **kwargs) -> (device, dtype, non_blocking, memory format) of `Tensor.to`.
parse_to = private.find(
  "torch._C._nn._parse_to", "torch's own errors of Tensor.to", instead=_parse_to
)


def set_metadata(tensor: torch.Tensor, source: torch.Tensor) -> None:
  """Gives `tensor` the shape, strides and dtype of `source`, keeping its identity."""
  # The setter asks an operation that wrappers would send back to Python.
  with without_dispatch():
    torch.Tensor.data.__set__(tensor, source)


def mark_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
  """Makes `isinstance(tensor, torch.nn.Parameter)` true."""
  tensor._is_param = True
  return tensor


def is_parameter(tensor: torch.Tensor) -> bool:
  """True for what `torch.nn.Parameter` has made of a tensor."""
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


def innermost(tensor: torch.Tensor) -> torch.Tensor:
  """The tensor that the transforms of `torch.func` have wrapped, or the tensor."""
  while _is_wrapped(tensor):
    tensor = _unwrapped(tensor)
  return tensor
