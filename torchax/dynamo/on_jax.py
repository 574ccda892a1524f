"""Graphs of Dynamo's that compute on jax: compiled by `jax_jit`.

Dynamo hands over Python numbers in its own way: a float that changes is a 0-d tensor on
the CPU that the graph calls `item()` of, and a float that is returned goes through
`scalar_tensor`. Here they are numbers again.
"""

import operator
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from torchax.core.static_values import StaticValue
from torchax.dynamo.options import Options
from torchax.environment import env_on
from torchax.graphs import higher_order
from torchax.graphs.fx import (
  add_input,
  attribute,
  copied,
  example,
  example_tensors,
  inner,
  inputs,
  where,
)
from torchax.graphs.sites import at_sites
from torchax.interop import jax_jit
from torchax.tensor import Tensor

NAME = "a function compiled with torch.compile"
"""What messages call it: Dynamo does not say its name."""

_SCALAR_TENSOR = torch.scalar_tensor


def is_on_jax(gm: fx.GraphModule, example_inputs: Sequence) -> bool:
  """True for a graph in which a tensor is on jax, given or made there."""
  tensors = [t for node in gm.graph.nodes for t in example_tensors(node)]
  tensors += [value for value in example_inputs if isinstance(value, torch.Tensor)]
  return any(tensor.device.type == "jax" for tensor in tensors)


def compiled(gm: fx.GraphModule, options: Options) -> Callable:
  """The graph compiled by `jax_jit`, gradients and changes in place included.

  Args:
    gm: the graph; left as it is.
    options: of the backend.

  Returns:
    A function of the graph's inputs.
  """
  module = fx.GraphModule(gm, copied(gm.graph))
  lifted = _lift_tensors_on_host(module)
  floats = _replace_floats(module.graph)
  integers = _replace_integers(module.graph)
  results = _Results(module.graph)
  _replace_higher_order(module.graph)
  module.recompile()
  moved = _moved(module.graph)
  forward = at_sites(module)
  run = forward if moved else _jitted(forward, module.graph, results, options)
  if moved:
    warnings.warn(
      "torch.compile leaves a graph uncompiled that takes a tensor on the CPU and "
      'computes on jax. Call `.to("jax")` before the compiled function.'
      f"{where(moved)}",
      stacklevel=2,
    )

  def call(*args):
    args = [*args, *lifted]
    for place, is_constant in floats.items():
      number = float(args[place])
      args[place] = StaticValue(number) if is_constant and not moved else number
    if not moved:
      # A size that Dynamo leaves open decides shapes: another one compiles anew.
      args = [
        StaticValue(arg) if type(arg) is int and place not in integers else arg
        for place, arg in enumerate(args)
      ]
    with env_on(), options.applied():
      return results.shown(run(*args))

  return torch.compiler.disable(call)


def _jitted(
  forward: Callable, graph: fx.Graph, results: "_Results", options: Options
) -> Callable:
  kwargs = {}
  if options.compiler_options:
    kwargs["compiler_options"] = options.compiler_options
  if options.donate:
    kwargs["donate_argnums"] = _overwritten(graph)

  def compiled_graph(*args):
    return results.hidden(forward(*args))

  compiled_graph.__name__ = NAME
  return jax_jit(compiled_graph, kwargs)


def _lift_tensors_on_host(module: fx.GraphModule) -> list[torch.Tensor]:
  """Makes the CPU tensors of the graph's module its last inputs, and returns them.

  An optimizer's count of steps is one. jax tensors are captured by `jax_jit`.
  """
  graph, lifted = module.graph, {}
  for node in list(graph.nodes):
    value = attribute(node)
    if not isinstance(value, torch.Tensor) or isinstance(value, Tensor):
      continue
    if node.target not in lifted:
      given = add_input(graph, f"lifted_{len(lifted)}")
      given.meta = dict(node.meta)
      lifted[node.target] = (value, given)
    node.replace_all_uses_with(lifted[node.target][1])
    graph.erase_node(node)
  return [value for value, _ in lifted.values()]


def _moved(graph: fx.Graph) -> fx.Node | None:
  """An input on the CPU that has dimensions; None if there is none."""
  for node in inputs(graph):
    value = example(node)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
      return node
  return None


class _Results:
  """Numbers among the results, which JAX would make arrays of.

  Args:
    graph: changed, so that it returns the number itself where it returned a tensor on
      the CPU made of it.
  """

  def __init__(self, graph: fx.Graph):
    (output,) = [node for node in graph.nodes if node.op == "output"]
    returned, self._dtypes = [], []
    for node in output.args[0]:
      made = isinstance(node, fx.Node) and node.target is _SCALAR_TENSOR
      if made and example(node).device.type == "cpu":
        self._dtypes.append(example(node).dtype)
        node = node.args[0]
      else:
        self._dtypes.append(None)
      returned.append(node)
    output.args = (tuple(returned),)
    graph.eliminate_dead_code(_is_effect)

  def hidden(self, results) -> tuple:
    """The results that leave the trace, with numbers as its static values."""
    return tuple(StaticValue(v) if type(v) in _NUMBERS else v for v in results)

  def shown(self, results) -> tuple:
    """The results of a call: numbers again, or the tensors that Dynamo expects."""
    values = (v.value if type(v) is StaticValue else v for v in results)
    return tuple(
      value if dtype is None else torch.scalar_tensor(value, dtype=dtype, device="cpu")
      for value, dtype in zip(values, self._dtypes)
    )


_NUMBERS = frozenset({int, float, bool, complex})


def _is_effect(node: fx.Node) -> bool:
  """True unless the node only makes a tensor of a number, which may stay unused."""
  return node.target is not _SCALAR_TENSOR


def _replace_floats(graph: fx.Graph) -> dict[int, bool]:
  """Has the graph take Python floats where it calls `item()` of its inputs.

  Returns:
    The places of these inputs, and whether the number has to be a constant: anywhere
    but in arithmetic of floating-point tensors it may decide what is computed.
  """
  floats = {}
  for place, node in enumerate(inputs(graph)):
    value = example(node)
    if not isinstance(value, torch.Tensor) or value.dim() or not node.users:
      continue
    if value.dtype is not torch.float64 or value.device.type != "cpu":
      continue
    items = list(node.users)
    if all(user.op == "call_method" and user.target == "item" for user in items):
      floats[place] = not all(map(_is_arithmetic, items))
      for item in items:
        item.replace_all_uses_with(node)
        graph.erase_node(item)
  return floats


def _is_arithmetic(number: fx.Node) -> bool:
  """True for a number of which only arithmetic makes use."""
  return all(
    _is_arithmetic_operation(user)
    and (
      _is_arithmetic(user)
      if isinstance(example(user), torch.SymFloat)
      else all(t.is_floating_point() for n in user.all_input_nodes for t in _tensors(n))
    )
    for user in number.users
  )


def _is_arithmetic_operation(node: fx.Node) -> bool:
  """True for `x + y`, `torch.add(x, y)` and `x.add(y)`, without further arguments."""
  if node.op == "call_method":
    return node.target in _METHODS and not node.kwargs
  return node.op == "call_function" and node.target in _ARITHMETIC


def _replace_integers(graph: fx.Graph) -> frozenset[int]:
  """Has the graph index by integers where it selects at those that it is given.

  Returns:
    The places of integers of which another one needs no other program: factors of
    floating-point tensors, and positions, which Dynamo's guards keep in range.
  """
  found = set()
  for place, node in enumerate(inputs(graph)):
    if not isinstance(example(node), torch.SymInt) or not node.users:
      continue
    if all(map(_scales, node.users)):
      found.add(place)
    elif all(_selects_at(user, node) for user in node.users):
      found.add(place)
      for user in list(node.users):
        tensor, dim, index = user.args
        user.target = operator.getitem
        user.args = (tensor, (*[slice(None)] * dim, index))
  return frozenset(found)


def _scales(user: fx.Node) -> bool:
  """True for sums and products with floating-point tensors; powers are special."""
  if not _is_arithmetic_operation(user) or user.target in _POWERS:
    return False
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  return bool(tensors) and all(t.is_floating_point() for t in tensors)


def _selects_at(user: fx.Node, position: fx.Node) -> bool:
  """True for `torch.select(x, dim, position)` of a tensor on jax, dim from 0 on."""
  if user.target is not torch.select or user.kwargs or len(user.args) != 3:
    return False
  tensor, dim, index = user.args
  is_place = index is position and type(dim) is int and dim >= 0
  return is_place and isinstance(tensor, fx.Node) and bool(_tensors(tensor))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
  return [tensor for tensor in example_tensors(node) if tensor.device.type == "jax"]


_ARITHMETIC = frozenset(
  {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.pow),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.pow),
  }
)
_POWERS = frozenset({operator.pow, torch.pow, "pow"})
_METHODS = frozenset(
  {"add", "sub", "mul", "div", "pow", "add_", "sub_", "mul_", "div_"}
)


def _replace_higher_order(graph: fx.Graph) -> None:
  """Puts our functions in place of the higher-order operators that torch would run."""
  for node in graph.nodes:
    node.target = higher_order.replacement(node.target) or node.target
    body = inner(node)
    if body is not None:
      _replace_higher_order(body.graph)
      body.recompile()


def _overwritten(graph: fx.Graph) -> tuple[int, ...]:
  """Numbers of the inputs that a graph changes in place, as far as names tell."""
  written: set[fx.Node] = set()
  for node in graph.nodes:
    name = node.target if node.op == "call_method" else _name_of(node.target)
    if name.endswith("_") and not name.endswith("__") and node.args:
      fx.map_arg(node.args[0], written.add)
  return tuple(place for place, node in enumerate(inputs(graph)) if node in written)


def _name_of(target) -> str:
  return getattr(target, "__name__", "")
