"""Jax tensors of users' subclasses of `torch.Tensor`.

`x.as_subclass(cls)` and `torch.Tensor._make_subclass(cls, x)` give a tensor whose class
inherits from `cls` and from `Tensor`: the methods of the one, the array of the other.
"""

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions, handle_torch_function

from torchax.compat import jax_compat, torch_compat
from torchax.errors import MutationError
from torchax.saving import torch_files
from torchax.saving.torch_files import OWN
from torchax.tensor import Tensor, handles_functions


class UserAttributes(MutableMapping, dict):
  """Attributes of a tensor without those of its array.

  Libraries copy, update and assign `tensor.__dict__` to copy metadata. Changes reach
  the tensor; copies are plain dictionaries.
  """

  __getitem__, __iter__, __len__ = dict.__getitem__, dict.__iter__, dict.__len__

  def __init__(self, attributes: dict):
    dict.__init__(self, {n: v for n, v in attributes.items() if n not in OWN})
    self._attributes = attributes

  def __setitem__(self, name, value):
    if name not in OWN:
      dict.__setitem__(self, name, value)
      self._attributes[name] = value

  def __delitem__(self, name):
    dict.__delitem__(self, name)
    del self._attributes[name]

  def copy(self) -> dict:
    return dict(self)

  def __reduce_ex__(self, protocol):
    return dict, (dict(self),)


def _overridable(function: Callable) -> Callable:
  """Return a method that calls a torch function through the user's override."""

  def method(self, *args, **kwargs):
    return handle_torch_function(function, (self,), self, *args, **kwargs)

  return functools.wraps(function)(method)


_DATA = _overridable(torch.Tensor.data.__get__)


class SubclassTensor(Tensor):
  """Base of these classes; replaces the methods of `torch.Tensor`."""

  user_class: type = torch.Tensor

  to = _overridable(torch.Tensor.to)
  cpu = _overridable(torch.Tensor.cpu)

  @property
  def __dict__(self) -> dict:  # type: ignore[override]
    return UserAttributes(torch_compat.attributes_of(self))

  @__dict__.setter
  def __dict__(self, attributes: dict):
    current = self.__dict__
    current.clear()
    current.update(attributes)

  def __init__(self, *args: Any, **kwargs: Any):
    pass  # `__new__` of the user's class takes the arguments

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    """Return results of the user's class, as torch does by default."""
    if not all(issubclass(cls, other) for other in filter(handles_functions, types)):
      return NotImplemented
    result = super().__torch_function__(func, types, args, kwargs)
    is_kept = func in get_default_nowrap_functions()
    return result if is_kept else torch_compat.convert(result, cls.user_class)

  def __reduce_ex__(self, protocol):
    state = self.__dict__.copy()
    if torch_compat.is_parameter(self):
      state["_is_param"] = True
    plain = as_subclass(self.detach(), Tensor).requires_grad_(self.requires_grad)
    rebuild = torch_files.reduce(plain)
    return torch_compat.subclass_in_files_format(rebuild, self.user_class, state)


def as_subclass(tensor: Tensor, cls: type) -> Tensor:
  """Return an alias of a tensor, of class `cls`; gradients flow back through it."""
  new_class = class_with_array(cls)
  if new_class is Tensor and not isinstance(tensor, SubclassTensor):
    return tensor
  with torch_compat.without_function_overrides():
    made: Any = torch.ops.aten.alias.default(tensor)
  made.__class__ = new_class
  return made


def make_subclass(cls: type, tensor: Tensor, requires_grad: bool) -> Tensor:
  """Return an alias without history, like `torch.Tensor._make_subclass`."""
  # The transforms of `torch.func` wrap results, and refuse `requires_grad_`.
  with torch_compat.without_function_overrides(), torch_compat.outside_transforms():
    made = as_subclass(tensor.detach(), cls)
    made.requires_grad = requires_grad
  return made


@functools.cache  # keeps the classes alive
def class_with_array(cls: type) -> type:
  """Return the class of jax tensors for a subclass of `torch.Tensor`.

  Raises:
    TypeError: the class has its own `__torch_dispatch__`, or `__slots__`.
  """
  if issubclass(Tensor, cls):
    return Tensor
  if issubclass(cls, Tensor):
    return cls
  if _has_own_dispatch(cls):
    raise TypeError(
      f"A jax tensor cannot become a {cls.__name__}, which has its own "
      "__torch_dispatch__. Let the class hold the jax tensor as an attribute."
    )
  attributes = {
    # Bases of the user's class may have a descriptor of theirs.
    "__dict__": vars(SubclassTensor)["__dict__"],
    "__doc__": cls.__doc__,
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__new__": _constructor(cls),
    "user_class": cls,
  }
  if cls.__reduce_ex__ is torch.nn.Parameter.__reduce_ex__:
    # As in torch, a saved parameter is a torch.nn.Parameter when it is loaded.
    attributes["__reduce_ex__"] = Tensor.__reduce_ex__
  override: Any = cls.__torch_function__
  if override is torch_compat.disabled_torch_function:
    attributes |= _OF_PARAMETERS
  elif override.__func__ is not torch.Tensor.__torch_function__.__func__:
    attributes["__torch_function__"] = _call_override(cls)
    attributes["data"] = property(_DATA, Tensor.data.fset)
  made = type(cls)(cls.__name__, (cls, SubclassTensor), attributes)
  if made.__basicsize__ != SubclassTensor.__basicsize__:
    raise TypeError(
      f"A jax tensor cannot become a {cls.__name__}, which has __slots__. Remove them; "
      "the attributes are then in __dict__."
    )
  return made


def _has_own_dispatch(cls: type) -> bool:
  return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _constructor(user_class: Any) -> Callable:
  """Return `__new__` of a class, which may get a tensor on any device."""
  has_own = user_class.__new__ is not torch.Tensor.__new__

  def new(cls, *args, **kwargs):
    if has_own:
      return user_class.__new__(user_class, *args, **kwargs)
    return torch.as_tensor(*args, **kwargs).as_subclass(user_class)

  return new


def _call_override(user_class: Any) -> classmethod:
  """Return a `__torch_function__` that passes the user's classes to the override."""

  def override(cls, func, types, args=(), kwargs=None):
    classes = tuple(map(class_of_user, filter(handles_functions, types)))
    return user_class.__torch_function__(func, classes, args, kwargs or {})

  return classmethod(override)


def class_of_user(cls: Any) -> type:
  """Return the class of CPU tensors for a class of jax tensors, or another class."""
  if issubclass(cls, SubclassTensor):
    return cls.user_class
  return torch.Tensor if issubclass(cls, Tensor) else cls


def _plain_data(tensor):
  data = Tensor.data.fget(tensor)
  data.__class__ = Tensor
  return data


# Results of operations are plain tensors.
_OF_PARAMETERS = {
  "__torch_function__": vars(Tensor)["__torch_function__"],
  "data": property(_plain_data, Tensor.data.fset),
}


def keep_class(tensor: torch.Tensor, cls: type) -> None:
  """Give a parameter that has moved the user's class that it had before."""
  cls = class_of_user(cls)
  if not (isinstance(tensor, cls) or _has_own_dispatch(cls)):
    tensor.__class__ = class_with_array(cls) if isinstance(tensor, Tensor) else cls


def move_to_data(tensor: torch.Tensor, other: Tensor) -> None:
  """Make a tensor of another device an alias of `other`, as `tensor.data = other` does.

  Its class, its attributes and a gradient stay; the gradient moves too.

  Raises:
    MutationError: the tensor is no leaf, or a function is being traced.
  """
  if not tensor.is_leaf or not jax_compat.is_top_level():
    raise MutationError(
      "`tensor.data = other` moves a tensor to jax only if the tensor is a leaf, "
      "and outside of functions that are being compiled. Move it before with "
      '`tensor.to("jax")`.'
    )
  gradient, cls, named = tensor.grad, type(tensor), dict(tensor.__dict__)
  made = other.detach()
  if isinstance(tensor, torch.nn.Parameter):
    made = torch.nn.Parameter(made)
  torch.utils.swap_tensors(tensor, made.requires_grad_(tensor.requires_grad))
  keep_class(tensor, cls)
  for name, value in named.items():
    tensor.__dict__.setdefault(name, value)
  if gradient is not None:
    tensor.grad = gradient.to(other.device)
