"""Loops of `torch._higher_order_ops` on jax tensors, by the loops of `interop.loops`.

Their functions take and return flat lists: the carry, then the slices, then additional
operands, which are equal in each iteration. `higher_order.py` has the table.
"""

import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.compat.user_code import name_of
from torchax.core.partitions import Partition
from torchax.errors import MutationError, RngError
from torchax.interop import loops
from torchax.interop.views import call_jax, jax_view
from torchax.rng import current, fold_in, rng_scope


def scan(combine, init, xs, additional=(), mutated_arg_indices=""):
  """Run torch's `scan`; each iteration draws the numbers of an unrolled loop."""
  return _run(_scan, (combine,), (tuple(init), tuple(xs), tuple(additional)))


def _scan(functions, tensors, arguments: Partition):
  (combine,), (init, xs, additional) = functions, arguments.unflatten(tensors)

  def step(carry, x):
    results = tuple(combine(*carry, *x, *additional))
    return results[: len(init)], results[len(init) :]

  step.__name__ = name_of(combine)
  carry, ys = loops.scan_in_trace(
    (step,), (init, xs), len(xs[0]), reverse=False, unroll=1
  )
  return *carry, *ys


def map_slices(function, xs, additional=(), mutated_arg_indices=""):
  """Run torch's `map`: a scan without a carry.

  Raises:
    MutationError: the function writes to its slices, which torch allows since 2.15.
  """
  if mutated_arg_indices:
    raise MutationError(
      "The function of torch's `map` writes in place to the slice that it is called "
      "with. Compute a new tensor, and return it."
    )
  return scan(function, (), xs, additional)


def while_loop(condition, body, carried, additional=(), mutated_arg_indices=""):
  """Run torch's `while_loop`, whose body draws from a child stream.

  JAX has no reverse-mode derivative of it. Where autograd records outside of JAX's
  transformations, torch runs the iterations one by one.
  """
  carried, additional = tuple(carried), tuple(additional)
  is_recorded = torch.is_grad_enabled() and any(
    isinstance(value, torch.Tensor) and value.requires_grad
    for value in (*carried, *additional)
  )
  if is_recorded and jax_compat.is_top_level():
    return _unrolled_while(condition, body, carried, additional)
  return _run(_while, (condition, body), (carried, additional))


def _while(functions, tensors, arguments: Partition):
  (condition, body), (carried, additional) = functions, arguments.unflatten(tensors)

  def test(carry):
    return _single(condition(*carry, *additional))

  def step(carry):
    return tuple(body(*carry, *additional))

  test.__name__, step.__name__ = name_of(condition), name_of(body)
  return loops.while_in_trace((test, step), (carried,))


def _unrolled_while(condition, body, carried, additional):
  stream, carried = current(), tuple(map(torch.clone, carried))
  with rng_scope(fold_in(*stream.peek("while_loop"))) as child:
    while True:
      drawn = child.draws
      goes_on = _single(condition(*carried, *additional))
      if child.draws > drawn:
        raise RngError(loops.CONDITION_DRAWS)
      if not goes_on:
        break
      carried = tuple(body(*carried, *additional))
  if child.draws:
    stream.record_draw("while_loop")
  return carried


def _single(result):
  return result[0] if isinstance(result, tuple | list) else result


def associative_scan(combine, xs, additional=()):
  """Run torch's `associative_scan` by `lax.associative_scan`."""

  def on_arrays(xs, additional):
    def combine_arrays(left, right):
      return tuple(jax_view(combine)(*left, *right, *additional))

    return lax.associative_scan(combine_arrays, tuple(xs))

  return tuple(call_jax(on_arrays, tuple(xs), tuple(additional)))


def _run(lower, functions: tuple, args: tuple):
  """Run a loop; arguments that are no tensors are static."""
  arguments = Partition(args)
  options = (arguments.without_arrays(),)
  return loops.run_loop(lower, functions, options, tuple(arguments.dynamic))
