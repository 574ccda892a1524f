"""Checkpoints in graphs that record no gradient: plain calls of their functions.

torch would still look for a backward pass to recompute them in, and refuse their draws.
"""

from collections.abc import Sequence

import torch
from torch import fx

from torchax.graphs.fx import copied, inner

_checkpoint = torch.ops.higher_order.tag_activation_checkpoint


def call_plainly(module: fx.GraphModule, example_inputs: Sequence) -> None:
  """Replaces the checkpoints of a graph of Dynamo's by calls of their functions.

  Args:
    module: the graph, which is changed, unless a gradient may be recorded.
    example_inputs: of the graph.
  """
  if torch.is_grad_enabled() and any(map(_needs_grad, example_inputs)):
    return
  for node in list(module.graph.nodes):
    if node.op != "call_function" or node.target is not _checkpoint:
      continue
    body, *args = node.args
    function = inner(body)
    assert function is not None, f"{node} checkpoints no graph"
    own = fx.GraphModule(function, copied(function.graph))
    call_plainly(own, ())
    name = f"{body.target}_without_checkpoint"
    module.add_submodule(name, own)
    with module.graph.inserting_before(node):
      call = module.graph.call_module(name, tuple(args))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)
  module.recompile()


def _needs_grad(value) -> bool:
  return isinstance(value, torch.Tensor) and value.requires_grad
