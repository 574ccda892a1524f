"""Dispatcher of an environment: chooses and caches one plan per overload.

`Environment.dispatch` calls it. A plan is a callable `(args, kwargs) -> result`.
`Dispatcher.choose` tries four steps in order: the table of special plans, the in-place
and `out=` variants derived from torch's schemas, the registered lowerings, and torch's
decompositions. Read next: `plans.py`, the plan of most operations.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchax.compat import torch_compat
from torchax.devices.placement import DeviceUse
from torchax.dispatch import device_plans, special_plans
from torchax.dispatch.compiling import NOT_COMPILABLE
from torchax.dispatch.decomposed import DecompositionPlan, TensorPlan
from torchax.dispatch.in_place import InPlacePlan
from torchax.dispatch.out import OutPlan
from torchax.dispatch.plans import Plan
from torchax.errors import OperatorNotFound
from torchax.registry import operators
from torchax.registry.operators import Kind, Operator
from torchax.registry.schema import (
  functional_form,
  is_in_place,
  returns_tensors,
  schema_of,
)


class Step(enum.Enum):
  """Steps that choose the plan of an overload, in order."""

  SPECIAL = "special plan"
  DERIVED = "variant"
  LOWERING = "lowering"
  DECOMPOSITION = "decomposition"


class Choice(NamedTuple):
  """Plan of an overload, and the step that chose it.

  Attributes:
    step: the first step with a plan.
    plan: callable `(args, kwargs) -> result`.
    source: the row of `special_plans.TABLE`, the functional overload of a derived plan,
      or the operator.
  """

  step: Step
  plan: Callable
  source: Any


class Dispatcher:
  """Plans of an environment, by overload; built on first use."""

  def __init__(self, env):
    self._env = env
    self._plans: dict[int, tuple] = {}
    self._generation = -1

  def __call__(self, func, args, kwargs):
    if DeviceUse.multiple_devices:
      return device_plans.run(self.plan_for(func, args, kwargs), func, args, kwargs)
    return self.plan_for(func, args, kwargs)(args, kwargs)

  def draw(self, draws: list, func, args, kwargs):
    """Run a random operation and append its draw to `draws`, for `Plan.redraw`."""
    plan = functools.partial(device_plans.unwrap(self.plan_for(func)), draws=draws)
    if DeviceUse.multiple_devices:
      return device_plans.run(plan, func, args, kwargs)
    return plan(args, kwargs)

  def plan_for(self, func, args=(), kwargs=None) -> Callable:
    """Return the cached plan of an overload; build it on first use.

    Raises:
      OperatorNotFound: no step has a plan; the message describes the arguments.
    """
    if self._generation != operators.generation():
      self._plans.clear()
      self._generation = operators.generation()
    entry = self._plans.get(id(func))
    if entry is None:
      try:
        plan = self.choose(func).plan
      except OperatorNotFound:
        raise self.not_found(func, args, kwargs) from None
      # A reference to the overload keeps its id from being reused.
      entry = self._plans[id(func)] = (plan, func)
    return entry[0]

  def choose(self, func, steps=tuple(Step)) -> Choice:
    """Build the plan of an overload with the first of `steps` that has one.

    Raises:
      OperatorNotFound: no step has a plan.
    """
    for step in steps:
      plan_and_source = _STEPS[step](self, func)
      if plan_and_source is not None:
        return Choice(step, *plan_and_source)
    raise self.not_found(func)

  def _special(self, func):
    if not isinstance(func, torch_compat.OpOverload) or self.is_customized(func):
      return None
    row = special_plans.find(func, schema_of(func))
    if row is None:
      return None
    return row.make(func, lambda: self._default_plan(func), self._env), row

  def _derived(self, func):
    """Derive the plan of an in-place or `out=` variant from the functional one's."""
    if not isinstance(func, torch_compat.OpOverload):
      return None
    operator, schema = self.operator(func), schema_of(func)
    is_for_overload = operator is not None and operator.torch_op is func
    is_on_arrays = operator is None or operator.kind in (Kind.ARRAYS, Kind.SAMPLER)
    if not schema.written or is_for_overload or not (is_on_arrays or schema.outputs):
      return None
    functional_op = functional_form(func)
    if functional_op is None:
      return None
    functional = device_plans.unwrap(self.choose(functional_op).plan)
    if not is_in_place(func):
      return OutPlan(func, functional), functional_op
    if isinstance(functional, Plan):
      return InPlacePlan(func, functional), functional_op
    if isinstance(functional, TensorPlan) and self.is_customized(functional_op):
      return lambda args, kwargs: args[0].copy_(functional(args, kwargs)), functional_op
    return None

  def _lowered(self, func):
    operator = self.operator(func)
    if operator is None:
      return None
    return self._operator_plan(func, operator), operator

  def _decomposed(self, func):
    if not isinstance(func, torch_compat.OpOverload):
      return None
    operator = self.decomposition(func)
    if operator is None:
      return None
    if func in self._env._decomps.own:
      return self._operator_plan(func, operator), operator
    if schema_of(func).written or not operator.execution.compiled:
      return TensorPlan(func, operator, self._env), operator
    return DecompositionPlan(func, operator, self._env), operator

  def _operator_plan(self, func, operator: Operator) -> Callable:
    if operator.kind in (Kind.ARRAYS, Kind.SAMPLER):
      return Plan(func, operator, self._env)
    if operator.kind is Kind.ENV_ARRAYS:
      # Not compiled, because it may draw from the environment's stream.
      return Plan(func, operator.without_compilation(), self._env)
    return TensorPlan(func, operator, self._env)

  def _default_plan(self, func) -> Callable:
    """Build the plan of an overload without `special_plans.TABLE`."""
    return self.choose(func, tuple(Step)[1:]).plan

  def not_found(self, func, args=(), kwargs=None) -> OperatorNotFound:
    """Return the error for an operation without a plan, called with these arguments."""
    arguments = f" It was called with ({describe(args, kwargs)})." if args else ""
    return OperatorNotFound(
      f"{func} has no lowering and no decomposition.{arguments} Write one with "
      "`@torchax.ops.op_base.op(…)` (docs: Writing lowerings), or move the tensors to "
      "the CPU for this operation with `.cpu()`."
    )

  def operator(self, func) -> Operator | None:
    """Return the registered operator of an overload or of its packet, or None."""
    own, keys = self._env._ops.own, operators.keys_of(func)
    for key in keys:
      if key in own:
        return own[key]
    registered = map(operators.all_aten_ops.get, keys)
    return next((operator for operator in registered if operator is not None), None)

  def is_customized(self, func) -> bool:
    """Return True for an operator of the user, or of this environment alone."""
    operator = self.operator(func)
    if operator is None:
      return False
    own = self._env._ops.own
    return operator.is_user_defined or any(
      key in own for key in operators.keys_of(func)
    )

  def decomposition(self, func) -> Operator | None:
    """Return the decomposition of an overload: this environment's, ours or torch's."""
    if func in self._env._decomps.own:
      return self._env._decomps.own[func]
    # In inference mode torch dispatches composite operations without decomposing them.
    # torch's composite kernel calls the same operations as in other modes. They may
    # write to running statistics or read a value, so it is not compiled. The same
    # holds for the code of a user's operator.
    is_composite = torch_compat.is_composite(func) or torch_compat.is_custom(func)
    decompose = None if is_composite else operators.decompositions.get(func)
    if decompose is None:
      decompose = torch_compat.composite_decomposition(func)
    if decompose is None:
      return None
    # A random decomposition would draw inside the compiled function. A decomposition
    # that returns a Python value may read values of tensors, which a trace lacks.
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    may_compile = not (is_random or is_composite) and returns_tensors(func)
    return Operator.with_options(
      func, decompose, kind=Kind.TENSORS, compiled=may_compile
    )

  def find_operator(self, func) -> Operator | None:
    """Return an operator that runs an overload, or None.

    For a packet, return the first operator found for its overloads, functional ones
    first. For an overload with only a plan, return an operator that calls the plan.
    """
    operator = self.operator(func)
    if operator is not None:
      return operator
    if not isinstance(func, torch_compat.OpOverload):
      overloads = [getattr(func, name) for name in getattr(func, "overloads", list)()]
      overloads.sort(key=lambda overload: bool(schema_of(overload).written))
      return next(filter(None, map(self.find_operator, overloads)), None)
    decomposition = self.decomposition(func)
    if decomposition is not None:
      return decomposition
    try:
      plan = self.choose(func).plan
    except OperatorNotFound:
      return None
    return Operator(func, lambda *args, **kwargs: plan(args, kwargs), kind=Kind.TENSORS)

  def shapes(self, func, args, kwargs):
    """Return the results of a lowering as `jax.ShapeDtypeStruct`s.

    Return None if no lowering on arrays exists, or if the shapes depend on values.

    Args:
      func: overload.
      args, kwargs: its arguments, with `jax.ShapeDtypeStruct`s for tensors.
    """
    operator = self.operator(func)
    if operator is None or operator.execution.compiled not in (True, None):
      return None
    plan = self._default_plan(func)
    if not isinstance(plan, Plan):
      return None
    try:
      return plan.shapes(args, kwargs)
    except NOT_COMPILABLE:
      if operator.execution.compiled is None:
        return None
      raise

  def clear(self) -> None:
    """Drop all plans, after an operator of the environment has changed."""
    self._plans.clear()


_STEPS = {
  Step.SPECIAL: Dispatcher._special,
  Step.DERIVED: Dispatcher._derived,
  Step.LOWERING: Dispatcher._lowered,
  Step.DECOMPOSITION: Dispatcher._decomposed,
}


def describe(args, kwargs) -> str:
  """Describe arguments for an error: tensors by dtype, shape and device."""

  def text_of(value) -> str:
    if isinstance(value, torch.Tensor):
      return f"{value.dtype}{list(value.shape)} on {value.device}"
    if isinstance(value, list | tuple):
      return f"[{', '.join(map(text_of, value))}]"
    return repr(value)

  named = [f"{name}={text_of(value)}" for name, value in (kwargs or {}).items()]
  return ", ".join([*map(text_of, args), *named])
