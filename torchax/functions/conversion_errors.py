"""Tensors given to JAX, and arrays given to torch: the errors name the way across.

JAX asks the class of a value what it is, and torch asks `__torch_function__`; both get
an answer here. What is asked is asked of values that they could not take anyway, so
nothing that works is touched.
"""

from torchax.compat import jax_compat, torch_compat
from torchax.core.explanations import explain_arrays
from torchax.errors import ConversionError
from torchax.tensor import Tensor


def _given_to_jax(tensor: Tensor):
  """Raises ConversionError: JAX takes no tensors."""
  raise ConversionError(
    "Functions of JAX (jnp, jax.jit, jax.grad, jax.vmap, lax, …) take and return "
    f"arrays, but met a torch tensor of shape {list(tensor.shape)}. Give "
    "`jax_view(tensor)`, and make functions of JAX out of torch functions and modules "
    "by `jax_view(f)`; `torch_view` leads back. Or stay in torch: `call_jax(jnp.sin, "
    "tensor)` keeps gradients, and `jax_jit`, `jax_value_and_grad`, `jax_vmap`, "
    "`scan`, … of torchax.interop take functions of tensors."
  )


def _given_to_torch(cls, func, types, args=(), kwargs=None):
  """Run a function of torch as if nobody had asked; explain what it refuses."""
  if any(issubclass(kind, Tensor) for kind in types):
    return NotImplemented  # it explains the same after its own lowering was tried
  try:
    with torch_compat.without_function_overrides():
      return func(*args, **(kwargs or {}))
  except TypeError as error:
    explain_arrays(error, func, types)
    raise


def register() -> None:
  """Puts the answers in place."""
  jax_compat.describe(Tensor, _given_to_jax)
  jax_compat.answer_torch(_given_to_torch)
