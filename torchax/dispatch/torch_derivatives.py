"""torch's derivative of an operation, used when JAX differentiates.

JAX would differentiate the lowering, which gives the same values at most points. The
operations listed in `registry/derivatives.py` differ at ties, bounds, zero or padding
rows: here torch's own backward formula becomes their derivative rule.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.compat import torch_compat
from torchax.core import grad_mode
from torchax.core.linear_maps import with_derivative
from torchax.core.partitions import Partition
from torchax.dispatch.autograd import conjugate, is_inexact
from torchax.registry.schema import schema_of
from torchax.tensor import Tensor, new_tensor


def _is_array(leaf) -> bool:
  return isinstance(leaf, jax.Array)


@dataclasses.dataclass(eq=False)
class _Rule:
  """Transpose rule of an operation, by torch's backward formula.

  Args:
    func: runs the operation on tensors, recorded by autograd.
    arguments: (args, kwargs) of the operation, without arrays.
    count: number of differentiable results; the residuals begin with these.
    env: the environment of the tensors.
  """

  func: Any
  arguments: Partition
  count: int
  env: Any

  def __call__(self, residuals, cotangents, wanted) -> list:
    with (
      torch_compat.at_top_level(),
      torch_compat.without_function_modes(),
      torch_compat.without_autocast(),
      grad_mode.in_formula(),
    ):
      tensors = [new_tensor(array, self.env) for array in residuals[self.count :]]
      sources = [tensor for tensor, want in zip(tensors, wanted) if want]
      for tensor in sources:
        tensor.requires_grad_()
      args, kwargs = self.arguments.unflatten(tensors)
      results = [r for r in _tensors(self.func(*args, **kwargs)) if is_inexact(r.jax())]
      pairs = [
        (result, cotangent)
        for result, cotangent in zip(results, cotangents, strict=True)
        if result.requires_grad and cotangent is not None
      ]
      found: Sequence[Any] = [None] * len(sources)
      if pairs:
        recorded = [result for result, _ in pairs]
        seeds = conjugate([cotangent for _, cotangent in pairs])
        given = [new_tensor(array, self.env) for array in seeds]
        found = torch.autograd.grad(recorded, sources, given, allow_unused=True)
      arrays = [
        jnp.zeros_like(source.jax()) if gradient is None else gradient.jax()
        for source, gradient in zip(sources, found)
      ]
    return conjugate(arrays)


def _tensors(tree) -> list[Tensor]:
  return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Tensor)]


def with_derivative_of(func, lower, env, args, kwargs):
  """Return `lower(args, kwargs)`, with the derivative of `func` in torch's autograd.

  Args:
    func: overload of the operation, which runs on tensors above dispatch.
    lower: runs the operation on arrays; returns a pytree of arrays.
    env: the environment of the tensors.
    args, kwargs: arguments of both, with arrays for tensors.
  """
  arguments = Partition((args, kwargs), _is_array)
  arrays = arguments.dynamic
  if not any(map(grad_mode.may_derive, arrays)):
    return lower(args, kwargs)
  schema = schema_of(func)
  named = {**dict(zip(schema.names, args)), **kwargs}
  scalars = [value for name, value in named.items() if name in schema.scalars]
  if any(map(_is_array, jax.tree.leaves(scalars))):
    return lower(args, kwargs)  # torch needs Python numbers here; JAX differentiates
  # Known arrays, such as masks, keep their values.
  fixed = [
    lax.stop_gradient(a) if isinstance(a, jax.core.Tracer) else a for a in arrays
  ]
  out = lower(*arguments.unflatten(fixed))
  leaves, structure = jax.tree.flatten(out)
  indices = [index for index, leaf in enumerate(leaves) if is_inexact(leaf)]
  rule = _Rule(func, arguments.without_arrays(), len(indices), env)
  outputs = [lax.stop_gradient(leaves[index]) for index in indices]
  for index, leaf in zip(indices, with_derivative(rule, outputs, arrays)):
    leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)
