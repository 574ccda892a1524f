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

from torchax.compat import jax_compat, torch_compat


class _Applied(threading.local):
  """Whether the outermost function whose forward pass is running has no gradient."""

  is_stopped = False


_applied = _Applied()


@contextlib.contextmanager
def forward_pass(is_stopped: bool) -> Iterator[None]:
  """Is put around the forward pass of the outermost function that is applied.

  Args:
    is_stopped: what it computes has no derivative.
  """
  before, _applied.is_stopped = _applied.is_stopped, is_stopped
  try:
    yield
  finally:
    _applied.is_stopped = before


@contextlib.contextmanager
def counted_anew() -> Iterator[None]:
  """Is put around what JAX differentiates.

  `torch.no_grad`, inference mode and the forward pass of a function count inside of it,
  and not around it.
  """
  with forward_pass(is_stopped=False), torch_compat.recording_anew():
    yield


class _Saved(threading.local):
  """Whether `detach` is torch's own, of what it has saved for a backward pass.

  Attributes:
    are_handed_out: it is.
    are_of_formula: an operation's backward formula runs in place of JAX's derivative.
  """

  are_handed_out = False
  are_of_formula = False


_saved = _Saved()


@contextlib.contextmanager
def handing_out_saved() -> Iterator[None]:
  """Is put around what saves tensors for a backward pass, or takes those saved.

  torch detaches the results among them, and they keep their derivative all the same.
  """
  before, _saved.are_handed_out = _saved.are_handed_out, True
  try:
    yield
  finally:
    _saved.are_handed_out = before


@contextlib.contextmanager
def in_formula() -> Iterator[None]:
  """Is put around an operation and its formula, which JAX may differentiate."""
  before, _saved.are_of_formula = _saved.are_of_formula, True
  try:
    with handing_out_saved(), counted_anew():
      yield
  finally:
    _saved.are_of_formula = before


def runs_formula() -> bool:
  """Whether what runs is torch's backward formula, in place of JAX's derivative."""
  return _saved.are_of_formula


def detaches() -> bool:
  """Whether `detach` has JAX see no derivative."""
  return not (jax_compat.is_top_level() or _saved.are_handed_out)


def is_stopped() -> bool:
  """True where results have no gradient, whatever they are computed from."""
  if torch.is_grad_enabled() or jax_compat.is_top_level():
    return False
  if torch_compat.in_backward():
    return False
  return not torch_compat.in_function_forward() or _applied.is_stopped


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
