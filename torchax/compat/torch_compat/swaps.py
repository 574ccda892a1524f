"""`torch.utils.swap_tensors` for jax tensors, used by `Module.to`.

`move_parameters_in_place` patches moves of modules, `watch_swaps` the swap itself.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.modules import move_placeholders
from torchax.compat.torch_compat.subclasses import attributes_of, set_attributes

# (t1, t2): exchange two tensors without other references.
swap_tensors = _swap_tensors = torch.utils.swap_tensors
# (t1, t2): exchange two tensors; graphs and views keep the contents they refer to.
swap_held_tensors = private.find(
  "torch._C._swap_tensor_impl", "moving a module while a graph holds its parameters"
)
# Without it, torch's own swap raises for tensors that a graph refers to.
_count_of_uses = private.find(
  "torch.Tensor._use_count",
  "moving a module while a graph holds its parameters",
  instead=lambda tensor: 0,
)

_SAME_OBJECT = "modules that move with the same objects as parameters"
_apply_to_module = private.find("torch.nn.Module._apply", _SAME_OBJECT, instead=None)
_can_take_data = private.find(
  "torch._has_compatible_shallow_copy_type",
  _SAME_OBJECT,
  instead=lambda tensor, other: False,
)


def watch_swaps(cls: type, notice) -> None:
  """Call `notice()` after torch has swapped tensors, one of them of class `cls`.

  `Module.to` and `load_state_dict` use swaps to change a tensor and keep its identity.
  torch refuses to swap a tensor that the graph of an earlier forward pass refers to.
  For this class the swap is done, and a backward pass through that graph raises. Weak
  references keep pointing to the same tensor.
  """

  @functools.wraps(_swap_tensors)
  def swap_tensors(t1, t2):
    if not (isinstance(t1, cls) or isinstance(t2, cls)):
      if _Moves.are_ours and _can_take_data(t1, t2):
        t1.data = t2.data  # as in a module without tensors of this class
      else:
        _swap_tensors(t1, t2)
      return
    has_references = _has_references(t1) or _has_references(t2)
    if type(t1) is type(t2) and has_references:
      # Weak references, such as Dynamo's guards: keep the objects, exchange the data.
      t1.data, t2.data = t2.data, t1.data
    elif (
      has_references
      or any(map(_is_in_graph, (t1, t2)))
      # torch's own swap would exchange the classes that tensors report.
      or any(tensor.__class__ is not type(tensor) for tensor in (t1, t2))
      # It would exchange only the attributes that a user's class shows.
      or any(hasattr(tensor, "user_class") for tensor in (t1, t2))
    ):
      _swap_referenced(t1, t2)
    else:
      _swap_tensors(t1, t2)
    notice()

  patch(torch.utils, "swap_tensors", swap_tensors, _SAME_OBJECT)


def move_by_data(cls: type, move: Callable) -> None:
  """Make `tensor.data = other` call `move(tensor, other)` if only `other` is a `cls`.

  torch's own setter raises: it cannot change the type of a tensor.
  """
  data = torch.Tensor.data

  def set_data(tensor, other):
    if isinstance(other, cls) and not isinstance(tensor, cls):
      move(tensor, other)
    else:
      data.__set__(tensor, other)

  patch(torch.Tensor, "data", property(data.__get__, set_data), _SAME_OBJECT)


def _has_references(tensor) -> bool:
  return bool(weakref.getweakrefs(tensor))


def _is_in_graph(tensor) -> bool:
  # The Python object is one use; a graph adds its node for gradient accumulation.
  return tensor.is_leaf and _count_of_uses(tensor) > 1 + tensor.requires_grad


def _swap_referenced(t1, t2) -> None:
  """Swap tensors that other objects refer to.

  References to the Python objects, weak ones included, see the exchanged contents.
  Autograd graphs keep the old ones.
  """
  for tensor in (t1, t2):
    if _is_in_graph(tensor) and tensor.requires_grad:
      accumulate = torch.autograd.graph.get_gradient_edge(tensor).node
      accumulate.register_prehook(_refuse_swapped)
  t1.__class__, t2.__class__ = type(t2), type(t1)
  first, second = attributes_of(t1), attributes_of(t2)
  set_attributes(t1, second)
  set_attributes(t2, first)
  swap_held_tensors(t1, t2)


def _refuse_swapped(gradients):
  raise RuntimeError(
    "A backward pass has reached a tensor that was moved to another device or dtype "
    "after the forward pass, as `module.to` does. Move it before, or run the forward "
    "pass again."
  )


class _Moves:
  """Flag: True while `_swapping`, not the user, makes modules swap parameters."""

  are_ours = False


def move_parameters_in_place(
  cls: type, own: frozenset[str], keep_class: Callable
) -> None:
  """Make `Module.to` keep the identity and attributes of parameters of a class.

  torch does this for moves between its own devices. Tied parameters, optimizers and
  weak references depend on it.

  Args:
    cls: class of the parameters.
    own: attributes with the contents of a tensor of this class, which are replaced.
    keep_class: (parameter, its class before) -> None; restores a user's class.
  """
  if _apply_to_module is None:
    return

  @functools.wraps(_apply_to_module)
  def _apply(self, fn, recurse=True):
    if torch.compiler.is_compiling():  # Dynamo traces torch's
      return _apply_to_module(self, fn, recurse)
    if recurse:
      for child in self.children():
        child._apply(fn)
    parameters = [p for p in self._parameters.values() if p is not None]
    attributes = [
      {name: value for name, value in p.__dict__.items() if name not in own}
      for p in parameters
    ]
    classes = list(map(type, parameters))
    is_swapped = any(isinstance(parameter, cls) for parameter in parameters)
    swapping = _swapping() if is_swapped else contextlib.nullcontext()
    with swapping, move_placeholders(self, fn):
      _apply_to_module(self, fn, recurse=False)
    for parameter, before, named in zip(parameters, classes, attributes):
      keep_class(parameter, before)
      for name, value in named.items():
        parameter.__dict__.setdefault(name, value)
    return self

  patch(torch.nn.Module, "_apply", _apply, _SAME_OBJECT)


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
  """Make `Module.to` swap parameters inside the block."""
  future = torch.__future__
  before = future.get_swap_module_params_on_conversion(), _Moves.are_ours
  future.set_swap_module_params_on_conversion(True)
  _Moves.are_ours = not before[0] or _Moves.are_ours
  try:
    yield
  finally:
    future.set_swap_module_params_on_conversion(before[0])
    _Moves.are_ours = before[1]
