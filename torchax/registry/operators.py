"""The one registry of lowerings: torch operation -> what runs in its place.

An operation is an ATen `OpOverload`, an `OpOverloadPacket` (which stands for all
its functional overloads), or a torch function that is caught above ATen. The name of a
packet, "torchvision::nms", stands for one of a library that may be imported later.
What this version of torch lacks, `names.Missing`, is left out.

There are two styles. The library's own lowerings (`builtin.py`) say what they can do:
their numbers are operands, a shape that depends on data is written down, and two for
one operation are a mistake. Any other one, a user's or one that was written for
upstream's registry, has said nothing: it gets Python numbers, whether it compiles is
tried for each of its programs, and it replaces what was there, whichever is loaded
first, with a warning unless it says `is_user_defined=True`; what ran before is its
`replaced`. Environments notice later registrations through `generation`.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from torchax.compat import user_code
from torchax.compat.torch_compat import OpOverload, OpOverloadPacket
from torchax.registry.names import Missing, resolve
from torchax.types import JaxCallable, TorchCallable


class Kind(enum.Enum):
  """What a lowering consumes. One kind each, so no wrong combination can be written."""

  ARRAYS = "arrays"  # (arrays…) -> arrays; pure JAX, compiled as one function
  SAMPLER = "sampler"  # (key, arrays…) -> arrays; dispatch draws the key
  ENV_ARRAYS = "env arrays"  # (arrays…, env=) -> arrays; upstream's `needs_env`
  TENSORS = "tensors"  # (tensors…) -> tensors; sees views, may call torch operations

  @classmethod
  def from_flags(
    cls, is_jax_function: bool, needs_env: bool, is_view_op: bool
  ) -> "Kind":
    """The kind that upstream's flags stand for."""
    if is_view_op or not is_jax_function:
      return cls.TENSORS
    return cls.ENV_ARRAYS if needs_env else cls.ARRAYS


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Numbers among the arguments: static values or operands.

  Attributes:
    static: names of float or Scalar arguments that a built-in lowering needs as Python
      values; integers, flags, shapes and dtypes always are.
    dynamic: names of numbers that may change without recompiling. In a built-in
      lowering these are integers, in any other one numbers of any type. Eager calls
      hand them over as traced scalars; inside traces integers are Python numbers.
    prepare: turns `static` numbers into operands once others than the first ones are
      seen. Called on the host with a dict of torch's arguments, which it may change. A
      `StaticValue` decides what is compiled and reaches the lowering as its value. The
      lowering also gets arguments that were not prepared.
  """

  static: tuple[str, ...] = ()
  dynamic: tuple[str, ...] = ()
  prepare: Callable[[dict], None] | None = None


@dataclasses.dataclass(frozen=True)
class Checks:
  """Checks of the arguments.

  Attributes:
    check: called with torch's arguments before anything is drawn or computed; raises
      where they are wrong.
    rules: called with torch's arguments, or with arrays for tensors; returns the
      `index_rules.Rule`s for the values of its indices.
    shape_check: raises for numbers that the shapes do not allow, where `prepare` made
      them operands. Called once for each number and shapes, with arrays that have
      shapes only. The lowering itself sees all other numbers.
  """

  check: Callable | None = None
  rules: Callable | None = None
  shape_check: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Draw:
  """Draws of a sampler.

  Attributes:
    distribution: name for ledgers, where the operation's name does not say it; with its
      parameters where these are no arguments.
    order_dependent: it adds floats, so its bits depend on the order that the compiler
      chooses. Eager programs are compiled as those of users are, with the same bits.
    is_exact: integers, comparisons and at most one rounding; the bits are the same
      whatever compiles it, so it is compiled quickly.
    shared_bits: number of elements of an exact sampler that calls `threefry.two_words`
      once, by its arguments, whose arrays have shapes only. The sampler may get these
      bits in place of its key.
  """

  distribution: str = ""
  order_dependent: bool = False
  is_exact: bool = False
  shared_bits: Callable[..., int] | None = None


@dataclasses.dataclass(frozen=True)
class Execution:
  """How a lowering is run.

  Attributes:
    compiled: False where the result's shape depends on data, so that `jax.jit` cannot
      run the lowering; or a function of (args, kwargs) that tells. None where that is
      unknown: the lowering is tried, and a program that fails compiled falls back to
      running without, after one warning in the log.
    on_host: the lowering for numpy arrays, with the same bits, for an operation that
      only moves elements or rounds each once. Runs while shapes are new; returns None
      for what it leaves to the lowering.
    is_brief: small arrays whose shape is rarely seen again: most of the time is that of
      the compiler.
    index_results: positions of the results that are indices, which
      `Configuration.use_int32_for_index` narrows. A single result is at 0.
    takes_cpu: takes CPU tensors beside jax tensors, as torch does here.
    overwrites: the in-place form uses only the shape and dtype of its target.
    saves_residuals: the gradient of a torch function uses results of the forward pass
      instead of computing them again from the arguments.
    backward: gradient of a torch function: called with the cotangents of its results
      and its arguments; returns the gradients of the tensors among these, in their
      order. Without one JAX differentiates the function, which may take a program
      several times as large.
  """

  compiled: bool | Callable[[tuple, dict], bool] | None = None
  on_host: Callable | None = None
  is_brief: bool = False
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
    func: the lowering; `kind` says what it takes.
    is_jax_function: upstream's flag: `func` takes arrays.
    is_user_defined: meant to replace what is registered, without a warning.
    needs_env: upstream's flag: `func` takes `env=`.
    is_view_op: upstream's flag: `func` sees views.
    kind: what `func` consumes; follows from the flags where not given. Only a function
      of tensors may ask for `env=` as well.
    is_builtin: one of the library's own, which follows the rules of that style.
    numbers, checks, draw, execution: see these classes.
    replaced: the operator in whose place this one was registered.
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
  def with_options(cls, torch_op, func: Callable, **options) -> "Operator":
    """An operator by the names of its fields and of those of its groups.

    Args:
      torch_op, func: see `Operator`.
      **options: fields of `Operator`, `Numbers`, `Checks`, `Draw` and `Execution`.

    Raises:
      TypeError: an option has another name.
    """
    grouped: dict[str, dict] = {group: {} for group in _GROUPS}
    own: dict[str, Any] = {}
    for name, value in options.items():
      group = _GROUP_OF.get(name)
      (own if group is None else grouped[group])[name] = value
    parts = {group: _GROUPS[group](**given) for group, given in grouped.items()}
    return cls(torch_op, func, **own, **parts)

  def uncompiled(self) -> "Operator":
    """This operator, which is not compiled."""
    execution = dataclasses.replace(self.execution, compiled=False)
    return dataclasses.replace(self, execution=execution)


def keys_of(operation) -> tuple:
  """What an operation may be registered under, the nearest first."""
  named: Any = operation
  if isinstance(operation, OpOverload):
    return (named, named.overloadpacket, named._schema.name)
  if isinstance(operation, OpOverloadPacket) and "default" in named.overloads():
    return (named, named.default)
  return (named,)


class _Operations(dict):
  """The registered operations; an overload may have the entry of its packet."""

  def __missing__(self, operation) -> Operator:
    for key in keys_of(operation):
      if key in self:
        return self[key]
    raise KeyError(operation)


class _Functions(dict):
  """The registered torch functions; of any other one, torch's own is what runs."""

  def __missing__(self, function) -> Operator:
    if not callable(function) or torch.overrides.resolve_name(function) is None:
      raise KeyError(function)
    return Operator(function, function, kind=Kind.TENSORS)


all_aten_ops: dict[Any, Operator] = _Operations()
all_torch_functions: dict[Any, Operator] = _Functions()
# Overload -> function of tensors, used where there is no lowering.
decompositions: dict[Any, Callable] = {}
_generation = 0


def generation() -> int:
  """Grows with every registration; an environment compares it to drop its caches."""
  return _generation


def _register(table: dict, operator: Operator) -> Operator:
  global _generation
  if isinstance(operator.torch_op, Missing):
    return operator
  operator.torch_op = resolve(operator.torch_op)
  known = table.get(operator.torch_op)
  if known is not None and not operator.is_user_defined:
    if operator.is_builtin and not known.is_builtin:
      return known  # it was loaded before ours, which it replaces
    _refuse_or_warn(known, operator)
  operator.replaced = known
  if known is None and table is all_torch_functions:
    operator.replaced = _of_torch(operator.torch_op)
  table[operator.torch_op] = operator
  _generation += 1
  return operator


def _of_torch(function) -> Operator | None:
  try:
    return all_torch_functions[function]
  except KeyError:  # a function that torch knows nothing of
    return None


def _refuse_or_warn(known: Operator, operator: Operator) -> None:
  """What is said of a second lowering.

  Raises:
    ValueError: both are the library's own.
  """
  both = f"{operator.torch_op} already has the lowering {name_of(known.func)}"
  if operator.is_builtin:
    raise ValueError(
      f"{both}, so {name_of(operator.func)} was not registered. Pass "
      "is_user_defined=True to replace it."
    )
  # A theme that was carried over is there to replace what is built in.
  if not str(getattr(operator.func, "__module__", "")).startswith("torchax."):
    user_code.warn(
      f"{both}, which {name_of(operator.func)} replaces. Pass is_user_defined=True if "
      "that is meant.",
      UserWarning,
    )
  operator.is_user_defined = True


def name_of(func: Callable) -> str:
  """The name of a lowering; of one that has none, as a partial, how it prints."""
  return getattr(func, "__name__", None) or repr(func)


def register(operator: Operator) -> Operator:
  """Registers an operator for `__torch_dispatch__` (ATen) or for torch functions."""
  named = resolve(operator.torch_op)
  is_aten = isinstance(named, OpOverload | OpOverloadPacket | str)
  table = all_aten_ops if is_aten else all_torch_functions
  return _register(table, operator)


def registering(operations, **options) -> Callable:
  """The decorator that registers a function for operations; it gives the function back.

  Args:
    operations: of ATen, or torch functions.
    **options: see `Operator.with_options`.
  """

  def register_all(func):
    for operation in operations:
      register(Operator.with_options(operation, func, **options))
    return func

  return register_all


def register_torch_dispatch_op(
  aten_op,
  impl_callable: Callable,
  is_jax_function=True,
  is_user_defined=False,
  needs_env=False,
  is_view_op=False,
) -> Callable:
  """Registers the lowering of an ATen operation, and gives it back.

  The parameters are `Operator`'s; `all_aten_ops[aten_op]` is the operator.
  """
  _register(
    all_aten_ops,
    Operator(
      aten_op,
      impl_callable,
      is_jax_function,
      is_user_defined,
      needs_env,
      is_view_op,
    ),
  )
  return impl_callable


def register_torch_function_op(
  torch_func,
  impl_callable: Callable,
  is_jax_function=True,
  is_user_defined=False,
  needs_env=False,
  is_view_op=False,
) -> Callable:
  """Registers what runs for a torch function, above ATen and above autograd.

  Gives the function back; `all_torch_functions[torch_func]` is the operator.
  """
  _register(
    all_torch_functions,
    Operator(
      torch_func,
      impl_callable,
      is_jax_function,
      is_user_defined,
      needs_env,
      is_view_op,
    ),
  )
  return impl_callable
