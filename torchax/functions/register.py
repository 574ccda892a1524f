"""The decorator that registers lowerings of torch functions."""

from collections.abc import Callable

from torchax.registry.operators import Kind, Operator, register


def register_function(
  *torch_functions,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_user_defined: bool = False,
  is_view_op: bool = False,
  kind: Kind | None = None,
  saves_residuals: bool = False,
  backward: Callable | None = None,
  dynamic: tuple[str, ...] = (),
  compiled: bool | None = None,
  rules: Callable | None = None,
  is_builtin: bool = False,
) -> Callable:
  """Registers the decorated function to run in place of torch functions.

  It replaces one that is registered.

  Args:
    *torch_functions: the functions as torch hands them to a `TorchFunctionMode`.
    is_jax_function: it takes arrays; then it is compiled, and differentiated by JAX.
    needs_env: it takes the environment as `env=`.
    is_user_defined: it is meant to replace what exists, which is then no warning.
    kind: in place of the flags.
    saves_residuals: the gradient uses results of the forward pass, for functions that
      cost much; otherwise it starts again from the arguments.
    backward: called with the cotangents of the results and with the arguments; gives
      the gradients of the tensors among the arguments, in their order. Without one JAX
      differentiates the function, which may take a program several times as large.
    dynamic: names of numbers that may change without recompiling: all but the first
      ones that a function sees are operands, and arrive as traced scalars.
    compiled: False where the result's shape depends on data. By default it is tried:
      calls with arguments for which the function fails compiled run without, after one
      warning in the log.
    rules: called with the arguments, tensors or arrays; gives the rules for the numbers
      of its indices (`registry/index_rules.py`).
    is_builtin: it is one of the library's own; see `ops_registry.py`.

  Raises:
    ValueError: it is built in, and so is one that the torch function already has.

  Warns:
    UserWarning: it replaces another one, and comes from code outside of the library.
  Returns:
    The decorator. It gives back what it is given: a function, a partial, or any other
    callable.
  """

  def register_all(func):
    for torch_function in torch_functions:
      register(
        Operator(
          torch_function,
          func,
          is_jax_function=is_jax_function,
          needs_env=needs_env,
          is_user_defined=is_user_defined,
          is_view_op=is_view_op,
          kind=kind,
          saves_residuals=saves_residuals,
          backward=backward,
          dynamic=dynamic,
          compiled=compiled,
          rules=rules,
          is_builtin=is_builtin,
        )
      )
    return func

  return register_all
