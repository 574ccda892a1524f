"""Effects of a traced function: found in the trace, applied after each call.

A `Change` is static. Its array, if it has one, is a result of the program. `collect`
finds the changes for `trace.py`; callers of the program apply them with `Effects`.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch
from torch.autograd.graph import increment_version

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.boundary import Boundary, version_of
from torchax.core.host_numbers import Entry, Expression, HostNumber
from torchax.core.static_values import Identity
from torchax.errors import MutationError
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.autograd_bridge import Tape
from torchax.tracing.conversions import tensors_of
from torchax.tracing.gradients import LeafGradient, gradient_of, set_gradient
from torchax.tracing.modules import is_born_in
from torchax.tracing.specialization import Specialization, is_trained


class OverlapError(MutationError):
  """An argument was changed whose memory another argument has, too."""


class Change(abc.ABC):
  """Change that each call of a program makes."""

  __slots__ = ()
  kind = "changed in place"

  @abc.abstractmethod
  def apply(self, leaves: list, array) -> Tensor | None:
    """Make the change, given the argument leaves and the new values, if any.

    Returns:
      The tensor whose count of in-place changes increases, if any.
    """

  @abc.abstractmethod
  def name(self, arguments: list[str], names: dict[int, str]) -> str:
    """Return the name of the changed tensor, for messages.

    Args:
      arguments: names of the argument leaves.
      names: names of captured tensors, by the identity of their storages.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class WriteArgument(Change):
  """New values for the argument leaf with this index.

  Attributes:
    counts: torch counts the change, so that a backward pass rejects values that were
      saved before. It does not count new statistics of BatchNorm.
  """

  index: int
  counts: bool = False

  def apply(self, leaves: list, array) -> Tensor | None:
    leaf = leaves[self.index]
    if isinstance(leaf, Tensor):
      leaf.replace_jax(array)
      return leaf if self.counts else None
    if isinstance(leaf, torch.Tensor):  # 0-d on the CPU, such as a step count
      with torch.no_grad():
        leaf.copy_(mappings.j2t(array))
    return None

  def name(self, arguments: list, names: dict) -> str:
    return arguments[self.index]


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentTarget:
  """Argument leaf whose new values have a gradient, which torch records."""

  kind = Change.kind
  index: int

  def get(self, leaves: list) -> torch.Tensor:
    return leaves[self.index]

  def set(self, tensor: torch.Tensor, leaves: list) -> None:
    leaves[self.index].copy_(tensor)

  def describe(self, paths: dict, arguments: list[str]) -> str:
    return arguments[self.index]


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape(WriteArgument):
  """In-place shape changes of an argument, replayed on the caller's tensor.

  There is an array only if the argument's memory was replaced.

  Attributes:
    steps: (operation, args, kwargs) of each change.
  """

  steps: tuple = ()

  def apply(self, leaves, array):
    leaf = leaves[self.index]
    if isinstance(leaf, Tensor):
      with torch.no_grad():
        for op, args, kwargs in self.steps:
          op(leaf, *args, **dict(kwargs))
      if array is not None:
        leaf.replace_jax(array)


@dataclasses.dataclass(frozen=True, slots=True)
class WriteStorage(Change):
  """New values for an outer storage.

  Attributes:
    storage: storage that the trace has written.
    holder: captured tensor with this storage, or the leaf whose `.grad` has it, or
      None. Later calls write to the storage that the holder has by then.
    is_gradient: the storage belongs to `holder.grad`.
    counts: torch counts the change, as for `WriteArgument`.
  """

  storage: Identity
  holder: Identity | None = None
  is_gradient: bool = False
  counts: bool = False

  def apply(self, leaves, array):
    found = self.holder and self.holder.value
    if self.is_gradient:
      found = found.grad
    storage = self.storage.value if found is None else found._storage
    storage.write(array, found)
    return found if self.counts else None

  def name(self, arguments, names):
    return names.get(id(self.storage.value), "a tensor")


@dataclasses.dataclass(frozen=True, slots=True)
class SetGradient(Change):
  """New tensor for the `.grad` of an outer leaf."""

  kind = "set"
  leaf: Identity

  def apply(self, leaves, array):
    leaf = self.leaf.value
    with torch_compat.without_function_overrides():  # skip `__torch_function__`
      leaf.grad = new_tensor(array, leaf._env)

  def name(self, arguments, names):
    return names.get(id(self.leaf.value._storage), "a tensor") + ".grad"


class ClearGradient(SetGradient):
  """Removal of the `.grad` of an outer leaf."""

  kind = "cleared"

  def apply(self, leaves, array):
    self.leaf.value.grad = None


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentGradient(Change):
  """Gradient that a `backward` of the trace has computed for an argument.

  Attributes:
    index: index of the argument leaf.
    is_dropped: True if the trace drops the argument's earlier gradient first.
  """

  kind = "given a gradient"
  index: int
  is_dropped: bool

  def apply(self, leaves, array):
    leaf = leaves[self.index]
    if self.is_dropped and leaf.is_leaf:
      leaf.grad = None
    if array is not None:
      leaf.backward(new_tensor(array, leaf._env))

  def name(self, arguments, names):
    return arguments[self.index] + ".grad"


@dataclasses.dataclass(frozen=True, slots=True)
class SetNumbers(Change):
  """New numbers of an optimizer, such as its count of steps, computed on the host.

  Attributes:
    numbers: each number, and its new value: a constant, or the expression for it.
  """

  kind = "set"
  numbers: tuple[tuple[Entry, Any], ...]

  def apply(self, leaves, array):
    values = [v.now() if isinstance(v, Expression) else v for _, v in self.numbers]
    for (entry, _), value in zip(self.numbers, values):
      entry.set(value)

  def name(self, arguments, names):
    return ", ".join([str(entry) for entry, _ in self.numbers])


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Effects:
  """Changes of a traced function, with the arrays of one call.

  Attributes:
    changes: changes in the order in which they are applied.
    arrays: new values for each change, or None.
    targets: module attributes, optimizer state entries and arguments (`Target`,
      `StateTarget`, `ArgumentTarget`) that each call gives new tensors to.
    assigned: arrays of these tensors.
    tape: backward pass of the call for torch's autograd, or None.
    environments: environments of the results; empty if all are the default one.
  """

  changes: tuple[Change, ...] = ()
  arrays: list = dataclasses.field(default_factory=list)
  targets: tuple = ()
  assigned: list = dataclasses.field(default_factory=list)
  tape: Tape | None = None
  environments: tuple = ()

  def tree_flatten(self):
    static = (self.changes, self.targets, self.environments)
    return (self.arrays, self.assigned, self.tape), static

  @classmethod
  def tree_unflatten(cls, static, children):
    changes, targets, environments = static
    arrays, assigned, tape = children
    return cls(changes, arrays, targets, assigned, tape, environments)

  @classmethod
  def of(cls, changes: Sequence[tuple], assigned: Sequence[tuple]) -> "Effects":
    """Build effects from (change, array) pairs and (target, tensor) pairs."""
    return cls(
      tuple([change for change, _ in changes]),
      [array for _, array in changes],
      tuple([target for target, _ in assigned]),
      [tensor.jax() for _, tensor in assigned],
    )

  def or_none(self) -> "Effects | None":
    """Return the effects, or None if there are none, so that a call skips them."""
    return (
      self if self.changes or self.targets or self.tape or self.environments else None
    )

  def apply(self, leaves: list) -> None:
    """Make the changes to the caller's tensors."""
    pairs = zip(self.changes, self.arrays)
    changed = [change.apply(leaves, array) for change, array in pairs]
    if written := [tensor for tensor in changed if tensor is not None]:
      increment_version(written)

  def assign(self, values: Sequence, leaves: list) -> None:
    """Assign tensors, or arrays without a gradient, to the targets."""
    for target, tensor in zip(self.targets, tensors_of(list(values))):
      target.set(tensor, leaves)

  def of_kind(self, *kinds: type) -> list[tuple[Any, Any]]:
    """Return the changes of these classes, with their arrays."""
    pairs = zip(self.changes, self.arrays)
    return [(change, array) for change, array in pairs if type(change) in kinds]


# In a trace ---------------------------------------------------------------------------


def collect(
  boundary: Boundary,
  inner: list,
  given: list,
  born: list,
  specialization: Specialization,
  captured: Sequence[Tensor],
) -> tuple[list[tuple[Change, Any]], list[tuple[ArgumentTarget, Tensor]]]:
  """Find the changes that a function has made in its trace.

  Args:
    boundary: boundary of the trace.
    inner: argument leaves of the trace.
    given: argument leaves as the function receives them.
    born: storage, chain and version of each of `given` when the trace began; None if it
      is no tensor.
    specialization: static part of the call.
    captured: captured tensors, those that the trace has met first included.

  Returns:
    The changes with their arrays, and the in-place changes that torch records, with the
    tensors that are assigned to the arguments.

  Raises:
    MutationError: the caller's tensors cannot take over a change.
  """
  written, recorded, reshapes = _of_arguments(boundary, given, born, specialization)
  changes = [
    *_of_argument_gradients(boundary, inner),
    *written,
    *_of_captured(boundary, captured),
    *reshapes,
  ]
  for state in boundary.attributes.states.values():
    if state.numbers:
      pairs = [(e, _recorded(value, boundary)) for e, value in state.numbers.items()]
      changes.append((SetNumbers(tuple(pairs)), None))
  return changes, recorded


def _of_arguments(
  boundary: Boundary, given: list, born: list, specialization: Specialization
) -> tuple[list, list, list]:
  """Return new values, new values that torch records, and changes of shape."""
  repeats = {index for index, _ in specialization.same}
  written: list[tuple[Change, Any]] = []
  recorded: list[tuple[ArgumentTarget, Tensor]] = []
  reshapes: list[tuple[Change, Any]] = []
  for index, (value, start) in enumerate(zip(given, born)):
    if start is None or index in repeats:
      continue
    storage, chain, version = start
    is_reshaped, is_rebound = (
      id(value) in boundary.reshapes,
      value._storage is not storage,
    )
    if not (is_reshaped or is_rebound or storage.version):
      continue
    if index in specialization.overlapping:
      raise OverlapError(
        f"{boundary.name} changes an argument in place whose memory another argument "
        "shares as a different view, or that repeats elements, as after `expand`. Pass "
        "the base and take the views inside."
      )
    if is_reshaped:
      _, steps = boundary.reshapes[id(value)]
      change = Reshape(index, steps=tuple(steps))
      reshapes.append((change, value.jax() if is_rebound else None))
      is_rebound = False
    array = chain.read(storage.array)
    if is_rebound:
      array = _rebound(boundary.name, value, array)
    if index in specialization.copied and value.requires_grad and not is_reshaped:
      recorded.append((ArgumentTarget(index), value))
    else:
      written.append((WriteArgument(index, version != version_of(value)), array))
  return written, recorded, reshapes


def _recorded(value, boundary: Boundary) -> Any:
  """Return a new value for `SetNumbers`; each call makes its own tensor."""
  if isinstance(value, torch.Tensor):
    _, number = boundary.host_numbers.get(id(value), (value, value.item()))
    return Expression(_scalar_tensor, getattr(number, "node", number), value.dtype)
  return value.node if isinstance(value, HostNumber) else value


def _scalar_tensor(number, dtype: torch.dtype) -> torch.Tensor:
  return torch.tensor(number, dtype=dtype, device="cpu")


def _of_argument_gradients(
  boundary: Boundary, inner: list
) -> Iterator[tuple[Change, Any]]:
  """Yield the changes of the `.grad` of arguments."""
  indices = {id(value): index for index, value in enumerate(inner)}
  for each in boundary.argument_gradients.values():
    gradient = gradient_of(each.leaf)
    if gradient is not None or each.is_dropped:
      array = None if gradient is None else gradient.jax()
      yield ArgumentGradient(indices[id(each.leaf)], bool(each.is_dropped)), array


def _of_captured(
  boundary: Boundary, captured: Sequence[Tensor]
) -> Iterator[tuple[Change, Any]]:
  """Yield the changes of outer storages, and of the `.grad` of outer leaves."""
  holders = {id(tensor._storage): (tensor, False) for tensor in captured}
  gradients = leaf_gradients(boundary)
  for each in gradients:
    if isinstance(each.before, Tensor) and not each.is_dropped:
      holders[id(each.before._storage)] = (each.leaf, True)
  for shadow in boundary.changed_shadows():
    holder = holders.get(id(shadow.storage))
    change = WriteStorage(Identity(shadow.storage))
    if holder is not None:
      tensor, is_gradient = holder
      is_known = shadow.version is not None and not is_gradient
      counts = is_known and shadow.version != version_of(tensor)
      change = WriteStorage(change.storage, Identity(tensor), is_gradient, counts)
    yield change, shadow.array
  for each in gradients:
    gradient = gradient_of(each.leaf)
    if is_born_in(gradient, boundary):
      yield SetGradient(Identity(each.leaf)), gradient.jax()
  for each in gradients:
    was_there = each.before is not None
    if (was_there or each.is_dropped) and gradient_of(each.leaf) is None:
      yield ClearGradient(Identity(each.leaf)), None


def _rebound(name: str, tensor: Tensor, before: jax.Array) -> jax.Array:
  """Return the new values of an argument whose memory was replaced.

  `x.data = …` and `set_` replace it.
  """
  array = tensor.jax()
  if array.shape != before.shape or array.dtype != before.dtype:
    raise MutationError(
      f"{name} gives an argument of shape {before.shape} the memory "
      f"of a tensor of shape {array.shape} (`.data = …` or `set_`), which the "
      "caller's tensor cannot follow. Return the new tensor instead."
    )
  return array


def trained_leaves(boundary: Boundary) -> list[Tensor]:
  """Return the outer leaves with a gradient that a trace has met."""
  tensors = (shadow.tensor for shadow in boundary.shadows.values())
  return [t for t in tensors if t is not None and is_trained(t)]


def leaf_gradients(boundary: Boundary) -> list[LeafGradient]:
  """Return the `.grad` of the outer leaves that a trace may have changed."""
  met = {id(leaf): LeafGradient(leaf) for leaf in trained_leaves(boundary)}
  return [*{**met, **boundary.gradients}.values()]


def drop_traced_grads(boundary: Boundary) -> None:
  """Restore the `.grad` of outer leaves that the trace has set or cleared."""
  for each in leaf_gradients(boundary):
    gradient = gradient_of(each.leaf)
    is_cleared = gradient is None and each.before is not None
    if is_cleared or is_born_in(gradient, boundary):
      set_gradient(each.leaf, each.before)
