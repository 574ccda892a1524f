"""Linear maps with a given transpose, and results whose derivative is such a map."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from torchax.core.linear_maps import linear_map, with_derivative

TABLE = jnp.arange(12.0).reshape(4, 3)
ROWS = jnp.linspace(-1, 1, 6).reshape(2, 3)
NUMBERS = jnp.linspace(0.5, 2, 3)


def _transpose(residuals, cotangents, wanted):
  """Transpose (v, w) -> (a * v + w, a * w)."""
  (a,), (first, second) = residuals, cotangents
  found = [first * a, first + second * a]
  return [gradient for gradient, want in zip(found, wanted) if want]


def _map(a, v, w):
  return linear_map(_transpose, [a], [v, w], [jax.typeof(v), jax.typeof(v)])


def _open(a, v, w):
  return [a * v + w, a * w]


def test_transpose_of_a_map_is_the_given_one():
  a, v, w = NUMBERS, ROWS[0], ROWS[1]
  for run in (_map, jax.jit(_map)):
    np.testing.assert_allclose(run(a, v, w), _open(a, v, w), rtol=1e-6)


def test_linear_map_is_differentiable_in_operands_and_residuals():
  def total(run):
    return lambda a, v, w: sum(out.sum() for out in map(jnp.sin, run(a, v, w)))

  values = (NUMBERS, ROWS[0], ROWS[1])
  for order in (jax.grad, jax.hessian):
    found, expected = (order(total(run), (0, 1, 2))(*values) for run in (_map, _open))
    jax.tree.map(
      lambda f, e: np.testing.assert_allclose(f, e, atol=1e-5), found, expected
    )
  check_grads(total(_map), values, order=2, modes=["fwd", "rev"], atol=1e-2, rtol=1e-2)


def test_rows_share_unmapped_operands():
  for axes in ((None, 0, 0), (None, None, 0), (None, 0, None)):
    values = (NUMBERS, *[ROWS[0] if axis is None else ROWS for axis in axes[1:]])
    found, expected = (jax.vmap(run, axes)(*values) for run in (_map, _open))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _double(residuals, cotangents, wanted):
  """Return the derivative of `_looked_up` by (table, x), ten times."""
  _, table, x, index = residuals
  (cotangent,) = cotangents
  found = [
    jnp.zeros_like(table).at[index].add(10 * cotangent * x),
    10 * cotangent * table[index],
  ]
  return [gradient for gradient, want in zip(found, wanted) if want]


def _looked_up(table, x, index):
  stopped = jax.lax.stop_gradient(table[index] * x)
  (out,) = with_derivative(_double, [stopped], [table, x], [index])
  return out


def test_outputs_have_the_derivative_that_is_given():
  index = jnp.array(2)
  x = ROWS[0]
  np.testing.assert_array_equal(_looked_up(TABLE, x, index), TABLE[2] * x)
  for transform in (lambda f: f, jax.jit, jax.checkpoint):
    f = transform(lambda t, x: _looked_up(t, x, index).sum())
    of_table, of_x = jax.grad(f, (0, 1))(TABLE, x)
    np.testing.assert_allclose(of_table, jnp.zeros((4, 3)).at[2].set(10 * x))
    np.testing.assert_allclose(of_x, 10 * TABLE[2])
  # Differentiate by the residuals, which are the arguments: the second gradient.
  mixed = jax.jacobian(jax.grad(f, 1))(TABLE, x)
  np.testing.assert_allclose(mixed[:, 2], 10 * jnp.eye(3))


def test_rows_of_outputs_do_not_repeat_shared_operands():
  indices = jnp.array([2, 0])

  def total(table, x):
    rows = jax.vmap(_looked_up, (None, 0, 0))(table, x, indices)
    return rows.sum()

  of_table, of_x = jax.jit(jax.grad(total, (0, 1)))(TABLE, ROWS)
  np.testing.assert_allclose(of_table, jnp.zeros((4, 3)).at[indices].add(10 * ROWS))
  np.testing.assert_allclose(of_x, 10 * TABLE[indices])
  forward = jax.make_jaxpr(lambda t, x: jax.vjp(total, t, x)[0])(TABLE, ROWS)
  sizes = [v.aval.size for eqn in forward.jaxpr.eqns for v in eqn.outvars]
  assert max(sizes) < TABLE.size
