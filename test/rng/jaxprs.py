"""What a jaxpr consists of."""

import jax


def equations(jaxpr):
  """The equations of a jaxpr and of those inside of them."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
    ):
      if hasattr(inner, "jaxpr"):
        inner = inner.jaxpr
      if hasattr(inner, "eqns"):
        yield from equations(inner)
