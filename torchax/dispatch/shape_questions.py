"""Operations by which torch's C++ asks for a shape and a dtype alone.

The forward-mode formula of `x - 1` has a tangent of zeros for the number. C++ adds it
to the other one by the reference implementation of torch on meta tensors; ours report
that they are meta, so they come there as they are.
"""

from collections.abc import Callable

import torch
from torch.utils import _pytree as torch_pytree

from torchax import _torch_compat
from torchax.tensor import Tensor
from torchax.view import View


class ShapePlan:
  """Runs a part of a reference implementation; on meta where it meets a meta tensor."""

  def __init__(self, op, plan: Callable):
    self.op = op
    self.plan = plan

  def __call__(self, args, kwargs):
    leaves = torch_pytree.tree_leaves((args, kwargs or {}))
    if not any(map(_is_plain, leaves)):
      return self.plan(args, kwargs)
    args, kwargs = torch_pytree.tree_map(_on_meta, (args, kwargs or {}))
    with _torch_compat.without_modes():
      return self.op(*args, **kwargs)


def plan(op, schema, plan_by_registry: Callable, env) -> ShapePlan | None:
  """The plan of a part of a reference implementation; None for all others."""
  if op.namespace != "prims":
    return None
  return ShapePlan(op, plan_by_registry(op))


def _is_plain(value) -> bool:
  if not isinstance(value, torch.Tensor) or isinstance(value, Tensor | View):
    return False
  with _torch_compat.without_function_modes():
    return value.is_meta


def _on_meta(value):
  """A meta tensor of the shape and dtype of a jax tensor; anything else as it is."""
  if not isinstance(value, Tensor | View):
    return value
  shape, dtype = tuple(value.shape), value.dtype
  with _torch_compat.without_modes():
    return torch.empty(shape, dtype=dtype, device="meta")
