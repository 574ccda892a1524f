"""Graphs of Dynamo's: what their nodes hold."""

import operator

import torch
from torch import fx
from torch.utils import _pytree as torch_pytree


def copied(graph: fx.Graph) -> fx.Graph:
  """A graph with the same nodes, which may be changed."""
  new = fx.Graph()
  values: dict = {}
  new.output(new.graph_copy(graph, values))
  for node, copy in values.items():
    if hasattr(node, "_dynamo_source"):
      copy._dynamo_source = node._dynamo_source
  return new


def example(node):
  """What Dynamo has seen in the place of a node: fakes and symbolic numbers."""
  return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def example_tensors(node: fx.Node) -> list[torch.Tensor]:
  """The tensors among it."""
  leaves = torch_pytree.tree_leaves(example(node))
  return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def inputs(graph: fx.Graph) -> list[fx.Node]:
  """The placeholders, in order."""
  return [node for node in graph.nodes if node.op == "placeholder"]


def add_input(graph: fx.Graph, name: str) -> fx.Node:
  """Adds a placeholder behind the other ones."""
  known = inputs(graph)
  place = (
    graph.inserting_after(known[-1])
    if known
    else graph.inserting_before(next(iter(graph.nodes)))
  )
  with place:
    return graph.placeholder(name)


def attribute(node: fx.Node):
  """What a node gets from the graph's module; None for other nodes."""
  if node.op != "get_attr":
    return None
  return operator.attrgetter(node.target)(node.graph.owning_module)


def inner(node: fx.Node) -> fx.GraphModule | None:
  """The graph that a node hands to an operation, such as a branch of `torch.cond`."""
  value = attribute(node)
  return value if isinstance(value, fx.GraphModule) else None
