"""Generators passed by position, as in `torch.poisson(rate, generator)`.

Plans read the keyword `generator`. Older random operations take it as their last
positional argument, which `NamedGeneratorPlan` passes as a keyword.
"""

from collections.abc import Callable

from torchax.dispatch.decomposed import TensorPlan
from torchax.registry.schema import schema_of

_NAME = "generator"


class NamedGeneratorPlan:
  """Plan that calls `plan` with argument `index` as the keyword `generator`."""

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
  """Build the plan of an operation with a positional generator.

  A `TensorPlan` passes it on by position. See `Special.make` for the arguments.
  """
  plan = default()
  if isinstance(plan, TensorPlan):
    return plan
  return NamedGeneratorPlan(plan, schema_of(op).names.index(_NAME))
