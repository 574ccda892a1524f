"""Tensors given to JAX, and arrays given to torch: the errors name the way across.

JAX asks the class of a value what it is, and torch asks `__torch_function__`; both get
an answer here. What is asked is asked of values that they could not take anyway, so
nothing that works is touched.
"""

from torchax import _jax_compat, _torch_compat
from torchax.errors import ConversionError, NotATensorError
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
  """Runs a function of torch as if nobody had asked; explains what it refuses.

  Raises:
    NotATensorError: it takes no arrays. A TypeError, so that an operator goes on to
      what the array makes of it.
  """
  with _torch_compat.without_function_overrides():
    try:
      return func(*args, **(kwargs or {}))
    except TypeError as error:
      if not any(kind.__name__ in str(error) for kind in types):
        raise
      name = getattr(func, "__name__", str(func))
      raise NotATensorError(
        f"torch's `{name}` takes tensors, but was given a jax.Array. Give it "
        "`torch_view(array)`; nothing is copied. To use a torch function or module in "
        "JAX, make it a function of arrays by `jax_view(f)`; to use a function of JAX "
        "on tensors, `call_jax(f, tensor)`."
      ) from error


def register() -> None:
  """Puts the answers in place."""
  _jax_compat.describe(Tensor, _given_to_jax)
  _jax_compat.answer_torch(_given_to_torch)
