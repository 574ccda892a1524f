"""`torch.no_grad` under JAX's transformations.

torch computes no gradient while grad mode is off; JAX differentiates everything that it
traces. So results get `stop_gradient`, and an in-place change keeps the tensor's old
derivative, because torch does not record the change.

The forward pass of a `torch.autograd.Function`, and a backward pass, run with grad mode
off too. JAX differentiates these, unless the function was applied with grad mode off.
`view_steps.py` and the operations (`torchax/ops`) call these functions.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from torchax.compat import jax_compat, torch_compat
from torchax.compat.patches import setting
from torchax.core.linear_maps import zero_tangent


class _Applied(threading.local):
  """State of the outermost `torch.autograd.Function` whose forward pass is running."""

  is_stopped = False


_applied = _Applied()


def forward_pass(is_stopped: bool) -> contextlib.AbstractContextManager[None]:
  """Enclose the forward pass of the outermost `torch.autograd.Function`.

  Args:
    is_stopped: its results have no derivative.
  """
  return setting(_applied, "is_stopped", is_stopped)


@contextlib.contextmanager
def fresh_grad_mode() -> Iterator[None]:
  """Enclose code that JAX differentiates, with grad mode on.

  Only grad modes entered inside this context apply; the caller's are ignored.
  """
  with forward_pass(is_stopped=False), torch_compat.enable_recording():
    yield


class _Saved(threading.local):
  """Context in which torch saves tensors for a backward pass, or returns them.

  Attributes:
    are_handed_out: calls of `detach` are torch's own, on saved tensors.
    are_of_formula: an operation's backward formula replaces JAX's derivative.
  """

  are_handed_out = False
  are_of_formula = False


_saved = _Saved()


def accessing_saved_tensors() -> contextlib.AbstractContextManager[None]:
  """Enclose code that saves tensors for a backward pass, or reads saved ones.

  torch detaches the saved results; they keep their derivative for JAX.
  """
  return setting(_saved, "are_handed_out", True)


@contextlib.contextmanager
def in_formula() -> Iterator[None]:
  """Enclose an operation and its backward formula, which JAX may differentiate."""
  formula = setting(_saved, "are_of_formula", True)
  with formula, accessing_saved_tensors(), fresh_grad_mode():
    yield


def runs_formula() -> bool:
  """Return True while torch's backward formula runs in place of JAX's derivative."""
  return _saved.are_of_formula


def detaches() -> bool:
  """Return True if `detach` removes the derivative for JAX."""
  return not (jax_compat.is_top_level() or _saved.are_handed_out)


def is_stopped() -> bool:
  """Return True if results have no gradient, whatever their operands."""
  if torch.is_grad_enabled() or jax_compat.is_top_level():
    return False
  if torch_compat.in_backward():
    return False
  return not torch_compat.in_function_forward() or _applied.is_stopped


def stop_gradients(tree):
  """Apply `stop_gradient` to the arrays in a tree if grad mode asks for it."""
  if not is_stopped():
    return tree
  leaves, structure = jax.tree.flatten(tree)
  places = [index for index, leaf in enumerate(leaves) if may_derive(leaf)]
  for place, array in zip(places, _bind([], [leaves[place] for place in places])):
    leaves[place] = array
  return jax.tree.unflatten(structure, leaves)


def may_derive(value) -> bool:
  """Return True for a tracer of floats or complex numbers: JAX may differentiate it."""
  return isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.inexact)


def with_derivative_of(old: jax.Array, new: jax.Array) -> jax.Array:
  """Return `new`, with the tangent of `old`.

  Raises:
    ValueError: the shapes or dtypes differ.
  """
  return with_derivatives_of([old], [new])[0]


def with_derivatives_of(
  old: Sequence[jax.Array], new: Sequence[jax.Array]
) -> list[jax.Array]:
  """Return the arrays of `new`, with the tangents of those of `old`.

  Raises:
    ValueError: the shapes or dtypes of a pair differ.
  """
  result = list(new)
  places = []
  for place, (before, after) in enumerate(zip(old, new, strict=True)):
    if before.shape != after.shape or before.dtype != after.dtype:
      raise ValueError(
        f"Expected an array of shape {before.shape} and {before.dtype}, but got "
        f"{after.shape} and {after.dtype}."
      )
    if jnp.issubdtype(after.dtype, jnp.inexact):
      places.append(place)
  found = _bind([old[place] for place in places], [new[place] for place in places])
  for place, array in zip(places, found):
    result[place] = array
  return result


# Values without their own derivatives: operands are the arrays whose tangents they get
# (none: zeros), then the values. One equation serves all tensors of an optimizer; a
# primitive is cheaper than `jax.custom_jvp`.
_with_derivatives_of_p = Primitive("with_derivatives_of")
_with_derivatives_of_p.multiple_results = True


def _bind(old: Sequence, new: Sequence) -> list:
  return _with_derivatives_of_p.bind(*old, *new, count=len(new)) if new else []


@_with_derivatives_of_p.def_impl
@_with_derivatives_of_p.def_abstract_eval
def _new(*operands, count):
  return list(operands[-count:])


def _jvp(primals, tangents, *, count):
  result = _with_derivatives_of_p.bind(*primals, count=count)
  if len(primals) > count:
    return result, list(tangents[:count])
  return result, list(map(zero_tangent, result))


def _batch(args, axes, *, count):
  size = next(a.shape[d] for a, d in zip(args, axes) if d is not None)
  moved = [batching.bdim_at_front(a, d, size) for a, d in zip(args, axes)]
  return _with_derivatives_of_p.bind(*moved, count=count), [0] * count


ad.primitive_jvps[_with_derivatives_of_p] = _jvp
batching.primitive_batchers[_with_derivatives_of_p] = _batch
mlir.register_lowering(
  _with_derivatives_of_p, lambda context, *operands, count: list(operands[-count:])
)
