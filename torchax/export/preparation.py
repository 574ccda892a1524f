"""Conversion of an exported program to a functional graph for JAX.

`torch.export.export` returns a training graph, with in-place writes, `no_grad` and
`detach`. `run_decompositions` makes it functional, but drops gradient stops and unused
draws, so these first become operations defined here. Operations with a lowering are not
decomposed: the program computes and draws the same as eager code. `export/__init__.py`
calls `functional`.
"""

import copy
from collections.abc import Iterator

import torch
from jax import lax
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from torchax.compat.torch_compat import remove_effect_tokens
from torchax.graphs.fx import is_draw
from torchax.ops.builtin import Kind, op
from torchax.registry import operators
from torchax.registry.names import aten, higher_order

_library = torch.library.Library("torchax_export", "DEF")
_library.define("stop_gradient(Tensor self) -> Tensor")
_library.define("keep(Tensor[] values) -> ()")
_library.impl("stop_gradient", torch.clone, "CompositeExplicitAutograd")
_library.impl("keep", lambda values: None, "CompositeExplicitAutograd")

# Identity that stops gradients, for `detach` and `no_grad`.
stop_gradient = torch.ops.torchax_export.stop_gradient.default
# No-op that keeps an unused draw in the graph, so that later draws stay the same.
keep = torch.fx.has_side_effect(torch.ops.torchax_export.keep.default)


@op(stop_gradient)
def _stop_gradient(self):
  return lax.stop_gradient(self)


@op(keep, kind=Kind.TENSORS)
def _keep(values):
  """Do nothing: the values have been drawn."""


# Composite operations that draw or loop. If they stay whole, they equal the eager
# functions. torch 2.13 decomposes recurrent layers without dropout between layers.
WHOLE = (
  aten.lstm.input,
  aten.gru.input,
  aten.rnn_tanh.input,
  aten.rnn_relu.input,
  aten.scaled_dot_product_attention.default,
)


def functional(program: ExportedProgram) -> ExportedProgram:
  """Return the program as a functional graph of operations that have lowerings.

  Args:
    program: result of `torch.export.export`, for training or decomposed.
  """
  decomposed = _insert_operations(program).run_decompositions(_decompositions())
  has_tokens = any(
    spec.kind is InputKind.TOKEN for spec in decomposed.graph_signature.input_specs
  )
  return remove_effect_tokens()(decomposed) if has_tokens else decomposed


def _decompositions() -> dict:
  table = torch.export.default_decompositions()
  lowerings = operators.all_aten_ops
  for overload in list(table):
    operator = lowerings.get(overload) or lowerings.get(overload.overloadpacket)
    is_lowered = operator is not None and operator.kind in (Kind.ARRAYS, Kind.SAMPLER)
    if overload in WHOLE or is_lowered:
      table.pop(overload)
  table[aten.dropout.default] = _dropout
  return table


def _dropout(input, p, train):
  """Make one draw wherever eager dropout makes one, also for p = 1."""
  if not train or p == 0:
    return input.clone()
  return aten.native_dropout.default(input, p, True)[0]


# Before the graph is made functional -------------------------------------------------


def _insert_operations(program: ExportedProgram) -> ExportedProgram:
  """Return the program with the operations defined here inserted."""
  graph = copy.deepcopy(program.graph_module.graph)
  changes = list(_rewrites(graph))
  if not changes:
    return program
  for change, node in changes:
    change(graph, node)
  graph.lint()
  signature = copy.deepcopy(program.graph_signature)
  (results,) = graph.output_node().args
  for spec, node in zip(signature.output_specs, results):
    if isinstance(node, torch.fx.Node):
      spec.arg.name = node.name  # an inserted operation may now compute the result
  return ExportedProgram(
    root=program.graph_module,
    graph=graph,
    graph_signature=signature,
    state_dict=program.state_dict,
    range_constraints=program.range_constraints,
    module_call_graph=program.module_call_graph,
    example_inputs=program.example_inputs,
    constants=program.constants,
    verifiers=program.verifiers,
  )


def _rewrites(graph: torch.fx.Graph) -> Iterator[tuple]:
  for node in graph.nodes:
    if node.op != "call_function":
      continue
    if node.target is aten.detach.default:
      yield _stop_after, node
    elif node.target is higher_order.wrap_with_set_grad_enabled:
      # The tensors that are selected from a `no_grad` region.
      for result in node.users if node.args[0] is False else ():
        if isinstance(result.meta.get("val"), torch.Tensor):
          yield _stop_after, result
    elif node.target is aten.dropout_.default:
      yield _separate_dropout, node
    elif is_draw(node) and not node.users:
      yield _keep_draw, node


def _stop_after(graph, node) -> None:
  with graph.inserting_after(node):
    stopped = graph.call_function(stop_gradient, (node,))
  stopped.meta = dict(node.meta)
  node.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)


def _separate_dropout(graph, node) -> None:
  """Split `dropout_` into `dropout` and a copy, as in eager mode on jax."""
  with graph.inserting_before(node):
    dropped = graph.call_function(aten.dropout.default, node.args, node.kwargs)
  dropped.meta = dict(node.meta)
  node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], dropped), {}


def _keep_draw(graph, node) -> None:
  value = node.meta.get("val")
  if not isinstance(value, torch.Tensor):
    return
  with graph.inserting_after(node):
    use = graph.call_function(keep, ([node],))
  use.meta = {**node.meta, "val": None}
