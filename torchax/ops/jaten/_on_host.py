"""Operations on numpy arrays, with the bits of the compiled lowerings.

`core/numpy_fallback.py` runs them while shapes are new. Each has the arguments of its
lowering, arrays and numbers as numpy arrays, and returns None for what it leaves to the
program: large arrays, promotion between kinds, dtypes that numpy lacks. XLA's code for
the CPU takes subnormal numbers as zero, so arithmetic leaves those to it too. Every
other sum, product, quotient and root has one right rounding.
"""

import math

import jax
import numpy as np

from torchax.core import mappings
from torchax.ops.promotion import default_float

# Elements of a result; numpy is as quick as a program for so few.
_MOST = 2**15
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_BITS = {_FLOATS[0]: np.uint32, _FLOATS[1]: np.uint64}
# Twice the bits of the smallest normal number, less two.
_MOST_SUBNORMAL = {np.uint32: 2**24 - 2, np.uint64: 2**53 - 2}
_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
# Kinds of numpy's own dtypes; those of ml_dtypes have others.
_STANDARD = "biufc"


def _pair(left, right):
  """Return both in one dtype, float or integer; None where torch promotes further."""
  if not (_is_small(left) and _is_small(right)):
    return None
  if left.dtype != right.dtype:
    # Without dimensions, 64 bits may be a number's, which has no dtype to promote to.
    if left.ndim == 0 and (right.ndim or right.dtype == np.float32):
      left = _scalar_as(left, right)
    elif right.ndim == 0:
      right = _scalar_as(right, left)
  if left is None or right is None or left.dtype != right.dtype:
    return None
  return (left, right) if left.dtype in (*_FLOATS, *_INTEGERS) else None


def _is_small(value) -> bool:
  return isinstance(value, np.ndarray) and value.size <= _MOST


def _scalar_as(scalar, other):
  """Return a number or 0-d array in the dtype of `other`, if it has a lower category.

  Without JAX's x64 mode only Python's numbers have 64 bits.
  """
  kinds = scalar.dtype.kind, other.dtype.kind
  is_number = scalar.dtype.itemsize == 8 and not jax.config.jax_enable_x64
  if other.dtype in _FLOATS:
    is_lower = kinds[0] in "bi" or (kinds[0] == "f" and (other.ndim or is_number))
  elif kinds == ("i", "i") and is_number:
    limits = np.iinfo(other.dtype)
    is_lower = limits.min <= scalar <= limits.max
  else:
    is_lower = False
  with np.errstate(over="ignore"):
    return scalar.astype(other.dtype) if is_lower else None


def _has_subnormal(array) -> bool:
  """Return True for a float array with numbers in [-tiny, tiny] other than zeros."""
  carrier = _BITS.get(array.dtype)
  if carrier is None or not array.size:
    return False
  # Without the sign, less one: zeros wrap around and are largest.
  bits = (array.view(carrier) << carrier(1)) - carrier(2)
  return np.minimum.reduce(bits, axis=None) <= _MOST_SUBNORMAL[carrier]


def _exact(function, *arrays):
  """Return the result of an operation of one rounding; None near subnormal numbers."""
  with np.errstate(all="ignore"):
    result = np.asarray(function(*arrays))
    is_subnormal = any(map(_has_subnormal, (result, *arrays)))
  return None if is_subnormal or result.size > _MOST else result


def _binary(function, dtypes=(*_FLOATS, *_INTEGERS)):
  def on_host(self, other):
    pair = _pair(self, other)
    return _exact(function, *pair) if pair and pair[0].dtype in dtypes else None

  return on_host


def _unary(function, dtypes=(*_FLOATS, *_INTEGERS)):
  def on_host(self):
    is_few = self.size <= _MOST and self.dtype in dtypes
    return _exact(function, self) if is_few else None

  return on_host


def _scaled(function):
  def on_host(self, other, alpha=1):
    return binary(self, other) if np.ndim(alpha) == 0 and alpha == 1 else None

  binary = _binary(function)
  return on_host


def _divided(self, other, rounding_mode=None):
  """XLA multiplies by the reciprocal of a divisor that is broadcast."""
  is_alone = np.ndim(other) == np.ndim(self) and np.shape(other) == np.shape(self)
  return _quotient(self, other) if is_alone and rounding_mode is None else None


def _boolean(function):
  def on_host(self, *other):
    arrays = (self, *other)
    is_known = all(a.dtype == np.bool_ and a.size <= _MOST for a in arrays)
    return np.asarray(function(*arrays)) if is_known else None

  return on_host


def power(self, exponent):
  """Squares only."""
  is_square = type(exponent) in (int, float) and exponent == 2
  return _square(self) if is_square else None


_quotient = _binary(np.divide, _FLOATS)
_square = _unary(np.square, _FLOATS)
POWER = {"static": ("exponent",), "on_host": power}
POINTWISE = {
  "abs": _unary(np.abs),
  "add": _scaled(np.add),
  "bitwise_and": _boolean(np.logical_and),
  "bitwise_not": _boolean(np.logical_not),
  "bitwise_or": _boolean(np.logical_or),
  "div": _divided,
  "eq": _binary(np.equal),
  "ge": _binary(np.greater_equal),
  "gt": _binary(np.greater),
  "le": _binary(np.less_equal),
  "logical_and": _boolean(np.logical_and),
  "logical_not": _boolean(np.logical_not),
  "logical_or": _boolean(np.logical_or),
  "lt": _binary(np.less),
  "mul": _binary(np.multiply),
  "ne": _binary(np.not_equal),
  "neg": _unary(np.negative),
  "reciprocal": _unary(np.reciprocal, _FLOATS),
  "sqrt": _unary(np.sqrt, _FLOATS),
  "sub": _scaled(np.subtract),
}


# --- moves -----------------------------------------------------------------------


def _converted(array, dtype):
  """Return an array in a wider kind of numbers; None for any other conversion."""
  dtype = np.dtype(dtype)
  if array.dtype == dtype:
    return array
  is_wider = array.dtype.kind in "biu" and dtype in _FLOATS
  is_wider |= array.dtype.kind == "b" and dtype.kind in "iu"
  return array.astype(dtype) if is_wider and array.size <= _MOST else None


def to_copy(self, *, dtype=None):
  """A copy, or a conversion that loses nothing but a rounding."""
  converted = self if dtype is None else _converted(self, mappings.t2j_dtype(dtype))
  return None if converted is None else np.array(converted)


def copy(self, src):
  """`src` broadcast to the shape of `self`."""
  converted = _converted(src, self.dtype)
  return None if converted is None else np.array(np.broadcast_to(converted, self.shape))


def filled(size, value, dtype):
  """An array of one number, which the dtype holds; of numpy's own dtypes."""
  dtype = np.dtype(dtype)
  is_few = math.prod(size) <= _MOST and min(size, default=0) >= 0
  return np.full(size, value, dtype) if is_few and dtype.kind in _STANDARD else None


def of_size(value):
  """A factory `(size)` of one number."""

  def on_host(size, *layout, dtype=None):
    dtype = default_float() if dtype is None else mappings.t2j_dtype(dtype)
    return filled(size, value, dtype)

  return on_host


def of_new_size(value):
  """A factory `(self, size)` of one number."""

  def on_host(self, size, *layout, dtype=None):
    dtype = self.dtype if dtype is None else mappings.t2j_dtype(dtype)
    return filled(size, value, dtype)

  return on_host


def like(value):
  """A factory `(self)` of one number."""

  def on_host(self, *, dtype=None):
    return made(self, self.shape, dtype=dtype)

  made = of_new_size(value)
  return on_host


def full_like(self, fill_value, *, dtype=None):
  """An array of one number, in a shape and a dtype that are known."""
  dtype = self.dtype if dtype is None else mappings.t2j_dtype(dtype)
  value = np.asarray(fill_value)
  if value.dtype != dtype:
    value = _scalar_as(value, np.empty(1, dtype))
  return None if value is None or value.ndim else filled(self.shape, value, dtype)


def rows(weight, indices, *_ignored):
  """Rows of a table; an index out of range is the program's matter."""
  if weight.ndim != 2 or not indices.size or indices.min() < 0:
    return None
  return weight[indices]


def index(self, indices):
  """Elements at places that index arrays say; masks have no program."""
  return np.array(self[tuple(slice(None) if i is None else i for i in indices)])


def index_select(self, dim, index):
  """Rows along a dimension."""
  if not self.ndim or not index.size or index.min() < 0:
    return None
  return np.take(self, index.reshape(-1), dim)


def gather(self, dim, index, *, sparse_grad=False):
  """Elements along a dimension."""
  if not index.ndim or index.ndim != self.ndim or not index.size or index.min() < 0:
    return None
  axes = enumerate(index.shape)
  window = tuple(slice(None if n == dim % self.ndim else size) for n, size in axes)
  return np.take_along_axis(self[window], index.astype(np.int64), dim)


def where(condition, self, other):
  """Elements of one of two arrays of one dtype."""
  if condition.dtype != np.bool_:
    return None
  are_arrays = isinstance(self, np.ndarray) and isinstance(other, np.ndarray)
  if are_arrays and self.dtype == other.dtype:
    return np.where(condition, self, other)
  pair = _pair(self, other)
  return np.where(condition, *pair) if pair else None


def masked_fill(self, mask, value):
  """A number where a mask is true."""
  pair = _pair(self, np.asarray(value))
  if pair is None or mask.dtype != np.bool_ or pair[0].dtype != self.dtype:
    return None
  return np.where(mask, pair[1], self)


def flip(self, dims):
  """The elements in the reverse order."""
  return np.array(np.flip(self, tuple(dims)))


def slice_backward(grad_output, input_sizes, dim, start, end, step):
  """Zeros around the elements of a slice."""
  result = filled(input_sizes, 0, grad_output.dtype)
  if result is not None:
    start, end = int(start), int(min(end, input_sizes[dim]))
    part = slice(start, end, int(step))
    result[(slice(None),) * (dim % len(input_sizes)) + (part,)] = grad_output
  return result


def select_backward(grad_output, input_sizes, dim, index):
  """Zeros around a row."""
  result = filled(input_sizes, 0, grad_output.dtype)
  if result is not None:
    result[(slice(None),) * (dim % len(input_sizes)) + (int(index),)] = grad_output
  return result
