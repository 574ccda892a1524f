"""Upstream's helpers of lowerings, for programs that import them from `jaten`.

No lowering here is written with them. Each is what its name says, of arrays, by way of
the lowering that does the same. Arguments stand in upstream's order.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.jaten import (
  activation,
  creation,
  embedding,
  gather,
  indexing,
  matmul,
  normalize,
  pooling,
  resize,
  shapes,
  solve,
  sorting,
  special,
)
from torchax.ops.promotion import promote, result_dtype
from torchax.registry.names import aten, functions
from torchax.upstream.aliases import of_tensors, with_defaults

FACES: dict[str, Callable] = {
  # Lowerings that need fewer arguments than ATen gives them.
  "_aten_log_softmax": with_defaults(activation._aten_log_softmax, dim=-1),
  "_aten_native_batch_norm": of_tensors(
    with_defaults(
      normalize._aten_native_batch_norm, training=False, momentum=0.1, eps=1e-5
    )
  ),
  "_aten_native_group_norm": with_defaults(normalize._aten_native_group_norm, eps=1e-5),
  "_aten_native_layer_norm": with_defaults(
    normalize._aten_native_layer_norm, weight=None, bias=None, eps=1e-5
  ),
  "_aten_nonzero_static": with_defaults(indexing._aten_nonzero_static),
  "_aten__linalg_check_errors": with_defaults(
    solve._aten__linalg_check_errors, api_name="linalg", is_matrix=False
  ),
  # Other names.
  "_aten_erfcx": special._aten_special_erfcx,
  "_aten_to_dtype_layout": of_tensors(aten._to_copy),
  # Shapes, or tensors, may be one argument or many.
  "_aten_broadcast_tensors": of_tensors(functions.broadcast_tensors),
  "_rand": of_tensors(functions.rand, makes=True),
  "_aten_randn": of_tensors(functions.randn, makes=True),
}


# --- other arguments than ATen's ----------------------------------------------------


def _aten_linalg_solve_triangular(a, b, *, upper=True, left=True, unitriangular=False):
  """X of A X = B; `upper` has a default."""
  return solve._aten_linalg_solve_triangular(a, b, upper, left, unitriangular)


def _aten_scatter_reduce(input, dim, index, src, reduce=None, *, include_self=True):
  """Without `reduce` the values take the places, as in `scatter`."""
  if reduce is None:
    return gather._aten_scatter_src(input, dim, index, src)
  return gather._aten_scatter_reduce(
    input, dim, index, src, reduce, include_self=include_self
  )


def _aten_scatter(input, dim, index, src, reduce=None):
  """`src` is an array or a number; `reduce` is "add" or "multiply"."""
  options = {} if reduce is None else {"reduce": reduce}
  return of_tensors(aten.scatter)(input, dim, index, src, **options)


_aten_scatter_src = _aten_scatter


def _aten_max_unpoolxd(input, indices, output_size, stride=None, padding=0):
  """Stride and padding are in the output's size already."""
  return pooling._unpool(input, indices, tuple(output_size), len(output_size))


def _aten_nonzero(x, as_tuple=False):
  """The places as rows, or as an array for each dimension."""
  places = indexing._aten_nonzero(x)
  return tuple(places.T) if as_tuple else places


def _aten_sort(a, dim=-1, descending=False, stable=False):
  """It is stable in any case."""
  return sorting._aten_sort(a, dim, descending)


def _aten__embedding_bag(weight, indices, offsets=None, *options, **named):
  """Without `offsets`, each row of the indices of shape (bags, length) is a bag."""
  if offsets is None:
    bags, length = indices.shape
    offsets = jnp.arange(0, bags * length, length, indices.dtype)
    indices = indices.ravel()
  return embedding._aten__embedding_bag(weight, indices, offsets, *options, **named)


def _aten_bernoulli(self, p=0.5, *, generator=None, env=None):
  """Ones with probability `p`, in the shape and dtype of `self`."""
  return of_tensors(aten.bernoulli.p)(self, p, generator=generator, env=env)


def _aten_normal(self, mean=0, std=1, generator=None, env=None):
  """Normal numbers in the shape and dtype of `self`."""
  draw = of_tensors(aten.normal_functional)
  return draw(self, mean, std, generator=generator, env=env)


def _aten_randint_like(input, *bounds, env=None, **options):
  """Integers below `high`, or from `low` below `high`, in the shape of `input`."""
  return of_tensors(functions.randint_like)(input, *bounds, env=env, **options)


# --- conversions --------------------------------------------------------------------


def _aten_to_dtype(a, dtype, non_blocking=False, copy=False, memory_format=None):
  """The array in a torch dtype; as it is where that is None."""
  return creation._aten__to_copy(a, dtype=dtype)


def _aten_to_device(x, device, dtype):
  """As `_aten_to_dtype`: an array stays where JAX has it."""
  return creation._aten__to_copy(x, dtype=dtype)


def _aten_local_scalar_dense(x) -> bool | int | float | complex:
  """The number of an array that has one element, which must not be traced."""
  return x.item()


# --- numbers and dtypes -------------------------------------------------------------


def _is_int(x) -> bool:
  """Is it an integer, or an array of integers? For Python a bool is one."""
  if isinstance(x, jax.Array):
    return bool(jnp.issubdtype(x.dtype, jnp.integer))
  return isinstance(x, int)


def _torch_binary_scalar_type(scalar, tensor):
  """The dtype that torch gives an operation of an array and a number."""
  return result_dtype(scalar, tensor)


def highest_precision_int_dtype(tensor1, tensor2):
  """The wider one of two integer dtypes, or the first of two of one width.

  Raises:
    ValueError: one of them is no integer.
  """
  widths = [jnp.iinfo(tensor.dtype).bits for tensor in (tensor1, tensor2)]
  return tensor1.dtype if widths[0] >= widths[1] else tensor2.dtype


def _run_binary_pointwise_operator(op: Callable, x, y):
  """A function of two arrays, on operands of torch's promoted dtype."""
  return op(*promote(x, y))


def _with_reduction_scalar(jax_func: Callable, self, dim, keepdim):
  """A reduction of JAX; an array of no dimensions takes 0 and -1 as its `dim`."""
  if self.ndim == 0:
    return jax_func(self.reshape(1), axis=dim, keepdims=False)
  return jax_func(self, axis=dim, keepdims=keepdim)


# --- places -------------------------------------------------------------------------


def _indices_along_axis(x, axis):
  """0, 1, … along an axis of `x`, of one element along all others."""
  shape = [1] * x.ndim
  shape[axis] = -1
  return jnp.arange(x.shape[axis]).reshape(shape)


def _broadcast_indices(indices, shape):
  """An array of indices in the shape that it is used in."""
  return jnp.broadcast_to(indices, shape)


def _scatter_index(dim, index):
  """Where `scatter` writes, an array for each dimension, and what it reads of `src`."""
  places = list(jnp.indices(index.shape))
  places[dim] = index
  return tuple(places), tuple(slice(0, size) for size in index.shape)


def _generate_indices(dims, skip_dim_indices=None) -> list[list[int]]:
  """All places of an array of the shape `dims`, with 0 in the dimensions to skip."""
  skipped = set(skip_dim_indices or ())
  ranges = [range(1 if axis in skipped else n) for axis, n in enumerate(dims)]
  return [list(place) for place in itertools.product(*ranges)]


def _strided_index(sizes, strides, storage_offset=None):
  """Of each element of a strided tensor, its place in the flat memory."""
  offset = storage_offset or 0
  reach = offset + sum((n - 1) * step for n, step in zip(sizes, strides))
  return shapes._strided_places(reach + 1, tuple(sizes), strides, offset)


def _get_median_index(x, axis=None, keepdims=False):
  """Where the median is, along an axis or in all of it; of two, the lower one."""
  size = x.size if axis is None else x.shape[axis]
  order = jnp.argsort(
    x.ravel() if axis is None else x, axis=0 if axis is None else axis
  )
  found = lax.index_in_dim(order, (size - 1) // 2, axis or 0, keepdims=axis is not None)
  if axis is None:
    return found.reshape((1,) * x.ndim) if keepdims else found
  return found if keepdims else found.squeeze(axis)


def diag_indices_with_offset(input_shape, offset, dim1=0, dim2=1) -> list[jax.Array]:
  """The places in `dim1` and in `dim2` of a diagonal above (or below) the main one."""
  rows, columns = input_shape[dim1], input_shape[dim2]
  down, right = max(-offset, 0), max(offset, 0)
  places = jnp.arange(max(min(rows - down, columns - right), 0))
  return [places + down, places + right]


def _shape_static_boolean_index_put(
  self, mask, values, accumulate=False, is_sequential=False, left_align_mask=True
):
  """`self` with values written where `mask` is true, in compiled functions too.

  Args:
    self: what is copied and written to.
    mask: of the leading dimensions of `self`.
    values: one for each true element in turn, or one for all.
    accumulate: they are added.
    is_sequential: has no meaning here; the result is the same.
    left_align_mask: False where there is a value for each element, true or not.
  """
  if left_align_mask:
    return indexing._aten_index_put(self, [mask], values, accumulate)
  written = self + values if accumulate else jnp.asarray(values, self.dtype)
  mask = mask.reshape(mask.shape + (1,) * (self.ndim - mask.ndim))
  return jnp.where(mask, written, self)


# --- distances ----------------------------------------------------------------------


def _hamming_distance(x1, x2):
  """In how many places each row of `x1` differs from each row of `x2`."""
  return matmul._aten_cdist_forward(x1, x2, 0.0)


def _euclidean_direct(x1, x2):
  """Distances of all rows, by their differences."""
  return matmul._aten_cdist_forward(x1, x2, 2.0, 2)


def _euclidean_mm(x1, x2):
  """Distances of all rows, by a product of matrices."""
  return matmul._aten_cdist_forward(x1, x2, 2.0, 1)


# --- pooling and resizing -----------------------------------------------------------


def pool(inputs, init, reduce_fn: Callable, window_shape, strides, padding):
  """Folds windows over the last dimensions, as `lax.reduce_window` does.

  Args:
    inputs: any leading dimensions, and one for each size in `window_shape`.
    init: the number that a fold starts with, which stands in the padding too.
    reduce_fn: of two numbers, as `lax.max`.
    window_shape: sizes of the window.
    strides: one for each size; None for 1.
    padding: "SAME", "VALID", or a pair (before, after) for each size.
  """
  window = tuple(window_shape)
  lead = inputs.ndim - len(window)
  if not isinstance(padding, str):
    padding = [(0, 0)] * lead + [tuple(pair) for pair in padding]
  return lax.reduce_window(
    inputs,
    jnp.asarray(init, inputs.dtype),
    reduce_fn,
    (1,) * lead + window,
    (1,) * lead + tuple(strides or (1,) * len(window)),
    padding,
  )


def _ceil_mode_padding(
  padding: Sequence[int],
  input_shape: Sequence[int],
  kernel_size: Sequence[int],
  stride: Sequence[int],
  dilation: Sequence[int],
  ceil_mode: bool,
) -> list[tuple[int, int]]:
  """Padding before and after each spatial dimension of an input (N, C, …).

  With `ceil_mode` there is as much after it as the last window needs.
  """
  widths = []
  sizes = zip(input_shape[2:], kernel_size, stride, padding, dilation, strict=True)
  for size, kernel, step, before, spread in sizes:
    after = before
    if ceil_mode:
      count = pooling._pooled_size(size, kernel, step, before, spread, True)
      reach = (count - 1) * step + spread * (kernel - 1) + 1
      after = max(before, reach - size - before)
    widths.append((before, after))
  return widths


def max_pool(
  inputs,
  kernel_size: Sequence[int],
  strides=None,
  padding=0,
  dilation=1,
  ceil_mode=False,
  with_index=False,
):
  """Maxima of windows of (N, C, …) or (C, …), and their indices `with_index`.

  Args:
    inputs: with one spatial dimension for each entry of `kernel_size`.
    kernel_size: a sequence, which says how many spatial dimensions there are.
    strides: the kernel's sizes where None.
    padding: for all dimensions or for each.
    dilation: likewise.
    ceil_mode: a last window may reach over the end.
    with_index: the places in the flattened spatial plane are given too.
  """
  values, indices = pooling._max_pool(
    inputs, len(kernel_size), kernel_size, strides, padding, dilation, ceil_mode
  )
  return (values, indices) if with_index else values


def _aten_upsample(
  input,
  output_size,
  align_corners,
  antialias,
  method,
  scale_factors=None,
  scales_h=None,
  scales_w=None,
):
  """An image (N, C, height, width) in another size.

  Args:
    input: the image.
    output_size: (height, width), or None where `scale_factors` say it.
    align_corners: as `torch.nn.functional.interpolate` has it.
    antialias: likewise.
    method: "bilinear" or "bicubic".
    scale_factors: of height and width, in place of the size.
    scales_h: the factor that the samples are placed by, where it is not the sizes'.
    scales_w: likewise.

  Raises:
    ValueError: another method.
  """
  lowerings = {
    ("bilinear", False): resize._aten_upsample_linear,
    ("bilinear", True): resize._aten_upsample_billinear_aa,
    ("bicubic", False): resize._aten_upsample_bicubic2d,
    ("bicubic", True): resize._aten_upsample_bicubic2d_aa,
  }
  lowering = lowerings.get((method, bool(antialias)))
  if lowering is None:
    raise ValueError(f'method should be "bilinear" or "bicubic", but got {method!r}.')
  if scale_factors is not None:
    scales_h, scales_w = scale_factors
  if output_size is None:
    output_size = list(map(resize._scaled, input.shape[2:], (scales_h, scales_w)))
  return lowering(input, output_size, align_corners, scales_h, scales_w)


def _smooth_upsample(method: str):
  def lowering(
    input,
    output_size,
    align_corners,
    scale_factors=None,
    scales_h=None,
    scales_w=None,
  ):
    """`_aten_upsample` with anti-aliasing."""
    scales = (scale_factors, scales_h, scales_w)
    return _aten_upsample(input, output_size, align_corners, True, method, *scales)

  return lowering


_aten_upsample_billinear_aa = _smooth_upsample("bilinear")
_aten_upsample_bicubic2d_aa = _smooth_upsample("bicubic")
