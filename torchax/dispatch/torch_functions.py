"""Handlers of torch functions that are caught above ATen, such as `F.dropout`.

The lowerings are in `functions`. A handler sorts out operands, compiles functions of
arrays and makes them differentiable (`autograd.py`). `Tensor.__torch_function__` looks
the handler up in the environment's `FunctionTable`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchax import amp
from torchax.compat import torch_compat
from torchax.core import host_numbers
from torchax.core.program_limit import ProgramCache
from torchax.dispatch import autograd, compiling, index_checks
from torchax.dispatch.explaining import EXPLAINED, raise_as_torch
from torchax.dispatch.operands import Flattener, tensors_in
from torchax.dispatch.out import write_output
from torchax.dispatch.programs import MOST_PROGRAMS, NumberPrograms
from torchax.registry import operators, packed_numbers
from torchax.registry.operators import Kind, Operator, is_aten
from torchax.tensor import Tensor


def _has_jax_tensor(args, kwargs) -> bool:
  for value in (*args, *kwargs.values()):
    if isinstance(value, Tensor):
      return True
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
      return True
  return False


def is_for_torch(args, kwargs) -> bool:
  """Return True if torch must decompose the function.

  torch does so without jax tensors, inside a transform of `torch.func`, and under
  another dispatch mode, such as a counter of operations, which must see the parts.
  """
  return (
    not _has_jax_tensor(args, kwargs)
    or torch_compat.is_transforming()
    or torch_compat.is_watched()
  )


class ArrayFunctionHandler:
  """Handler that runs a function of arrays for a torch function, with gradients."""

  def __init__(self, func, operator: Operator, env):
    self.func = func
    self.operator = operator
    self.env = env
    # An array function without a torch function; its caller explains the errors.
    self._is_core = func is operator.func
    self.name = f"torch.{getattr(func, '__name__', str(func))}"
    self.flattener = Flattener(self.name, env, keeps_tensors=True)
    self._numbers_flattener = self.flattener
    dynamic = operator.numbers.dynamic
    if dynamic:
      names = tuple(inspect.signature(operator.func).parameters)
      options = (self.name, env, dynamic, names)
      self._numbers_flattener = Flattener(*options, keeps_tensors=True)
    # Function and numbers of each key.
    self._functions: ProgramCache[tuple, tuple[autograd.ArrayFunction, tuple]]
    self._functions = ProgramCache(MOST_PROGRAMS)
    self._number_programs: NumberPrograms[autograd.ArrayFunction] = NumberPrograms()

  def __call__(self, args, kwargs):
    if is_for_torch(args, kwargs):
      return self.func(*args, **kwargs)
    if kwargs.get("out") is not None:
      return _call_with_out(self.name, lambda *a, **k: self(a, k), args, kwargs)
    try:
      rules = self.operator.checks.rules
      if rules is not None:
        given = rules(*args, **kwargs)
        index_checks.require(given, self.name, self.env.config)
      tensors, static_key = self.flattener.flatten(args, kwargs)
      found = self._functions.get(static_key)
      if found is None:
        found = self._functions[static_key] = self._function(args, kwargs, static_key)
      function, numbers = found
      if torch_compat.is_profiling():
        with torch_compat.recorded(operators.name_of(self.func)):
          return autograd.call(function, tensors, numbers)
      return autograd.call(function, tensors, numbers)
    except EXPLAINED as error:
      if self._is_core:
        compiling.raise_if_needs_values(error, self.operator)
      elif torch_compat.with_parts({*map(type, tensors_in((args, kwargs)))}, Tensor):
        return self.func(*args, **kwargs)  # its operations run on the parts
      else:
        raise_as_torch(error, self.func, args, kwargs, self.operator)
      raise

  def _function(self, args, kwargs, static_key) -> tuple[autograd.ArrayFunction, tuple]:
    # Cached functions outlive the trace, so they must not hold its host numbers.
    args = [host_numbers.concretize(arg) for arg in args]
    kwargs = {name: host_numbers.concretize(arg) for name, arg in kwargs.items()}
    operands, form = self._numbers_flattener.flatten(args, kwargs)
    numbers = tuple([o for o in operands if not isinstance(o, Tensor)])
    function = None
    if numbers:
      is_number = [not isinstance(operand, Tensor) for operand in operands]
      make = lambda: self._array_function(self._numbers_flattener, form, is_number)  # noqa: E731
      function = self._number_programs.get(form, make)
    if function is None:
      return self._array_function(self.flattener, static_key, ()), ()
    return function, numbers

  def _array_function(self, flattener, static_key, is_number) -> autograd.ArrayFunction:
    extra = {"env": self.env} if self.operator.needs_env else {}
    formula = self.operator.execution.backward
    count = sum(is_number)

    def arguments(arrays):
      if count:
        numbers, others = iter(arrays[:count]), iter(arrays[count:])
        arrays = [next(numbers if is_one else others) for is_one in is_number]
      return flattener.rebuild(static_key, arrays)

    def on_arrays(*arrays):
      args, kwargs = arguments(arrays)
      if self.operator.is_builtin:
        packed_numbers.require_none(self.name, args, kwargs)
      return self.operator.func(*args, **kwargs, **extra)

    def backward(arrays, cotangents):
      args, kwargs = arguments(arrays)
      return formula(*cotangents, *args, **kwargs)

    on_arrays.__name__ = getattr(self.operator.func, "__name__", "function")
    return autograd.ArrayFunction(
      on_arrays,
      self.operator.execution.saves_residuals,
      operator=self.operator,
      numbers=count,
      backward=formula and backward,
    )


class WithoutOut:
  """Handler that calls a torch function without `out=`, then writes to `out=`.

  Needed for composite functions whose C++ checks for shared memory before it writes,
  which it cannot see in wrapper subclasses.
  """

  def __init__(self, func):
    self.func = func

  def __call__(self, args, kwargs):
    if not isinstance(kwargs.get("out"), Tensor):
      return self.func(*args, **kwargs)
    return _call_with_out(self.func.__name__, self.func, args, kwargs)


class AutocastHandler:
  """Handler that casts tensors for another handler while autocast is on.

  Args:
    func: the torch function; its name selects the autocast policy.
    handler: the handler of the function.
  """

  def __init__(self, func, handler: Callable):
    self.func = func
    self.handler = handler

  def __call__(self, args, kwargs):
    dtype = amp.dtype_in_force()
    if dtype is None or is_for_torch(args, kwargs):
      return self.handler(args, kwargs)
    policy = amp.policy_of_function(self.func)
    with torch_compat.without_autocast():
      # As in torch, a call with `out=` is not cast.
      if policy is not None and kwargs.get("out") is None:
        args, kwargs = amp.execute_policy(policy, args, kwargs, dtype)
      return self.handler(args, kwargs)


def _call_with_out(name: str, func: Callable, args, kwargs) -> Tensor:
  """Call the function without `out=`, write the result to that tensor, return it."""
  needs_grad = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
  if needs_grad and torch.is_grad_enabled():
    raise RuntimeError(
      f"{name}(): functions with out=... arguments don't support automatic "
      "differentiation, but one of the arguments requires grad. Call it without out=, "
      "or in torch.no_grad()."
    )
  kwargs = dict(kwargs)
  out = kwargs.pop("out")
  with torch.no_grad():
    write_output(name, out, func(*args, **kwargs))
  return out


class TensorFunctionHandler:
  """Handler that runs a function of tensors for a torch function."""

  def __init__(self, func, operator: Operator, env):
    self.func = func
    self.operator = operator
    self.env = env

  def __call__(self, args, kwargs):
    if is_for_torch(args, kwargs):
      return self.func(*args, **kwargs)
    if self.operator.needs_env:
      kwargs = {**kwargs, "env": self.env}
    if torch_compat.is_profiling():
      with torch_compat.recorded(operators.name_of(self.func)):
        return self.operator.func(*args, **kwargs)
    return self.operator.func(*args, **kwargs)


class FunctionTable:
  """Table from torch function to handler; rebuilt when the registry changes."""

  def __init__(self, env):
    self._env = env
    self._handlers: dict[Any, Callable] = {}
    self._builtin: dict[Any, Callable] = {}
    self._cores: dict[tuple[Callable, bool], ArrayFunctionHandler] = {}
    self._generation = -1

  def get(self, func) -> Callable | None:
    """Return the handler of a torch function, `(args, kwargs) -> result`, or None."""
    if self._generation != operators.generation():
      self._load()
    return self._handlers.get(func)

  def add(self, func, handler: Callable) -> None:
    """Add a handler of this environment; registered functions take precedence."""
    self._builtin[func] = handler
    self._generation = -1

  def clear(self) -> None:
    """Drop the handlers, after an operator of the environment has changed."""
    self._generation = -1

  def call(
    self,
    array_function: Callable,
    *args,
    numbers=(),
    rules=None,
    effort=None,
    **kwargs,
  ):
    """Run a function of arrays on tensors, compiled and differentiable.

    Lowerings on tensors call it for their expensive part. Its residuals are saved for
    the gradient.

    Args:
      array_function: function of arrays.
      *args, **kwargs: its arguments; all values except tensors are static.
      numbers: names of arguments whose numbers are operands instead.
      rules, effort: see `registry.operators.Checks` and `Execution`.
    """
    handler = self._cores.get((array_function, effort))
    if handler is None:
      operator = Operator.with_options(
        array_function,
        array_function,
        rules=rules,
        saves_residuals=True,
        dynamic=numbers,
        effort=effort,
        is_builtin=True,
      )
      handler = ArrayFunctionHandler(array_function, operator, self._env)
      self._cores[array_function, effort] = handler
    return handler(args, kwargs)

  def _load(self) -> None:
    self._generation = operators.generation()
    known = {**operators.all_torch_functions, **self._env._ops.own}
    handlers = {
      func: self._handler(func, operator)
      for func, operator in known.items()
      if operator is not None and not is_aten(func)
    }
    handlers = {**self._builtin, **handlers}
    for func, handler in handlers.items():
      # Functions without a policy pay nothing for autocast.
      if amp.policy_of_function(func) is not None:
        handlers[func] = AutocastHandler(func, handler)
    self._handlers = handlers

  def _handler(self, func, operator: Operator) -> Callable:
    if operator.kind in (Kind.ARRAYS, Kind.ENV_ARRAYS):
      return ArrayFunctionHandler(func, operator, self._env)
    return TensorFunctionHandler(func, operator, self._env)
