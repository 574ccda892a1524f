"""Generators that an operation takes by position: `torch.poisson(rate, generator)`.

Most random operations take theirs by keyword, which is how a plan looks for it. The
older ones have it as their last positional argument; here it becomes a keyword.
"""

from collections.abc import Callable

from torchax.dispatch.decomposed import TensorPlan
from torchax.registry.schema import schema_of

_NAME = "generator"


class NamedGeneratorPlan:
  """Runs a plan with the generator by keyword, wherever it came from."""

  def __init__(self, plan: Callable, place: int):
    self.plan = plan
    self.place = place

  def __call__(self, args, kwargs):
    if len(args) > self.place:
      kwargs = {**(kwargs or {}), _NAME: args[self.place]}
      args = args[: self.place]
    return self.plan(args, kwargs)

  def redraw(self, draw, args, kwargs=None):
    """See `Plan.redraw`."""
    return self.plan.redraw(draw, args, kwargs)


def takes_generator(op, schema) -> bool:
  """True for random operations with a positional generator."""
  if not schema.is_random or _NAME not in schema.names:
    return False
  return not op._schema.arguments[schema.names.index(_NAME)].kwarg_only


def generator_plan(op, default, env) -> Callable:
  """The plan of such an operation; see `special_plans.Special`.

  A lowering that is a function of tensors passes the generator on by itself.
  """
  found = default()
  if isinstance(found, TensorPlan):
    return found
  return NamedGeneratorPlan(found, schema_of(op).names.index(_NAME))
