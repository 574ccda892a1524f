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

from torchax.compat.torch_compat import OpOverload, OpOverloadPacket
from torchax.core import user_code
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
      of tensors may ask for `env=` beside it.
    static: names of float or Scalar arguments that a built-in `func` needs as Python
      values; integers, flags, shapes and dtypes always are.
    dynamic: names of numbers that may change without recompiling: of integers, and in
      a `func` that is not built in of any. In eager calls `func` gets them as traced
      scalars, inside traces integers are Python numbers.
    compiled: False where the result's shape depends on data, so that the function
      cannot run under `jax.jit`; or a function of (args, kwargs) that tells. None
      where that is unknown: a function that is not built in is tried, and a program
      that fails compiled falls back to running without.
    check: called with torch's arguments before anything is drawn or computed; raises
      where they are wrong.
    rules: called with torch's arguments, or with arrays for tensors; gives the
      `index_rules.Rule`s for the numbers of its indices.
    prepare: how numbers that are `static` become operands once there are others than
      the first ones. Called on the host with a dict of torch's arguments, which it may
      change. A `StaticValue` decides what is compiled and reaches `func` as its value;
      `func` also gets arguments that were not prepared.
    fits: raises for numbers that shapes do not allow, where they are operands; called
      with the arguments once for each of them and each of the shapes.
    saves_residuals: a torch function's gradient uses results of the forward pass
      instead of computing them again from the arguments.
    backward: a torch function's gradient: called with the cotangents of its results and
      its own arguments; gives the gradients of the tensors among these, in their order.
      Without one JAX differentiates the function.
    index_results: places of the results that are indices, which
      `Configuration.use_int32_for_index` makes narrower. A single result is at 0.
    takes_cpu: takes CPU tensors beside jax tensors, as torch does here.
    distribution: what a sampler draws, for ledgers, where the operation's name does not
      say it; with its parameters where these are no arguments.
    adds_up: a sampler that adds floats up, in an order that the compiler chooses.
    is_exact: a sampler of integers, comparisons and at most one rounding; its bits are
      the same whatever compiles it.
    words: for a sampler that draws by `threefry.two_words` once: of how many elements,
      by its arguments, of which arrays have shapes only. It may get the words then in
      place of its key.
    on_host: `func` of numpy arrays with the same bits, for an operation that only moves
      elements or rounds each once. It runs in its place while shapes are new, and
      returns None for what it leaves to `func`.
    is_brief: a function of small arrays whose shape hardly comes again: most of its
      time is that of its compiler.
    overwrites: the in-place form uses nothing of its target but shape and dtype.
    is_builtin: one of the library's own, which follows the rules of that style.
    replaced: the operator in whose place this one was registered.
  """

  torch_op: TorchCallable
  func: TorchCallable | JaxCallable
  is_jax_function: bool = True
  is_user_defined: bool = False
  needs_env: bool = False
  is_view_op: bool = False
  kind: Kind | None = None
  static: tuple[str, ...] = ()
  dynamic: tuple[str, ...] = ()
  compiled: bool | Callable[[tuple, dict], bool] | None = None
  check: Callable | None = None
  rules: Callable | None = None
  prepare: Callable[[dict], None] | None = None
  fits: Callable | None = None
  saves_residuals: bool = False
  backward: Callable | None = None
  index_results: tuple[int, ...] = ()
  takes_cpu: bool = False
  distribution: str = ""
  adds_up: bool = False
  is_exact: bool = False
  words: Callable[..., int] | None = None
  on_host: Callable | None = None
  is_brief: bool = False
  overwrites: bool = False
  is_builtin: bool = False
  replaced: "Operator | None" = None

  def __post_init__(self):
    if self.compiled is None and self.is_builtin:
      self.compiled = True
    if self.kind is None:
      self.kind = Kind.from_flags(self.is_jax_function, self.needs_env, self.is_view_op)
      return
    self.is_jax_function = self.kind is not Kind.TENSORS
    self.needs_env = self.kind is Kind.ENV_ARRAYS or (
      self.needs_env and self.kind is Kind.TENSORS
    )


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
