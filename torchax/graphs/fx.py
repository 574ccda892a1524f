"""Queries on graphs of `torch.fx`: nodes, draws, sites, and lines of user code.

Used by `dynamo`, `export` and the other modules here. `draw_at_sites` runs a graph
whose operations draw at the sites of the modules that they come from.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx
from torch.utils import _pytree as torch_pytree

from torchax.compat import user_code
from torchax.compat.torch_compat import named_scopes
from torchax.compat.torch_compat.active_functions import UNSEEN, at_path
from torchax.environment import default_env, env_on
from torchax.registry.names import higher_order
from torchax.registry.operators import Kind
from torchax.rng import current

# Nodes and inputs ---------------------------------------------------------------------


def copy_graph(graph: fx.Graph) -> fx.Graph:
  """Return a copy of a graph, with Dynamo's sources of the inputs."""
  new = fx.Graph()
  values: dict = {}
  new.output(new.graph_copy(graph, values))
  for node, copy in values.items():
    if hasattr(node, "_dynamo_source"):
      copy._dynamo_source = node._dynamo_source
  return new


def example(node):
  """Return a node's example value in a Dynamo graph: fake tensors, symbolic numbers."""
  return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def example_tensors(node: fx.Node) -> list[torch.Tensor]:
  """Return the tensors in the example value of a node."""
  leaves = torch_pytree.tree_leaves(example(node))
  return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_on_jax(gm: fx.GraphModule, example_inputs: Sequence) -> bool:
  """Return True if any input or intermediate of a graph of Dynamo is on jax."""
  tensors = [t for node in gm.graph.nodes for t in example_tensors(node)]
  tensors += [value for value in example_inputs if isinstance(value, torch.Tensor)]
  return any(tensor.device.type == "jax" for tensor in tensors)


def meta(node):
  """Return the example value of a node in a graph of ATen operations."""
  return node.meta.get("val") if isinstance(node, fx.Node) else node


def operation_name(node: fx.Node) -> str:
  """Return the name of the function, method or attribute that a node uses, or ""."""
  if node.op == "call_method":
    return node.target
  if node.op != "call_function":
    return ""
  if node.target is getattr:
    return node.args[1]
  return getattr(node.target, "__name__", "")


def inputs(graph: fx.Graph) -> list[fx.Node]:
  """Return the placeholders, in order."""
  return [node for node in graph.nodes if node.op == "placeholder"]


def add_input(graph: fx.Graph, name: str) -> fx.Node:
  """Add a placeholder after the others."""
  placeholders = inputs(graph)
  position = (
    graph.inserting_after(placeholders[-1])
    if placeholders
    else graph.inserting_before(next(iter(graph.nodes)))
  )
  with position:
    return graph.placeholder(name)


def results_of(graph: fx.Graph):
  """Return the results of a graph: nodes and constants, in their containers."""
  (output,) = [node for node in graph.nodes if node.op == "output"]
  return output.args[0]


def attribute(node: fx.Node):
  """Return the module attribute that a `get_attr` node reads; None for other nodes."""
  if node.op != "get_attr":
    return None
  return operator.attrgetter(node.target)(node.graph.owning_module)


def inner_graph(node: fx.Node) -> fx.GraphModule | None:
  """Return the inner graph that a node reads, such as a branch of `torch.cond`."""
  value = attribute(node)
  return value if isinstance(value, fx.GraphModule) else None


def inline_effects(graph: fx.Graph) -> None:
  """Replace `with_effects(token, operation, *args)` by `operation(*args)`.

  The tokens keep torch's compilers from changing the order of effects on the host. Here
  the order of the nodes does that; new tokens become the input token.
  """
  for node in list(graph.nodes):
    if node.op != "call_function" or node.target is not higher_order.with_effects:
      continue
    token, operation, *args = node.args
    _, *values = node.meta["val"]
    with graph.inserting_before(node):
      call = graph.call_function(operation, tuple(args), node.kwargs)
    is_single = len(values) == 1
    call.meta = {**node.meta, "val": values[0] if is_single else tuple(values)}
    for user in list(node.users):
      _, index = user.args
      if index and not is_single:
        user.args = (call, index - 1)
      else:
        user.replace_all_uses_with(call if index else token)
        graph.erase_node(user)
    graph.erase_node(node)


# Draws --------------------------------------------------------------------------------


def is_marked_random(node: fx.Node) -> bool:
  """Return True for an operation that torch marks as random."""
  tags = getattr(node.target, "tags", ())
  return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags


def kind_of(node: fx.Node) -> Kind | None:
  """Return the kind of an operation's lowering; None without one."""
  found = default_env()._dispatcher.operator(node.target)
  return None if found is None else found.kind


def is_draw(node: fx.Node) -> bool:
  """Return True for an operation that may draw random numbers.

  torch also marks operations as random that draw nothing here, such as attention
  without dropout: their lowerings are functions of arrays.
  """
  return is_marked_random(node) and kind_of(node) is not Kind.ARRAYS


def may_draw(graph_module: torch.nn.Module) -> bool:
  """Return True if a graph, or an inner graph such as a branch, may draw."""
  graphs = (getattr(module, "graph", None) for module in graph_module.modules())
  return any(is_draw(node) for graph in graphs if graph for node in graph.nodes)


# Dynamo names a module by its path from a variable of the traced frame: a local, or a
# closure cell of a function that is an argument (of `torch.cond`), maybe in a partial.
_ROOT = re.compile(
  r"^\w\['\w+'\]"
  r"(\[\d+\]|\.keywords\['\w+'\]|\.__closure__\[\d+\]\.cell_contents)*"
)


def _modules_of(node: fx.Node, stack: str = "nn_module_stack") -> list[str]:
  """Return the paths of the modules that an operation comes from, outermost first."""
  return [_path(found) for found, _ in (node.meta.get(stack) or {}).values()]


def _path(found: str) -> str:
  path = _ROOT.sub("", found).replace("['", ".").replace("']", "")
  return path.replace("._modules", "").replace("._orig_mod", "").strip(".")


def _below(path: str, base: str) -> str:
  """Return a path relative to that of an outer module."""
  return f"{path}.".removeprefix(f"{base}." if base else "").removesuffix(".")


def site_of(node: fx.Node, base: str = "") -> str:
  """Return the site of an operation: the path of the module that it comes from.

  Args:
    node: the operation.
    base: site of the operation that runs the graph; this prefix is removed.
  """
  paths = _modules_of(node)
  return _below(paths[-1], base) if paths else ""


def scope_of(node: fx.Node, base: str = "") -> str:
  """Return the named scope of an operation, such as "layers.0/linear1".

  In a backward graph it has the name of the gradient.

  Args:
    node: the operation.
    base: site of the operation that runs the graph.
  """
  paths = _modules_of(node)
  differentiated = [] if paths else _modules_of(node, "fwd_nn_module_stack")
  names = []
  for path in paths or differentiated:
    if not f"{base}.".startswith(f"{path}."):
      names.append(_below(path, base))
      base = path
  scope = "/".join(filter(None, names))
  return named_scopes.transposed(scope) if differentiated else scope


# The user's code ----------------------------------------------------------------------

# File, line, function and text of a frame in a node's `stack_trace`.
_FRAME = re.compile(r'File "(.*?)", line (\d+)(?:, in (.*))?\n\s*(.*)')
_GENERATED = "<eval_with_key>"


def _frames(node: fx.Node) -> list[tuple[str, str, str, str]]:
  return _FRAME.findall(node.meta.get("stack_trace") or "")


def _is_of_user(frame) -> bool:
  return not frame[0].startswith((*user_code.LIBRARIES, _GENERATED))


def function_name(graph: fx.Graph) -> str:
  """Return the name of the function by the frames of its nodes; "" if unknown."""
  frames = next(filter(None, map(_frames, graph.nodes)), None)
  return frames[0][2] if frames else ""


def line_of(node: fx.Node) -> str:
  """Return file, line and text of the innermost user code behind a node, or ""."""
  frames = list(filter(_is_of_user, _frames(node)))
  if not frames:
    return ""
  file, number, _, text = frames[-1]
  return f"{file}:{number} ({text})"


def where(node: fx.Node) -> str:
  """Return a sentence with the line of user code behind a node, or "".

  A module of torch that is captured alone has lines of torch only.
  """
  frame = _frame(node)
  if frame is None:
    return ""
  file, number, _, text = frame
  return f" It comes from {file}, line {number} (`{text}`)."


def source_line(node: fx.Node) -> tuple[str, int] | None:
  """Return file and line of the user code behind a node."""
  frame = _frame(node)
  return None if frame is None else (frame[0], int(frame[1]))


def _frame(node: fx.Node):
  frames = [frame for frame in _frames(node) if not frame[0].startswith(_GENERATED)]
  frames = list(filter(_is_of_user, frames)) or frames
  return frames[-1] if frames else None


def user_name(graph: fx.Graph) -> str:
  """Return the name of the user's function that was captured; "" if unknown."""
  for node in reversed(graph.nodes):
    frames = _frames(node)
    if frames and node.op != "placeholder":
      return frames[-1][2].strip() if _is_of_user(frames[-1]) else ""
  return ""


def hint(number):
  """Return the value that a symbolic number had at capture."""
  return number.node.hint if isinstance(number, torch.SymInt) else number


# Running at the sites of modules ------------------------------------------------------
# No module runs when a graph runs, so the metadata of each operation names its module.
# Draws need the sites, traces the named scopes, and messages about indices the lines.


@contextlib.contextmanager
def in_module_of(node: fx.Node, base: str) -> Iterator[None]:
  """Run an operation at the site and in the named scope of its captured module."""
  with at_path(site_of(node, base)), named_scopes.entered(scope_of(node, base)):
    yield


def draw_at_sites(module: fx.GraphModule, base: str = "") -> Callable:
  """Return the graph's function, which draws at the sites of the captured modules.

  Args:
    module: the graph; changed. Its `forward` becomes this function, and so do those of
      its inner graphs.
    base: site of the operation that runs the graph.
  """
  if hasattr(type(module), UNSEEN):
    return module.forward
  setattr(type(module), UNSEEN, True)  # each GraphModule has its own class
  forward = module.forward
  for node in module.graph.nodes:
    body = inner_graph(node)
    if body is not None and node.users:
      draw_at_sites(body, site_of(next(iter(node.users))))

  def run(*args):
    is_traced = named_scopes.is_recording()
    if is_traced or current().by_site or env_on().config.check_indices:
      return _AtSites(module, base).run(*args, enable_io_processing=False)
    return forward(*args)

  module.forward = run
  return run


class _AtSites(fx.Interpreter):
  """Interpreter that runs each operation in its captured module.

  Args:
    module: the graph.
    base: site of the operation that runs the graph.
  """

  def __init__(self, module: fx.GraphModule, base: str):
    super().__init__(module)
    self._base = base

  def run_node(self, node: fx.Node):
    module = in_module_of(node, self._base)
    with module, user_code.using_node_source(source_line(node)):
      return super().run_node(node)
