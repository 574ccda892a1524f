"""The decorator that registers lowerings of torch functions."""

from collections.abc import Callable

from torchax.registry.operators import Kind, registering


def register_function(
  *torch_functions,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_user_defined: bool = False,
  is_view_op: bool = False,
  kind: Kind | None = None,
  is_builtin: bool = False,
  **options,
) -> Callable:
  """Registers the decorated function to run in place of torch functions.

  It replaces one that is registered.

  Args:
    *torch_functions: the functions as torch hands them to a `TorchFunctionMode`.
    is_jax_function: it takes arrays; then it is compiled, and differentiated by JAX.
    needs_env: it takes the environment as `env=`.
    is_user_defined: it is meant to replace what exists, which is then no warning.
    kind: in place of the flags.
    is_builtin: it is one of the library's own; see `registry/operators.py`.
    **options: fields of the groups of an operator, as `dynamic=`, `rules=`,
      `compiled=`, `saves_residuals=` and `backward=`: see `Numbers`, `Checks` and
      `Execution` in `registry/operators.py`.

  Raises:
    TypeError: an option has another name.
    ValueError: it is built in, and so is one that the torch function already has.

  Warns:
    UserWarning: it replaces another one, and comes from code outside of the library.

  Returns:
    The decorator. It gives back what it is given: a function, a partial, or any other
    callable.
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
