"""`jax.jit` of lowerings that have not said whether they can be compiled.

The library's own say so. Others are tried: what fails compiled and runs without, as
where a result's shape depends on data, is not compiled from then on.
"""

import logging
from collections.abc import Callable

from torchax.core import programs
from torchax.ops.ops_registry import Operator

_logger = logging.getLogger("torchax")

NOT_COMPILABLE = (TypeError, IndexError)
"""What JAX raises where a traced array would have to be known.

Its own errors (concretization, conversion to numpy, a mask as an index) are among the
first; traced shapes raise that class itself, traced slices the second.
"""


def compiled(function: Callable, operator: Operator | None = None) -> Callable:
  """A function under `jax.jit`; as it is where its operator turns out not to allow it.

  Args:
    function: of arrays; the lowering, with what surrounds it.
    operator: whose lowering it calls.
  """
  jitted = programs.jit(function)
  if operator is None or operator.compiled is not None:
    return jitted

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
