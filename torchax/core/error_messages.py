"""Errors raised from several modules: a tensor has no values, or loses its gradient.

Each function returns the exception; the caller raises it. The classes are in
`torchax/errors.py`.
"""

from torchax.compat import jax_compat
from torchax.core.storage import active
from torchax.errors import (
  ConversionError,
  DonationError,
  TracedStateError,
)


def no_numbers(asked: str) -> TracedStateError:
  """Return the error for a read of a tensor's values during tracing.

  Args:
    asked: the call that needs the values, as the user wrote it.
  """
  boundary = active.boundary
  name = "the function" if boundary is None else f"`{boundary.name}`"
  return TracedStateError(
    f"{asked} needs the numbers of a tensor, but {name} is being traced by JAX, and "
    "there are none yet. Keep the value a tensor: `torch.where`, or `cond` of "
    "torchax.interop, in place of `if`, and `scan` or `while_loop` in place of a loop "
    "over values. Pass what Python decides by as a Python number, and name its "
    "position in `static_argnums` of `jax_jit`. Or return the tensor, and do this "
    "outside."
  )


def leaked_tracer_error(user: str) -> TracedStateError:
  """Return the error for an operand that is a tracer of a finished trace.

  Args:
    user: name of the operation.
  """
  return TracedStateError(
    f"{user} was given a tensor that was made while JAX was tracing a function, and "
    "kept: it stood for a value of each later call, and has none itself. Return it "
    "from the function."
  )


def require_eager(user: str) -> None:
  """Raise inside a traced function; for calls that create or change kept tensors.

  Args:
    user: the call, as the user wrote it.

  Raises:
    TracedStateError: a function is being traced.
  """
  if not jax_compat.is_staging():
    return
  boundary = active.boundary
  name = "a function" if boundary is None else f"`{boundary.name}`"
  raise TracedStateError(
    f"{user} was called while {name} is being traced by JAX, where the tensors that it "
    "lays out would stand for values of each later call, and have none themselves. "
    "Call it before, outside of the compiled function."
  )


def donated_error(user: str) -> DonationError:
  """Return the error for an operand whose memory was donated.

  Args:
    user: name of the operation.
  """
  return DonationError(
    f"{user} was given a tensor whose memory was donated to a compiled function "
    "(`donate_argnums`, `donate_argnames`), so its numbers are gone. Use what the "
    "function returned, pass a `.clone()`, or do not donate the argument."
  )


def donated_twice_error(name: str, shapes: list[list[int]]) -> DonationError:
  """Return the error for donated memory that the function also uses otherwise.

  Args:
    name: name of the function.
    shapes: shapes of the tensors that are both donated and closed over.
  """
  which = f"a tensor of shape {shapes[0]}" if shapes else "a tensor"
  return DonationError(
    f"`{name}` donates the memory of an argument (`donate_argnums`, "
    f"`donate_argnames`), and uses it in another way too: it closes over {which} that "
    "has the same memory, or was given it twice. Pass the tensor as the argument "
    "alone, leave it out of what is donated, or give the function a `.clone()`."
  )


def loses_gradient() -> ConversionError:
  """Return the error for a JAX operation on a tensor that requires a gradient."""
  return ConversionError(
    "An operation of JAX would lose the gradient of a tensor that requires one. Make "
    "the array a tensor by `torch_view(array)`, or call the function by `call_jax(f, "
    "tensor)`, which keeps gradients. Where none is wanted, give `jax_view(tensor)`, "
    "or `.detach()` it."
  )


def not_assignable(value, device) -> TypeError:
  """Return the error for a numpy value assigned to a part of a tensor."""
  return TypeError(
    f"can't assign a numpy.{type(value).__name__} to a tensor on {device}. Make a "
    f'tensor of it: torch.as_tensor(value, device="{device}").'
  )


def packed_error(name: str) -> NotImplementedError:
  """Return torch's error for an operation that cannot read packed 4-bit numbers."""
  return NotImplementedError(
    f"\"{name}\" not implemented for 'Float4_e2m1fn_x2'. View it as torch.uint8, "
    "or multiply with torch.nn.functional.scaled_mm."
  )
