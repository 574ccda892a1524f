"""The decorator that registers lowerings of torch functions."""

from collections.abc import Callable

from torchax.ops.ops_registry import Kind, Operator, register


def register_function(
  *torch_functions,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_user_defined: bool = False,
  is_view_op: bool = False,
  kind: Kind | None = None,
  saves_residuals: bool = False,
) -> Callable:
  """Registers the decorated function to run in place of torch functions.

  Args:
    *torch_functions: the functions as torch hands them to a `TorchFunctionMode`.
    is_jax_function: it takes arrays; then it is compiled, and differentiated by JAX.
    needs_env: it takes the environment as `env=`.
    is_user_defined: it may replace what is registered; otherwise that warns. What ran
      before is `all_torch_functions[f].replaced`.
    is_view_op: it takes tensors, and may alias or change them.
    kind: in place of the flags.
    saves_residuals: the gradient uses results of the forward pass, for functions that
      cost much; otherwise it starts again from the arguments.

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
        )
      )
    return func

  return register_all
