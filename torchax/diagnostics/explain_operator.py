"""`torchax.explain_operator`: the code that runs for a torch function or operator.

The explanation follows the order of dispatch: first the table of torch functions
(`dispatch/torch_functions.py`), then the steps of `Dispatcher.choose`, which this
module calls.
"""

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchax.compat import torch_compat
from torchax.dispatch import special_plans
from torchax.dispatch.dispatcher import Choice, Step
from torchax.dispatch.torch_functions import AutocastHandler
from torchax.environment import Environment, default_env
from torchax.errors import OperatorNotFound
from torchax.functions.shortcuts import Shortcut
from torchax.registry.operators import Kind, Operator, name_of
from torchax.registry.schema import schema_of

_TABLE = "function table"
_TORCH = "torch"
# Paths below these folders are shown relative to the package.
_PACKAGES = (
  os.path.dirname(os.path.dirname(__file__)),
  os.path.dirname(torch.__file__),
)
# Explanation of each value of `compiled=`.
_COMPILED = {
  True: "compiled: one program for each static key",
  False: "not compiled: registered so, as where a shape depends on data",
  None: "compiled, with a fallback to uncompiled calls where that fails",
}


class Decision(NamedTuple):
  """One dispatch step and its outcome.

  Attributes:
    operation: the function or overload being dispatched.
    step: name of the step.
    runs: name of the code that the step selects; "" if it has no entry or is not
      reached.
    where: file and line of the code, or "".
    why: reason for the outcome, and if the code is compiled.
  """

  operation: str
  step: str
  runs: str
  where: str
  why: str

  def __str__(self):
    where = f" ({self.where})" if self.where else ""
    mark = "->" if self.runs else "  "
    text = ": ".join(part for part in (self.runs + where, self.why) if part)
    return f"  {mark} {self.step:<15}{text}"


class OperatorExplanation(NamedTuple):
  """Explanation of the dispatch of an operation; `str` formats it as a table.

  Attributes:
    operation: name of the operation.
    decisions: all steps in order, for the function and for its operators.

  >>> explain_operator(torch.ops.aten.relu.default).operation
  'aten.relu.default'
  """

  operation: str
  decisions: tuple[Decision, ...]

  @property
  def chosen(self) -> tuple[Decision, ...]:
    """Steps that select code.

    >>> explanation = explain_operator(torch.ops.aten.relu.default)
    >>> [(decision.step, decision.runs) for decision in explanation.chosen]
    [('lowering', '_aten_relu')]
    """
    return tuple(decision for decision in self.decisions if decision.runs)

  def __str__(self):
    lines = []
    for decision in self.decisions:
      heading = f"{decision.operation}:"
      if heading not in lines:
        lines.append(heading)
      lines.append(str(decision))
    return "\n".join(lines)


def explain_operator(
  operation: Any, env: Environment | None = None
) -> OperatorExplanation:
  """Explain which code runs for a torch function or ATen operator on jax tensors.

  Args:
    operation: a torch function (`torch.add`, `torch.Tensor.add_`,
      `torch.nn.functional.gelu`), an overload (`torch.ops.aten.add.Tensor`) or a packet
      (`torch.ops.aten.add`), for all of its overloads that take tensors.
    env: the environment; by default `default_env()`.

  Returns:
    The steps in dispatch order. Nothing is run or compiled.

  Raises:
    TypeError: `operation` is neither a torch function nor an operator.

  >>> print(torchax.explain_operator(torch.ops.aten.roll.default).chosen[0].runs)
  _aten_roll
  """
  env = default_env() if env is None else env
  if isinstance(operation, torch_compat.OpOverload | torch_compat.OpOverloadPacket):
    name, decisions = str(operation), []
    overloads = _overloads(operation)
  elif callable(operation) and torch.overrides.resolve_name(operation):
    name = torch.overrides.resolve_name(operation)
    decisions, overloads = _of_function(operation, name, env)
  else:
    raise TypeError(
      f"explain_operator expects a function of torch or an operation, but got "
      f"{operation!r}. Pass torch.add or torch.ops.aten.add.Tensor."
    )
  for overload in overloads:
    decisions += _of_overload(overload, env)
  return OperatorExplanation(name, tuple(decisions))


def _of_function(function, name: str, env) -> tuple[list[Decision], list]:
  """Return the decisions for a torch function, and the overloads it may dispatch to."""
  handler, policy = env.functions.get(function), ""
  if isinstance(handler, AutocastHandler):
    handler, policy = handler.handler, "autocast casts its arguments where it is on"
  operator = getattr(handler, "operator", None)
  own = f"{_TORCH}'s own function"
  if operator is not None:
    why = "; ".join(
      filter(None, (_registration(operator), _compilation(operator), policy))
    )
    runs, where = name_of(operator.func), _where(operator.func)
    return [Decision(name, _TABLE, runs, where, why), _unreached_step(name, _TORCH)], []
  if isinstance(handler, Shortcut):
    why = "for plain arguments and no gradient; all others go on"
    table = Decision(name, _TABLE, str(handler.op), _where(type(handler)), why)
    return [table, Decision(name, _TORCH, own, "", "")], [handler.op]
  if handler is not None:
    table = Decision(name, _TABLE, _name(handler), _where(handler), policy)
  else:
    table = Decision(name, _TABLE, "", "", "no entry")
  packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
  is_builtin = not inspect.isfunction(function)
  overloads = _overloads(packet) if is_builtin and packet is not None else []
  why = "" if is_builtin else "in Python; its operations are decided one by one"
  where = "" if is_builtin else _where(function)
  return [table, Decision(name, _TORCH, own, where, why)], overloads


def _overloads(operation) -> list:
  """Return the overloads of a packet that take tensors and have no `out=`."""
  if isinstance(operation, torch_compat.OpOverload):
    return [operation]
  if not isinstance(operation, torch_compat.OpOverloadPacket):
    return []
  overloads = [getattr(operation, name) for name in operation.overloads()]
  return [
    overload
    for overload in overloads
    if not schema_of(overload).outputs
    and any("Tensor" in str(a.type) for a in overload._schema.arguments)
  ]


def _of_overload(overload, env) -> Iterator[Decision]:
  name = str(overload)
  if torch_compat.is_composite(overload):
    why = "taken apart by torch; the steps below count in inference mode alone"
    yield Decision(name, _TORCH, "its operations, one by one", "", why)
  try:
    choice = env._dispatcher.choose(overload)
  except OperatorNotFound as error:
    for step in Step:
      yield Decision(name, step.value, "", "", "no entry")
    yield Decision(name, "error", type(error).__name__, "", str(error))
    return
  is_reached = True
  for step in Step:
    if step is choice.step:
      is_reached = False
      yield Decision(name, step.value, *_answer(choice, overload, env))
    elif is_reached:
      is_customized = step is Step.SPECIAL and env._dispatcher.is_customized(overload)
      why = "an operator of yours comes first" if is_customized else "no entry"
      yield Decision(name, step.value, "", "", why)
    else:
      yield _unreached_step(name, step.value)


def _unreached_step(name: str, step: str) -> Decision:
  return Decision(name, step, "", "", "not reached")


def _answer(choice: Choice, overload, env) -> tuple[str, str, str]:
  """Return the code that a step runs, its file and line, and the reason."""
  source = choice.source
  if isinstance(source, special_plans.Special):
    return _name(choice.plan), _where(choice.plan), f"it is a {source.name}"
  if choice.step is Step.DERIVED:
    inner = env._dispatcher.choose(source)
    kind = "out=" if schema_of(overload).outputs else "in-place"
    why = f"the {kind} variant of {source}, whose step is: {inner.step.value}"
    return _name(choice.plan), _where(choice.plan), why
  if choice.step is Step.DECOMPOSITION:
    own = overload in env._decomps.own
    origin = "of this environment" if own else "of torchax or torch"
    is_whole = bool(source.execution.compiled) and not schema_of(overload).written
    compiled = (
      "compiled as one function" if is_whole else "its operations run one by one"
    )
    is_torch_kernel = torch_compat.is_composite(overload) and not own
    runs = "torch's composite kernel" if is_torch_kernel else name_of(source.func)
    where = "" if is_torch_kernel else _where(source.func)
    return runs, where, f"{origin}; {compiled}"
  why = f"{_registration(source)}; {_compilation(source)}"
  return name_of(source.func), _where(source.func), why


def _registration(operator: Operator) -> str:
  return "built in" if operator.is_builtin else "registered from outside"


def _compilation(operator: Operator) -> str:
  """Explain if an operator is compiled."""
  if operator.kind is Kind.TENSORS:
    return "not compiled as a whole: it is a function of tensors"
  if operator.kind is Kind.ENV_ARRAYS:
    return "not compiled: it asks for the environment and may draw"
  compiled = operator.execution.compiled
  if callable(compiled):
    return f"compiled where {_name(compiled)} of the arguments says so"
  return _COMPILED[compiled]


def _name(code) -> str:
  if inspect.isfunction(code) or inspect.isclass(code):
    return code.__qualname__.replace(".<locals>", "")
  return type(code).__name__


def _where(code: Any) -> str:
  """Return file and line of a function, or of the class of a callable object."""
  while isinstance(code, functools.partial):
    code = code.func
  code = inspect.unwrap(code)
  if not (inspect.isfunction(code) or inspect.isclass(code)):
    code = type(code)
  try:
    path = inspect.getsourcefile(code)
    line = inspect.getsourcelines(code)[1]
  except (OSError, TypeError):  # built in, or not defined in a file
    return ""
  for package in _PACKAGES:
    if str(path).startswith(package + os.sep):
      path = os.path.relpath(path, os.path.dirname(package))
  return f"{path}:{line}"
