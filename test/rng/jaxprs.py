"""Equations of jaxprs."""

import jax


def equations(jaxpr):
  """Yield the equations of a jaxpr and of the jaxprs inside."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
    ):
      if hasattr(inner, "jaxpr"):
        inner = inner.jaxpr
      if hasattr(inner, "eqns"):
        yield from equations(inner)
