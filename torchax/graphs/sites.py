"""Where the operations of graphs that run on tensors come from: modules and lines.

The modules are not running when a graph runs; its operations say whose they are. Draws
ask for the sites, messages about indices for the lines.
"""

from collections.abc import Callable

from torch import fx

from torchax.compat import user_code
from torchax.compat.torch_compat.active_functions import UNSEEN, at
from torchax.environment import env_on
from torchax.graphs.fx import inner, place_of, site_of
from torchax.rng import current


def at_sites(module: fx.GraphModule, base: str = "") -> Callable:
  """A graph's function; where draws are addressed by site, they have their modules'.

  Args:
    module: the graph. It is changed to be this function itself, and so are the graphs
      in it that its operations run.
    base: site of the operation that runs the graph.
  """
  if hasattr(type(module), UNSEEN):
    return module.forward
  setattr(type(module), UNSEEN, True)  # each has a class of its own
  forward = module.forward
  for node in module.graph.nodes:
    body = inner(node)
    if body is not None and node.users:
      at_sites(body, site_of(next(iter(node.users))))

  def run(*args):
    if current().by_site or env_on().config.check_indices:
      return _AtSites(module, base).run(*args, enable_io_processing=False)
    return forward(*args)

  module.forward = run
  return run


class _AtSites(fx.Interpreter):
  """Runs each operation of a graph at the site of the modules that it came from.

  Args:
    module: the graph.
    base: site of the operation that runs it.
  """

  def __init__(self, module: fx.GraphModule, base: str):
    super().__init__(module)
    self._base = base

  def run_node(self, node: fx.Node):
    site = at(site_of(node, self._base))
    with site, user_code.coming_from(place_of(node)):
      return super().run_node(node)
