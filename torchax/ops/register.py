"""The `op` decorator, which registers a lowering.

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

from collections.abc import Callable

from torchax.registry.operators import Kind, registering


def op(
  *aten,
  kind: Kind | None = None,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_view_op: bool = False,
  is_user_defined: bool = False,
  is_builtin: bool = False,
  **options,
) -> Callable:
  """Registers the decorated function as the lowering of one or more operations.

  It replaces a lowering that exists.

  Args:
    *aten: overloads, or packets for all functional overloads of a name.
    kind: what the function consumes; by default follows from the three flags,
      which are those of upstream.
    is_jax_function: it takes arrays (default) instead of tensors.
    needs_env: it takes the environment as `env=`.
    is_view_op: it sees views as such.
    is_user_defined: it is meant to replace what exists, which is then no warning.
    is_builtin: it is one of the library's own; see `registry/operators.py`.
    **options: fields of the groups of an operator, `Numbers` (`static=`, `dynamic=`,
      …), `Checks` (`check=`, `rules=`, …), `Draw` and `Execution` (`compiled=`, …):
      see these classes in `registry/operators.py`.

  Raises:
    TypeError: an option has another name.
    ValueError: it is built in, and so is a lowering that the operation already has.

  Warns:
    UserWarning: it replaces a lowering, and comes from code outside of the library.
  """

  return registering(
    aten,
    is_jax_function=is_jax_function,
    needs_env=needs_env,
    is_view_op=is_view_op,
    is_user_defined=is_user_defined,
    kind=kind,
    is_builtin=is_builtin,
    **options,
  )
