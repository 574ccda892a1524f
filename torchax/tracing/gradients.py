"""`.grad` of outer leaves in a trace: which ones it reads, and which it only drops.

A training step begins with `optimizer.zero_grad()` or `p.grad = None`. A `.grad` that
is dropped before it is read is no operand, and its presence is not in the cache key of
programs. So the first step and all later ones have one program.

While a function is traced, a property of `Tensor` records Python's first access to the
`.grad` of each leaf. Accumulation in torch's C++ bypasses it; `read_leaves` finds it by
its result. `captures.py` has the key; `effects.py` returns the new gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from torchax.compat.patches import WhileNeeded, patch
from torchax.core.boundary import Boundary
from torchax.core.storage import active
from torchax.dispatch.autograd import gradient_of, set_gradient
from torchax.errors import MutationError
from torchax.tensor import Tensor
from torchax.tracing.modules import is_born_in
from torchax.tracing.optimizer_state import parameters_of


@dataclasses.dataclass
class LeafGradient:
  """`.grad` of a leaf in a trace: of an outer leaf, or of an argument.

  Attributes:
    leaf: the leaf; the trace has a tensor of its own for an argument.
    before: its `.grad` before the trace; None for an argument.
    is_dropped: True if the first access of the trace replaces the `.grad`, False if it
      reads it; None without an access.
  """

  leaf: Tensor
  before: Any = None
  is_dropped: bool | None = None

  def record(self, is_drop: bool) -> None:
    """Record an access; only the first one counts."""
    if self.is_dropped is None:
      self.is_dropped = is_drop


def _record(leaf: Any, is_drop: bool) -> None:
  """Record an access in all active boundaries that the leaf outlives.

  An argument is recorded in its own boundary alone.
  """
  boundary = active.boundary
  # Tensors of the CPU and those that Dynamo traces have no storage of ours.
  if boundary is None or not (hasattr(leaf, "_storage") and leaf.is_leaf):
    return
  gradient = gradient_of(leaf)
  birth = leaf._storage.birth
  while boundary is not None and boundary is not birth:
    before = None if is_born_in(gradient, boundary) else gradient
    found = boundary.gradients.setdefault(id(leaf), LeafGradient(leaf, before))
    found.record(is_drop)
    gradient, boundary = found.before, boundary.parent
  if boundary is not None and id(leaf) in boundary.argument_gradients:
    boundary.argument_gradients[id(leaf)].record(is_drop)


def read_leaves(boundary: Boundary, leaves: list[Tensor]) -> list[Tensor]:
  """Return the outer leaves whose `.grad` before the trace matters to it.

  Args:
    boundary: boundary of the trace, which has run the function.
    leaves: outer leaves that the trace has met.
  """
  for leaf in leaves:
    gradient = gradient_of(leaf)
    if isinstance(gradient, Tensor):
      shadow = boundary.shadows.get(id(gradient._storage))
      is_touched = shadow is not None and shadow.is_touched
      if is_touched or is_born_in(gradient, boundary):  # `backward` has added to it
        _record(leaf, is_drop=False)
  return [each.leaf for each in boundary.gradients.values() if each.is_dropped is False]


def require_no_gradients(leaves: list, read: set[tuple[int, int]]) -> None:
  """Raise MutationError if an argument has a gradient that a trace would not see.

  Args:
    leaves: argument leaves of the call.
    read: count of leaves, and index of the argument, for each that a trace reads.
  """
  for count, index in read:
    leaf = leaves[index] if count == len(leaves) else None
    if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None:
      raise MutationError(
        "A compiled function reads the `.grad` of an argument of shape "
        f"{list(leaf.shape)}, which had a gradient before the call. Set it to None "
        "where you would zero it, or close over the tensor instead of passing it."
      )


def _get(leaf: Tensor) -> torch.Tensor | None:
  _record(leaf, is_drop=False)
  return gradient_of(leaf)


def _set(leaf: Tensor, value: torch.Tensor | None) -> None:
  _record(leaf, is_drop=True)
  set_gradient(leaf, value)


def _dropping(parameters_of: Callable, original: Callable) -> Callable:
  """Return `zero_grad` that records drops, since torch's reads each `.grad` first."""

  @functools.wraps(original)
  def zero_grad(self, set_to_none: bool = True) -> None:
    if set_to_none:
      for parameter in parameters_of(self):
        _record(parameter, is_drop=True)
    original(self, set_to_none)

  return zero_grad


def _follow() -> Callable[[], None]:
  optimizer, module = torch.optim.Optimizer, torch.nn.Module
  reason = "gradients that a compiled function drops before it reads them"
  made = [
    patch(cls, "zero_grad", _dropping(parameters, cls.zero_grad), reason)
    for cls, parameters in ((optimizer, parameters_of), (module, module.parameters))
  ]
  delete = functools.partial(_set, value=None)
  tensor: Any = Tensor
  tensor.grad = property(_get, _set, delete)

  def undo() -> None:
    del tensor.grad
    for each in made:
      each.undo()

  return undo


following_gradients = WhileNeeded(_follow)
"""Context of a trace: accesses to `.grad` are recorded."""
