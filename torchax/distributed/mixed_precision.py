"""`MixedPrecisionPolicy` of `fully_shard`: modules compute in a dtype.

The parameters stay as they are, and so do their gradients and the optimizer's state.
While a module runs, what it finds under their names are copies in the dtype of the
policy, whose gradients autograd casts back.
"""

from typing import Any, NamedTuple

import jax
import torch

from torchax.errors import CollectiveError

Place = tuple[torch.nn.Module, str]
"""A module and the name of a parameter of its own."""


class _Entered(NamedTuple):
  """A forward pass that is in progress, and what it has put in whose place."""

  module: torch.nn.Module
  replaced: list[tuple[Place, torch.Tensor, torch.Tensor]]


def require_known(policy: Any) -> None:
  """Raises for a policy that floating-point numbers cannot follow.

  Raises:
    CollectiveError: a dtype that is none of floating-point numbers.
  """
  dtypes = {k: v for k, v in vars(policy).items() if isinstance(v, torch.dtype)}
  wrong = {name: dtype for name, dtype in dtypes.items() if not dtype.is_floating_point}
  if wrong:
    raise CollectiveError(
      "A MixedPrecisionPolicy has dtypes of floating-point numbers, such as "
      f"torch.bfloat16, but got {wrong}."
    )


class Precision:
  """What `fully_shard(modules, mp_policy=)` has modules compute in.

  Each module that holds a parameter of the group, or has one inside that does, enters
  by itself: a part that is computed again, as checkpointing does, runs alone.

  Args:
    roots: the modules that were given; their inputs and outputs are cast as well.
    places: of the parameters of floating-point numbers.
    policy: of torch; `reduce_dtype` is XLA's matter.
  """

  def __init__(self, roots: list[torch.nn.Module], places: list[Place], policy: Any):
    self.dtype, self.output_dtype = policy.param_dtype, policy.output_dtype
    self.casts_inputs = policy.cast_forward_inputs
    self.roots = roots
    self.places: dict[torch.nn.Module, list[Place]] = {}
    self.entered: list[_Entered] = []
    for module in dict.fromkeys(part for root in roots for part in root.modules()):
      inside = set(map(id, module.modules()))
      found = [place for place in places if id(place[0]) in inside]
      if found or module in roots:
        self.places[module] = found
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

  def enter(self, module: torch.nn.Module, args, kwargs):
    """Called before a module's forward pass."""
    known: dict[int, torch.Tensor] = {}
    replaced: list = []
    self.entered.append(_Entered(module, replaced))
    for place in self.places[module] if self.dtype is not None else ():
      owner, name = place
      parameter = owner._parameters[name]
      if parameter is None or parameter.dtype == self.dtype:
        continue
      if id(parameter) not in known:
        known[id(parameter)] = parameter.to(self.dtype)
      cast = known[id(parameter)]
      replaced.append((place, parameter, cast))
      owner._parameters[name] = cast  # type: ignore[assignment]
    if module in self.roots and self.casts_inputs:
      return _cast((args, kwargs), self.dtype)
    return args, kwargs

  def leave(self, module: torch.nn.Module, args, outputs):
    """Called after it, and where it has raised."""
    if not self.entered or self.entered[-1].module is not module:
      return None  # a hook before ours has raised: this one never entered
    for (owner, name), parameter, cast in self.entered.pop().replaced:
      if owner._parameters[name] is cast:
        owner._parameters[name] = parameter  # type: ignore[assignment]
    return _cast(outputs, self.output_dtype) if module in self.roots else None

  def called(self, module: torch.nn.Module, method, args, kwargs):
    """Calls a method of a module as its forward pass is called."""
    args, kwargs = self.enter(module, args, kwargs)
    outputs = None
    try:
      outputs = method(*args, **kwargs)
    finally:
      left = self.leave(module, args, outputs)
    return left


def _cast(tree, dtype: torch.dtype | None):
  """The tensors of floating-point numbers of a tree in a dtype; None keeps them."""

  def cast(leaf):
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_float else leaf

  return tree if dtype is None else jax.tree.map(cast, tree, is_leaf=_is_tensor)


def _is_tensor(leaf) -> bool:
  return isinstance(leaf, torch.Tensor)
