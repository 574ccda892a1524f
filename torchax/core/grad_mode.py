"""`torch.no_grad` under JAX's transformations.

What is computed without recording has no gradient in torch. JAX differentiates whatever
it traces, so it is told: results are stopped, and a change in place keeps the
derivative that the tensor had before, since torch records nothing of it.

The forward pass of a `torch.autograd.Function` runs without recording too, and so does
a backward pass; these are differentiated by JAX as they are, unless the function was
applied where nothing is recorded.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from torchax import _jax_compat, _torch_compat


class _Applied(threading.local):
  """Whether the outermost function in whose forward pass a thread is has no gradient.

  Of the last one that was applied, where there is none.
  """

  is_stopped = False


_applied = _Applied()


def _note_application() -> None:
  if _jax_compat.is_top_level():
    _applied.is_stopped = False
  # A function that another one applies is as the other one is.
  elif not (_torch_compat.in_function_forward() or torch.is_inference_mode_enabled()):
    _applied.is_stopped = is_stopped()


@contextlib.contextmanager
def counted_anew() -> Iterator[None]:
  """Is put around what JAX differentiates.

  `torch.no_grad`, inference mode and the forward pass of a function count inside of it,
  and not around it.
  """
  before = _applied.is_stopped
  try:
    with _torch_compat.recording_anew():
      yield
  finally:
    _applied.is_stopped = before


class _Formula(threading.local):
  """Whether a thread runs torch's backward formula in place of JAX's derivative."""

  is_running = False


_formula = _Formula()


@contextlib.contextmanager
def in_formula() -> Iterator[None]:
  """Is put around an operation and its backward formula, which JAX may differentiate.

  torch detaches the results that it saves, and they keep their derivative all the same.
  """
  before, _formula.is_running = _formula.is_running, True
  try:
    with counted_anew():
      yield
  finally:
    _formula.is_running = before


def runs_formula() -> bool:
  """Whether what runs is torch's backward formula, in place of JAX's derivative."""
  return _formula.is_running


def detaches() -> bool:
  """Whether `detach` has JAX see no derivative."""
  return not (_jax_compat.is_top_level() or _formula.is_running)


class Recomputation:
  """Whether a backward pass may run a part of its forward pass again.

  Attributes:
    expected: True once something was recorded for a checkpoint, or somebody has asked
      for the random state, as checkpoints do.
  """

  expected = False

  @classmethod
  def note(cls) -> None:
    """Notes that torch is recording for a checkpoint, if it is."""
    if _torch_compat.has_saved_tensors_hooks():
      cls.expected = True


def is_stopped() -> bool:
  """True where results have no gradient, whatever they are computed from."""
  if torch.is_grad_enabled() or _jax_compat.is_top_level():
    return False
  if _torch_compat.in_backward():
    return False
  return not _torch_compat.in_function_forward() or _applied.is_stopped


def stopped(tree):
  """Arrays in a tree, without a gradient where there is to be none."""
  return jax.tree.map(_stop, tree) if is_stopped() else tree


def _stop(leaf):
  is_number = isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(
    leaf.dtype, jnp.inexact
  )
  return lax.stop_gradient(leaf) if is_number else leaf


def with_derivative_of(old: jax.Array, new: jax.Array) -> jax.Array:
  """`new`, of which derivatives do not know: they are still those of `old`."""
  if old.shape != new.shape or old.dtype != new.dtype:
    raise ValueError(
      f"Expected an array of shape {old.shape} and {old.dtype}, but got {new.shape} "
      f"and {new.dtype}."
    )
  if not jnp.issubdtype(new.dtype, jnp.inexact):
    return new
  return _with_derivative_of_p.bind(old, new)


# A primitive, and not `jax.custom_jvp`, because an optimizer's step has hundreds.
_with_derivative_of_p = Primitive("with_derivative_of")


@_with_derivative_of_p.def_impl
def _impl(old, new):
  return new


@_with_derivative_of_p.def_abstract_eval
def _abstract_eval(old, new):
  return new


def _jvp(primals, tangents):
  return with_derivative_of(*primals), tangents[0]


def _batch(args, axes):
  size = next(a.shape[d] for a, d in zip(args, axes) if d is not None)
  moved = [batching.bdim_at_front(a, d, size) for a, d in zip(args, axes)]
  return with_derivative_of(*moved), 0


ad.primitive_jvps[_with_derivative_of_p] = _jvp
batching.primitive_batchers[_with_derivative_of_p] = _batch
mlir.register_lowering(_with_derivative_of_p, lambda context, old, new: [new])


_torch_compat.watch_applied_functions(_note_application)
