"""Random operations of a graph as functions of the key and their number in the graph.

AOTAutograd may run an operation again in the backward pass. One that draws must draw
the same numbers there, so each one takes the packed key, which is an input of the graph
and is kept for the backward pass like any other, and a number of its own.
"""

import re

import jax
import torch
from torch import fx
from torch.utils import _pytree as torch_pytree

from torchax import _torch_compat
from torchax.core.partitions import Partition
from torchax.errors import RngError
from torchax.graphs import fx as fx_graphs
from torchax.graphs.fx import is_draw, is_marked_random, kind_of, where
from torchax.graphs.interpreter import run_operation
from torchax.ops import mappings
from torchax.ops.names import aten
from torchax.ops.ops_registry import Kind
from torchax.rng import rng_scope

PLACEHOLDER = "torchax_rng"
"""Name of the graph input that holds the packed key and count."""

_DROPOUT = aten.native_dropout.default


def keyed(rng, number: int, operation, *args, **kwargs):
  """Stands in the graph for a random operation, with the number of its draw.

  `Program` runs the operation. torch calls this function on fake tensors, for shapes
  and costs.
  """
  return operation(*args, **kwargs)


def add_input(graph: fx.Graph) -> None:
  """Adds the input for the packed key behind the other ones."""
  node = fx_graphs.add_input(graph, PLACEHOLDER)
  # Dynamo says of each input where it comes from; this one, from nowhere.
  node._dynamo_source = None


def key_draws(graph: fx.Graph, rng: fx.Node) -> int:
  """Gives each random operation of a graph the key and its number.

  Args:
    graph: of ATen operations; a joint graph of forward and backward, or one of both.
    rng: its input with the packed key.

  Returns:
    How many draws the graph makes.

  Raises:
    RngError: an operation of the backward pass, or one inside a branch or a loop, draws
      numbers of its own.
  """
  _require_no_draws_inside(graph)
  draws = 0
  for node in list(graph.nodes):
    if not is_marked_random(node):
      continue
    if node.meta.get("partitioner_tag") == "is_backward":
      raise RngError(
        f"{node.target} draws numbers in the backward pass of a compiled function. "
        f"Draw them in the forward pass and keep them.{where(node)}"
      )
    # `torch.dropout` hands an empty tensor back, and draws nothing.
    is_empty = node.target is _DROPOUT and not hint(node.args[0].meta["val"].numel())
    made = 0 if is_empty else _count(node)
    if made == 0 and not is_empty:
      continue
    with graph.inserting_before(node):
      args = (rng, draws, node.target, *node.args)
      replacement = graph.call_function(keyed, args, dict(node.kwargs))
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
    draws += made
  return draws


def _require_no_draws_inside(graph: fx.Graph) -> None:
  """Raises RngError for a draw in a graph that an operation of this one runs."""
  for module in {n.target: fx_graphs.inner(n) for n in graph.nodes}.values():
    for node in () if module is None else module.graph.nodes:
      if is_draw(node):
        raise RngError(
          f"{node.target} draws numbers inside a branch of torch.cond, or in the body "
          "of another operation that takes functions, where a compiled graph cannot "
          "number its draws. Draw before it and pass the numbers as an operand."
          f"{where(node)}"
        )
    if module is not None:
      _require_no_draws_inside(module.graph)


def _count(node: fx.Node) -> int:
  """The number of draws that an operation makes.

  A sampler makes one draw. Another operation, such as attention with dropout, is run on
  shapes, and its draws are counted.
  """
  if not is_draw(node):
    return 0
  if kind_of(node) is Kind.SAMPLER:
    return 1
  arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
  parts = Partition(torch_pytree.tree_map(hint, arguments), of_torch=True)

  def run(*arrays):
    args, kwargs = parts.filled(arrays)
    with torch.no_grad(), rng_scope(0) as stream:
      run_operation(node.target, args, kwargs)
      found.append(stream.draws)

  found: list[int] = []
  with _torch_compat.without_modes():
    jax.eval_shape(run, *map(_abstract, parts.dynamic))
  return found[0]


def _abstract(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
  shape = tuple(map(hint, tensor.shape))
  return jax.ShapeDtypeStruct(shape, mappings.t2j_dtype(tensor.dtype))


def hint(number):
  """The value that a symbolic number had when the graph was made."""
  return number.node.hint if isinstance(number, torch.SymInt) else number


# A module is reached from a variable of the frame that Dynamo has traced.
_ROOT = re.compile(r"^\w\['\w+'\]")


def site_of(node: fx.Node) -> str:
  """Path of the module that an operation belongs to, as ledgers name it."""
  paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
  if not paths:
    return ""
  path = _ROOT.sub("", paths[-1]).replace("['", ".").replace("']", "")
  return path.replace("._modules", "").replace("._orig_mod", "").strip(".")
