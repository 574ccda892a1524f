"""Registry of lowerings, shared by all environments: torch operation -> `Operator`.

An operation is an ATen `OpOverload`, an `OpOverloadPacket` (all its functional
overloads), or a torch function caught above ATen. The name of a packet, such as
"torchvision::nms", registers for a library that may be imported later. A
`names.Missing` is not registered.

There are two kinds of lowerings. Built-in ones (`ops/builtin.py`) declare their
properties: numbers are operands, a data-dependent shape is declared, and a second
lowering of an operation is an error. Users' lowerings, and those written for upstream's
registry, declare nothing. They get Python numbers, and dispatch tries to compile each
of their programs. They replace a built-in lowering whichever is loaded first, with a
warning unless `is_user_defined=True`; the former operator becomes their `replaced`.
Environments compare `generation` to notice later registrations.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from torchax.compat import user_code
from torchax.compat.torch_compat import OpOverload, OpOverloadPacket
from torchax.core.program_limit import Effort
from torchax.registry.names import Missing, resolve
from torchax.types import JaxCallable, TorchCallable


class Kind(enum.Enum):
  """Kind of a lowering's inputs; each lowering has exactly one.

  >>> Kind.from_flags(is_jax_function=True, needs_env=False, is_view_op=False).name
  'ARRAYS'
  """

  ARRAYS = "arrays"  # (arrays…) -> arrays; pure JAX, compiled as one function
  SAMPLER = "sampler"  # (key, arrays…) -> arrays; dispatch draws the key
  ENV_ARRAYS = "env arrays"  # (arrays…, env=) -> arrays; upstream's `needs_env`
  TENSORS = "tensors"  # (tensors…) -> tensors; sees views, may call torch operations

  @classmethod
  def from_flags(
    cls, is_jax_function: bool, needs_env: bool, is_view_op: bool
  ) -> "Kind":
    """Return the kind for upstream's flags.

    Args:
      is_jax_function: the lowering takes arrays.
      needs_env: it takes the environment as `env=`.
      is_view_op: it sees views.
    """
    if is_view_op or not is_jax_function:
      return cls.TENSORS
    return cls.ENV_ARRAYS if needs_env else cls.ARRAYS


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Options about numbers among the arguments: static values or operands.

  Attributes:
    static: names of float or Scalar arguments that a built-in lowering needs as Python
      values. Integers, flags, shapes and dtypes are always static.
    dynamic: names of numbers that may change without recompiling: integers in a
      built-in lowering, numbers of any type in others. Eager calls pass traced scalars;
      inside traces integers are Python numbers.
    prepare: turns `static` numbers into operands once a second set of numbers is seen.
      Called on the host with a dict of torch's arguments, which it may change. A
      `StaticValue` is part of the key, and the lowering gets its value. The lowering
      must also accept unprepared arguments.
  """

  static: tuple[str, ...] = ()
  dynamic: tuple[str, ...] = ()
  prepare: Callable[[dict], None] | None = None


@dataclasses.dataclass(frozen=True)
class Checks:
  """Options about checks of the arguments.

  Attributes:
    check: called with torch's arguments before anything is drawn or computed; raises
      if they are wrong.
    rules: called with torch's arguments, or with arrays for tensors; returns the
      `index_rules.Rule`s for the values of its indices.
    shape_check: raises for numbers that do not fit the shapes, if `prepare` made the
      numbers operands. Called once for each set of numbers and shapes, with abstract
      arrays. For static numbers the lowering raises itself.
    meta: torch's meta kernel checks the arguments. False if it refuses arguments that
      a kernel of another device accepts: then the lowering raises torch's errors.
  """

  check: Callable | None = None
  rules: Callable | None = None
  shape_check: Callable | None = None
  meta: bool = True


@dataclasses.dataclass(frozen=True)
class Draw:
  """Options about the draws of a sampler.

  Attributes:
    distribution: name for ledgers, if it differs from the operation's name; includes
      the parameters if these are not arguments.
    order_dependent: the sampler adds floats, so its bits depend on the order that the
      compiler chooses. Eager programs are compiled like users' programs, for the same
      bits.
    is_exact: the sampler uses integers, comparisons and at most one rounding. Its bits
      do not depend on the compiler's options, so it is compiled with least effort.
    by_element: the sampler computes each element from its own random bits, numbers,
      and the elements of its tensors at the same place. So a smaller draw has the first
      elements of a larger one.
  """

  distribution: str = ""
  order_dependent: bool = False
  is_exact: bool = False
  by_element: bool = False


@dataclasses.dataclass(frozen=True)
class Execution:
  """Options about running a lowering.

  Attributes:
    compiled: False if the result's shape depends on data, so that `jax.jit` cannot run
      the lowering; or a function from (args, kwargs) to such a bool. None if unknown:
      dispatch tries, and a program that fails compiled runs uncompiled, after one
      warning in the log.
    on_host: numpy version of the lowering with the same bits, for an operation that
      only moves elements or rounds each once. Runs while shapes are new; returns None
      to leave a call to the lowering.
    effort: effort of the compiler; None if the kind of the operation decides.
    index_results: positions of the results that are indices, which
      `Configuration.use_int32_for_index` narrows. A single result is at 0.
    takes_cpu: accepts CPU tensors after the first operand, as torch does here.
    overwrites: the in-place variant uses only the shape and dtype of its target.
    saves_residuals: the gradient of a torch function uses results of the forward pass
      instead of recomputing them from the arguments.
    backward: gradient of a torch function: called with the cotangents of the results,
      then the arguments; returns the gradients of the tensors among these, in order. If
      None, JAX differentiates the function, which may take a program several times as
      large.
  """

  compiled: bool | Callable[[tuple, dict], bool] | None = None
  on_host: Callable | None = None
  effort: Effort | None = None
  index_results: tuple[int, ...] = ()
  takes_cpu: bool = False
  overwrites: bool = False
  saves_residuals: bool = False
  backward: Callable | None = None


_GROUPS = {"numbers": Numbers, "checks": Checks, "draw": Draw, "execution": Execution}
_GROUP_OF = {
  field.name: group
  for group, cls in _GROUPS.items()
  for field in dataclasses.fields(cls)
}


@dataclasses.dataclass
class Operator:
  """A torch operation and its lowering.

  Attributes:
    torch_op: the operation that is lowered.
    func: the lowering; `kind` describes its inputs.
    is_jax_function: upstream's flag: `func` takes arrays.
    is_user_defined: may replace a registered operator without a warning.
    needs_env: upstream's flag: `func` takes `env=`.
    is_view_op: upstream's flag: `func` sees views.
    kind: kind of the inputs of `func`; None derives it from the flags. A function of
      tensors may also take `env=`.
    is_builtin: the lowering belongs to this library; see the module's docstring.
    numbers, checks, draw, execution: see these classes.
    replaced: the operator that this one replaced, or None.

  >>> all_aten_ops[torch.ops.aten.roll].func.__name__
  '_aten_roll'
  """

  torch_op: TorchCallable
  func: TorchCallable | JaxCallable
  is_jax_function: bool = True
  is_user_defined: bool = False
  needs_env: bool = False
  is_view_op: bool = False
  kind: Kind | None = None
  is_builtin: bool = False
  numbers: Numbers = Numbers()
  checks: Checks = Checks()
  draw: Draw = Draw()
  execution: Execution = Execution()
  replaced: "Operator | None" = None

  def __post_init__(self):
    if self.execution.compiled is None and self.is_builtin:
      self.execution = dataclasses.replace(self.execution, compiled=True)
    if self.kind is None:
      self.kind = Kind.from_flags(self.is_jax_function, self.needs_env, self.is_view_op)
      return
    self.is_jax_function = self.kind is not Kind.TENSORS
    self.needs_env = self.kind is Kind.ENV_ARRAYS or (
      self.needs_env and self.kind is Kind.TENSORS
    )

  @classmethod
  def with_options(
    cls, torch_op: TorchCallable, func: Callable, **options: Any
  ) -> "Operator":
    """Build an operator from options; each goes to the group that has its name.

    Args:
      torch_op, func: see `Operator`.
      **options: fields of `Operator`, `Numbers`, `Checks`, `Draw` and `Execution`.

    Raises:
      TypeError: no field has the name of an option.

    >>> operator = Operator.with_options(torch.sin, torch.cos, compiled=False)
    >>> operator.execution.compiled
    False
    """
    grouped: dict[str, dict] = {group: {} for group in _GROUPS}
    own: dict[str, Any] = {}
    for name, value in options.items():
      group = _GROUP_OF.get(name)
      (own if group is None else grouped[group])[name] = value
    groups = {group: _GROUPS[group](**values) for group, values in grouped.items()}
    return cls(torch_op, func, **own, **groups)

  def without_compilation(self) -> "Operator":
    """Return a copy of this operator that is not compiled.

    >>> Operator(torch.sin, torch.cos).without_compilation().execution.compiled
    False
    """
    execution = dataclasses.replace(self.execution, compiled=False)
    return dataclasses.replace(self, execution=execution)


def is_aten(operation) -> bool:
  """Return True for an ATen operation: an overload, a packet or a packet's name."""
  return isinstance(operation, OpOverload | OpOverloadPacket | str)


def keys_of(operation) -> tuple:
  """Return the keys under which an operation may be registered, nearest first."""
  named: Any = operation
  if isinstance(operation, OpOverload):
    return (named, named.overloadpacket, named._schema.name)
  if isinstance(operation, OpOverloadPacket) and "default" in named.overloads():
    return (named, named.default)
  return (named,)


class _Operations(dict):
  """Registered operations; an overload falls back to the entry of its packet."""

  def __missing__(self, operation) -> Operator:
    for key in keys_of(operation):
      if key in self:
        return self[key]
    raise KeyError(operation)


class _Functions(dict):
  """Registered torch functions; any other function of torch maps to itself."""

  def __missing__(self, function) -> Operator:
    if not callable(function) or torch.overrides.resolve_name(function) is None:
      raise KeyError(function)
    return Operator(function, function, kind=Kind.TENSORS)


all_aten_ops: dict[Any, Operator] = _Operations()
all_torch_functions: dict[Any, Operator] = _Functions()
# Overload -> function of tensors, used if there is no lowering.
decompositions: dict[Any, Callable] = {}
_generation = 0


def generation() -> int:
  """Return a number that grows with every registration.

  Environments drop their caches when it has changed.
  """
  return _generation


def _register(table: dict, operator: Operator) -> Operator:
  global _generation
  if isinstance(operator.torch_op, Missing):
    return operator
  operator.torch_op = resolve(operator.torch_op)
  current = table.get(operator.torch_op)
  if current is not None and not operator.is_user_defined:
    if operator.is_builtin and not current.is_builtin:
      return current  # a user's operator replaces ours, even if it was loaded first
    _refuse_or_warn(current, operator)
  operator.replaced = current
  if current is None and table is all_torch_functions:
    operator.replaced = _of_torch(operator.torch_op)
  table[operator.torch_op] = operator
  _generation += 1
  return operator


def _of_torch(function) -> Operator | None:
  try:
    return all_torch_functions[function]
  except KeyError:  # not a function of torch
    return None


def _refuse_or_warn(current: Operator, operator: Operator) -> None:
  """Raise or warn about a second lowering of an operation.

  Raises:
    ValueError: both are built in.
  """
  both = f"{operator.torch_op} already has the lowering {name_of(current.func)}"
  if operator.is_builtin:
    raise ValueError(
      f"{both}, so {name_of(operator.func)} was not registered. Pass "
      "is_user_defined=True to replace it."
    )
  # Modules ported from upstream replace built-in lowerings without a warning.
  if not str(getattr(operator.func, "__module__", "")).startswith("torchax."):
    user_code.warn(
      f"{both}; {name_of(operator.func)} replaces it. Pass is_user_defined=True to "
      "silence this warning.",
      UserWarning,
    )
  operator.is_user_defined = True


def name_of(func: Callable) -> str:
  """Return the name of a lowering, or its repr, as for a partial."""
  return getattr(func, "__name__", None) or repr(func)


def register(operator: Operator) -> Operator:
  """Register an operator of an ATen operation or of a torch function.

  Args:
    operator: the operator; a former one of the same operation becomes its `replaced`.

  Returns:
    The operator.

  >>> library = torch.library.Library("example_register", "DEF")
  >>> library.define("twice(Tensor x) -> Tensor")
  'twice'
  >>> twice = torch.ops.example_register.twice
  >>> _ = register(Operator(twice, lambda x: 2 * x, is_user_defined=True))
  >>> twice(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  named = resolve(operator.torch_op)
  table = all_aten_ops if is_aten(named) else all_torch_functions
  return _register(table, operator)


def registering(operations, **options) -> Callable:
  """Return a decorator that registers a function for operations and returns it.

  Args:
    operations: ATen operations or torch functions.
    **options: see `Operator.with_options`.
  """

  def register_all(func):
    for operation in operations:
      register(Operator.with_options(operation, func, **options))
    return func

  return register_all


def register_torch_dispatch_op(
  aten_op: TorchCallable,
  impl_callable: Callable,
  is_jax_function: bool = True,
  is_user_defined: bool = False,
  needs_env: bool = False,
  is_view_op: bool = False,
) -> Callable:
  """Register the lowering of an ATen operation.

  Args:
    aten_op: overload, or packet for all functional overloads.
    impl_callable: the lowering.
    is_jax_function, is_user_defined, needs_env, is_view_op: see `Operator`.

  Returns:
    The lowering; `all_aten_ops[aten_op]` is the operator.

  >>> library = torch.library.Library("example_dispatch", "DEF")
  >>> library.define("twice(Tensor x) -> Tensor")
  'twice'
  >>> twice = torch.ops.example_dispatch.twice
  >>> _ = register_torch_dispatch_op(twice, lambda x: 2 * x, is_user_defined=True)
  >>> twice(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  flags = (is_jax_function, is_user_defined, needs_env, is_view_op)
  _register(all_aten_ops, Operator(aten_op, impl_callable, *flags))
  return impl_callable


def register_torch_function_op(
  torch_func: Callable,
  impl_callable: Callable,
  is_jax_function: bool = True,
  is_user_defined: bool = False,
  needs_env: bool = False,
  is_view_op: bool = False,
) -> Callable:
  """Register the lowering of a torch function, which runs above ATen and autograd.

  Args:
    torch_func: function, as torch passes it to a `TorchFunctionMode`.
    impl_callable: the lowering.
    is_jax_function, is_user_defined, needs_env, is_view_op: see `Operator`.

  Returns:
    The lowering; `all_torch_functions[torch_func]` is the operator.

  >>> def twice(x):
  ...   return torch.overrides.handle_torch_function(twice, (x,), x)
  >>> _ = register_torch_function_op(twice, lambda x: 2 * x, is_user_defined=True)
  >>> twice(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  flags = (is_jax_function, is_user_defined, needs_env, is_view_op)
  _register(all_torch_functions, Operator(torch_func, impl_callable, *flags))
  return impl_callable
