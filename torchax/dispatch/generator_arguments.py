"""Generators that an operation takes by position: `torch.poisson(rate, generator)`.

Most random operations take theirs by keyword, which is how a plan looks for it. The
older ones have it as their last positional argument; here it becomes a keyword.
"""

from collections.abc import Callable

from torchax.dispatch.decomposed import TensorPlan

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


def plan(op, schema, plan_by_registry: Callable, env) -> NamedGeneratorPlan | None:
  """The plan of an operation with a positional generator; None for all others.

  A lowering that is a function of tensors passes the generator on by itself.
  """
  if not schema.is_random or _NAME not in schema.names:
    return None
  place = schema.names.index(_NAME)
  if op._schema.arguments[place].kwarg_only:
    return None
  found = plan_by_registry(op)
  return None if isinstance(found, TensorPlan) else NamedGeneratorPlan(found, place)
