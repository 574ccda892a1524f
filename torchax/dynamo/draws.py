"""Random operations of a graph as functions of the key and their number in the graph.

AOTAutograd may run an operation again in the backward pass. One that draws must draw
the same numbers there, so each one takes the packed key, which is an input of the graph
and is kept for the backward pass like any other, and a number of its own.
"""

from typing import NamedTuple

import jax
import torch
from torch import fx
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.partitions import Partition
from torchax.errors import RngError
from torchax.graphs import fx as fx_graphs
from torchax.graphs.fx import (
  hint,
  inner,
  is_draw,
  is_marked_random,
  kind_of,
  may_draw,
  site_of,
  where,
)
from torchax.graphs.interpreter import run_operation
from torchax.registry.names import aten, higher_order
from torchax.registry.operators import Kind
from torchax.rng import rng_scope

PLACEHOLDER = "torchax_rng"
"""Name of the graph input that holds the packed key and count."""

_DROPOUT = aten.native_dropout.default


def keyed(rng, place: tuple, operation, *args, **kwargs):
  """Stands in the graph for a random operation, with the place of its draw.

  `Program` runs the operation. torch calls this function on fake tensors, for shapes
  and costs.
  """
  return operation(*args, **kwargs)


def is_cond(node: fx.Node) -> bool:
  """True for a `torch.cond`."""
  return node.target is higher_order.cond


def add_input(graph: fx.Graph) -> None:
  """Adds the input for the packed key behind the other ones."""
  node = fx_graphs.add_input(graph, PLACEHOLDER)
  # Dynamo says of each input where it comes from; this one, from nowhere.
  node._dynamo_source = None


def key_draws(graph: fx.Graph, rng: fx.Node) -> tuple[int, dict[str, int]]:
  """Gives each random operation of a graph the key and the place of its draw.

  Args:
    graph: of ATen operations; a joint graph of forward and backward, or one of both.
    rng: its input with the packed key.

  Returns:
    How many draws the graph makes, and how many at each site.

  Raises:
    RngError: an operation of the backward pass draws numbers of its own, or one in a
      graph that an operation runs whose draws cannot be numbered.
  """
  draws, sites = 0, {}
  branches: list[_Branches] = []
  for node in list(graph.nodes):
    found = _made(node)
    if found is None:
      continue
    made, by_site = found
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    if is_backward and is_cond(node):
      # The forward pass of a branch is a part of its backward pass, and draws again.
      place = _of_forward(node, branches)
    elif is_backward:
      raise RngError(
        f"{node.target} draws numbers in the backward pass of a compiled function. "
        f"Draw them in the forward pass and keep them.{where(node)}"
      )
    else:
      turns = tuple([(path, sites.get(path, 0)) for path in by_site])
      place = (draws, site_of(node), turns)
      draws += made
      for path, n in by_site.items():
        sites[path] = sites.get(path, 0) + n
    with graph.inserting_before(node):
      args = (rng, place, node.target, *node.args)
      replacement = graph.call_function(keyed, args, dict(node.kwargs))
    replacement.meta = dict(node.meta)
    if is_cond(node) and not is_backward:
      branches.append(_Branches(replacement, place))
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
  return draws, sites


class _Branches(NamedTuple):
  """A `torch.cond` of the forward pass whose branches draw.

  Attributes:
    node: the operation, with its key and place.
    place: of its draws.
  """

  node: fx.Node
  place: tuple


def _of_forward(node: fx.Node, branches: list[_Branches]) -> tuple:
  """The place of the draws that a `torch.cond` of the backward pass makes again."""
  predicate, *bodies, operands = node.args
  for found in reversed(branches):
    _, _, _, earlier_predicate, *earlier_bodies, earlier_operands = found.node.args
    is_of_it = earlier_predicate is predicate and (
      earlier_operands == operands[: len(earlier_operands)]
    )
    if is_of_it and all(map(_draws_as, bodies, earlier_bodies)):
      branches.remove(found)
      return found.place
  raise RngError(
    "A torch.cond draws other numbers in the backward pass of a compiled function than "
    f"in the forward pass. Draw before it and pass the numbers.{where(node)}"
  )


def _draws_as(branch: fx.Node, forward: fx.Node) -> bool:
  """Whether a branch of a backward pass draws what that of the forward pass draws.

  Then its operations are said to be of the modules of those, which torch leaves out.
  """
  drawing = [
    [n for n in body.graph.nodes if _made(n)] for body in map(inner, (branch, forward))
  ]
  pairs = list(zip(*drawing))
  if len({*map(len, drawing)}) > 1 or any(a.target != b.target for a, b in pairs):
    return False
  for again, first in pairs:
    again.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
    bodies = [[n for n in node.all_input_nodes if inner(n)] for node in (again, first)]
    if not all(map(_draws_as, *bodies)):
      return False
  return True


def _made(node: fx.Node) -> tuple[int, dict[str, int]] | None:
  """How many draws an operation makes, in all and at each site; None for no draws.

  Raises:
    RngError: it runs graphs that draw, in a way in which they cannot be numbered.
  """
  bodies = [body for body in map(inner, node.all_input_nodes) if body is not None]
  if any(map(may_draw, bodies)):
    if is_cond(node):
      return _farthest([_drawn_in(body.graph) for body in bodies])
    if node.target is higher_order.while_loop:
      return 1, {site_of(node): 1}
    raise RngError(
      f"{node.target} runs a graph that draws numbers, which a compiled graph cannot "
      f"number. Draw before it and pass the numbers as an operand.{where(node)}"
    )
  if not is_marked_random(node):
    return None
  # `torch.dropout` hands an empty tensor back, and draws nothing.
  is_empty = node.target is _DROPOUT and not hint(node.args[0].meta["val"].numel())
  made = 0 if is_empty else _count(node)
  return (made, {site_of(node): made}) if made or is_empty else None


def _drawn_in(graph: fx.Graph) -> tuple[int, dict[str, int]]:
  total, sites = 0, {}
  for made, by_site in filter(None, map(_made, graph.nodes)):
    total += made
    for path, n in by_site.items():
      sites[path] = sites.get(path, 0) + n
  return total, sites


def _farthest(branches: list) -> tuple[int, dict[str, int]]:
  """How far branches move the streams of which one is run: as far as any."""
  paths = dict.fromkeys(path for _, sites in branches for path in sites)
  by_site = {path: max(sites.get(path, 0) for _, sites in branches) for path in paths}
  return max(made for made, _ in branches), by_site


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
  with torch_compat.without_modes():
    abstract = [
      jax.ShapeDtypeStruct(tuple(map(hint, t.shape)), mappings.t2j_dtype(t.dtype))
      for t in parts.dynamic
    ]
    jax.eval_shape(run, *abstract)
  return found[0]
