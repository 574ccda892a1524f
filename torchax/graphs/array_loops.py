"""Loops of `torch._higher_order_ops` on arrays, by those of `jax.lax`.

`part(graph)` is the function of arrays of a graph. `higher_order.py` has the table.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from torchax.errors import RngError
from torchax.graphs.fx import may_draw
from torchax.rng import RngState, current, rng_scope
from torchax.rng.counter import draws_between
from torchax.rng.ledger import Repeated, expand


def scan(part, combine, init, xs, additional=()):
  """Run torch's `scan` by `lax.scan`."""
  run = part(combine)

  def step(carry, x):
    results = run(*carry, *x, *additional)
    carry = [jnp.asarray(n, old.dtype) for n, old in zip(results, carry)]
    return carry, tuple(results[len(carry) :])

  carry, ys = _scan(step, may_draw(combine), list(map(jnp.asarray, init)), tuple(xs))
  return *carry, *ys


def map_slices(part, function, xs, additional=()):
  """Run torch's `map`: a scan without a carry."""
  return scan(part, function, (), xs, additional)


def _scan(step: Callable, draws: bool, init, xs):
  """Run `lax.scan`; each iteration draws the numbers of the unrolled loop."""
  if not draws:
    return lax.scan(step, init, xs)
  stream = current()
  stream.check("torch.scan")
  length = xs[0].shape[0]
  nested, each = [stream], {}

  def step_of_turn(carry, turn_and_x):
    turn, x = turn_and_x
    inner = stream.nest()
    inner.log = None if stream.log is None else []
    inner.counter.skip(turn, each)
    nested[0] = inner
    with rng_scope(inner):
      return step(carry, x)

  xs = jnp.arange(length, dtype=jnp.uint32), xs
  jax.eval_shape(step_of_turn, init, jax.tree.map(lambda x: x[0], xs))
  each.update(draws_between(stream, nested[0]))
  out = lax.scan(step_of_turn, init, xs)
  if stream.log is not None:
    moves = tuple((None, path, n) for path, n in each.items())
    entry = Repeated(tuple(nested[0].log), length, moves, "iteration")
    stream.log.extend(expand([entry]))
  for path, n in each.items():
    stream.advance_past(n * length, path)
  return out


def associative_scan(part, combine, xs, additional=()):
  """Run torch's `associative_scan` by `lax.associative_scan`."""
  run = part(combine)

  def combine_slices(left, right):
    return tuple(run(*left, *right, *additional))

  return lax.associative_scan(jax.vmap(combine_slices), tuple(xs))


def while_loop(part, condition, body, carried, additional=()):
  """Run `torch.while_loop` by `lax.while_loop`.

  The body draws from a child stream, whose key is one draw of the current stream.
  """
  if may_draw(condition):
    raise RngError(
      "The condition of torch.while_loop draws random numbers. Draw in the body, and "
      "pass what the condition needs among the carried values."
    )
  test, step = part(condition), part(body)
  key = current().next_key("torch.while_loop") if may_draw(body) else None

  def test_condition(values):
    result = test(*values, *additional)
    result = result[0] if isinstance(result, tuple | list) else result
    return jnp.asarray(result).reshape(())

  def run_body(state):
    count, values = state
    if key is None:
      results = step(*values, *additional)
    else:
      with rng_scope(RngState(key, count)) as child:
        results = step(*values, *additional)
        count += child.draws
    return count, tuple(jnp.asarray(n, old.dtype) for n, old in zip(results, values))

  start = jnp.uint32(0), tuple(map(jnp.asarray, carried))
  return lax.while_loop(lambda state: test_condition(state[1]), run_body, start)[1]
