"""Table of operations that need a plan of their own, such as views and factories.

`Dispatcher.choose` asks it first. The first row that accepts an operation wins, so
order matters if two rows accept it. An operator of a user, or of one environment, takes
precedence over all rows.
"""

from collections.abc import Callable
from typing import NamedTuple

from torchax.compat import torch_compat
from torchax.dispatch import (
  device_plans,
  generator_arguments,
  in_place,
  transfer,
  views,
)
from torchax.registry.names import aten

_FUNCTIONS = {**views.FUNCTIONS, **transfer.FUNCTIONS}


class Special(NamedTuple):
  """Row of the table.

  Attributes:
    name: kind of operation.
    takes: (op, schema) -> True if the row is for this overload.
    make: (op, default, env) -> plan. `default()` builds the plan without this table.
  """

  name: str
  takes: Callable[..., bool]
  make: Callable[..., Callable]


def _is(overload) -> Callable[..., bool]:
  return lambda op, schema: op is overload


class _ConvolutionPlan:
  """Plan of a convolution, which `torch.jit.trace` does not record."""

  def __init__(self, op, default: Callable, env):
    self.plan = default()

  def __call__(self, args, kwargs):
    if torch_compat.is_torchscript_paused():
      with torch_compat.record_for_torchscript():
        return aten._convolution.default(*args, False, False, True, True)
    return self.plan(args, kwargs)


TABLE = (
  Special(
    "function of tensors",
    lambda op, schema: op in _FUNCTIONS,
    lambda op, default, env: (
      lambda args, kwargs: _FUNCTIONS[op](*args, **(kwargs or {}))
    ),
  ),
  Special(
    "in-place view",
    lambda op, schema: op in views.IN_PLACE_VIEWS,
    lambda op, default, env: views.InPlaceViewPlan(op, env),
  ),
  Special("view", views.is_view, views.view_plan),
  Special("refused operation", transfer.is_refused, transfer.refusing_plan),
  Special("copy to a tensor", _is(aten.copy_.default), transfer.CopyPlan),
  Special("cast or move", _is(aten._to_copy.default), transfer.ToCopyPlan),
  Special("factory", device_plans.takes_device, device_plans.PlacedPlan),
  Special(
    "positional generator",
    generator_arguments.takes_generator,
    generator_arguments.generator_plan,
  ),
  Special("convolution", _is(aten.convolution.default), _ConvolutionPlan),
  Special("copy of lists", _is(aten._foreach_copy_.default), in_place.ForeachCopyPlan),
)


def find(op, schema) -> Special | None:
  """Return the row of an overload, or None."""
  return next((row for row in TABLE if row.takes(op, schema)), None)
