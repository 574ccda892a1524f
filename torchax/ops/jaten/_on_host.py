"""numpy implementations of operations, bitwise equal to the compiled lowerings.

`core/numpy_fallback.py` runs them while shapes are new, to save compilations. They take
the arguments of the lowering, with arrays and numbers as numpy arrays. They return None
to run the compiled program: for large arrays, promotion to another dtype, and dtypes
that numpy lacks. Sums, products, quotients and roots have equal bits, because IEEE 754
defines their rounding, and the caller flushes subnormal numbers to zero as XLA does.
"""

import math

import jax
import numpy as np
import torch

from torchax.core import mappings
from torchax.ops.promotion import default_float, dtype_or

# Largest size in elements; up to it numpy is as fast as a compiled program.
_MAX_SIZE = 2**15
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
# `dtype.kind` of numpy's own dtypes; those of ml_dtypes have others.
_STANDARD = "biufc"


def _promote(left, right):
  """Convert both to the float or integer dtype of one of them; None if impossible."""
  if not (_is_small(left) and _is_small(right)):
    return None
  if left.dtype != right.dtype:
    # A 0-d array of 64 bits may be a Python number, which has a weak type.
    if left.ndim == 0 and (right.ndim or right.dtype == np.float32):
      left = _scalar_as(left, right)
    elif right.ndim == 0:
      right = _scalar_as(right, left)
  if left is None or right is None or left.dtype != right.dtype:
    return None
  return (left, right) if left.dtype in (*_FLOATS, *_INTEGERS) else None


def _is_small(value) -> bool:
  return isinstance(value, np.ndarray) and value.size <= _MAX_SIZE


def _scalar_as(scalar, other):
  """Convert a 0-d array to the dtype of `other`; None if it would promote `other`.

  Without JAX's x64 mode, 64 bits mean a Python number.
  """
  kinds = scalar.dtype.kind, other.dtype.kind
  is_weak = scalar.dtype.itemsize == 8 and not jax.config.jax_enable_x64
  if other.dtype in _FLOATS:
    keeps_dtype = kinds[0] in "bi" or (kinds[0] == "f" and (other.ndim or is_weak))
  elif kinds == ("i", "i") and is_weak:
    limits = np.iinfo(other.dtype)
    keeps_dtype = limits.min <= scalar <= limits.max
  else:
    keeps_dtype = False
  return scalar.astype(other.dtype) if keeps_dtype else None


def _small(function, *arrays):
  """Call a function of arrays; None for a large result."""
  result = np.asarray(function(*arrays))
  return result if result.size <= _MAX_SIZE else None


def _binary(function, dtypes=(*_FLOATS, *_INTEGERS)):
  def on_host(self, other):
    pair = _promote(self, other)
    return _small(function, *pair) if pair and pair[0].dtype in dtypes else None

  return on_host


def _unary(function, dtypes=(*_FLOATS, *_INTEGERS)):
  def on_host(self):
    is_supported = self.size <= _MAX_SIZE and self.dtype in dtypes
    return _small(function, self) if is_supported else None

  return on_host


def _with_alpha(function):
  binary = _binary(function)

  def on_host(self, other, alpha=1):
    return binary(self, other) if _is_one(alpha) else None

  return on_host


def _is_one(alpha) -> bool:
  """Return True for the integer 1; the lowering checks factors of other kinds."""
  alpha = np.asarray(alpha)
  return alpha.ndim == 0 and alpha.dtype.kind == "i" and alpha == 1


def _quotient(left, right):
  # XLA multiplies by the reciprocal of a divisor that is broadcast.
  is_broadcast = right.size < np.broadcast(left, right).size
  return left * np.reciprocal(right) if is_broadcast else left / right


def _divide(self, other, rounding_mode=None):
  return _true_divide(self, other) if rounding_mode is None else None


def _boolean(function):
  def on_host(self, *other):
    arrays = (self, *other)
    is_supported = all(a.dtype == np.bool_ and a.size <= _MAX_SIZE for a in arrays)
    return np.asarray(function(*arrays)) if is_supported else None

  return on_host


def power(self, exponent):
  """Square an array; return None for other exponents."""
  is_square = type(exponent) in (int, float) and exponent == 2
  return _square(self) if is_square else None


_true_divide = _binary(_quotient, _FLOATS)
_square = _unary(np.square, _FLOATS)
POWER = {"static": ("exponent",), "on_host": power}
POINTWISE = {
  "abs": _unary(np.abs),
  "add": _with_alpha(np.add),
  "bitwise_and": _boolean(np.logical_and),
  "bitwise_not": _boolean(np.logical_not),
  "bitwise_or": _boolean(np.logical_or),
  "div": _divide,
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
  "sub": _with_alpha(np.subtract),
}


# --- casts, factories and indexing -----------------------------------------------


def _to_wider(array, dtype):
  """Convert bools to numbers, or integers to floats; None for other conversions."""
  dtype = np.dtype(dtype)
  if array.dtype == dtype:
    return array
  is_wider = array.dtype.kind in "biu" and dtype in _FLOATS
  is_wider |= array.dtype.kind == "b" and dtype.kind in "iu"
  return array.astype(dtype) if is_wider and array.size <= _MAX_SIZE else None


def to_copy(self, *, dtype=None):
  """Copy an array, or convert it by `_to_wider`."""
  converted = self if dtype is None else _to_wider(self, mappings.t2j_dtype(dtype))
  return None if converted is None else np.array(converted)


def copy(self, src):
  """Convert `src` to the dtype of `self` and broadcast it to its shape."""
  converted = _to_wider(src, self.dtype)
  return None if converted is None else np.array(np.broadcast_to(converted, self.shape))


def full(size, value, dtype):
  """Return a small array of a numpy dtype, filled with a number that it represents."""
  dtype = np.dtype(dtype)
  is_valid = math.prod(size) <= _MAX_SIZE and min(size, default=0) >= 0
  return np.full(size, value, dtype) if is_valid and dtype.kind in _STANDARD else None


def constant(value):
  """Return a factory `(size) -> array` filled with `value`."""

  def on_host(size, *layout, dtype=None):
    dtype = dtype_or(dtype, default_float())
    return full(size, value, dtype)

  return on_host


def new_constant(value):
  """Return a factory `(self, size) -> array` filled with `value`."""

  def on_host(self, size, *layout, dtype=None):
    dtype = dtype_or(dtype, self.dtype)
    return full(size, value, dtype)

  return on_host


def constant_like(value):
  """Return a factory `(self) -> array` filled with `value`."""
  new = new_constant(value)
  return lambda self, *, dtype=None: new(self, self.shape, dtype=dtype)


def full_like(self, fill_value, *, dtype=None):
  """Return an array of the shape of `self`, filled with a number."""
  dtype = dtype_or(dtype, self.dtype)
  value = np.asarray(fill_value)
  if value.dtype != dtype:
    value = _scalar_as(value, np.empty(1, dtype))
  return None if value is None or value.ndim else full(self.shape, value, dtype)


def embedding(weight, indices, *_ignored):
  """Look up rows of an embedding; the program handles indices out of range."""
  if weight.ndim != 2 or not indices.size or indices.min() < 0:
    return None
  return weight[indices]


def index(self, indices):
  """Index with integer arrays and masks."""
  return np.array(self[_index(indices)])


def _write(array, index, values, accumulate):
  """Return an array with values written, or added, at indices one after the other."""
  if values.dtype != array.dtype:
    return None
  values = np.broadcast_to(values, array[index].shape)
  result = np.array(array)
  if not accumulate:
    result[index] = values
    return result
  is_small = max(values.size, array.size) <= _MAX_SIZE
  if not is_small or array.dtype not in (*_FLOATS, *_INTEGERS):
    return None
  np.add.at(result, index, values)
  return result


def index_put(self, indices, values, accumulate=False, unsafe=False):
  """Write or add at integer indices, or the k-th value at the k-th True of a mask."""
  return _write(self, _index(indices), values, accumulate)


def _write_along(self, dim, index, values, accumulate):
  """Write one slice along a dimension per index."""
  shape = list(self.shape)
  shape[dim] = index.size
  if values.shape != tuple(shape) or index.min(initial=0) < 0:
    return None
  at = (slice(None),) * (dim % self.ndim) + (index.reshape(-1),)
  return _write(self, at, values, accumulate)


def index_copy(self, dim, index, source):
  """Write slices along a dimension."""
  return _write_along(self, dim, index, source, False)


def index_add(self, dim, index, source, *, alpha=1):
  """Add slices along a dimension."""
  return _write_along(self, dim, index, source, True) if _is_one(alpha) else None


def embedding_dense_backward(
  grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
):
  """Add rows of gradients to zeros."""
  shape = (int(num_weights), grad_output.shape[-1])
  table = full(shape, 0, grad_output.dtype)
  if scale_grad_by_freq or table is None:
    return None
  flat, rows = indices.reshape(-1), grad_output.reshape(-1, shape[-1])
  is_used = flat != (padding_idx if padding_idx >= 0 else num_weights)
  return _write_along(table, 0, flat[is_used], rows[is_used], True)


def scatter(self, dim, index, src, accumulate=False):
  """Write or add elements along a dimension."""
  values = src[tuple(slice(size) for size in index.shape)]
  is_matching = values.shape == index.shape and index.ndim == self.ndim
  if not is_matching or index.min(initial=0) < 0:
    return None
  grid = list(np.ogrid[tuple(slice(size) for size in index.shape)])
  grid[dim] = index
  return _write(self, tuple(grid), values, accumulate)


def scatter_value(self, dim, index, value):
  """Write a number along a dimension."""
  pair = _promote(self, np.asarray(value))
  return pair and scatter(self, dim, index, np.broadcast_to(pair[1], index.shape))


def scatter_add(self, dim, index, src):
  """Add elements along a dimension."""
  return scatter(self, dim, index, src, accumulate=True)


def masked_select(self, mask):
  """Select the elements where the mask is true."""
  shape = np.broadcast_shapes(self.shape, mask.shape)
  if mask.dtype != np.bool_:
    return None
  return np.broadcast_to(self, shape)[np.broadcast_to(mask, shape)]


def truth(function):
  """Return the numpy version of `any` or `all`, for bools."""

  def on_host(self, dim=None, keepdim=False):
    if self.dtype != np.bool_ or dim == ():
      return None
    axis = tuple(dim) if isinstance(dim, list | tuple) else dim
    return np.asarray(function(self, axis, keepdims=bool(keepdim)))

  return on_host


def bincount(self, weights=None, minlength=0):
  """Count integers; the lowering refuses negative ones, and sums weights."""
  is_valid = self.ndim == 1 and self.dtype.kind in "iu" and self.min(initial=0) >= 0
  if weights is not None or not is_valid:
    return None
  counts = np.bincount(self, minlength=minlength)
  return counts.astype(mappings.t2j_dtype(torch.int64))


def repeat_interleave(self, repeats, dim=None, *, output_size=None):
  """Repeat slices; the lowering refuses wrong numbers of repeats."""
  total = self.shape[dim or 0] if self.ndim else 1
  total = self.size if dim is None else total
  count = int(repeats) * total if np.ndim(repeats) == 0 else int(np.sum(repeats))
  if np.min(repeats, initial=0) < 0 or output_size not in (None, count):
    return None
  return np.repeat(self, repeats, dim)


def repeat_interleave_positions(repeats, *, output_size=None):
  """Repeat each position of `repeats` as often as the number there says."""
  positions = np.arange(len(repeats), dtype=repeats.dtype)
  return repeat_interleave(positions, repeats, 0, output_size=output_size)


def _index(indices) -> tuple:
  """Return the indices for numpy, in which bytes are not masks."""
  return tuple(
    slice(None) if i is None else i.astype(bool) if i.dtype == np.uint8 else i
    for i in indices
  )


def index_select(self, dim, index):
  """Select slices along a dimension."""
  if not self.ndim or not index.size or index.min() < 0:
    return None
  return np.take(self, index.reshape(-1), dim)


def gather(self, dim, index, *, sparse_grad=False):
  """Select one element along a dimension per element of `index`."""
  if not index.ndim or index.ndim != self.ndim or not index.size or index.min() < 0:
    return None
  sizes = enumerate(index.shape)
  crop = tuple(slice(None if n == dim % self.ndim else size) for n, size in sizes)
  return np.take_along_axis(self[crop], index.astype(np.int64), dim)


def where(condition, self, other):
  """Select elements from two arrays of one dtype, or an array and a number."""
  if condition.dtype != np.bool_:
    return None
  are_arrays = isinstance(self, np.ndarray) and isinstance(other, np.ndarray)
  if are_arrays and self.dtype == other.dtype:
    return np.where(condition, self, other)
  pair = _promote(self, other)
  return np.where(condition, *pair) if pair else None


def masked_fill(self, mask, value):
  """Write a number where the mask is true."""
  pair = _promote(self, np.asarray(value))
  if pair is None or mask.dtype != np.bool_ or pair[0].dtype != self.dtype:
    return None
  return np.where(mask, pair[1], self)


def flip(self, dims):
  """Reverse the elements along dimensions."""
  return np.array(np.flip(self, tuple(dims)))


def slice_backward(grad_output, input_sizes, dim, start, end, step):
  """Write the gradient of a slice into zeros."""
  index = slice(int(start), int(min(end, input_sizes[dim])), int(step))
  return select_backward(grad_output, input_sizes, dim, index)


def select_backward(grad_output, input_sizes, dim, index):
  """Write the gradient of `select`, or of a slice, into zeros."""
  result = full(input_sizes, 0, grad_output.dtype)
  if result is not None:
    index = index if isinstance(index, slice) else int(index)
    result[(slice(None),) * (dim % len(input_sizes)) + (index,)] = grad_output
  return result
