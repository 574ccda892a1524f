"""What a traced function changes in place: found in the trace, applied after a call."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import torch

from torchax.core import mappings
from torchax.core.boundary import Boundary
from torchax.core.static_values import Identity
from torchax.core.storage import Storage
from torchax.errors import MutationError
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.autograd_bridge import Tape
from torchax.tracing.conversions import tensors_of
from torchax.tracing.module_attributes import Assignment, Place, is_born_in
from torchax.tracing.specialization import is_trained


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Effects:
  """What a traced function changed in place; which is static, the numbers are not.

  Attributes:
    arguments: indices of argument leaves.
    storages: of outer tensors.
    holders: for each of these, the captured tensor whose storage it was in the trace,
      or None; for the storage of a captured leaf's gradient, the leaf.
    leaves: outer leaves whose `.grad` was set.
    cleared: outer leaves whose `.grad` became None.
    arrays: the new numbers of the first three, in order; then those of arguments whose
      memory has grown.
    tape: what torch's autograd needs to go back through the call, or None.
    reshapes: (index of an argument leaf, (operation, args, kwargs), …) of changes of
      shape in place, to replay on the caller's tensor.
    grown: indices of the argument leaves whose memory has grown.
    of_gradients: for each of `holders`, whether it is the leaf of a gradient.
    places: plain attributes of modules that were assigned to.
    assigned: their new tensors, as arrays.
    environments: of the results; empty where all are of the default one.
  """

  arguments: tuple[int, ...]
  storages: tuple[Storage, ...]
  holders: tuple[Tensor | None, ...]
  leaves: tuple[Tensor, ...]
  cleared: tuple[Tensor, ...]
  arrays: list[jax.Array]
  tape: Tape | None = None
  reshapes: tuple = ()
  grown: tuple[int, ...] = ()
  of_gradients: tuple[bool, ...] = ()
  places: tuple[Place, ...] = ()
  assigned: list[jax.Array] = dataclasses.field(default_factory=list)
  environments: tuple = ()

  def tree_flatten(self):
    objects = (*self.storages, *self.holders, *self.leaves, *self.cleared)
    static = tuple(map(Identity, objects))
    counts = (len(self.storages), len(self.leaves))
    shapes = (self.reshapes, self.grown, self.of_gradients, self.places)
    children = (self.arrays, self.tape, self.assigned)
    return children, (self.arguments, static, counts, shapes, self.environments)

  @classmethod
  def tree_unflatten(cls, static, children):
    arguments, identities, (n_storages, n_leaves), shapes, environments = static
    arrays, tape, assigned = children
    objects = tuple([identity.value for identity in identities])
    start = 2 * n_storages
    middle = start + n_leaves
    return cls(
      arguments,
      objects[:n_storages],
      objects[n_storages:start],
      objects[start:middle],
      objects[middle:],
      arrays,
      tape,
      *shapes,
      assigned,
      environments,
    )


NONE = Effects((), (), (), (), (), [])
"""Nothing has changed."""


class Lifted(NamedTuple):
  """The captured tensors of a trace, which are its operands.

  Attributes:
    tensors: in the order of the operands.
    grads: what leaves among them had for `.grad` before the trace, by identity.
    gradients: the leaves whose `.grad` is an operand as well.
  """

  tensors: list[Tensor]
  grads: dict[int, Tensor | None]
  gradients: tuple[Tensor, ...]


# In a trace ---------------------------------------------------------------------------


def collect(
  name: str, boundary: Boundary, inner: list, born: list, specialization,
  lifted: Lifted, assignments: Sequence[Assignment] = (),
) -> Effects | None:  # fmt: skip
  """What a function has changed in place in its trace; None for nothing.

  Args:
    name: of the function.
    boundary: of its trace.
    inner: its argument leaves in the trace.
    born: the storages that these had when the trace began; None for what is no tensor.
    specialization: of the trace.
    lifted: the captured tensors.
    assignments: to plain attributes of modules.

  Raises:
    MutationError: what changed cannot be handed back to the caller.
  """
  repeats = {place for place, _ in specialization.same}
  reshapes = tuple(
    (place, *boundary.reshapes[id(value)][1])
    for place, value in enumerate(inner)
    if id(value) in boundary.reshapes and place not in repeats
  )
  reshaped = {place for place, *_ in reshapes}
  changed = tuple(
    place
    for place, (value, storage) in enumerate(zip(inner, born))
    if storage is not None
    and place not in repeats
    and (storage.version or value._storage is not storage or place in reshaped)
  )
  if set(changed) & set(specialization.overlapping):
    raise MutationError(
      f"{name} changes an argument in place whose memory another argument "
      "shares as a different view. Pass the base and take the views inside."
    )
  grads = lifted.grads
  leaves = trained_leaves(boundary)
  updated = [t for t in leaves if is_born_in(t.grad, boundary)]
  cleared = [t for t in leaves if t.grad is None and grads.get(id(t)) is not None]
  shadows = boundary.written()
  if not (changed or shadows or updated or cleared or assignments):
    return None
  arrays = [
    born[place].array
    if inner[place]._storage is born[place] or place in reshaped
    else _rebound(name, inner[place], born[place])
    for place in changed
  ]
  arrays += [shadow.array for shadow in shadows]
  arrays += [tensor.grad.jax() for tensor in updated]
  grown = tuple(p for p in reshaped if inner[p]._storage is not born[p])
  arrays += [inner[place].jax() for place in grown]
  storages = tuple(shadow.storage for shadow in shadows)
  holders = {id(tensor._storage): tensor for tensor in lifted.tensors}
  gradients = {
    id(grads[id(leaf)]._storage): leaf
    for leaf in lifted.gradients
    if isinstance(grads.get(id(leaf)), Tensor)
  }
  keys = [id(storage) for storage in storages]
  return Effects(
    changed,
    storages,
    tuple([gradients.get(key, holders.get(key)) for key in keys]),
    tuple(updated),
    tuple(cleared),
    arrays,
    reshapes=reshapes,
    grown=grown,
    of_gradients=tuple([key in gradients for key in keys]),
    places=tuple([assignment.place for assignment in assignments]),
    assigned=[assignment.value.jax() for assignment in assignments],
  )


def _rebound(name: str, tensor: Tensor, storage: Storage) -> jax.Array:
  """The numbers of an argument that took another memory (`x.data = …`, `set_`)."""
  array = tensor.jax()
  if array.shape != storage.array.shape or array.dtype != storage.array.dtype:
    raise MutationError(
      f"{name} gives an argument of shape {storage.array.shape} the memory "
      f"of a tensor of shape {array.shape} (`.data = …` or `set_`), which the "
      "caller's tensor cannot follow. Return the new tensor instead."
    )
  return array


def trained_leaves(boundary: Boundary) -> list[Tensor]:
  """The outer leaves that a function has met in its trace."""
  tensors = (shadow.tensor for shadow in boundary.shadows.values())
  return [t for t in tensors if t is not None and is_trained(t)]


def drop_traced_grads(boundary: Boundary, lifted: Lifted) -> None:
  """The trace has set `.grad` of real leaves; they get back what they had."""
  for tensor in trained_leaves(boundary):
    before = lifted.grads.get(id(tensor))
    was_cleared = tensor.grad is None and before is not None
    if was_cleared or is_born_in(tensor.grad, boundary):
      tensor.grad = before


# After a call -------------------------------------------------------------------------


def settle(leaves: list, effects: Effects | None) -> None:
  """Applies what the function changed in place to the caller's tensors."""
  if effects is None:
    return
  arrays = iter(effects.arrays)
  on_host = []
  for place in effects.arguments:
    leaf, array = leaves[place], next(arrays)
    if isinstance(leaf, Tensor):
      leaf.replace_jax(array)
    elif isinstance(leaf, torch.Tensor):
      on_host.append((leaf, array))
    # else an array, whose holder cannot see the change
  if on_host:
    _write_to_host(on_host)
  for storage, holder, is_gradient in zip(
    effects.storages, effects.holders, effects.of_gradients
  ):
    found = holder.grad if is_gradient else holder
    (storage if found is None else found._storage).write(next(arrays))
  for tensor in effects.leaves:
    tensor.grad = new_tensor(next(arrays), tensor._env)
  for tensor in effects.cleared:
    tensor.grad = None
  for place, *steps in effects.reshapes:
    if isinstance(leaves[place], Tensor):
      with torch.no_grad():
        for op, args, kwargs in steps:
          op(leaves[place], *args, **dict(kwargs))
  for place in effects.grown:
    if isinstance(leaves[place], Tensor):
      leaves[place].replace_jax(next(arrays))


def assign(places: Sequence[Place], values: Sequence) -> None:
  """Gives plain attributes of modules the tensors that a call has made for them.

  Args:
    places: the attributes.
    values: the tensors; or arrays, which have no gradient.
  """
  for place, tensor in zip(places, tensors_of(list(values))):
    place.set(tensor)


def _write_to_host(changes: list[tuple[torch.Tensor, jax.Array]]) -> None:
  """Changes 0-d tensors on the CPU, such as an optimizer's count of its steps."""
  with torch.no_grad():
    for tensor, array in changes:
      tensor.copy_(mappings.j2t(array))
