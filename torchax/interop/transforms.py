"""`jax_value_and_grad` and `gradient_checkpoint`: JAX's transformations on tensors.

The random stream is an operand of both. So a function draws the same numbers with and
without them, and a recomputed forward pass draws the numbers of the first one.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import torch
from torch.utils import checkpoint as torch_checkpoint

from torchax.compat import jax_compat
from torchax.compat.user_code import name_of
from torchax.core import grad_mode
from torchax.core.tracebacks import hide_library_frames
from torchax.environment import env_on
from torchax.errors import MutationError
from torchax.interop.jit import _flatten, shift_argnums
from torchax.interop.jit_options import (
  CheckpointOptions,
  GradOptions,
  merge,
  with_names,
)
from torchax.rng import Advance
from torchax.tensor import Tensor
from torchax.tracing.conversions import tensors_of
from torchax.tracing.effects import Effects
from torchax.tracing.trace import Options, Traced
from torchax.tracing.transform import Transformed
from torchax.types import P, R


def jax_value_and_grad(
  torch_function: Callable[P, R],
  kwargs_for_value_and_grad: dict[str, Any] | None = None,
  **options: Unpack[GradOptions],
) -> Callable[P, tuple[R, Any]]:
  """Apply `jax.value_and_grad` to a function of tensors.

  Args:
    torch_function: function that returns a scalar tensor, or (scalar, aux) with
      `has_aux`.
    kwargs_for_value_and_grad: the options as a dict, for compatibility with upstream.
    **options: keyword arguments of `jax.value_and_grad`: `argnums` (default 0),
      `has_aux`, `holomorphic`, `allow_int`, `reduce_axes`. They refer to the arguments
      of `torch_function`.

  Returns:
    A function with the same arguments that returns (value, gradients) as tensors.

  Raises:
    TypeError: `jax.value_and_grad` has no such option.

  >>> x = torch.tensor([1.0, 2.0], device="jax")
  >>> value, gradient = jax_value_and_grad(lambda x: (x**2).sum())(x)
  >>> value.item(), gradient
  (5.0, tensor([2., 4.], device='jax:0'))
  """
  kwargs_for_jax = merge(
    "jax_value_and_grad", jax.value_and_grad, kwargs_for_value_and_grad, options
  )
  has_aux = kwargs_for_jax.pop("has_aux", False)
  argnums_of_user = kwargs_for_jax.pop("argnums", 0)
  argnums = shift_argnums(argnums_of_user)
  traced = Traced(torch_function, Options(assigns=True))

  def with_aux(rng, operands, *args, **kwargs):
    # JAX differentiates the function even if the call is under `torch.no_grad`.
    with grad_mode.fresh_grad_mode():
      (out, effects), advance = traced(rng, operands, *args, **kwargs)
    value, aux = out if has_aux else (out, None)
    return value, (aux, effects, advance)

  transformed = jax.value_and_grad(
    with_aux, argnums=argnums, has_aux=True, **kwargs_for_jax
  )

  @hide_library_frames
  @functools.wraps(torch_function, updated=())
  def value_and_grad(*args, **kwargs):
    leaves, args, kwargs = _flatten(args, kwargs, keeps_form=True)

    def run(rng):
      operands = ((), traced.specialization(leaves))
      (value, (aux, effects, advance)), grads = transformed(
        rng, operands, *args, **kwargs
      )
      return (((value, aux) if has_aux else value), effects, grads), advance

    try:
      value, effects, grads = traced.keyed.run(run)
    except TypeError as error:
      _explain(error, traced.__name__, argnums_of_user, len(args))
      raise
    if effects is not None:
      effects.apply(leaves)
      effects.assign(effects.assigned, leaves)
    return tensors_of((value, grads))

  return value_and_grad


def _explain(error: TypeError, name: str, argnums, count: int) -> None:
  """Raise JAX's errors about argnums and results with the user's names; else return."""
  message = str(error)
  if message.startswith("differentiating with respect to argnums"):
    raise TypeError(
      f"jax_value_and_grad differentiates `{name}` by argnums={argnums}, but it was "
      f"called with {count} positional argument(s)."
    ) from error
  if message.startswith(("Gradient only defined", "grad requires")):
    raise TypeError(f"`{name}` in jax_value_and_grad: {message}") from error


def gradient_checkpoint(
  torch_function: Callable[P, R],
  kwargs: dict[str, Any] | None = None,
  **options: Unpack[CheckpointOptions],
) -> Callable[P, R]:
  """Apply `jax.checkpoint`: recompute a function of tensors in the backward pass.

  The recomputation draws the numbers of the forward pass. JAX transformations and
  compiled functions use `jax.checkpoint`; eager programs use `torch.utils.checkpoint`.

  Args:
    torch_function: function or module.
    kwargs: the options as a dict, for compatibility with upstream.
    **options: keyword arguments of `jax.checkpoint`: `policy`, `prevent_cse`,
      `static_argnums`, `static_argnames`. The last two refer to the arguments of
      `torch_function`.

  Returns:
    A function with the same arguments and results.

  Raises:
    TypeError: `jax.checkpoint` has no such option.
    ValueError: the function has no argument of a given number or name.

  >>> block = gradient_checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5))
  >>> x = torch.zeros(100, device="jax", requires_grad=True)
  >>> block(x).sum().backward()
  >>> x.grad.unique()  # the recomputation drops the same elements
  tensor([0., 2.], device='jax:0')
  """
  name = "gradient_checkpoint"
  own = ("static_argnames",)
  kwargs_for_jax = merge(name, jax.checkpoint, kwargs, options, own)
  kwargs_for_jax = with_names(name, torch_function, kwargs_for_jax, ("static",))
  static_argnums = kwargs_for_jax.pop("static_argnums", ())
  static_argnames = kwargs_for_jax.pop("static_argnames", ())

  @hide_library_frames
  @functools.wraps(torch_function, updated=())
  def checkpointed(*args, **kwargs):
    if jax_compat.is_top_level():
      return _checkpointed_by_torch(torch_function, args, kwargs)
    function = torch_function
    by_name = {key: kwargs.pop(key) for key in static_argnames if key in kwargs}
    if by_name:
      function = functools.partial(torch_function, **by_name)
    static = _numbers(static_argnums, len(args))
    return _Checkpointed(function, kwargs_for_jax, static, args)(args, kwargs)

  return checkpointed


def _checkpointed_by_torch(function: Callable, args, kwargs):
  env = env_on()
  if not torch.is_grad_enabled():
    with env:
      return function(*args, **kwargs)

  def contexts():
    """Return the contexts for the forward pass and for the recomputation."""
    return contextlib.nullcontext(), env

  with env:
    return torch_checkpoint.checkpoint(
      function, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


def _numbers(argnums, count: int) -> frozenset[int]:
  """Return argument numbers as non-negative ones, given the argument count."""
  argnums = (argnums,) if isinstance(argnums, int) else argnums
  return frozenset(number % count for number in argnums if number < count)


class _Checkpointed:
  """Call of a checkpointed function in a trace."""

  def __init__(self, function: Callable, options: dict, static: frozenset, args):
    def on_dynamic(args, kwargs):
      remaining = iter(args)
      args = [
        self._static[n] if n in self._static else next(remaining)
        for n in range(self._count)
      ]
      return function(*args, **kwargs)

    on_dynamic.__name__ = name_of(function)
    self._options = options
    self._static = {number: args[number] for number in static}
    self._count = len(args)
    self._changed: tuple[int, ...] = ()
    self._targets: tuple = ()
    self._transformed = Transformed(
      "gradient_checkpoint", (on_dynamic,), self._lower, assigns=True
    )
    self._transformed.traced.keyed.__name__ = name_of(function)

  def __call__(self, args, kwargs):
    args = [arg for number, arg in enumerate(args) if number not in self._static]
    out, changed, assigned = self._transformed((args, kwargs))
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, Tensor))
    for index, tensor in zip(self._changed, changed):
      if isinstance(leaves[index], Tensor):
        if tensor.requires_grad:
          raise MutationError(
            "A checkpointed function changes an argument in place in a way that needs "
            "a gradient. Return the new value instead."
          )
        leaves[index].replace_jax(tensor.jax())
    Effects(targets=self._targets).assign(assigned, leaves)
    return out

  def _lower(self, call, rng, captured, args):
    advances: list[Advance] = []

    def pure(rng, captured, args):
      result = call(0, rng, captured, args)
      advances.append(result.advance)
      self._changed, self._targets = tuple(result.arguments), tuple(result.assigned)
      results = (result.out, [*result.arguments.values()], [*result.assigned.values()])
      # The keys are arrays if the function has seeded its stream.
      return results, result.states, result.advance.keys

    out, states, keys = jax.checkpoint(pure, **self._options)(rng, captured, args)
    return out, states, dataclasses.replace(advances[-1], keys=keys).or_none()
