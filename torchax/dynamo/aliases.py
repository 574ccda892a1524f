"""Results of a graph on jax that share memory with an input or with one another.

A compiled function returns arrays of its own. So a result that is a view is made after
the call, by the operations of the graph, from the tensor whose memory it has. The
function returns that tensor as well if it is no input.
"""

import torch
from torch import fx

from torchax.core.static_values import StaticValue
from torchax.graphs.fx import example, inputs
from torchax.tensor import Tensor

# In place of a result that is made after the call.
_LATER = object()
# Methods that may return a view; whether one did is seen in the trace.
_VIEWS = frozenset(
  (
    *("T", "H", "mT", "mH", "adjoint", "as_strided", "broadcast_to", "chunk", "conj"),
    *("contiguous", "data", "detach", "diagonal", "dsplit", "expand", "expand_as"),
    *("flatten", "getitem", "hsplit", "imag", "movedim", "moveaxis", "narrow"),
    *("permute", "ravel", "real", "reshape", "reshape_as", "select", "split"),
    *("split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split"),
    *("transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
    *("view_as_complex", "view_as_real", "vsplit"),
    *("double", "float", "half", "int", "long", "to", "type", "type_as"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
  )
)
_RESHAPING = frozenset(
  (
    *("as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_"),
    *("swapdims_", "t_", "transpose_", "unsqueeze_"),
  )
)


class Aliases:
  """The results that may be views, and how to make them.

  Args:
    graph: changed, so that it also returns the tensors that results are views of.
  """

  def __init__(self, graph: fx.Graph):
    (output,) = [node for node in graph.nodes if node.op == "output"]
    returned = list(output.args[0])
    self.count = len(returned)
    self._place = {node: place for place, node in enumerate(inputs(graph))}
    chains = [_chain(node) for node in returned]
    roots = [chain[0] if chain else None for chain in chains]
    self._chains = {
      place: chain
      for place, chain in enumerate(chains)
      if chain and (chain[0] in self._place or roots.count(chain[0]) > 1)
    }
    added = dict.fromkeys(chain[0] for chain in self._chains.values())
    self._roots = {node: self.count + place for place, node in enumerate(added)}
    output.args = ((*returned, *added),)

  def box(self, results) -> list:
    """In the trace: results and their bases, without what is made after the call."""
    boxed, needed = list(results), set()
    for place, (root, *steps) in self._chains.items():
      value, base = results[place], results[self._roots[root]]
      if _shares(value, base) and (steps or root not in self._place):
        boxed[place] = StaticValue(_LATER)
        needed.add(root)
    for root, place in self._roots.items():
      if root in self._place or root not in needed:
        boxed[place] = StaticValue(None)
    return boxed

  def made(self, results, args) -> list:
    """After the call: all results of the graph."""
    found = list(results[: self.count])
    for place, (root, *steps) in self._chains.items():
      value = found[place]
      value = value.value if type(value) is StaticValue else value
      if value is _LATER:
        is_input = root in self._place
        base = args[self._place[root]] if is_input else results[self._roots[root]]
        found[place] = _run(steps, root, base)
    return found


def _shares(value, base) -> bool:
  return (
    isinstance(value, Tensor)
    and isinstance(base, Tensor)
    and value._storage is base._storage
  )


def _chain(node) -> list[fx.Node]:
  """A tensor and the steps from it to the node that may be views; empty for others."""
  steps: list[fx.Node] = []
  reshapes: list[fx.Node] = []
  while isinstance(node, fx.Node):
    reshapes += [user for user in node.users if _name(user) in _RESHAPING]
    name = _name(node)
    is_view = name in _VIEWS
    is_in_place = name.endswith("_") and not name.endswith("__")
    if not is_view and not is_in_place:
      return [] if reshapes or not _is_tensor(node) else [node, *sorted(steps)]
    if is_view:
      steps += [node, *reshapes]
      reshapes = []
    if any(len(step.all_input_nodes) != 1 for step in steps) or not node.args:
      return []
    node = node.args[0]
  return []


def _is_tensor(node: fx.Node) -> bool:
  value = example(node)
  return isinstance(value, torch.Tensor) and value.device.type == "jax"


def _name(node: fx.Node) -> str:
  if node.op == "call_method":
    return node.target
  if node.op != "call_function":
    return ""
  if node.target is getattr:
    return node.args[1]
  return getattr(node.target, "__name__", "")


def _run(steps: list[fx.Node], root: fx.Node, base):
  """Run the steps on the tensor, with a gradient if the result had one."""
  values = {root: base}

  def given(node: fx.Node):
    # Of an operation in place the result is the tensor itself.
    while node not in values:
      node = node.args[0]
    return values[node]

  views = [node for node in steps if _name(node) not in _RESHAPING]
  is_recorded = example(views[-1]).requires_grad if views else True
  with torch.set_grad_enabled(is_recorded):
    for node in steps:
      args, kwargs = fx.map_arg((node.args, node.kwargs), given)
      if node.op == "call_method":
        values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
      else:
        values[node] = node.target(*args, **kwargs)
  return values[views[-1]] if views else base
