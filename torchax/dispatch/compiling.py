"""`jax.jit` of lowerings that have not said whether they can be compiled.

The library's own say so. Others are tried: what fails compiled and runs without, as
where a result's shape depends on data, is not compiled from then on.
"""

import logging
from collections.abc import Callable

from torchax.compat import jax_compat
from torchax.core import programs
from torchax.errors import DataDependentError
from torchax.registry.operators import Kind, Operator, name_of

_logger = logging.getLogger("torchax")

NOT_COMPILABLE = (TypeError, IndexError)
"""What JAX raises where a traced array would have to be known.

Its own errors (concretization, conversion to numpy, a mask as an index) are among the
first; traced shapes raise that class itself, traced slices the second.
"""


def compiled(
  function: Callable, operator: Operator | None = None, place=None
) -> Callable:
  """A function under `jax.jit`; as it is where its operator turns out not to allow it.

  Args:
    function: of arrays; the lowering, with what surrounds it.
    operator: whose lowering it calls.
    place: where its results are made; None leaves it to JAX.

  Returns:
    The function, and as its `in_traces` the same for calls inside of transformations.
  """
  options = {} if place is None else {"out_shardings": place}
  jitted = programs.jit(function, effort=_effort(operator), **options)
  if operator is None or operator.compiled is not None:
    return jitted
  attempt = _attempt(jitted, function, operator)
  attempt.in_traces = _attempt(jitted.in_traces, function, operator)
  return attempt


def _effort(operator: Operator | None) -> programs.Effort:
  """How a lowering is compiled: what draws has the bits of compiled functions."""
  if operator is not None and operator.is_brief:
    return programs.Effort.NONE
  if operator is None or operator.kind is not Kind.SAMPLER:
    return programs.Effort.LEAST
  if operator.is_exact:
    return programs.Effort.LEAST
  is_known = operator.is_builtin and not operator.adds_up
  return programs.Effort.SAME_BITS if is_known else programs.Effort.FULL


def _attempt(jitted: Callable, function: Callable, operator: Operator) -> Callable:
  """Runs a function compiled, and as it is once its operator has not allowed that."""

  def attempt(*operands):
    # Shapes and dtypes that come later may need what the first ones did not.
    if operator.compiled is False:
      return function(*operands)
    try:
      return jitted(*operands)
    except NOT_COMPILABLE as error:
      reason = error
    # A mistake in the arguments is one here too, and is told of arrays, not tracers.
    result = function(*operands)
    operator.compiled = False
    _logger.info("%s runs uncompiled from now on: %s", operator.torch_op, reason)
    return result

  return attempt


def explain(error: Exception, operator: Operator) -> None:
  """Names the lowering that needs values, where JAX is tracing and cannot do without.

  The library's own say it themselves.

  Raises:
    DataDependentError: the lowering of a program asked for the values of an array.
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
