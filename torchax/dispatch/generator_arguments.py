"""Generators passed by position, as in `torch.poisson(rate, generator)`.

Plans look for the keyword `generator`. Older random operations take it as their last
positional argument; the plan here turns that into a keyword.
"""

from collections.abc import Callable

from torchax.dispatch.decomposed import TensorPlan
from torchax.registry.schema import schema_of

_NAME = "generator"


class NamedGeneratorPlan:
  """Plan that calls another plan with the generator as a keyword."""

  def __init__(self, plan: Callable, index: int):
    self.plan = plan
    self.index = index

  def __call__(self, args, kwargs):
    if len(args) > self.index:
      kwargs = {**(kwargs or {}), _NAME: args[self.index]}
      args = args[: self.index]
    return self.plan(args, kwargs)

  def redraw(self, draw, args, kwargs=None):
    return self.plan.redraw(draw, args, kwargs)


def takes_generator(op, schema) -> bool:
  """Return True for random operations with a positional generator."""
  if not schema.is_random or _NAME not in schema.names:
    return False
  return not op._schema.arguments[schema.names.index(_NAME)].kwarg_only


def generator_plan(op, default, env) -> Callable:
  """Build the plan of such an operation; see `special_plans.Special`.

  A lowering that is a function of tensors passes the generator on itself.
  """
  found = default()
  if isinstance(found, TensorPlan):
    return found
  return NamedGeneratorPlan(found, schema_of(op).names.index(_NAME))
