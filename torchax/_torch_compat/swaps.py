"""`torch.utils.swap_tensors`, by which a module moves its parameters."""

import functools
import weakref

import torch

from torchax import private

_swap_tensors = torch.utils.swap_tensors
_swap_held_tensors = private.find(
  "torch._C._swap_tensor_impl", "moving a module while a graph holds its parameters"
)
# Without it, torch's own swap refuses what a graph holds.
_count_of_uses = private.find(
  "torch.Tensor._use_count",
  "moving a module while a graph holds its parameters",
  instead=lambda tensor: 0,
)


def watch_swaps(cls: type, notice) -> None:
  """Calls `notice()` when torch has swapped tensors of which one is of this class.

  That is how `Module.to` and `load_state_dict` change a tensor and keep its identity.
  Where the graph of an earlier forward pass holds a tensor, torch lets no swap happen;
  for this class it does, and a backward pass through that graph raises.
  """

  @functools.wraps(_swap_tensors)
  def swap_tensors(t1, t2):
    if not (isinstance(t1, cls) or isinstance(t2, cls)):
      _swap_tensors(t1, t2)
      return
    if type(t1) is type(t2) and (_has_references(t1) or _has_references(t2)):
      # Such as Dynamo's guards: the tensor stays, and shows the other one's numbers.
      t1.data, t2.data = t2.data, t1.data
    elif any(map(_is_held_by_a_graph, (t1, t2))):
      _swap_held(t1, t2)
    else:
      _swap_tensors(t1, t2)
    notice()

  torch.utils.swap_tensors = swap_tensors


def _has_references(tensor) -> bool:
  return bool(weakref.getweakrefs(tensor))


def _is_held_by_a_graph(tensor) -> bool:
  # One more than the name that Python has for it is its node of the graph.
  return tensor.is_leaf and _count_of_uses(tensor) > 1 + tensor.requires_grad


def _swap_held(t1, t2) -> None:
  """`torch.utils.swap_tensors` of leaves that the graph of autograd holds as well.

  Raises:
    RuntimeError: a weak reference to one of them would then be to the other one.
  """
  if _has_references(t1) or _has_references(t2):
    raise RuntimeError(
      "Tensors with weak references cannot be swapped. Move the module to its device "
      "before making what refers to its parameters."
    )
  for tensor in (t1, t2):
    if tensor.is_leaf and tensor.requires_grad:
      accumulate = torch.autograd.graph.get_gradient_edge(tensor).node
      accumulate.register_prehook(_refuse_swapped)
  t1.__class__, t2.__class__ = t2.__class__, t1.__class__
  t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
  _swap_held_tensors(t1, t2)


def _refuse_swapped(gradients):
  raise RuntimeError(
    "A backward pass has reached a tensor that was moved to another device or dtype "
    "after the forward pass, as `module.to` does. Move it before, or run the forward "
    "pass again."
  )
