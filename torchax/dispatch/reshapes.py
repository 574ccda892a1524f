"""Changes of a tensor's shape in place (`t_`, `squeeze_`, …), above autograd.

After a write, autograd replays the views of a tensor on the tensor itself. If its shape
had changed, they would show other elements. So the tensor becomes a view of a hidden
tensor, which keeps the old shape and the older views.
"""

from collections.abc import Callable

import torch

from torchax import _torch_compat
from torchax.dispatch.views import record_reshape, require_own
from torchax.tensor import Tensor
from torchax.view import View

_NAMES = (
  "as_strided_",
  "squeeze_",
  "swapaxes_",
  "swapdims_",
  "t_",
  "transpose_",
  "unsqueeze_",
)


def register() -> None:
  """Gives the class of jax tensors these methods."""
  for name in _NAMES:
    setattr(Tensor, name, _method(name))
  for name in ("detach_", "requires_grad_"):
    setattr(Tensor, name, _alone(name))


def _method(name: str) -> Callable:
  in_place, view = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

  def reshape(self, *args, **kwargs):
    if not _may_become_view(self):
      return in_place(self, *args, **kwargs)
    require_own(self, name)
    with torch.enable_grad():
      hidden = view(self, *args, **kwargs)
    if type(hidden) is not View:  # a transform of `torch.func` has wrapped it
      return in_place(self, *args, **kwargs)
    has_own_base = not self._is_view()
    _exchange(self, hidden)
    if has_own_base:
      self._has_hidden_base = True
    record_reshape(self, reshape, args, kwargs)
    return self

  return _named(reshape, name)


def _named(method: Callable, name: str) -> Callable:
  method.__name__ = name
  method.__doc__ = f"As `torch.Tensor.{name}`."
  return method


def _alone(name: str) -> Callable:
  """A method that torch has for tensors, and not for views, of a changed shape."""
  method = getattr(torch.Tensor, name)

  def run(self, *args, **kwargs):
    is_leaf = self.is_leaf or name == "detach_"
    if is_leaf and self.__dict__.pop("_has_hidden_base", False):
      _exchange(self, self.detach())
    return method(self, *args, **kwargs)

  return _named(run, name)


def _may_become_view(tensor) -> bool:
  """False for others' classes, and where autograd would not record the change."""
  if type(tensor) not in (Tensor, View) or tensor.is_inference():
    return False
  if tensor.retains_grad:  # autograd holds it weakly, so it has to stay
    return False
  is_recorded = torch.is_grad_enabled() and not tensor.is_leaf
  return is_recorded or not tensor.requires_grad


def _exchange(tensor: Tensor, view: View) -> None:
  """Gives `tensor` the shape and graph of `view`, and `view` those of `tensor`."""
  _torch_compat.swap_held_tensors(tensor, view)
  tensor._chain, view._chain = view._chain, tensor._chain
  tensor.__class__, view.__class__ = type(view), type(tensor)
