"""`MixedPrecisionPolicy` of `fully_shard`: modules compute in the policy's dtype.

Parameters, their gradients and the optimizer's state keep their dtype. While a module
runs, its parameters are replaced by copies in the policy's dtype. Autograd casts the
gradients of the copies back.
"""

from typing import Any, NamedTuple

import jax
import torch

from torchax.core.partitions import is_tensor
from torchax.errors import CollectiveError

Slot = tuple[torch.nn.Module, str]
"""Module and the name of one of its own parameters."""


class _ForwardPass(NamedTuple):
  """Forward pass in progress, with (slot, parameter, copy) for each replacement."""

  module: torch.nn.Module
  replaced: list[tuple[Slot, torch.Tensor, torch.Tensor]]


def require_known(policy: Any) -> None:
  """Check that the dtypes of a policy are floating-point.

  Raises:
    CollectiveError: a dtype is not floating-point.
  """
  dtypes = {k: v for k, v in vars(policy).items() if isinstance(v, torch.dtype)}
  wrong = {name: dtype for name, dtype in dtypes.items() if not dtype.is_floating_point}
  if wrong:
    raise CollectiveError(
      "A MixedPrecisionPolicy expects floating-point dtypes, such as "
      f"torch.bfloat16, but got {wrong}."
    )


class Precision:
  """Precision in which the modules of `fully_shard(modules, mp_policy=)` compute.

  Hooks on each module that contains a parameter of the group replace the parameters.
  Each submodule has its own hooks: checkpointing recomputes a submodule alone.

  Args:
    roots: the modules given to `fully_shard`; their inputs and outputs are cast too.
    slots: slots of the floating-point parameters.
    policy: torch's policy; `reduce_dtype` is ignored, XLA reduces.
  """

  def __init__(self, roots: list[torch.nn.Module], slots: list[Slot], policy: Any):
    self.dtype, self.output_dtype = policy.param_dtype, policy.output_dtype
    self.casts_inputs = policy.cast_forward_inputs
    self.roots = roots
    self.slots: dict[torch.nn.Module, list[Slot]] = {}
    self.entered: list[_ForwardPass] = []
    for module in dict.fromkeys(part for root in roots for part in root.modules()):
      inside = set(map(id, module.modules()))
      own_slots = [slot for slot in slots if id(slot[0]) in inside]
      if own_slots or module in roots:
        self.slots[module] = own_slots
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

  def enter(self, module: torch.nn.Module, args, kwargs):
    """Replace parameters by copies and cast inputs; runs before a forward pass."""
    copies: dict[int, torch.Tensor] = {}
    replaced: list = []
    self.entered.append(_ForwardPass(module, replaced))
    for slot in self.slots[module] if self.dtype is not None else ():
      owner, name = slot
      parameter = owner._parameters[name]
      if parameter is None or parameter.dtype == self.dtype:
        continue
      if id(parameter) not in copies:
        copies[id(parameter)] = parameter.to(self.dtype)
      cast = copies[id(parameter)]
      replaced.append((slot, parameter, cast))
      owner._parameters[name] = cast  # type: ignore[assignment]
    if module in self.roots and self.casts_inputs:
      return _cast((args, kwargs), self.dtype)
    return args, kwargs

  def leave(self, module: torch.nn.Module, args, outputs):
    """Restore parameters and cast outputs; also runs if the forward pass raised."""
    if not self.entered or self.entered[-1].module is not module:
      return None  # an earlier hook raised, so `enter` did not run
    for (owner, name), parameter, cast in self.entered.pop().replaced:
      if owner._parameters[name] is cast:
        owner._parameters[name] = parameter  # type: ignore[assignment]
    return _cast(outputs, self.output_dtype) if module in self.roots else None

  def call_with_precision(self, module: torch.nn.Module, method, args, kwargs):
    """Call a method of a module with the precision of its forward pass."""
    args, kwargs = self.enter(module, args, kwargs)
    outputs = None
    try:
      outputs = method(*args, **kwargs)
    finally:
      left = self.leave(module, args, outputs)
    return left


def _cast(tree, dtype: torch.dtype | None):
  """Cast the floating-point tensors of a tree; None keeps their dtype."""

  def cast(leaf):
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_float else leaf

  return tree if dtype is None else jax.tree.map(cast, tree, is_leaf=is_tensor)
