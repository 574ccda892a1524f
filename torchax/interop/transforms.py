"""Gradients and rematerialisation of functions of tensors, by JAX.

Both carry the random stream as operands, so that a function draws the same numbers
under them as without, and a recomputed forward pass the same as the first one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from torchax.interop.jit import _flatten, shift_argnums
from torchax.interop.traced import Traced
from torchax.interop.views import tensors_of


def jax_value_and_grad(
  torch_function: Callable, kwargs_for_value_and_grad: dict[str, Any] | None = None
) -> Callable:
  """`jax.value_and_grad` for a function of tensors.

  Args:
    torch_function: returns a scalar tensor, or (scalar, aux) with `has_aux`.
    kwargs_for_value_and_grad: `argnums` (default 0), `has_aux`, `holomorphic`,
      `allow_int`, `reduce_axes`; they refer to the arguments of `torch_function`.

  Returns:
    A function with the same arguments that returns (value, gradients) as tensors.
  """
  options = dict(kwargs_for_value_and_grad or {})
  has_aux = options.pop("has_aux", False)
  argnums = shift_argnums(options.pop("argnums", 0))
  traced = Traced(torch_function, lifts=False)

  def with_aux(rng, operands, *args, **kwargs):
    (out, effects), advance = traced.pure(rng, operands, *args, **kwargs)
    value, aux = out if has_aux else (out, None)
    return value, (aux, effects, advance)

  transformed = jax.value_and_grad(with_aux, argnums=argnums, has_aux=True, **options)

  @functools.wraps(torch_function, updated=())
  def value_and_grad(*args, **kwargs):
    leaves, args, kwargs = _flatten(args, kwargs)

    def run(rng):
      operands = ((), traced.situation(leaves))
      (value, (aux, effects, advance)), grads = transformed(
        rng, operands, *args, **kwargs
      )
      return (((value, aux) if has_aux else value), effects, grads), advance

    value, effects, grads = traced.pure.run(run)
    traced.settle(leaves, effects)
    return tensors_of((value, grads))

  return value_and_grad


def gradient_checkpoint(
  torch_function: Callable, kwargs: dict[str, Any] | None = None
) -> Callable:
  """`jax.checkpoint` for a function of tensors: recompute it in the backward pass.

  The recomputation draws the numbers of the forward pass.

  Args:
    torch_function: function or module.
    kwargs: of `jax.checkpoint`: `policy`, `prevent_cse`, `static_argnums`, which
      refers to the arguments of `torch_function`.
  """
  options = dict(kwargs or {})
  if "static_argnums" in options:
    options["static_argnums"] = shift_argnums(options["static_argnums"])
  traced = Traced(torch_function, lifts=False)
  transformed = jax.checkpoint(traced.pure, **options)

  @functools.wraps(torch_function, updated=())
  def checkpointed(*args, **kwargs):
    leaves, args, kwargs = _flatten(args, kwargs)

    def run(rng):
      return transformed(rng, ((), traced.situation(leaves)), *args, **kwargs)

    out, effects = traced.pure.run(run)
    traced.settle(leaves, effects)
    return tensors_of(out)

  return checkpointed
