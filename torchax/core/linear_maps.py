"""A linear map with a transpose that is given: how torch's derivatives reach JAX.

torch states an operation's derivative as a function of cotangents. Reverse mode takes
it as it is; forward mode is the transpose of it, which JAX finds. What the map depends
on besides, its residuals, may be differentiated and mapped over as well.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# (residuals, cotangents, wanted) -> the cotangents of the operands that are wanted.
# A cotangent that is None is 0, and its part of a formula is not to be computed: where
# a derivative is infinite, as that of equal eigenvectors, 0 times it would be NaN.
Transpose = Callable[[Sequence, Sequence, tuple[bool, ...]], list]


def linear_map(transpose: Transpose, residuals, operands, results) -> list[jax.Array]:
  """The map of which `transpose` is the transpose, at `operands`.

  Args:
    transpose: `(residuals, cotangents, wanted) -> cotangents` of the operands for which
      the tuple `wanted` is true. Cotangents are lists of arrays, shaped as the results;
      None of a result that nothing depends on.
    residuals: arrays on which the map depends in any way.
    operands: arrays of floats or complex numbers.
    results: the abstract values of the results, as `jax.typeof` gives them.
  """
  return _linear_map_p.bind(
    *residuals,
    *operands,
    transpose=transpose,
    count=len(residuals),
    results=tuple(results),
  )


_linear_map_p = Primitive("linear_map")
_linear_map_p.multiple_results = True


@_linear_map_p.def_impl
def _run(*args, transpose, count, results):
  residuals, operands = args[:count], args[count:]

  def pulled(*cotangents):
    return transpose(residuals, cotangents, (True,) * len(operands))

  # By `jax.vjp`: `jax.linear_transpose` takes no scatter that sets its elements.
  zeros = [jnp.zeros(result.shape, result.dtype) for result in results]
  _, push = jax.vjp(pulled, *zeros)
  return list(push(list(operands)))


@_linear_map_p.def_abstract_eval
def _abstract_eval(*args, transpose, count, results):
  return results


def _jvp(primals, tangents, *, transpose, count, results):
  out = linear_map(transpose, primals[:count], primals[count:], results)
  terms = []
  if any(type(t) is not ad.Zero for t in tangents[count:]):
    moved = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
    terms.append(linear_map(transpose, primals[:count], moved, results))
  moving = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
  if moving:

    def at(*given):
      residuals = list(primals[:count])
      for place, residual in zip(moving, given):
        residuals[place] = residual
      # Computed out in the open: a map has no derivative by its residuals of its own.
      return _run(
        *residuals,
        *primals[count:],
        transpose=transpose,
        count=count,
        results=results,
      )

    _, found = jax.jvp(at, [primals[i] for i in moving], [tangents[i] for i in moving])
    terms.append(found)
  if not terms:
    return out, [jnp.zeros_like(array) for array in out]
  return out, [functools.reduce(jnp.add, parts) for parts in zip(*terms)]


def _transpose(cotangents, *args, transpose, count, results):
  wanted = tuple([ad.is_undefined_primal(arg) for arg in args[count:]])
  given = [
    None if type(cotangent) is ad.Zero else cotangent for cotangent in cotangents
  ]
  found = iter(transpose(args[:count], given, wanted))
  return [None] * count + [next(found) if want else None for want in wanted]


def _batch(args, axes, *, transpose, count, results):
  size = next(a.shape[d] for a, d in zip(args, axes) if d is not None)
  residuals = [
    a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, axes[:count])
  ]
  operands = [
    batching.bdim_at_front(a, d, size) for a, d in zip(args[count:], axes[count:])
  ]
  places = [None if d is None else 0 for d in axes[:count]]

  def transpose_rows(residuals, cotangents, wanted):
    def one_row(residuals, cotangents):
      return transpose(residuals, cotangents, wanted)

    return jax.vmap(one_row, (places, 0))(list(residuals), list(cotangents))

  rows = [
    jax.core.ShapedArray((size, *result.shape), result.dtype) for result in results
  ]
  out = linear_map(transpose_rows, residuals, operands, rows)
  return out, [0] * len(out)


ad.primitive_jvps[_linear_map_p] = _jvp
ad.primitive_transposes[_linear_map_p] = _transpose
batching.primitive_batchers[_linear_map_p] = _batch
mlir.register_lowering(_linear_map_p, mlir.lower_fun(_run, multiple_results=True))
