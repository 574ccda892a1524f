"""Users' subclasses of `torch.Tensor` for tensors of ours."""

from collections.abc import Callable, Collection, Sequence

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.graphs import is_fake_class
from torchax.compat.torch_compat.wrappers import mark_as_parameter

_FEATURE = "jax tensors of users' subclasses of torch.Tensor"
_make_subclass = private.find("torch.Tensor._make_subclass", _FEATURE, instead=None)
# (result, cls) -> the result, its tensors as instances of `cls`.
convert = private.find("torch._tensor._convert", _FEATURE)

_attributes = vars(torch.Tensor)["__dict__"]
# `__torch_dispatch__` of classes that do not define it.
_plain = torch.Tensor.__torch_dispatch__
# Classes seen by `with_parts` that run no operations on parts.
_without_parts: set[type] = set()
# (tensor) -> its `__dict__`, whatever a subclass shows.
attributes_of = _attributes.__get__
# (tensor, attributes) -> None
set_attributes = _attributes.__set__


def with_parts(types: Collection[type], ours: type) -> tuple[type, ...]:
  """Return the classes of tensors, other than `ours`, that run operations on parts.

  These are wrapper subclasses, with their own `__torch_dispatch__`.
  """
  if _without_parts.issuperset(types):
    return ()
  found = []
  for cls in types:
    is_plain = getattr(cls, "__torch_dispatch__", _plain) is _plain
    if is_plain or issubclass(cls, ours) or is_fake_class(cls):
      _without_parts.add(cls)
    else:
      found.append(cls)
  return tuple(found)


def hand_over(name: str, classes: Sequence[type], func, args, kwargs):
  """Call a handler of classes, such as `__torch_function__`, until one accepts.

  The handlers see only these classes, because torch does not list its own tensors
  either.
  """
  for cls in classes:
    result = getattr(cls, name)(func, classes, args, kwargs or {})
    if result is not NotImplemented:
      return result
  return NotImplemented


def subclass_by(make: Callable, tensor_class: type, class_on_cpu: Callable) -> None:
  """Make constructors of subclasses call `make` for tensors of a class.

  Args:
    make: (cls, tensor, requires_grad) -> alias of class `cls`, without history.
    tensor_class: class of the tensors.
    class_on_cpu: (cls) -> the class that other tensors get for `cls`, which may be that
      of a tensor of `tensor_class`.
  """
  make_parameter, alias = torch.nn.Parameter.__new__, torch.Tensor.as_subclass
  construct = torch.Tensor.__new__

  def as_subclass(self, cls):
    # `torch.Tensor.as_subclass(x, cls)`; a method of ours would not be found.
    if isinstance(self, tensor_class):
      return self.as_subclass(cls)
    return alias(self, class_on_cpu(cls))

  def make_subclass(cls, data, requires_grad=False, **kwargs):
    # The signature of Dynamo's substitute; torch's own keyword is `require_grad`.
    requires_grad = kwargs.pop("require_grad", requires_grad)
    if isinstance(data, tensor_class):
      return make(cls, data, requires_grad)
    return _make_subclass(class_on_cpu(cls), data, requires_grad, **kwargs)

  def new(*args, **kwargs):  # the signature that Dynamo accepts
    if len(args) == 2 and isinstance(args[1], tensor_class) and not kwargs:
      return args[1].as_subclass(args[0])
    return construct(*args, **kwargs)

  def new_parameter(cls, data=None, requires_grad=True):
    if not isinstance(data, tensor_class):
      return make_parameter(cls, data, requires_grad)
    # torch would return a tensor of the class of `data`.
    if cls is not torch.nn.Parameter:
      return make(cls, data, requires_grad)
    return mark_as_parameter(make(type(data), data, requires_grad))

  patch(torch.Tensor, "as_subclass", as_subclass, _FEATURE)
  if _make_subclass is not None:
    patch(torch.Tensor, "_make_subclass", staticmethod(make_subclass), _FEATURE)
  patch(torch.Tensor, "__new__", staticmethod(new), _FEATURE)
  patch(torch.nn.Parameter, "__new__", staticmethod(new_parameter), _FEATURE)
