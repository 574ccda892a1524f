"""Body of an operation's program: the lowering, and the steps around it.

`Lowering` turns operands into arguments, reads views, derives the key of a draw, calls
the lowering, and writes the result of an in-place operation to its base. `programs.py`
compiles this body. `Plan` runs it uncompiled inside a trace, and if it cannot be
compiled.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat, torch_compat
from torchax.core import explicit_axes, mappings, narrowing
from torchax.core.chains import WHOLE
from torchax.dispatch import torch_checks, torch_derivatives
from torchax.dispatch.operands import Flattener, PreparedFlattener, drop_weak_type
from torchax.registry import packed_numbers, real_numbers
from torchax.registry.derivatives import formula_of
from torchax.registry.operators import Kind, Operator
from torchax.registry.schema import schema_of
from torchax.rng import state as rng_state


class Lowering:
  """Lowering of one operation, called with operands and a static key.

  Attributes:
    op, operator, env: the operation, its operator, and the environment.
    name: name of the operation.
    flattener: sorts arguments into operands and key.
    prepared: flattener whose static numbers become operands; None without such numbers.
    shapes_compiled: number of shapes whose programs a pointwise operation has used.
    is_checked: torch's meta kernel checks the arguments of each program.
    takes_device: the operation has a `device=` argument.
    is_inlined: function that returns True if the lowering runs as part of an outer
      trace instead of as a program of its own.
  """

  def __init__(self, op, operator: Operator, env):
    self.op, self.operator, self.env = op, operator, env
    self.name = str(op)
    schema = schema_of(op) if isinstance(op, torch_compat.OpOverload) else None
    names = schema.names if schema else ()
    static, dynamic = set(operator.numbers.static), set(operator.numbers.dynamic)
    numbers = schema.dynamic - static if schema else frozenset()
    if operator.is_builtin:
      dynamic |= numbers
    options = (self.name, env, dynamic, names, operator.execution.takes_cpu, numbers)
    self.flattener = Flattener(*options)
    self.prepared: PreparedFlattener | None = None
    prepare = operator.numbers.prepare
    if prepare is not None:
      self.prepared = PreparedFlattener(prepare, operator.numbers.static, *options)
    self.is_sampler = operator.kind is Kind.SAMPLER
    self.shapes_compiled = 0
    self.takes_device = "device" in names
    # A user's lowering may accept arguments that torch refuses.
    self.is_checked = (
      operator.is_builtin and schema is not None and operator.checks.meta
    )
    self._is_real = operator.is_builtin and real_numbers.may_refuse_complex(self.name)
    self._may_compute = operator.is_builtin and packed_numbers.may_compute(self.name)
    self._func = operator.func
    if operator.kind is Kind.ENV_ARRAYS:
      self._func = functools.partial(operator.func, env=env)
    # Overload with torch's derivative formula, or None for JAX's derivative.
    self._formula = formula_of(op)
    self.is_inlined = _is_traced if self._formula else jax_compat.is_staging

  def inline(self, static_key, write, operands):
    """Run as part of the current trace, or uncompiled; see `Plan.run`."""
    run = functools.partial(self._run, static_key, write, None, True)
    return explicit_axes.call(run, operands, self.name, (self, static_key, write, True))

  def program(
    self, static_key, write, example: torch_checks.Example | None
  ) -> Callable:
    """Return the function of operands to compile for a key.

    Args:
      static_key, write: see `Plan.run`.
      example: checks the arguments whenever JAX traces the function; may be None.
    """
    run = functools.partial(self._run, static_key, write, example, False)
    form = (self, static_key, write, False)

    def program(*operands):
      return explicit_axes.call(run, operands, self.name, form)

    program.__name__ = self.name.replace(".", "_")
    return program

  def _run(self, static_key, write, example, is_inline, *operands):
    drawn = 2 * self.is_sampler  # key and count
    draw, operands = operands[:drawn], operands[drawn:]
    if write is not None:
      base, *operands = operands
    args, kwargs = self.flattener.rebuild(static_key, operands)
    # The views are read: their dtypes may differ from those of the operands.
    with narrowing.uint64_kept((*args, *kwargs.values(), write)):
      result = self._lower(args, kwargs, example, is_inline, draw)
      if write is None:
        return jax.tree.map(drop_weak_type, result)
      return _written_base(base, write, result)

  def _lower(self, args, kwargs, example, is_inline, draw):
    self.require_real(args, kwargs)
    if self._may_compute:
      packed_numbers.require_none(self.name, args, kwargs)
    if example is not None:
      example.require(args, kwargs)
    if draw:
      rng_key, count = draw
      args = [rng_state.fold_in(rng_key, count), *args]
    if self._formula and is_inline:
      lower = lambda args, kwargs: self._func(*args, **kwargs)  # noqa: E731
      return torch_derivatives.with_derivative_of(
        self._formula, lower, self.env, args, kwargs
      )
    return self._func(*args, **kwargs)

  def require_real(self, args, kwargs) -> None:
    """Raise for complex arguments of an operation on real numbers."""
    if self._is_real:
      real_numbers.require(self.name, args, kwargs)


def _is_traced() -> bool:
  return not jax_compat.is_top_level()


def _written_base(base, write, result):
  """Return the base of a view, with `result` written to the view."""
  if type(write[0]) is tuple:
    parts = zip(base, write, jax.tree.leaves(result), strict=True)
    return tuple([_written_base(*part) for part in parts])
  chain, dtype, shape = write
  if np.broadcast_shapes(result.shape, shape) != shape:
    raise RuntimeError(
      f"output with shape {list(shape)} doesn't match the broadcast shape "
      f"{list(result.shape)}: an in-place operation cannot change the shape."
    )
  require_cast(result.dtype, dtype)
  result = lax.convert_element_type(result, dtype) if result.dtype != dtype else result
  if result.shape != shape:
    result = jnp.broadcast_to(result, shape)
  return result if chain is WHOLE else chain.write(base, result)


def require_cast(source, target) -> None:
  """Raise as torch does for a cast to a lower kind of dtype, as float to integer."""
  source, target = mappings.j2t_dtype(source), mappings.j2t_dtype(target)
  if not torch.can_cast(source, target):
    raise RuntimeError(
      f"result type {_kind_name(source)} can't be cast to the desired output type "
      f"{_kind_name(target)}"
    )


def _kind_name(dtype) -> str:
  return torch.empty(0, dtype=dtype, device="meta").type().rpartition(".")[2][:-6]
