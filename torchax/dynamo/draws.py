"""Random operations of a graph as functions of the key and their number in the graph.

AOTAutograd may run an operation again in the backward pass. One that draws must draw
the same numbers there, so each one takes the packed key, which is an input of the graph
and is kept for the backward pass like any other, and a number of its own.
"""

import torch
from torch import fx

from torchax.environment import default_env
from torchax.errors import RngError
from torchax.ops.ops_registry import Kind

PLACEHOLDER = "torchax_rng"
"""Name of the graph input that holds the packed key and count."""

_SEEDED = torch.Tag.nondeterministic_seeded


def keyed(rng, number: int, operation, *args, **kwargs):
  """A random operation with its draw's number; what the graph holds in its place.

  It is run by `Program`. torch calls it on fake tensors, for shapes and costs.
  """
  return operation(*args, **kwargs)


def is_random(node: fx.Node) -> bool:
  """True for an operation that draws from the stream."""
  return node.op == "call_function" and _SEEDED in getattr(node.target, "tags", ())


def add_input(graph: fx.Graph) -> None:
  """Adds the input for the packed key behind the other ones."""
  last = None
  for node in graph.nodes:
    if node.op == "placeholder":
      last = node
  inserting = (
    graph.inserting_before(next(iter(graph.nodes)))
    if last is None
    else graph.inserting_after(last)
  )
  with inserting:
    node = graph.placeholder(PLACEHOLDER)
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
    RngError: an operation of the backward pass draws numbers of its own.
  """
  draws = 0
  for node in list(graph.nodes):
    if not is_random(node):
      continue
    if node.meta.get("partitioner_tag") == "is_backward":
      raise RngError(
        f"{node.target} draws numbers in the backward pass of a compiled function. "
        f"Draw them in the forward pass and keep them.{where(node)}"
      )
    with graph.inserting_before(node):
      args = (rng, draws, node.target, *node.args)
      replacement = graph.call_function(keyed, args, dict(node.kwargs))
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
    draws += _count(replacement.args[2])
  return draws


def _count(operation) -> int:
  """How many draws an operation makes.

  Raises:
    RngError: it has no single draw.
  """
  operator = default_env()._dispatcher.operator(operation)
  if operator is None or operator.kind is not Kind.SAMPLER:
    raise RngError(
      f"{operation} draws in several steps, which torch.compile cannot number. Compile "
      "with torchax.interop.jax_jit."
    )
  return 1


def where(node: fx.Node) -> str:
  """The line of the user's code that an operation comes from, as a sentence or ""."""
  line = line_of(node)
  return f" It comes from {line}." if line else ""


def line_of(node: fx.Node) -> str:
  """File, line and text of the innermost user's code that an operation comes from."""
  trace = node.meta.get("stack_trace") or ""
  lines = [line.strip() for line in trace.strip().splitlines()]
  for place in range(len(lines) - 1, -1, -1):
    if lines[place].startswith("File "):
      file, _, number = lines[place].partition(", line ")
      number = number.partition(",")[0]
      text = lines[place + 1] if place + 1 < len(lines) else ""
      return f"{file[6:-1]}:{number} ({text})" if text else f"{file[6:-1]}:{number}"
  return ""


def site_of(node: fx.Node) -> str:
  """Path of the module that an operation belongs to, as ledgers name it."""
  paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
  if not paths:
    return ""
  below = paths[-1].removeprefix(paths[0]).replace("['", ".").replace("']", "")
  return below.replace("._modules", "").strip(".")
