"""What lowerings are written with: the `op` decorator and torch's type promotion.

A lowering is a pure JAX function with the ATen signature:

  @op(aten.roll)
  def _aten_roll(self, shifts, dims=()):
    return jnp.roll(self, shifts, axis=dims or None)

Tensors arrive as arrays, lists of integers as tuples, dtypes as torch dtypes, numbers
as Python numbers unless `dynamic` names the argument. (In the library's own lowerings,
which take `op` from `builtin.py`, those in Tensor, Scalar and float places arrive as
weakly typed scalars that may be traced, unless `static` names the argument.) The
arguments `device`, `layout`, `pin_memory`, `memory_format` and `non_blocking` never
arrive. The in-place form (`aten.relu_`) and the `out=` form follow from the functional
one by torch's schema.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.dispatch.out import write_output
from torchax.ops import mappings
from torchax.ops.casting import convert
from torchax.ops.ops_registry import Kind, Operator, register
from torchax.tensor import Tensor
from torchax.types import JaxCallable, JaxValue, P, R

__all__ = [
  "InplaceOp",
  "Kind",
  "OutVariant",
  "convert_dtype",
  "default_float",
  "foreach_loop",
  "maybe_convert_constant_dtype",
  "op",
  "promote",
  "promote_int_input",
  "result_dtype",
  "to_float",
]


def op(
  *aten,
  kind: Kind | None = None,
  static: tuple[str, ...] = (),
  dynamic: tuple[str, ...] = (),
  compiled: bool | Callable[[tuple, dict], bool] | None = None,
  check: Callable | None = None,
  rules: Callable | None = None,
  prepare: Callable[[dict], None] | None = None,
  fits: Callable | None = None,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_view_op: bool = False,
  is_user_defined: bool = False,
  index_results: tuple[int, ...] = (),
  takes_cpu: bool = False,
  distribution: str = "",
  adds_up: bool = False,
  is_exact: bool = False,
  words: Callable[..., int] | None = None,
  on_host: Callable | None = None,
  overwrites: bool = False,
  is_builtin: bool = False,
) -> Callable:
  """Registers the decorated function as the lowering of one or more operations.

  It replaces a lowering that exists.

  Args:
    *aten: overloads, or packets for all functional overloads of a name.
    kind: what the function consumes; by default follows from the three flags,
      which are those of upstream.
    static: names of float or Scalar arguments that a built-in lowering needs as Python
      values.
    dynamic: names of numbers that may change without recompiling; in eager calls they
      arrive as traced scalars.
    compiled: False where the result's shape depends on data, or a function of
      (args, kwargs) that tells. By default this is noticed: a function that fails
      compiled and runs without is not compiled from then on.
    check: called with torch's arguments before anything is drawn or computed; raises
      where they are wrong.
    rules: called with the arguments, tensors or arrays; gives the rules for the numbers
      of its indices (`ops/index_rules.py`).
    prepare: for `static` numbers that may change after all: the first ones are compiled
      for, all others are operands, once this function was called on the host with
      torch's arguments by name, which it may change: for numbers that are computed in
      Python's precision, and for those that have code of their own, which it makes a
      `StaticValue`.
    fits: called with the arguments, whose arrays have shapes only, where numbers are
      operands by `prepare`: raises for those that the shapes do not allow. Of others
      the function sees the numbers. It is called once for each number and shape.
    is_jax_function: it takes arrays (default) instead of tensors.
    needs_env: it takes the environment as `env=`.
    is_view_op: it sees views as such.
    is_user_defined: it is meant to replace what exists, which is then no warning.
    index_results: places of the results that are indices.
    takes_cpu: it takes CPU tensors beside jax tensors.
    distribution: what it draws, for ledgers, where its name does not say it.
    adds_up: a sampler that adds floats up; eagerly it is compiled as functions of users
      are, so that it adds them in the order in which these do.
    is_exact: a sampler of integers, comparisons and at most one rounding; its bits are
      the same whatever compiles it, so it is compiled quickly.
    words: of an exact sampler that draws by `threefry.two_words` once: called with its
      arguments, whose arrays have shapes only, gives the number of elements drawn. It
      may get the words in place of its key.
    on_host: the same for numpy arrays, with the same bits, of an operation that only
      moves elements or rounds each once; None for arguments that it leaves to the
      lowering. It runs while shapes are new.
    overwrites: its in-place form uses nothing of its target but shape and dtype.
    is_builtin: it is one of the library's own; see `ops_registry.py`.

  Raises:
    ValueError: it is built in, and so is a lowering that the operation already has.

  Warns:
    UserWarning: it replaces a lowering, and comes from code outside of the library.
  """

  def register_all(func):
    for torch_op in aten:
      register(
        Operator(
          torch_op,
          func,
          is_jax_function=is_jax_function,
          needs_env=needs_env,
          is_view_op=is_view_op,
          is_user_defined=is_user_defined,
          kind=kind,
          static=static,
          dynamic=dynamic,
          compiled=compiled,
          check=check,
          rules=rules,
          prepare=prepare,
          fits=fits,
          index_results=index_results,
          takes_cpu=takes_cpu,
          distribution=distribution,
          adds_up=adds_up,
          is_exact=is_exact,
          words=words,
          on_host=on_host,
          overwrites=overwrites,
          is_builtin=is_builtin,
        )
      )
    return func

  return register_all


def default_float() -> jnp.dtype:
  """The JAX form of torch's default dtype."""
  return mappings.t2j_dtype(torch.get_default_dtype())


_NUMBER_DTYPES = {
  bool: lambda: jnp.dtype(bool),
  int: lambda: mappings.t2j_dtype(torch.int64),
  float: default_float,
  complex: lambda: jnp.promote_types(default_float(), jnp.complex64),
}


def _is_number(value) -> bool:
  return isinstance(value, bool | int | float | complex) or getattr(
    value, "weak_type", False
  )


def _number_dtype(value) -> jnp.dtype:
  if isinstance(value, bool | int | float | complex):
    return _NUMBER_DTYPES[type(value)]()
  if jnp.issubdtype(value.dtype, jnp.floating):
    return default_float()
  if jnp.issubdtype(value.dtype, jnp.complexfloating):
    return _NUMBER_DTYPES[complex]()
  return jnp.dtype(value.dtype)


def _category(dtype) -> int:
  """Bool, integer, floating, complex: the order in which promotion decides."""
  if dtype is None:
    return -1
  if dtype == jnp.bool_:
    return 0
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return 3
  return 1 if jnp.issubdtype(dtype, jnp.integer) else 2


_FLOAT8 = frozenset(
  jax_dtype
  for dtype, jax_dtype in mappings.TORCH_DTYPE_TO_JAX.items()
  if "float8" in str(dtype)
)
# torch has these dtypes for storage, and promotes them with floats alone.
_WIDE_UNSIGNED = frozenset(map(jnp.dtype, ("uint16", "uint32", "uint64")))


def _join(left, right):
  """The common dtype of two operands of one group.

  Raises:
    RuntimeError: torch promotes neither 8-bit floats nor, beside another dtype that
      is no float, uint16, uint32 and uint64.
  """
  if left == right:
    return left
  pair = {left, right}
  if pair & _FLOAT8 or (pair & _WIDE_UNSIGNED and {*map(_category, pair)} != {1, 2}):
    raise RuntimeError(
      f"torch does not promote {left} with {right}. Convert one of the tensors with "
      "`.to(dtype)` first."
    )
  return jnp.promote_types(left, right)


def _combine(higher, lower):
  """A lower group (0-d, numbers) decides only by being of a higher category."""
  if higher is None:
    return lower
  if lower is None or _category(higher) >= _category(lower):
    return higher
  if _category(higher) == 2:  # a complex number beside floats keeps their precision
    return _join(higher, jnp.dtype(jnp.complex64))
  return lower if _category(lower) == 3 else _join(higher, lower)


def result_dtype(*values) -> jnp.dtype:
  """torch's promoted dtype of arrays, 0-d arrays and Python numbers.

  Arrays with dimensions decide first, then 0-d arrays, then numbers
  (https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch-dtype).

  >>> result_dtype(jnp.ones(3, jnp.bfloat16), 2.5)
  dtype(bfloat16)
  """
  groups: list[Any] = [None, None, None]
  for value in values:
    if value is None:
      continue
    if _is_number(value):
      place, dtype = 2, _number_dtype(value)
    else:
      place, dtype = (0 if jnp.ndim(value) else 1), jnp.dtype(value.dtype)
    known = groups[place]
    groups[place] = dtype if known is None else _join(known, dtype)
  return _combine(_combine(groups[0], groups[1]), groups[2])


def promote(*values) -> list[jax.Array]:
  """The values as arrays of their `result_dtype`; shapes are left to broadcasting."""
  dtype = result_dtype(*values)
  return [convert(value, dtype) for value in values]


def to_float(value: jax.Array) -> jax.Array:
  """Integers and bools in torch's default dtype; floats and complex unchanged."""
  if _category(jnp.dtype(value.dtype)) < 2:
    return convert(value, default_float())
  return value


def promote_int_input(
  f: Callable[Concatenate[jax.Array, P], R],
) -> Callable[Concatenate[jax.Array, P], R]:
  """Makes a lowering whose first argument may be an integer array compute in floats."""

  @functools.wraps(f)
  def with_float_input(x: jax.Array, *args: P.args, **kwargs: P.kwargs) -> R:
    return f(to_float(x), *args, **kwargs)

  return with_float_input


def convert_dtype(use_default_dtype: bool = True) -> Callable:
  """Turns the keyword argument `dtype` of a lowering into a JAX dtype.

  Args:
    use_default_dtype: pass torch's default dtype when there is none.
  """

  def decorate(func: JaxCallable) -> JaxCallable:
    @functools.wraps(func)
    def with_jax_dtype(*args, dtype: torch.dtype | None = None, **kwargs):
      if dtype is None and use_default_dtype:
        dtype = torch.get_default_dtype()
      converted = mappings.t2j_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
      return func(*args, dtype=converted, **kwargs)

    return with_jax_dtype

  return decorate


def maybe_convert_constant_dtype(
  val: JaxValue | None, dtype: np.dtype | None
) -> JaxValue | None:
  """A 0-d array or number in the given dtype; anything else as it is."""
  if val is None or dtype is None:
    return val
  if isinstance(val, jax.Array) and val.ndim == 0:
    return lax.convert_element_type(val, dtype)
  if isinstance(val, bool | int | float | complex):
    return jnp.asarray(val, dtype)
  return val


def foreach_loop(
  seq: jax.Array,
  fn: Callable[[jax.Array, jax.Array], jax.Array],
  init_val=0.0,
) -> jax.Array:
  """Folds `fn(carry, element)` over the first axis of `seq`, as one `lax.fori_loop`."""
  return lax.fori_loop(0, len(seq), lambda i, carry: fn(carry, seq[i]), init_val)


class InplaceOp:
  """The in-place form of a functional operation on torchax tensors.

  In-place forms of ATen operations are derived; this is for functions of your own.

  Args:
    functional_op: a function of tensors, or of arrays if `is_jax_func`, that returns
      one result; its other arguments are passed on.
    replace: the tensor takes the result as it is, in its shape and dtype. Otherwise
      the result is copied into it: broadcast, cast, and written through if it is a
      view.
    position_to_mutate: the place of the tensor that is written to.
    is_jax_func: see `functional_op`.

  >>> double_ = InplaceOp(lambda x: x * 2)
  """

  def __init__(
    self, functional_op, replace=False, position_to_mutate=0, is_jax_func=False
  ):
    self.functional = functional_op
    self.replace = replace
    self.position_to_mutate = position_to_mutate
    self.is_jax_func = is_jax_func

  def __call__(self, *args, **kwargs):
    """Runs the operation and gives back the tensor that was written to."""
    target = args[self.position_to_mutate]
    if not isinstance(target, Tensor):
      raise TypeError(
        f"Argument {self.position_to_mutate} is written to and should be a jax tensor, "
        f'but got {type(target).__name__}. Move a tensor with `.to("jax")`.'
      )
    env = target._env
    if self.is_jax_func:
      args, kwargs = env.t2j_iso((args, kwargs))
    result = env.j2t_iso(self.functional(*args, **kwargs))
    if self.replace:
      target.data = result
      return target
    return target.copy_(result)


class OutVariant:
  """The `out=` form of a functional operation on torchax tensors.

  Args:
    functional_op: a function of tensors that returns a tensor, or several.

  >>> double_out = OutVariant(lambda x: x * 2)
  """

  def __init__(self, functional_op):
    self.functional = functional_op

  def __call__(self, *args, out, **kwargs):
    """Runs the operation and writes its results to `out`, which is given back.

    Raises:
      RuntimeError: the dtype of an output cannot hold its result.
    """
    results = self.functional(*args, **kwargs)
    name = getattr(self.functional, "__name__", str(self.functional))
    if isinstance(out, torch.Tensor):
      write_output(name, out, out._env.j2t_iso(results))
      return out
    for output, result in zip(out, results, strict=True):
      write_output(name, output, output._env.j2t_iso(result))
    return out
