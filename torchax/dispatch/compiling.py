"""Compilation of lowerings by `jax.jit`, with a fallback for those that may fail.

Built-in lowerings declare whether they compile. Others are tried: a program that fails
under `jax.jit` but runs without it, for example because a shape depends on data, runs
uncompiled from then on. The fallback applies to that program only.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torchax.compat import jax_compat
from torchax.core import program_limit
from torchax.core.program_limit import Effort, Program
from torchax.errors import DataDependentError
from torchax.registry.operators import Kind, Operator, name_of

_logger = logging.getLogger("torchax")

# Operators whose fallback was logged, by id.
_logged: "weakref.WeakValueDictionary[int, Operator]" = weakref.WeakValueDictionary()

NOT_COMPILABLE = (TypeError, IndexError)
"""Errors that JAX raises if a lowering needs the values of a traced array.

JAX's own errors (concretization, conversion to numpy, a mask as an index) and errors
about traced shapes are TypeErrors; traced slices raise IndexError.
"""


def jit_if_possible(
  function: Callable,
  operator: Operator | None = None,
  sharding=None,
  repeats: bool = False,
) -> Program:
  """Compile a function with `jax.jit`; add a fallback if its operator may not compile.

  Args:
    function: function of arrays: the lowering and the steps around it.
    operator: operator of the lowering.
    sharding: sharding of the results; None lets JAX choose.
    repeats: the program has many equal kernels, as for lists of tensors of few shapes.

  Returns:
    The compiled function. Its attribute `in_traces` is for calls inside
    transformations.
  """
  options = {} if sharding is None else {"out_shardings": sharding}
  jitted = program_limit.jit(function, effort=_effort(operator, repeats), **options)
  if operator is None or operator.execution.compiled is not None:
    return jitted
  return _with_fallback(jitted, function, operator)


def _effort(operator: Operator | None, repeats: bool) -> Effort:
  """Return the compiler's effort; samplers need the bits of users' programs."""
  if operator is not None and operator.execution.effort is not None:
    return operator.execution.effort
  if operator is None or operator.kind is not Kind.SAMPLER or operator.draw.is_exact:
    return Effort.REPEATED if repeats else Effort.LEAST
  is_known = operator.is_builtin and not operator.draw.order_dependent
  return Effort.SAME_BITS if is_known else Effort.FULL


def _with_fallback(jitted: Program, function: Callable, operator: Operator) -> Program:
  """Run `jitted` until it fails where `function` succeeds, then only `function`."""
  has_failed = False

  def guarded(run: Callable) -> Callable:
    def call(*operands):
      nonlocal has_failed
      if has_failed:
        return function(*operands)
      try:
        return run(*operands)
      except NOT_COMPILABLE as error:
        reason = error
      # A mistake in the arguments raises here too, and names arrays, not tracers.
      result = function(*operands)
      has_failed = True
      _log_fallback(operator, reason)
      return result

    return call

  program: Any = guarded(jitted)
  program.in_traces = guarded(jitted.in_traces)
  return program


def _log_fallback(operator: Operator, reason: Exception) -> None:
  if id(operator) in _logged:
    return
  _logged[id(operator)] = operator
  _logger.warning(
    "The lowering %s of %s does not compile under jax.jit, so it runs uncompiled for "
    "such arguments. Register it with compiled=False if that is meant. The reason: %s",
    name_of(operator.func),
    operator.torch_op,
    reason,
  )


def raise_if_needs_values(error: Exception, operator: Operator) -> None:
  """Raise an error that names a user's lowering which needs values inside a trace.

  Built-in lowerings raise such errors themselves.

  Raises:
    DataDependentError: a user's lowering asked for the values of a traced array.
  """
  if operator.is_builtin or not jax_compat.is_about_values(error):
    return
  raise DataDependentError(
    f"The lowering {name_of(operator.func)} of {operator.torch_op} needs the values of "
    "a tensor, for a shape, an index or a branch of Python, but these are unknown "
    "inside a JAX transformation such as jax.jit. Call the operation outside of "
    "`jax_jit`, where it runs uncompiled; or write it with results of a fixed shape: "
    "jnp.where in place of a mask or a branch, `size=` of jnp.nonzero and jnp.unique."
  ) from error
