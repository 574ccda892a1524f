"""Decorator `op`, which registers a lowering.

A lowering is a pure JAX function with the ATen signature:

  @op(aten.roll)
  def _aten_roll(self, shifts, dims=()):
    return jnp.roll(self, shifts, axis=dims or None)

The decorator converts the arguments. Tensors become arrays, lists of integers become
tuples, dtypes stay torch dtypes. Numbers stay Python numbers unless `dynamic` names the
argument. The library's own lowerings take `op` from `builtin.py`: there a number for a
parameter of type Tensor, Scalar or float becomes a weakly typed scalar, which may be
traced, unless `static` names the argument. `device`, `layout`, `pin_memory`,
`memory_format` and `non_blocking` are dropped. The in-place variant (`aten.relu_`) and
the `out=` variant are derived from the functional one and torch's schema.
"""

from collections.abc import Callable
from typing import Any

from torchax.registry.operators import Kind, registering


def op(
  *aten: Any,
  kind: Kind | None = None,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_view_op: bool = False,
  is_user_defined: bool = False,
  is_builtin: bool = False,
  **options: Any,
) -> Callable:
  """Register the decorated function as the lowering of one or more operations.

  It replaces an existing lowering.

  Args:
    *aten: overloads, or packets for all functional overloads of a name.
    kind: the kind of arguments that the function takes; by default it follows from
      the next three flags, which google/torchax also has.
    is_jax_function: the function takes arrays (default) instead of tensors.
    needs_env: the function takes the environment as `env=`.
    is_view_op: the function receives views as views.
    is_user_defined: the function is meant to replace an existing one; do not warn.
    is_builtin: the lowering is the library's own; see `registry/operators.py`.
    **options: fields of an operator's `Numbers` (`static=`, `dynamic=`, …), `Checks`
      (`check=`, `rules=`, …), `Draw` and `Execution` (`compiled=`, …); these classes
      are in `registry/operators.py`.

  Returns:
    The decorator. It returns the function.

  Raises:
    TypeError: an option is unknown.
    ValueError: the lowering and the one that it replaces are both built in.

  Warns:
    UserWarning: code outside of the library replaces a lowering.

  >>> library = torch.library.Library("example_op", "DEF")
  >>> library.define("twice(Tensor x) -> Tensor")
  'twice'
  >>> @op(torch.ops.example_op.twice, is_user_defined=True)
  ... def twice(x):
  ...   return 2 * x
  >>> torch.ops.example_op.twice(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
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
