"""Backward passes of a batch of gradients: `is_grads_batched`, `vectorize=True`.

torch runs the backward pass once, under its `vmap`. There a gradient is a wrapper
without an array, so the backward functions of this library run per row: under JAX's
`vmap` if they can, else in a loop. `autograd.py` is the main caller.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import torch

from torchax.compat import torch_compat
from torchax.tensor import Tensor, new_tensor


def over_batches(backward: Callable, is_mapped: bool = True) -> Callable:
  """Extend a `backward(ctx, *gradients)` to batched gradients.

  Args:
    backward: the function.
    is_mapped: True if JAX's `vmap` can run it.
  """

  @functools.wraps(backward)
  def run(ctx, *gradients):
    if all(gradient is None or isinstance(gradient, Tensor) for gradient in gradients):
      return backward(ctx, *gradients)
    rows = _Rows(functools.partial(run, ctx), is_mapped)
    if any(map(torch_compat.is_transformed, gradients)):
      return rows.with_none(_InTransforms.apply(rows, *gradients))
    batch = torch_compat.GradientBatch(gradients)
    if batch.size is None:  # on the CPU
      return backward(ctx, *gradients)
    found = rows.stacked(batch.gradients, batch.is_batched, batch.size)
    return rows.with_none([batch.wrap(result) for result in found])

  return run


class _Rows:
  """Backward pass that runs for each row of a batch.

  Args:
    backward: `(*gradients) -> results`; some results may be None.
    is_mapped: True if JAX's `vmap` can run it.
  """

  def __init__(self, backward: Callable, is_mapped: bool):
    self._backward = backward
    self._is_mapped = is_mapped
    self._is_tensor: list[bool] = []

  def __call__(self, gradients: Sequence) -> tuple[torch.Tensor, ...]:
    """Run the backward pass; return the results that are not None."""
    results = self._backward(*gradients)
    results = results if isinstance(results, tuple) else (results,)
    self._is_tensor = [result is not None for result in results]
    return tuple([result for result in results if result is not None])

  def with_none(self, results: Sequence) -> tuple:
    """Return all results of the last call, given those that are not None."""
    remaining = iter(results)
    return tuple([next(remaining) if is_one else None for is_one in self._is_tensor])

  def stacked(
    self, gradients: Sequence, is_batched: Sequence[bool], size: int
  ) -> tuple[torch.Tensor, ...]:
    """Return the results of all rows, stacked; the batch is the first dimension."""
    batched = [g for g, is_one in zip(gradients, is_batched) if is_one]

    def of_row(row: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
      remaining = iter(row)
      return self([next(remaining) if b else g for g, b in zip(gradients, is_batched)])

    is_ours = all(isinstance(gradient, Tensor) for gradient in batched)
    # Results of JAX's `vmap` have no graph.
    if torch.is_grad_enabled() or not self._is_mapped or not is_ours:
      columns = zip(*[of_row([g[n] for g in batched]) for n in range(size)])
      return tuple(map(torch.stack, columns))
    env = batched[0]._env

    def of_arrays(arrays):
      return [t.jax() for t in of_row([new_tensor(array, env) for array in arrays])]

    arrays = jax.vmap(of_arrays)([gradient.jax() for gradient in batched])
    return tuple([new_tensor(array, env) for array in arrays])


class _InTransforms(torch_compat.OwnFunction):
  """Backward pass inside the transforms of `torch.func`."""

  @staticmethod
  def forward(rows, *gradients):
    return rows(gradients)

  @staticmethod
  def setup_context(ctx, inputs, output):
    pass

  @staticmethod
  def vmap(info, in_dims, rows, *gradients):
    dims = in_dims[1:]
    first = [g if dim is None else g.movedim(dim, 0) for g, dim in zip(gradients, dims)]
    results = rows.stacked(first, [dim is not None for dim in dims], info.batch_size)
    return results, (0,) * len(results)
