"""A graph of ATen operations as one compiled JAX function of plain torch tensors.

The graph is run by the lowerings that run eagerly, once for each combination of shapes,
while `jax.jit` traces. Symbolic sizes are static: other ones compile anew, without
Dynamo. The packed key is an operand; the graph's draws have fixed numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from torchax import _torch_compat
from torchax.dynamo import border, checks, control_flow, draws, products
from torchax.dynamo.options import Options
from torchax.dynamo.outputs import Outputs, is_number
from torchax.environment import default_env
from torchax.graphs import fx as fx_graphs
from torchax.ops import mappings, narrowing
from torchax.ops.names import aten, prims
from torchax.rng import rng_scope
from torchax.rng.packing import PackedStream
from torchax.tensor import new_tensor


@jax.tree_util.register_static
class _Static:
  """What a trace found besides arrays; comes back with every call.

  Attributes:
    values: results that are no tensors.
    log: draws.
    messages: of the assertions, whose conditions are arrays.
  """

  def __init__(self, values: tuple, log: tuple, messages: tuple):
    self.values, self.log, self.messages = values, log, messages


INFERENCE = "inference"
"""Name of a program without a backward pass."""


class Keys:
  """What the programs of one compiled function share.

  Attributes:
    rng: name of the graphs' input with the packed key.
    draws: how many numbers are drawn for one call of the forward pass.
    impl: the implementation of the key.
    log: the draws of the last call, for ledgers.
  """

  def __init__(self):
    self.rng = ""
    self.draws = 0
    self.impl = ""
    self.log: tuple = ()


class Program:
  """A compiled graph; called with a list of its inputs, which it empties.

  Args:
    module: the graph and its constants.
    options: of the backend.
    keys: shared with the other graphs of the same function.
    name: for logs and profiles.
  """

  # torch then gives the arguments as one list, so that they can be freed early.
  _boxed_call = True

  def __init__(self, module: fx.GraphModule, options: Options, keys: Keys, name: str):
    self.module, self.options, self.keys, self.name = module, options, keys, name
    nodes = list(module.graph.nodes)
    self._inputs = fx_graphs.inputs(module.graph)
    (returned,) = nodes[-1].args
    self._steps = [
      node
      for node in nodes
      if node.op in ("get_attr", "call_function") and not is_number(node)
    ]
    checks.require_runnable(self._steps)
    self._outputs = Outputs(returned, self._inputs, shares=name == INFERENCE)
    named = [node.name == keys.rng for node in self._inputs]
    self._rng = named.index(True) if True in named else None
    self._is_needed = [
      isinstance(_meta(node), torch.Tensor) and bool(node.users)
      for node in self._inputs
    ]
    self._constants: dict[str, jax.Array] | None = None
    self._jitted = self._jit()

  def _converted_constants(self) -> dict[str, jax.Array]:
    found = {
      n.target: fx_graphs.attribute(n) for n in self._steps if n.op == "get_attr"
    }
    with self.options.applied():
      return {
        name: mappings.t2j(value)
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
      }

  def _jit(self) -> Callable:
    def pure(numbers, impl, constants, arrays):
      return self._run(numbers, impl, constants, arrays)

    pure.__name__ = self.name
    options = {}
    if self.options.compiler_options:
      options["compiler_options"] = self.options.compiler_options
    return jax.jit(pure, static_argnums=(0, 1), **options)

  # While tracing --------------------------------------------------------------------

  def _run(self, numbers, impl, constants, arrays):
    env = default_env()
    given, sizes = iter(arrays), iter(numbers)
    values: dict[fx.Node, Any] = {}
    words = None
    for place, (node, is_needed) in enumerate(zip(self._inputs, self._is_needed)):
      if isinstance(_meta(node), torch.Tensor):
        array = next(given) if is_needed else None
        if place == self._rng:
          words, values[node] = array, None
        else:
          values[node] = None if array is None else new_tensor(array, env)
      else:
        values[node] = next(sizes)
    stream = None if words is None else PackedStream(words, impl)
    asserted: list[tuple] = []
    with env, torch.no_grad(), _torch_compat.without_autocast():
      self._interpret(env, values, constants, stream, asserted)
    taken = {id(array) for array in arrays}
    computed = self._outputs.stored(_filled(self._outputs.arrays, values))
    outputs = [_own(array, taken) for array in computed]
    others = tuple(_filled(self._outputs.numbers, values))
    conditions = [condition for condition, _ in asserted]
    drawn = () if stream is None else tuple(stream.log)
    messages = tuple(message for _, message in asserted)
    return (outputs, conditions), _Static(others, drawn, messages)

  def _interpret(self, env, values, constants, stream, asserted) -> None:
    for node in self._steps:
      if node.target in _ASSERTIONS:
        condition, *message = _filled(node.args, values)
        asserted.append((condition.jax(), *(message or [f"{node.target} failed"])))
        values[node] = None
        continue
      if node.op == "get_attr":
        constant = constants.get(node.target)
        values[node] = (
          fx_graphs.attribute(node) if constant is None else new_tensor(constant, env)
        )
        continue
      args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
      try:
        result = products.contract(env, node, values)
        if result is None:
          result = self._call(env, node, args, kwargs, stream)
        values[node] = result
      except Exception as error:
        line = draws.line_of(node)
        if line:
          error.add_note(f"{node.target} comes from {line}.")
        raise

  def _call(self, env, node, args, kwargs, stream):
    if node.target is draws.keyed:
      _, number, target, *args = args
      site, line = draws.site_of(node), draws.line_of(node)
      with rng_scope(stream), stream.draw_number(number, site, line):
        return _apply(env, target, tuple(args), kwargs)
    return _apply(env, node.target, args, kwargs)

  # On a call ------------------------------------------------------------------------

  def __call__(self, args: list) -> list:
    if self.options.change_settings:
      with self.options.applied():
        return self._called(args)
    return self._called(args)

  def _called(self, args: list) -> list:
    arrays, numbers = [], []
    for place, value in enumerate(args):
      if isinstance(value, torch.Tensor):
        if self._is_needed[place]:
          arrays.append(border.as_numpy(value))
      else:
        numbers.append(value)
    given = {place: args[place] for place in self._outputs.passed}
    args.clear()
    if self._constants is None:
      # Not before: while torch compiles, tensors are fake.
      self._constants = self._converted_constants()
    computed = self._jitted(tuple(numbers), self.keys.impl, self._constants, arrays)
    (outputs, conditions), static = jax.block_until_ready(computed)
    for condition, message in zip(conditions, static.messages):
      if not condition:
        raise RuntimeError(message)
    if static.log:
      self.keys.log = static.log
    return self._outputs.assemble(given, outputs, static.values)


_ASSERTIONS = frozenset({aten._assert_async.default, aten._assert_async.msg})
_CONVERT = prims.convert_element_type.default
_TO_COPY = aten._to_copy.default
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def _apply(env, target, args, kwargs):
  if isinstance(target, _torch_compat.OpOverload):
    if "device" in kwargs:
      kwargs = {**kwargs, "device": None}
    if target in _VIEWS:
      # Whether memory can be viewed so was asked of torch's strides, not of ours.
      args = (new_tensor(args[0].jax(), env), *args[1:])
    if target is _CONVERT:
      return _converted(env, *args)
    return env.dispatch(target, (), args, kwargs)
  if isinstance(target, _torch_compat.HigherOrderOperator):
    run_graph = functools.partial(_run_graph, env)
    return control_flow.run(env, target, args, kwargs, run_graph)
  return target(*args, **kwargs)


def _converted(env, tensor, dtype):
  if dtype is torch.float64 and not tensor.dim() and narrowing.is_on():
    return tensor  # a Python float on its way to the dtype it is used in
  return env.dispatch(_TO_COPY, (), (tensor,), {"dtype": dtype})


def _run_graph(env, module: fx.GraphModule, arguments: list) -> list:
  """Runs a graph inside a graph."""
  given, values = iter(arguments), {}
  for node in module.graph.nodes:
    if node.op == "placeholder":
      values[node] = next(given)
    elif node.op == "get_attr":
      values[node] = fx_graphs.attribute(node)
    elif node.op == "call_function":
      args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
      values[node] = _apply(env, node.target, args, kwargs)
    else:
      return _filled(node.args[0], values)


def _filled(argument, values: dict):
  """An argument of a node with values in place of nodes, in plain lists and tuples."""
  if isinstance(argument, fx.Node):
    return values[argument]
  if isinstance(argument, dict):
    return {name: _filled(value, values) for name, value in argument.items()}
  if isinstance(argument, tuple):
    return tuple(_filled(value, values) for value in argument)
  if isinstance(argument, list):
    return [_filled(value, values) for value in argument]
  if isinstance(argument, slice):
    parts = (argument.start, argument.stop, argument.step)
    return slice(*[_filled(part, values) for part in parts])
  return argument


def _own(array: jax.Array, taken: set[int]) -> jax.Array:
  """An output of its own: JAX returns inputs and repeated outputs as they are."""
  if id(array) in taken:
    return jax.numpy.copy(array)
  taken.add(id(array))
  return array


def _meta(value):
  return value.meta.get("val") if isinstance(value, fx.Node) else value
