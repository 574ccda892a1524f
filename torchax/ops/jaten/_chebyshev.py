"""Chebyshev series, in which special functions are written down."""

import jax
import jax.numpy as jnp


def chebyshev(coefficients: tuple[float, ...], t: jax.Array) -> jax.Array:
  """Σ cₖ Tₖ(t) on -1 ≤ t ≤ 1, by Clenshaw's recurrence."""
  last = before_last = jnp.zeros_like(t)
  for coefficient in reversed(coefficients[1:]):
    last, before_last = coefficient + 2 * t * last - before_last, last
  return coefficients[0] + t * last - before_last
