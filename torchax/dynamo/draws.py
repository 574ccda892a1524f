"""Keys for the random operations of a graph of ATen operations.

AOTAutograd may recompute an operation in the backward pass. A recomputed draw must give
the same numbers. Each random operation therefore takes two more arguments: the packed
key and the position of its draw. The key is an input of the graph, saved for the
backward pass like any other. `backend.py` calls `key_draws`; `program.py` runs the
keyed operations.
"""

import collections

import jax
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.partitions import Partition
from torchax.errors import RngError
from torchax.graphs import fx as fx_graphs
from torchax.graphs.fx import (
  hint,
  inner_graph,
  is_draw,
  is_marked_random,
  kind_of,
  may_draw,
  meta,
  site_of,
  where,
)
from torchax.graphs.interpreter import run_operation
from torchax.registry.names import aten, higher_order, present, resolve
from torchax.registry.operators import Kind
from torchax.rng import rng_scope

PLACEHOLDER = "torchax_rng"
"""Name of the graph input with the packed key and count."""

_DROPOUT = aten.native_dropout.default


def run_keyed(rng, position: tuple, operation, *args, **kwargs):
  """Run a random operation; marks it in a graph with the key and its draw's position.

  `Program` recognizes this function and runs the operation with the key. torch calls it
  with fake tensors, for shapes and costs.
  """
  return operation(*args, **kwargs)


def add_input(graph: fx.Graph) -> None:
  """Add the input for the packed key after the other inputs."""
  node = fx_graphs.add_input(graph, PLACEHOLDER)
  # Dynamo records the source of each input; this one has none.
  node._dynamo_source = None


_DROPOUTS = frozenset(
  {
    F.dropout,
    torch.dropout,
    torch.dropout_,
    *(resolve(op) for op in (aten.dropout, aten.dropout.default)),
    *(resolve(op) for op in (aten.dropout_, aten.dropout_.default)),
  }
)


def remove_idle_dropout(graph: fx.Graph) -> None:
  """Replace a dropout that is off by its input, which is its result in eager mode.

  torch's decomposition is a copy, so in-place changes of the result would be lost.
  """
  for node in graph.nodes:
    if node.op == "call_function" and node.target in _DROPOUTS:
      named = {**dict(zip(("input", "p", "train"), node.args)), **node.kwargs}
      is_on = named.get("train", named.get("training", True))
      if is_on is False or type(named.get("p")) in (int, float) and not named["p"]:
        node.replace_all_uses_with(named["input"])
        graph.erase_node(node)


def key_draws(graph: fx.Graph, rng: fx.Node) -> tuple[int, dict[str, int]]:
  """Replace each random operation by a `run_keyed` call with the position of its draw.

  Args:
    graph: ATen operations of the forward pass, the backward pass or both.
    rng: input of the graph with the packed key.

  Returns:
    The number of draws in the graph, and their number at each site.

  Raises:
    RngError: an operation draws in the backward pass alone, or runs an inner graph
      whose draws cannot be numbered.
  """
  draws, sites = 0, collections.Counter[str]()
  # (keyed `torch.cond` whose branches draw, position of its draws)
  branches: list[tuple[fx.Node, tuple]] = []
  for node in list(graph.nodes):
    counts = _draws_of(node)
    if counts is None:
      continue
    count, by_site = counts
    is_backward = node.meta.get("partitioner_tag") == "is_backward"
    is_cond = node.target is higher_order.cond
    if is_backward and is_cond:
      # The backward pass of a branch recomputes its forward pass, with its draws.
      position = _forward_position(node, branches)
    elif is_backward:
      raise RngError(
        f"{node.target} draws numbers in the backward pass of a compiled function. "
        f"Draw them in the forward pass and keep them.{where(node)}"
      )
    else:
      turns = tuple([(path, sites[path]) for path in by_site])
      position = (draws, site_of(node), turns)
      draws += count
      sites.update(by_site)
    with graph.inserting_before(node):
      args = (rng, position, node.target, *node.args)
      replacement = graph.call_function(run_keyed, args, dict(node.kwargs))
    replacement.meta = dict(node.meta)
    if is_cond and not is_backward:
      branches.append((replacement, position))
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
  return draws, sites


def _forward_position(node: fx.Node, branches: list[tuple]) -> tuple:
  """Return the position of the draws that a backward `torch.cond` recomputes."""
  predicate, *bodies, operands = node.args
  for forward, position in reversed(branches):
    _, _, _, earlier_predicate, *earlier_bodies, earlier_operands = forward.args
    has_same_operands = earlier_predicate is predicate and (
      earlier_operands == operands[: len(earlier_operands)]
    )
    if has_same_operands and all(map(_makes_same_draws, bodies, earlier_bodies)):
      branches.remove((forward, position))
      return position
  raise RngError(
    "A torch.cond draws other numbers in the backward pass of a compiled function than "
    f"in the forward pass. Draw before it and pass the numbers.{where(node)}"
  )


def _makes_same_draws(branch: fx.Node, forward: fx.Node) -> bool:
  """Return True if a backward branch makes the same draws as its forward branch.

  torch omits the modules of the backward operations. They are copied from the forward
  operations, so that both draw at the same sites.
  """
  drawing = [
    [n for n in body.graph.nodes if _draws_of(n)]
    for body in map(inner_graph, (branch, forward))
  ]
  pairs = list(zip(*drawing))
  if len({*map(len, drawing)}) > 1 or any(a.target != b.target for a, b in pairs):
    return False
  for second, first in pairs:
    second.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
    bodies = [
      [n for n in node.all_input_nodes if inner_graph(n)] for node in (second, first)
    ]
    if not all(map(_makes_same_draws, *bodies)):
      return False
  return True


def _draws_of(node: fx.Node) -> tuple[int, dict[str, int]] | None:
  """Return the number of draws, in total and by site; None if there are none.

  Raises:
    RngError: the operation runs an inner graph whose draws cannot be numbered.
  """
  bodies = [body for body in map(inner_graph, node.all_input_nodes) if body is not None]
  if any(map(may_draw, bodies)):
    if node.target is higher_order.cond:
      # The streams advance by the largest number of draws of all branches.
      draws = [_draws_in(body.graph) for body in bodies]
      paths = dict.fromkeys(path for _, sites in draws for path in sites)
      by_site = {path: max(sites.get(path, 0) for _, sites in draws) for path in paths}
      return max(count for count, _ in draws), by_site
    if node.target is higher_order.while_loop:
      return 1, {site_of(node): 1}
    if node.target in _SLICES:
      count, by_site = _draws_in(bodies[0].graph)
      length = _length(node)
      return length * count, {path: length * n for path, n in by_site.items()}
    raise RngError(
      f"{node.target} runs a graph that draws numbers, which a compiled graph cannot "
      f"number. Draw before it and pass the numbers as an operand.{where(node)}"
    )
  if not is_marked_random(node):
    return None
  # `torch.dropout` returns an empty tensor unchanged and draws nothing.
  is_empty = node.target is _DROPOUT and not hint(node.args[0].meta["val"].numel())
  count = 0 if is_empty else _count_draws(node)
  return (count, {site_of(node): count}) if count or is_empty else None


# Loop over slices -> position of the tensors that it slices.
_SLICES = present({higher_order.scan: 2, higher_order.map_impl: 1})


def _length(node: fx.Node) -> int:
  length = meta(node.args[_SLICES[node.target]][0]).shape[0]
  if isinstance(length, torch.SymInt):
    raise RngError(
      f"{node.target} draws numbers in a number of iterations that varies from call to "
      f"call. Compile with `dynamic=False`, for one length each.{where(node)}"
    )
  return length


def _draws_in(graph: fx.Graph) -> tuple[int, dict[str, int]]:
  total, sites = 0, collections.Counter[str]()
  for count, by_site in filter(None, map(_draws_of, graph.nodes)):
    total += count
    sites.update(by_site)
  return total, sites


def _count_draws(node: fx.Node) -> int:
  """Return the number of draws of one operation.

  A sampler makes one draw. Other operations, such as attention with dropout, are
  evaluated on shapes to count their draws.
  """
  if not is_draw(node):
    return 0
  if kind_of(node) is Kind.SAMPLER:
    return 1
  arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
  partition = Partition(torch_pytree.tree_map(hint, arguments), is_torch_tree=True)

  def run(*arrays):
    args, kwargs = partition.unflatten(arrays)
    with torch.no_grad(), rng_scope(0) as stream:
      run_operation(node.target, args, kwargs)
      counts.append(stream.draws)

  counts: list[int] = []
  with torch_compat.without_modes():
    abstract = [
      jax.ShapeDtypeStruct(tuple(map(hint, t.shape)), mappings.t2j_dtype(t.dtype))
      for t in partition.dynamic
    ]
    jax.eval_shape(run, *abstract)
  return counts[0]
