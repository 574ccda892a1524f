"""Linear maps defined by their transpose: torch's derivatives as JAX primitives.

torch states an operation's derivative as a function of cotangents. Reverse mode applies
that function. Forward mode applies its transpose, which JAX derives. The residuals of
the map may be differentiated and mapped over as well.

`with_derivative` attaches such a map to computed arrays as their derivative.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# (residuals, cotangents, wanted) -> the cotangents of the wanted operands.
# None is a zero cotangent; its term of the formula must be skipped. If the derivative
# is infinite, as for equal eigenvalues, 0 times it would be NaN.
Transpose = Callable[[Sequence, Sequence, tuple[bool, ...]], list]


def linear_map(transpose: Transpose, residuals, operands, results) -> list[jax.Array]:
  """Apply the linear map whose transpose is `transpose` to `operands`.

  Args:
    transpose: `(residuals, cotangents, wanted) -> cotangents` of the operands for which
      the tuple `wanted` is true. The given cotangents are a list of arrays, shaped as
      the results; None if nothing depends on the result.
    residuals: arrays on which the map depends, not necessarily linearly.
    operands: float or complex arrays.
    results: the abstract values of the results, as returned by `jax.typeof`.
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

  def pull(*cotangents):
    return transpose(residuals, cotangents, (True,) * len(operands))

  # `jax.linear_transpose` does not support a scatter that sets elements.
  zeros = [jnp.zeros(result.shape, result.dtype) for result in results]
  _, push = jax.vjp(pull, *zeros)
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

    def at(*moving_residuals):
      residuals = list(primals[:count])
      for index, residual in zip(moving, moving_residuals):
        residuals[index] = residual
      # `_run` instead of the primitive, which has no derivative rule for residuals.
      return _run(
        *residuals,
        *primals[count:],
        transpose=transpose,
        count=count,
        results=results,
      )

    _, term = jax.jvp(at, [primals[i] for i in moving], [tangents[i] for i in moving])
    terms.append(term)
  if not terms:
    return out, [jnp.zeros_like(array) for array in out]
  return out, [functools.reduce(jnp.add, summands) for summands in zip(*terms)]


def _transpose(cotangents, *args, transpose, count, results):
  wanted = tuple([ad.is_undefined_primal(arg) for arg in args[count:]])
  given = [
    None if type(cotangent) is ad.Zero else cotangent for cotangent in cotangents
  ]
  found = iter(transpose(args[:count], given, wanted))
  return [None] * count + [next(found) if want else None for want in wanted]


def _batch(args, axes, *, transpose, count, results):
  size, args, axes = _rows_first(args, axes)
  transpose_rows = _of_rows(transpose, axes[:count], axes[count:])
  rows = [
    jax.core.ShapedArray((size, *result.shape), result.dtype) for result in results
  ]
  out = linear_map(transpose_rows, args[:count], args[count:], rows)
  return out, [0] * len(out)


def _rows_first(args, axes):
  """Move batch axes to the front; return the batch size, arguments and new axes."""
  size = next(a.shape[d] for a, d in zip(args, axes) if d is not None)
  args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, axes)]
  return size, args, [None if d is None else 0 for d in axes]


def _of_rows(transpose, of_residuals, of_operands) -> Transpose:
  """Return `transpose` mapped over rows; an axis of None is shared by all rows."""

  def transpose_rows(residuals, cotangents, wanted):
    def one_row(residuals, cotangents):
      return transpose(residuals, cotangents, wanted)

    found = jax.vmap(one_row, (of_residuals, 0))(list(residuals), list(cotangents))
    axes = [axis for axis, want in zip(of_operands, wanted) if want]
    return [array if axis == 0 else array.sum(0) for array, axis in zip(found, axes)]

  return transpose_rows


ad.primitive_jvps[_linear_map_p] = _jvp
ad.primitive_transposes[_linear_map_p] = _transpose
batching.primitive_batchers[_linear_map_p] = _batch
mlir.register_lowering(_linear_map_p, mlir.lower_fun(_run, multiple_results=True))


def with_derivative(transpose: Transpose, outputs, inputs, rest=()) -> list[jax.Array]:
  """Return `outputs` with a given linear map as their derivative by `inputs`.

  Args:
    transpose: transpose of the map; see `linear_map`. Its residuals are the outputs,
      the inputs and the rest; its operands are the inputs.
    outputs: float or complex arrays without derivatives.
    inputs: arrays.
    rest: more arrays that the map depends on, without derivatives.
  """
  return _with_derivative_p.bind(
    *outputs,
    *inputs,
    *rest,
    transpose=transpose,
    counts=(len(outputs), len(inputs)),
  )


_with_derivative_p = Primitive("with_derivative")
_with_derivative_p.multiple_results = True


@_with_derivative_p.def_impl
@_with_derivative_p.def_abstract_eval
def _outputs(*args, transpose, counts):
  return list(args[: counts[0]])


def _jvp_of_outputs(primals, tangents, *, transpose, counts):
  # These outputs, with their derivative, are the residuals: needed for second order.
  out = _with_derivative_p.bind(*primals, transpose=transpose, counts=counts)
  start, count = counts
  moving = [i for i in range(count) if not _is_zero(tangents[start + i])]
  results = [jax.typeof(array) for array in out]
  if not moving:
    return out, list(map(zero_tangent, out))

  def of_moving(residuals, cotangents, wanted):
    chosen = [i for i, want in zip(moving, wanted) if want]
    return transpose(residuals, cotangents, tuple([i in chosen for i in range(count)]))

  tangents = [tangents[start + i] for i in moving]
  return out, linear_map(of_moving, [*out, *primals[start:]], tangents, results)


def zero_tangent(value) -> ad.Zero:
  """Return the zero tangent of an array, for a rule of `jax.interpreters.ad`."""
  return ad.Zero(jax.typeof(value).to_tangent_aval())


def _is_zero(tangent) -> bool:
  """Return True for a zero tangent, which integers always have."""
  return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def _batch_outputs(args, axes, *, transpose, counts):
  size, args, axes = _rows_first(args, axes)
  start, count = counts
  for i in range(start):  # the derivative differs from row to row
    if axes[i] is None:
      args[i], axes[i] = jnp.broadcast_to(args[i], (size, *args[i].shape)), 0
  transpose_rows = _of_rows(transpose, axes, axes[start : start + count])
  out = _with_derivative_p.bind(*args, transpose=transpose_rows, counts=counts)
  return out, [0] * len(out)


ad.primitive_jvps[_with_derivative_p] = _jvp_of_outputs
batching.primitive_batchers[_with_derivative_p] = _batch_outputs
mlir.register_lowering(
  _with_derivative_p,
  lambda context, *args, transpose, counts: list(args[: counts[0]]),
)
