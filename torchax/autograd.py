"""Gradients of functions on arrays, for torch's autograd.

Operations that torch differentiates itself need nothing from here: their backward
formulas are ATen operations. Functions caught above ATen are differentiated by
`jax.vjp`, compiled; their backward passes can be differentiated again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from torchax import _jax_compat
from torchax.tensor import Tensor, new_tensor


def _is_inexact(array) -> bool:
  return jnp.issubdtype(array.dtype, jnp.inexact)


def _conjugate(arrays):
  """torch's gradient of a complex number is the conjugate of JAX's cotangent."""
  return [
    a.conj() if jnp.issubdtype(a.dtype, jnp.complexfloating) else a for a in arrays
  ]


class ArrayFunction:
  """A pure function of arrays, with its compiled value and gradient.

  Args:
    function: `(*arrays) -> pytree of arrays`.
  """

  def __init__(self, function: Callable):
    self._function = function
    self._compiled = jax.jit(function)
    self._compiled_linearize = jax.jit(self._linearize)
    self._gradient: ArrayFunction | None = None

  def value(self, *arrays):
    """The result; compiled unless JAX is tracing."""
    return (self._function if _jax_compat.is_staging() else self._compiled)(*arrays)

  def linearize(self, *arrays):
    """The result, and its pull-back: cotangents of outputs -> of inputs.

    Both are lists of the floating-point and complex leaves alone.
    """
    if _jax_compat.is_staging():
      return self._linearize(*arrays)
    return self._compiled_linearize(*arrays)

  def _linearize(self, *arrays):
    def on_inexact(*inexact):
      remaining = iter(inexact)
      out = self._function(*[next(remaining) if _is_inexact(a) else a for a in arrays])
      return [leaf for leaf in jax.tree.leaves(out) if _is_inexact(leaf)], out

    _, pull_back, out = jax.vjp(
      on_inexact, *[a for a in arrays if _is_inexact(a)], has_aux=True
    )
    return out, pull_back

  @property
  def gradient(self) -> "ArrayFunction":
    """`(n, *arrays, *cotangents) -> cotangents of the inexact arrays`, as a function.

    The number n of arrays is the length of the first argument, which has no numbers.
    """
    if self._gradient is None:
      self._gradient = ArrayFunction(self._pull_back)
    return self._gradient

  def _pull_back(self, count, *arrays):
    inputs, cotangents = arrays[: count.shape[0]], arrays[count.shape[0] :]
    _, pull_back = self._linearize(*inputs)
    return _pull(pull_back, list(cotangents))


def _pull(pull_back, cotangents):
  return _conjugate(pull_back(_conjugate(cotangents)))


_compiled_pull = jax.jit(_pull)


class _Call(torch.autograd.Function):
  """One recorded call of an `ArrayFunction`."""

  @staticmethod
  def forward(ctx, function, structure, *tensors):
    env = tensors[0]._env
    out, ctx.pull_back = function.linearize(*[t.jax() for t in tensors])
    leaves, treedef = jax.tree.flatten(out)
    structure.append(treedef)
    ctx.function, ctx.env = function, env
    ctx.shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    ctx.save_for_backward(*tensors)
    # torch would make its zeros on the wrapper's meta device.
    ctx.set_materialize_grads(False)
    outputs = tuple(new_tensor(leaf, env) for leaf in leaves)
    ctx.mark_non_differentiable(
      *[o for o in outputs if not (o.is_floating_point() or o.is_complex())]
    )
    return outputs

  @staticmethod
  def backward(ctx, *grads):
    cotangents = [
      new_tensor(jnp.zeros(shape, dtype), ctx.env) if grad is None else grad
      for grad, (shape, dtype) in zip(grads, ctx.shapes)
      if jnp.issubdtype(dtype, jnp.inexact)
    ]
    tensors = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph: the gradient is differentiated again
      count = new_tensor(jnp.zeros((len(tensors), 0), jnp.int32), ctx.env)
      results = call(ctx.function.gradient, [count, *tensors, *cotangents])
    else:
      pull = _pull if _jax_compat.is_staging() else _compiled_pull
      arrays = pull(ctx.pull_back, [c.jax() for c in cotangents])
      results = [new_tensor(array, ctx.env) for array in arrays]
    remaining = iter(results)
    return (
      None,
      None,
      *[
        next(remaining) if t.is_floating_point() or t.is_complex() else None
        for t in tensors
      ],
    )


def call(function: ArrayFunction, tensors: list[Tensor]):
  """Runs a function of arrays on tensors; recorded by autograd if one needs it.

  Returns:
    The function's pytree with tensors for its arrays.
  """
  if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
    structure: list = []
    leaves = _Call.apply(function, structure, *tensors)
    return jax.tree.unflatten(structure[0], leaves)
  env = tensors[0]._env
  result = function.value(*[t.jax() for t in tensors])
  return jax.tree.map(lambda array: new_tensor(array, env), result)
