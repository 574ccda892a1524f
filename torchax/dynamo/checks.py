"""Checks of a graph before it is compiled."""

from collections.abc import Sequence

from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from torchax.compat import torch_compat
from torchax.dynamo import draws
from torchax.environment import default_env
from torchax.errors import DataDependentError, OperatorNotFound
from torchax.graphs import higher_order
from torchax.graphs.fx import where


def require_runnable(steps: Sequence[fx.Node]) -> None:
  """Checks the operations of a graph.

  Raises:
    OperatorNotFound: an operation cannot run; names the user's code.
    DataDependentError: the shape of a result, or a number, depends on the values of a
      tensor.
    TypeError: the branches of a `torch.cond` differ in their results.
  """
  for node in steps:
    if has_free_unbacked_symbols(node.meta.get("val")):
      higher_order.require_equal_branches(node)
      raise DataDependentError(
        f"{node.target} gives a number or a shape that depends on the values of a "
        "tensor, so it cannot be part of a compiled JAX program. Leave "
        "torch._dynamo.config.capture_scalar_outputs and "
        "capture_dynamic_output_shape_ops off, so that the graph breaks there."
        f"{where(node)}"
      )
    target = node.args[2] if node.target is draws.keyed else node.target
    try:
      _require_known(node, target)
    except OperatorNotFound as error:
      raise OperatorNotFound(
        f"{error.text}{where(node)} Or keep that code out of the graph with "
        "@torch.compiler.disable."
      ) from None


def _require_known(node: fx.Node, target) -> None:
  dispatcher = default_env()._dispatcher
  if isinstance(target, torch_compat.HigherOrderOperator):
    if node.args and isinstance(node.args[0], torch_compat.OpOverload):
      # A custom operation that changes its arguments, made functional.
      dispatcher.plan_for(node.args[0])
    higher_order.on_arrays(target)
  elif isinstance(target, torch_compat.OpOverload):
    dispatcher.plan_for(target)
