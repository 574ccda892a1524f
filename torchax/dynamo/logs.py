"""What the backend compiles, for who wants to see it: see `torchax/logs.py`."""

import logging

import torch
from torch import fx

from torchax.dynamo import draws
from torchax.graphs import fx as fx_graphs
from torchax.logs import are_on

logger = logging.getLogger("torchax.dynamo")


def note(name: str, module: fx.GraphModule, rng: str) -> None:
  """Logs a graph that is about to be compiled.

  Args:
    name: which part of the function it is.
    module: the graph.
    rng: name of the input that holds the packed key.
  """
  nodes = list(module.graph.nodes)
  if are_on("graphs"):
    code = module.print_readable(print_output=False)
    logger.info("graph of %s:\n%s", name, code)
  if are_on("operands"):
    inputs = [_operand(node, rng) for node in fx_graphs.inputs(module.graph)]
    logger.info("operands of %s:\n%s", name, "\n".join(inputs))
  if are_on("draws"):
    drawn = [_draw(node) for node in nodes if node.target is draws.keyed]
    logger.info("draws of %s:\n%s", name, "\n".join(drawn) or "  none")


def _operand(node: fx.Node, rng: str) -> str:
  meta = node.meta.get("val")
  if not isinstance(meta, torch.Tensor):
    return f"  {node.name}: size"
  key = "  (key and count)" if node.name == rng else ""
  return f"  {node.name}: {_shown(meta)}{key}"


def _draw(node: fx.Node) -> str:
  _, number, operation, *_ = node.args
  meta = node.meta.get("val")
  first = next((m for m in (meta if isinstance(meta, tuple) else (meta,))), None)
  place = "  ".join(filter(None, (draws.site_of(node), fx_graphs.line_of(node))))
  return f"  {number}  {operation}  {_shown(first)}  {place}"


def _shown(tensor) -> str:
  return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
