"""Flattening of an operation's arguments into operands and a static key.

Operands are the arrays, and the Python numbers that may change without recompiling.
The key holds everything else, including the view chains of tensors. A lowering is
compiled once per key (`programs.py`), and `rebuild` restores its arguments there.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.core import deferred, host_numbers, narrowing
from torchax.core.bounded_cache import BoundedCache
from torchax.core.chains import WHOLE, Chain, MovingChain
from torchax.core.static_values import NUMBERS, StaticValue, static_number
from torchax.core.storage import active as _active
from torchax.errors import UnsupportedDtypeError
from torchax.tensor import Tensor, new_tensor
from torchax.view import View

# Arguments about device, memory and generator, which lowerings do not take.
IGNORED = frozenset(
  {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)
_DENSE = (None, torch.strided)
_default_dtype = torch.get_default_dtype
_INT32 = range(-(2**31), 2**31)


def tensors_in(value) -> Iterator[torch.Tensor]:
  """Yield the tensors in nested lists, tuples and dicts, or a tensor itself."""
  if isinstance(value, torch.Tensor):
    yield value
  elif isinstance(value, dict):
    for part in value.values():
      yield from tensors_in(part)
  elif isinstance(value, list | tuple):
    for part in value:
      yield from tensors_in(part)


def operand_of(tensor: Tensor):
  """Return the base array of a tensor for a program; `Pending` in the fused mode."""
  if _active.boundary is None and deferred.is_recording():
    return tensor._storage.operand
  return tensor._storage.read(tensor)


class _Marker:
  """Marker in a static key: an operand follows, or a list or tuple."""

  __slots__ = ("name",)

  def __init__(self, name: str):
    self.name = name

  def __repr__(self):
    return self.name


_NUMBER, _LIST, _TUPLE = _Marker("number"), _Marker("list"), _Marker("tuple")
# Value of "dynamic": a static number whose type is part of the key.
_TYPED = _Marker("typed")
# Value of "dynamic": numbers of a `_Prepared` argument, which become operands.
_PREPARED = _Marker("prepared")


# Arrays of Python numbers; `_SEEN` for a number that was used once.
_number_arrays: BoundedCache[tuple, Any] = BoundedCache(4096)
_SEEN = object()


def number_array(number):
  """Return a weakly typed array for a Python number; `jax.jit` accepts it faster.

  A number gets its array the second time it is seen, so numbers that change on every
  call, such as a step size, cost nothing extra. In a trace the number is returned.
  """
  # As keys, 0.0 equals -0.0, and NaN does not equal itself.
  if number == 0 or number != number or not jax_compat.is_top_level():
    return number
  if deferred.is_recording():
    return number
  key = (type(number), number, jax.config.jax_enable_x64)
  array = _number_arrays.get(key)
  if array is None:
    _number_arrays[key] = _SEEN
    return number
  if array is _SEEN:
    with jax.default_device(None):
      array = _number_arrays[key] = jnp.asarray(number)
  return array


_COMPARISONS = {f"aten.{n}.Scalar" for n in ("eq", "ne", "lt", "le", "gt", "ge")}


class Flattener:
  """Conversion between torch's arguments and (operands, static key).

  Args:
    name: name of the operation, for errors.
    env: environment of the operation.
    dynamic: names of arguments whose numbers are operands.
    names: names of all arguments, positional ones first.
    cpu_ok: accept CPU tensors after the first operand.
    numbers: names of arguments that are, or contain, numbers of any type.
    keeps_tensors: operands are tensors, views included, not arrays.
  """

  def __init__(
    self,
    name: str,
    env,
    dynamic=frozenset(),
    names=(),
    cpu_ok=False,
    numbers=frozenset(),
    keeps_tensors=False,
  ):
    self.keeps_tensors = keeps_tensors
    self.names = names
    self._name = name
    self._env = env
    self._dynamic: dict[str, bool | _Marker] = dict.fromkeys(numbers, _TYPED)
    self._dynamic.update(dict.fromkeys(dynamic, True))
    # Functions caught above ATen have no schema: their other numbers are static.
    by_position = [self._dynamic.get(name, False) for name in names]
    self._dynamic_by_position: Iterable[bool | _Marker]
    self._dynamic_by_position = by_position or itertools.repeat(False)
    self._cpu_ok = cpu_ok

  def flatten(self, args, kwargs) -> tuple[list, tuple]:
    """Return the operands and the key of a call; `rebuild` is the inverse.

    The key starts with the number of positional arguments and with torch's default
    dtype, which factories and promotion depend on.

    Raises:
      UnsupportedDtypeError: `layout=` is not dense.
    """
    operands: list[Any] = []
    static_key: list[Any] = [len(args), _default_dtype()]
    boundary = _active.boundary
    is_recording = deferred.Use.is_on and deferred.is_recording()
    for arg, dynamic in zip(args, self._dynamic_by_position):
      cls = type(arg)
      if (cls is Tensor or cls is View) and not self.keeps_tensors:
        storage = arg._storage
        if boundary is None:
          operands.append(storage.operand if is_recording else storage.array)
        else:
          operands.append(boundary.read(storage, arg))
        chain = arg._chain
        if chain.moving is not None:
          chain = use_moving_form(chain, operands)
        static_key.append(chain)
      else:
        static_key.append(self._flatten_other(arg, cls, dynamic, operands))
    if kwargs:
      for name, arg in kwargs.items():
        if name not in IGNORED:
          static_key.append(name)
          static_key.append(
            self._flatten_other(
              arg, type(arg), self._dynamic.get(name, False), operands
            )
          )
        elif name == "layout" and arg not in _DENSE:
          raise UnsupportedDtypeError(
            f"{self._name} was asked for {arg}, but torchax holds dense tensors: "
            "leave it out, or make the tensor on the CPU and call `.to_dense()`."
          )
    return operands, tuple(static_key)

  def _flatten_other(self, arg, cls, dynamic: bool | _Marker, operands: list):
    if cls in NUMBERS:
      if dynamic is True and (cls is not int or arg in _INT32):
        operands.append(number_array(arg))
        return _NUMBER
      return arg if cls is int and not dynamic else static_number(arg)
    if cls is list or cls is tuple:
      marker = _LIST if cls is list else _TUPLE
      return (
        marker,
        *[self._flatten_other(a, type(a), dynamic, operands) for a in arg],
      )
    if isinstance(arg, torch.Tensor):
      return self._flatten_tensor(arg, operands)
    if isinstance(arg, torch.Size):
      return (_TUPLE, *arg)
    if isinstance(arg, jax.Array):
      operands.append(new_tensor(arg, self._env) if self.keeps_tensors else arg)
      return WHOLE
    if isinstance(arg, torch.SymFloat):
      if not dynamic:
        return static_number(float(arg))
      operands.append(host_numbers.operand(arg))
      return _NUMBER
    return arg

  def _flatten_tensor(
    self, tensor: torch.Tensor, operands: list
  ) -> Chain | MovingChain:
    if isinstance(tensor, Tensor):
      if self.keeps_tensors:
        operands.append(tensor)
        return WHOLE
      operands.append(operand_of(tensor))
      chain = tensor._chain
      return chain if chain.moving is None else use_moving_form(chain, operands)
    # The first operand decides the device.
    array = self._env.admit(tensor, self._name, self._cpu_ok and bool(operands))
    operands.append(new_tensor(array, self._env) if self.keeps_tensors else array)
    return WHOLE

  def rebuild(self, static_key: tuple, operands) -> tuple[list, dict]:
    """Return the arguments of a lowering; read views, turn lists of numbers to tuples.

    Raises:
      OverflowError: an integer needs more than 32 bits, and JAX's x64 mode is off.
    """
    args, kwargs = _rebuild(static_key, operands)
    wide = [part.value for part in static_key if _is_wide(part)]
    if not wide:
      return args, kwargs
    values = (*args, *kwargs.values())
    convert = narrowing.float_conversion(wide, values, self._name in _COMPARISONS)
    if convert is None:
      return args, kwargs
    floats = [static_number(convert(p.value)) if _is_wide(p) else p for p in static_key]
    return _rebuild(floats, operands)

  def rebuild_on_host(self, static_key: tuple, operands) -> tuple[list, dict]:
    """Return the arguments as numpy arrays; numpy takes views without a copy."""
    arrays = [x if type(x) is tuple else np.asarray(x) for x in operands]
    # numpy gives scalars for single elements
    return _rebuild(static_key, arrays, lambda c, x: np.asarray(c.view_numpy(x)))


class _Prepared:
  """An argument whose numbers become operands."""

  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value


class _NumberOperand(NamedTuple):
  """Prepared number among the operands, as an array and as a Python number."""

  array: Any
  number: Any


class PreparedFlattener(Flattener):
  """Flattener whose static numbers become operands, by `operators.Numbers.prepare`.

  Args:
    prepare, static: the operator's; see `operators.Numbers`.
    *args: arguments of `Flattener`.
  """

  def __init__(self, prepare: Callable[[dict], None], static: tuple[str, ...], *args):
    super().__init__(*args)
    self._prepare, self._static = prepare, static

  def numbers_of(self, args, kwargs) -> tuple[list[tuple], tuple]:
    """Return the prepared numbers of a call, and the key without their values.

    Returns:
      A list of (index among the operands, array, Python number), and the key.
    """
    given = dict(zip(self.names, args))
    given.update(kwargs or {})
    if _active.boundary is not None:
      given = {name: host_numbers.concretize(value) for name, value in given.items()}
    before = dict(given)
    self._prepare(given)
    for name, value in given.items():
      if name in self._static or value is not before[name]:
        given[name] = _Prepared(value)
    values = list(given.values())
    named = dict(zip(list(given)[len(args) :], values[len(args) :]))
    operands, static_key = self.flatten(values[: len(args)], named)
    numbers = [
      (index, *operand)
      for index, operand in enumerate(operands)
      if type(operand) is _NumberOperand
    ]
    return numbers, static_key

  def _flatten_other(self, arg, cls, dynamic, operands: list):
    if cls is _Prepared:
      is_tensor = isinstance(arg.value, torch.Tensor | jax.Array)
      dynamic = True if is_tensor else _PREPARED
      return self._flatten_other(arg.value, type(arg.value), dynamic, operands)
    if dynamic is not _PREPARED or cls is list or cls is tuple:
      return super()._flatten_other(arg, cls, dynamic, operands)
    start = len(operands)
    part = super()._flatten_other(arg, cls, True, operands)
    if len(operands) > start:
      array = operands[start]
      operands[start] = _NumberOperand(array, arg if cls in NUMBERS else array)
    return part


def _read(chain, operand):
  return chain.read(operand)


def _rebuild(static_key, operands, read=_read) -> tuple[list, dict]:
  remaining = iter(operands)
  end = 2 + static_key[0]
  args = [_restore(part, remaining, read) for part in static_key[2:end]]
  named = iter(static_key[end:])
  kwargs = {name: _restore(part, remaining, read) for name, part in zip(named, named)}
  return args, kwargs


def tensor_parts(static_key: tuple) -> Iterator[tuple[int, int]]:
  """Yield (index in the key, index among the operands) of each tensor argument."""
  operand = 0
  for index, part in enumerate(static_key[2:], 2):
    if isinstance(part, Chain | MovingChain):
      yield index, operand
    operand += _number_of_operands(part)


def _number_of_operands(part) -> int:
  if type(part) is tuple:
    return sum(map(_number_of_operands, part[1:]))
  return int(part is _NUMBER or isinstance(part, Chain | MovingChain))


def _is_wide(part) -> bool:
  """Return True for a static integer outside the range of int32."""
  return (
    type(part) is StaticValue and type(part.value) is int and part.value not in _INT32
  )


def use_moving_form(chain: Chain, operands: list) -> Chain | MovingChain:
  """Return the moving form of a chain; pair its starts with its base, the last operand.

  Slices whose start changes from call to call share one program that way. Inside a
  trace the chain is returned unchanged, since XLA optimizes constant starts better;
  traced starts are always operands.
  """
  if chain.moving is None or (jax_compat.is_staging() and not chain.is_traced):
    return chain
  moving_chain, starts = chain.moving
  operands[-1] = (operands[-1], starts)
  return moving_chain


def _restore(part, remaining, read):
  if isinstance(part, Chain | MovingChain):
    return read(part, next(remaining))
  if part is _NUMBER:
    return next(remaining)
  if type(part) is StaticValue:
    return part.value
  if type(part) is tuple:
    values = [_restore(inner, remaining, read) for inner in part[1:]]
    has_arrays = any(isinstance(value, jax.Array) for value in values)
    return values if part[0] is _LIST and has_arrays else tuple(values)
  return part


def drop_weak_type(value):
  """Return a result without JAX's weak type, which torch does not have."""
  if getattr(value, "weak_type", False):
    return lax.convert_element_type(value, value.dtype)
  return value
