"""Decorator that registers lowerings of torch functions.

Users import it; built-in lowerings use `builtin.py`. `dispatch/torch_functions.py` runs
the lowerings.
"""

from collections.abc import Callable
from typing import Any

from torchax.registry.operators import Kind, registering


def register_function(
  *torch_functions: Callable,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_user_defined: bool = False,
  is_view_op: bool = False,
  kind: Kind | None = None,
  is_builtin: bool = False,
  **options: Any,
) -> Callable:
  """Register the decorated function as the lowering of torch functions.

  It replaces a registered lowering.

  Args:
    *torch_functions: the functions, as torch passes them to a `TorchFunctionMode`.
    is_jax_function: the lowering takes arrays; it is compiled, and differentiated by
      JAX.
    needs_env: the lowering takes the environment as `env=`.
    is_user_defined: replace an existing lowering without a warning.
    is_view_op: upstream's flag: the lowering takes tensors and sees views.
    kind: kind of the lowering, instead of the flags.
    is_builtin: the lowering belongs to this library; see `registry/operators.py`.
    **options: fields of the groups of an operator, such as `dynamic=`, `rules=`,
      `compiled=`, `saves_residuals=` and `backward=`: see `Numbers`, `Checks` and
      `Execution` in `registry/operators.py`.

  Returns:
    The decorator. It returns its argument: a function, a partial, or any other
    callable.

  Raises:
    TypeError: no field has the name of an option.
    ValueError: this lowering and the registered one are both built in.

  Warns:
    UserWarning: code outside the library replaces a lowering.

  >>> def twice(x):
  ...   return torch.overrides.handle_torch_function(twice, (x,), x)
  >>> @register_function(twice, is_user_defined=True)
  ... def on_arrays(x):
  ...   return 2 * x
  >>> twice(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """

  return registering(
    torch_functions,
    is_jax_function=is_jax_function,
    needs_env=needs_env,
    is_user_defined=is_user_defined,
    is_view_op=is_view_op,
    kind=kind,
    is_builtin=is_builtin,
    **options,
  )
