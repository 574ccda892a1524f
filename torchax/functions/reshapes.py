"""Handlers of in-place changes of shape (`t_`, `squeeze_`, …), above autograd.

After a write, autograd replays the views of a tensor on the tensor itself. If its shape
had changed, they would show other elements. So the tensor becomes a view of a hidden
tensor, which keeps the old shape and the older views.
"""

from collections.abc import Callable

import torch

from torchax.compat import torch_compat
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


def register_functions(env) -> None:
  """Add in-place changes of shape, `detach_` and `requires_grad_` to an environment."""
  for name in _NAMES:
    env.functions.add(getattr(torch.Tensor, name), _reshape(name))
  for name in ("detach_", "requires_grad_"):
    env.functions.add(getattr(torch.Tensor, name), _without_base(name))


def _reshape(name: str) -> Callable:
  in_place, view = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

  def reshape(args, kwargs):
    tensor, *rest = args
    if not _may_become_view(tensor):
      return in_place(*args, **kwargs)
    require_own(tensor, name)
    from_base = (
      name == "as_strided_" and tensor._is_view() and not torch.is_grad_enabled()
    )
    with torch.enable_grad():
      hidden = _strided(*args, **kwargs) if from_base else view(*args, **kwargs)
    if type(hidden) is not View:  # a transform of `torch.func` has wrapped it
      return in_place(*args, **kwargs)
    has_own_base = not tensor._is_view()
    _exchange(tensor, hidden)
    if has_own_base:
      tensor._has_hidden_base = True
    record_reshape(tensor, in_place, rest, kwargs)
    return tensor

  return reshape


def _strided(tensor, size, stride, storage_offset=None):
  """Return `as_strided` of a view with elements of its base that it did not show.

  Under `no_grad` torch derives the graph of a changed view from its base.
  """
  offset = tensor.storage_offset() if storage_offset is None else storage_offset
  return tensor._base.as_strided(size, stride, offset)


def _without_base(name: str) -> Callable:
  """Return a handler that gives a tensor with a hidden base its own base first.

  torch refuses these functions for views.
  """
  function = getattr(torch.Tensor, name)

  def run(args, kwargs):
    tensor = args[0]
    is_leaf = tensor.is_leaf or name == "detach_"
    if is_leaf and tensor.__dict__.pop("_has_hidden_base", False):
      _exchange(tensor, tensor.detach())
    return function(*args, **kwargs)

  return run


def _may_become_view(tensor) -> bool:
  """Return False for other classes, and if autograd would not record the change."""
  if type(tensor) not in (Tensor, View) or tensor.is_inference():
    return False
  if tensor.retains_grad:  # autograd has a weak reference to this object
    return False
  base = tensor if tensor._base is None else tensor._base
  if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
    return False  # torch raises an error
  # Under `no_grad` torch derives the graph of a changed view from its base.
  is_recorded = torch.is_grad_enabled() or tensor._is_view()
  return (is_recorded and not tensor.is_leaf) or not tensor.requires_grad


def _exchange(tensor: Tensor, view: View) -> None:
  """Give `tensor` the shape and graph of `view`, and `view` those of `tensor`."""
  torch_compat.swap_held_tensors(tensor, view)
  tensor._chain, view._chain = view._chain, tensor._chain
  tensor.__class__, view.__class__ = type(view), type(tensor)
