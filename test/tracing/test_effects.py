"""Effects, each constructed and applied by hand without tracing a function."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from torchax.core.boundary import Boundary
from torchax.core.static_values import Identity
from torchax.errors import MutationError
from torchax.tracing.effects import (
  ClearGradient,
  Effects,
  Reshape,
  SetGradient,
  WriteArgument,
  WriteStorage,
  collect,
)
from torchax.tracing.modules import Attributes, Target
from torchax.tracing.specialization import ORDINARY, Specialization

ONES = jnp.ones(3)

pytestmark = pytest.mark.usefixtures("env")


def _zeros(**options) -> torch.Tensor:
  return torch.zeros(3, device="jax", **options)


def test_write_argument_reaches_tensors_on_jax_and_on_the_cpu():
  on_jax, on_cpu = _zeros(), torch.zeros(())
  WriteArgument(0).apply([on_jax, on_cpu], ONES)
  WriteArgument(1).apply([on_jax, on_cpu], jnp.ones(()))
  assert on_jax.tolist() == [1, 1, 1]
  assert on_cpu.item() == 1


def test_write_argument_ignores_plain_arrays():
  WriteArgument(0).apply([jnp.zeros(3)], ONES)


def test_write_storage_follows_the_holder_to_its_new_memory():
  tensor = _zeros()
  old = tensor._storage
  tensor.data = _zeros()
  WriteStorage(Identity(old), Identity(tensor)).apply([], ONES)
  assert tensor.tolist() == [1, 1, 1]
  assert not old.array.any()


def test_write_storage_without_a_holder_writes_to_the_storage():
  tensor = _zeros()
  WriteStorage(Identity(tensor._storage)).apply([], ONES)
  assert tensor.tolist() == [1, 1, 1]


def test_write_storage_of_a_gradient_finds_it_by_its_leaf():
  leaf = _zeros(requires_grad=True)
  leaf.grad = _zeros()
  old, leaf.grad = leaf.grad, _zeros()
  WriteStorage(Identity(old._storage), Identity(leaf), is_gradient=True).apply([], ONES)
  assert leaf.grad.tolist() == [1, 1, 1] and old.tolist() == [0, 0, 0]


def test_gradients_are_set_and_cleared():
  leaf = _zeros(requires_grad=True)
  SetGradient(Identity(leaf)).apply([], ONES)
  assert leaf.grad.tolist() == [1, 1, 1]
  ClearGradient(Identity(leaf)).apply([], None)
  assert leaf.grad is None


def test_reshape_replays_its_steps_and_writes_new_memory():
  tensor = _zeros()
  Reshape(0, steps=((torch.Tensor.unsqueeze_, (0,), ()),)).apply([tensor], None)
  assert tensor.shape == (1, 3)
  steps = ((torch.Tensor.resize_, ((2, 3),), ()),)
  Reshape(0, steps=steps).apply([tensor], jnp.ones((2, 3)))
  assert tensor.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
  "change, expected",
  [
    (WriteArgument(0), ("x", "changed in place")),
    (Reshape(0), ("x", "changed in place")),
    (SetGradient, ("a tensor.grad", "set")),
    (ClearGradient, ("a tensor.grad", "cleared")),
  ],
)
def test_changes_name_their_targets(change, expected):
  if isinstance(change, type):
    change = change(Identity(_zeros()))
  assert (change.name(["x"], {}), change.kind) == expected


def test_effects_are_a_pytree_of_their_arrays():
  leaf, module = _zeros(), nn.Module()
  changes = [(WriteArgument(0), ONES), (ClearGradient(Identity(leaf)), None)]
  target = Target(Identity(module), "hidden", False)
  effects = Effects.of(changes, [(target, _zeros())])
  arrays, treedef = jax.tree.flatten(effects)
  assert len(arrays) == 2
  assert treedef == jax.tree.structure(Effects.of(changes, [(target, leaf)]))
  again = jax.tree.unflatten(treedef, arrays)
  again.apply([leaf])
  again.assign(again.assigned, [leaf])
  assert leaf.tolist() == [1, 1, 1] and module.hidden.tolist() == [0, 0, 0]


def test_effects_without_changes_are_none():
  assert Effects.of([], []).or_none() is None
  assert Effects.of([(WriteArgument(0), ONES)], []).or_none() is not None


def _collected(change, specialization=ORDINARY, captured=()):
  """Return the changes of an argument that a trace of the function records."""
  lifted = list(captured)
  with Boundary().enter() as boundary:
    for tensor in captured:
      boundary.lift(tensor._storage, tensor._storage.array, tensor)
    boundary.attributes = Attributes()
    argument = _zeros()
    born = [(argument._storage, argument._chain, argument._version)]
    change(argument)
    given = [argument]
    changes, recorded = collect(boundary, given, given, born, specialization, lifted)
    assert recorded == []
    return changes


def test_collect_finds_a_write_to_an_argument():
  ((change, array),) = _collected(lambda x: x.add_(1))
  assert change == WriteArgument(0, counts=True) and array.tolist() == [1, 1, 1]
  assert _collected(lambda x: x + 1) == []


def test_collect_finds_a_reshape_after_the_write():
  changes = [change for change, _ in _collected(lambda x: x.unsqueeze_(0))]
  assert list(map(type, changes)) == [WriteArgument, Reshape]


def test_collect_finds_a_write_to_a_captured_tensor():
  tensor = _zeros()
  ((change, array),) = _collected(lambda x: tensor.add_(2), captured=[tensor])
  holder = Identity(tensor)
  assert change == WriteStorage(Identity(tensor._storage), holder, counts=True)
  assert array.tolist() == [2, 2, 2] and tensor.tolist() == [0, 0, 0]


def test_collect_rejects_a_write_to_overlapping_arguments():
  with pytest.raises(MutationError, match="whose memory another argument"):
    _collected(lambda x: x.add_(1), Specialization(overlapping=(0,)))


def test_collect_rejects_memory_of_another_shape():
  with pytest.raises(MutationError, match="the memory of a tensor of shape"):
    _collected(lambda x: x.set_(torch.zeros(4, device="jax")))
