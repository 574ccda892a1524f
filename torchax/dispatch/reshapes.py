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
  Tensor.detach_ = _detach


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
    _exchange(self, hidden)
    record_reshape(self, reshape, args, kwargs)
    return self

  reshape.__name__ = name
  reshape.__doc__ = f"As `torch.Tensor.{name}`."
  return reshape


def _detach(self):
  """As `torch.Tensor.detach_`; torch refuses views, which a change of shape makes."""
  if not self.__dict__.get("_has_hidden_base"):
    return torch.Tensor.detach_(self)
  _exchange(self, self.detach())
  return self


def _may_become_view(tensor) -> bool:
  """False for trained leaves, which have to stay leaves, and for others' classes."""
  is_trained = tensor.requires_grad and tensor.is_leaf
  return type(tensor) in (Tensor, View) and not (is_trained or tensor.is_inference())


def _exchange(tensor: Tensor, view: View) -> None:
  """Gives `tensor` the shape and graph of `view`, and `view` those of `tensor`."""
  retains_grad, was_view = tensor.retains_grad, tensor._is_view()
  _torch_compat.swap_held_tensors(tensor, view)
  tensor._chain, view._chain = view._chain, tensor._chain
  tensor.__class__, view.__class__ = type(view), type(tensor)
  if not was_view:
    tensor._has_hidden_base = True
  if retains_grad:
    tensor.retain_grad()
