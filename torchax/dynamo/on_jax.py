"""Graphs of Dynamo that compute on jax: compiled by `jax_jit`. Called by `backend.py`.

Dynamo passes Python floats as tensors. `numbers.py` turns inputs back into numbers.
Results that Dynamo wraps in `scalar_tensor` leave the trace as numbers too.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchax.core import host_numbers
from torchax.core.static_values import Identity, StaticValue
from torchax.core.storage import active
from torchax.dynamo import numbers, shared_results
from torchax.dynamo.options import Options
from torchax.dynamo.sizes import ArgumentSizes, GraphSizes
from torchax.environment import env_on
from torchax.graphs import higher_order
from torchax.graphs.fx import (
  add_input,
  attribute,
  draw_at_sites,
  example,
  function_name,
  inner_graph,
  inputs,
  operation_name,
  where,
)
from torchax.interop.jit import LEADING, Jitted
from torchax.tensor import Tensor
from torchax.tracing.effects import OverlapError

NAME = "a function compiled with torch.compile"
"""Name of a function in messages if the frames of its nodes are unknown."""

_SCALAR_TENSOR = torch.scalar_tensor


def drop_unused_moves(graph: fx.Graph) -> None:
  """Erase moves to jax without users; a library calls `x.jax()` to look for a tracer.

  Otherwise they would make the graph of a CPU program one on jax.
  """
  for node in graph.find_nodes(op="call_method", target="jax"):
    if not node.users:
      graph.erase_node(node)


def compile_graph(module: fx.GraphModule, options: Options) -> Callable:
  """Compile a graph by `jax_jit`, which handles gradients and in-place changes.

  Args:
    module: the graph; changed.
    options: options of the backend.

  Returns:
    A function of the graph's inputs.
  """
  lifted = _lift_tensors_on_host(module)
  arguments = _Arguments(module.graph)
  results = _Results(module.graph)
  _replace_higher_order(module.graph)
  module.recompile()
  is_compiled = True
  forward = draw_at_sites(module)
  parts = (forward, module.graph, arguments, results, options)
  run = _jit(*parts)
  # Inside an outer trace host numbers are constants.
  run_in_trace = _jit(*parts) if arguments.on_host else run

  def leave_uncompiled(reason: str) -> None:
    nonlocal is_compiled
    is_compiled = False
    warnings.warn(
      f"torch.compile leaves a graph uncompiled that {reason}", stacklevel=3
    )

  cpu_input = _cpu_input(module.graph)
  if cpu_input:
    leave_uncompiled(
      'takes a tensor on the CPU and computes on jax. Call `.to("jax")` before the '
      f"compiled function.{where(cpu_input)}"
    )

  def call(*args):
    args = [*args, *lifted]
    with env_on(), options.apply():
      if is_compiled:
        bound, on_host = arguments.bind(args)
        try:
          with host_numbers.argument_values(on_host):
            out = (run_in_trace if active.boundary else run)(*bound)
          return results.unbox(out, args)
        except OverlapError as error:
          leave_uncompiled(f"is refused by jax_jit: {error}")
      return results.unbox(forward(*arguments.plain(args)), args)

  return torch.compiler.disable(call)


def _jit(
  forward: Callable,
  graph: fx.Graph,
  arguments: "_Arguments",
  results: "_Results",
  options: Options,
) -> Callable:
  kwargs: dict[str, Any] = {}
  if options.compiler_options:
    kwargs["compiler_options"] = options.compiler_options
  if options.donate:
    kwargs["donate_argnums"] = _overwritten(graph)

  def compiled_graph(*args):
    args = arguments.in_trace(args)
    return results.box(args, forward(*args))

  compiled_graph.__name__ = function_name(graph) or NAME
  if options.buckets is not None:
    examples = [example(node) for node in inputs(graph)]
    sizes = GraphSizes(examples, options.buckets)
    kwargs["buckets"] = ArgumentSizes(sizes, LEADING)
  return Jitted(compiled_graph, kwargs)


def _lift_tensors_on_host(module: fx.GraphModule) -> list[torch.Tensor]:
  """Turn CPU tensor attributes of the module into its last inputs; return the tensors.

  One is an optimizer's step count. `jax_jit` captures jax tensors itself.
  """
  graph, lifted = module.graph, {}
  for node in list(graph.nodes):
    value = attribute(node)
    if not isinstance(value, torch.Tensor) or isinstance(value, Tensor):
      continue
    if node.target not in lifted:
      placeholder = add_input(graph, f"lifted_{len(lifted)}")
      placeholder.meta = dict(node.meta)
      lifted[node.target] = (value, placeholder)
    node.replace_all_uses_with(lifted[node.target][1])
    graph.erase_node(node)
  return [value for value, _ in lifted.values()]


def _cpu_input(graph: fx.Graph) -> fx.Node | None:
  """Return a CPU input that is not 0-d, if any."""
  for node in inputs(graph):
    value = example(node)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
      return node
  return None


class _Arguments:
  """Numbers among the arguments of a graph, and their form in the trace.

  Args:
    graph: changed: it takes Python numbers.

  Attributes:
    on_host: symbols of the arguments that are host numbers, by position.
  """

  def __init__(self, graph: fx.Graph):
    self._scalars = numbers.take_scalars(graph)
    self._uses = {**self._scalars, **numbers.take_integers(graph)}
    self.on_host = {
      position: host_numbers.Argument(object(), node.name)
      for position, node in enumerate(inputs(graph))
      if self._uses.get(position) is numbers.Use.HOST
    }

  def plain(self, args) -> list:
    """Return the arguments with Python numbers in place of 0-d tensors."""
    return [
      arg.item() if position in self._scalars else arg
      for position, arg in enumerate(args)
    ]

  def bind(self, args) -> tuple[list, dict]:
    """Return the arguments of the compiled function, and the host numbers' values."""
    args, on_host = self.plain(args), {}
    for position, arg in enumerate(args):
      use = self._uses.get(position, numbers.Use.CONSTANT)
      if type(arg) is not int and position not in self._scalars:
        continue
      if use is numbers.Use.HOST and active.boundary is None:
        on_host[self.on_host[position]] = float(arg)
        args[position] = StaticValue(self.on_host[position])
      elif use is numbers.Use.EXPONENT and arg not in numbers.SIMPLE_EXPONENTS:
        args[position] = float(arg)
      elif use is not numbers.Use.OPERAND or not numbers.fits_int32(arg):
        # A symbolic size determines shapes, so another value retraces.
        args[position] = StaticValue(arg)
    return args, on_host

  def in_trace(self, args) -> list:
    """Return the graph's arguments inside the trace, with `HostNumber` objects."""
    return [
      host_numbers.HostNumber(arg) if isinstance(arg, host_numbers.Argument) else arg
      for arg in args
    ]


class _Results:
  """Results of a graph; numbers and CPU tensors among them do not move to jax.

  A CPU tensor computed in the trace is a constant of the program.

  Args:
    graph: changed: it returns a number instead of a CPU tensor built from it.
  """

  def __init__(self, graph: fx.Graph):
    (output,) = [node for node in graph.nodes if node.op == "output"]
    returned: list = []
    # Dtypes of the results that are on the CPU; None for others.
    self._dtypes: list[torch.dtype | None] = []
    for node in output.args[0]:
      value = example(node)
      is_on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
      self._dtypes.append(value.dtype if is_on_cpu else None)
      is_wrapped = is_on_cpu and node.target is _SCALAR_TENSOR
      returned.append(node.args[0] if is_wrapped else node)
    output.args = (tuple(returned),)
    # `eliminate_dead_code` would also remove in-place operations from bodies of loops.
    for node in reversed(list(graph.nodes)):
      if node.target is _SCALAR_TENSOR and not node.users:
        graph.erase_node(node)

  def box(self, args, results) -> tuple:
    """Return the results that leave the trace; box numbers and CPU tensors."""
    values = map(host_numbers.concretize, shared_results.box(args, results))
    return tuple(map(_box, values))

  def unbox(self, results, args) -> tuple:
    """Return the results of a call, with numbers or CPU tensors as Dynamo expects."""
    results = shared_results.unbox(args, results, len(self._dtypes))
    values = (v.value if type(v) is StaticValue else v for v in results)
    return tuple(
      value if dtype is None else _on_cpu(value, dtype)
      for value, dtype in zip(values, self._dtypes)
    )


_NUMBERS = frozenset({int, float, bool, complex})


def _box(value):
  if type(value) in _NUMBERS:
    return StaticValue(value)
  is_on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
  return StaticValue(Identity(value)) if is_on_cpu else value


def _on_cpu(value, dtype: torch.dtype) -> torch.Tensor:
  """Return a number, a boxed CPU tensor, or a tensor on any device as a CPU tensor."""
  if isinstance(value, Identity):
    return value.value.clone()
  if isinstance(value, torch.Tensor):
    return value.to("cpu", dtype)
  return torch.scalar_tensor(value, dtype=dtype, device="cpu")


def _replace_higher_order(graph: fx.Graph) -> None:
  """Replace torch's higher-order operators by ours, in inner graphs too."""
  for node in graph.nodes:
    node.target = higher_order.replacement(node.target) or node.target
    body = inner_graph(node)
    if body is not None:
      _replace_higher_order(body.graph)
      body.recompile()


def _overwritten(graph: fx.Graph) -> tuple[int, ...]:
  """Return the positions of inputs changed in place, judged by operation names."""
  written: set[fx.Node] = set()
  for node in graph.nodes:
    name = operation_name(node)
    if name.endswith("_") and not name.endswith("__") and node.args:
      fx.map_arg(node.args[0], written.add)
  return tuple(
    position for position, node in enumerate(inputs(graph)) if node in written
  )
