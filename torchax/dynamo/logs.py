"""What the backend compiles, for who wants to see it.

`TORCHAX_LOGS=graphs,operands,draws python program.py`, or `set_logs(draws=True)`:

  graphs    the ATen graphs of the forward and the backward pass
  operands  their inputs: name, dtype, shape, and which one holds the key
  draws     their random operations: number, operation, shape, module, line of code

All goes to the logger "torchax.dynamo", whose level is INFO while something is on.
"""

import logging
import os

import torch
from torch import fx

from torchax.dynamo import draws
from torchax.graphs import fx as fx_graphs

logger = logging.getLogger("torchax.dynamo")

KINDS = ("graphs", "operands", "draws")
VARIABLE = "TORCHAX_LOGS"

_on: set[str] = set()


def set_logs(**kinds: bool) -> None:
  """Says what is logged from now on.

  Args:
    kinds: `graphs`, `operands`, `draws`; those not named stay as they are.

  Raises:
    ValueError: a name that is none of these.
  """
  _require_known(kinds)
  for kind, is_on in kinds.items():
    (_on.add if is_on else _on.discard)(kind)
  if _on:
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
      logger.addHandler(logging.StreamHandler())
  else:
    logger.setLevel(logging.NOTSET)


def _require_known(kinds) -> None:
  unknown = sorted(set(kinds) - set(KINDS))
  if unknown:
    raise ValueError(
      f"{', '.join(unknown)} cannot be logged; {VARIABLE} and set_logs take "
      f"{', '.join(KINDS)}."
    )


def read_environment() -> None:
  """Turns on what the environment variable names.

  Raises:
    ValueError: it names something else.
  """
  named = [kind.strip() for kind in os.environ.get(VARIABLE, "").split(",")]
  if any(named):
    set_logs(**{kind: True for kind in named if kind})


def note(name: str, module: fx.GraphModule, rng: str) -> None:
  """Logs a graph that is about to be compiled.

  Args:
    name: which part of the function it is.
    module: the graph.
    rng: name of the input that holds the packed key.
  """
  if not _on:
    return
  nodes = list(module.graph.nodes)
  if "graphs" in _on:
    code = module.print_readable(print_output=False)
    logger.info("graph of %s:\n%s", name, code)
  if "operands" in _on:
    inputs = [_operand(node, rng) for node in fx_graphs.inputs(module.graph)]
    logger.info("operands of %s:\n%s", name, "\n".join(inputs))
  if "draws" in _on:
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
  place = "  ".join(filter(None, (draws.site_of(node), draws.line_of(node))))
  return f"  {number}  {operation}  {_shown(first)}  {place}"


def _shown(tensor) -> str:
  return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


read_environment()
