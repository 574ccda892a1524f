"""Convolutions, transposed convolutions, and their gradients.

Layouts are torch's: input (N, C, spatial…), weight (out, in/groups, spatial…), and
for a transposed convolution (in, out/groups, spatial…). The gradient of the input is
the other kind of convolution; that of the weight is a linear transpose by JAX.

XLA's CPU compiler has fast convolutions only without groups, in one and two dimensions.
With groups they take up to 40 times as long, and their gradients up to 100 times. So
there each group is a convolution. A depthwise one is a sum over the positions of the
kernel (`_sum_over_kernel`), one in three dimensions is one in two (`_fold_depth`), and
a transposed one with a large stride is one without stride (`_by_phase`).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import expand_sizes
from torchax.ops.promotion import widen
from torchax.registry.names import aten

# Largest number of groups and of kernel positions in an unrolled program of the CPU.
_UNROLLED_GROUPS, _UNROLLED_POSITIONS = 8, 64
# Growth of an input by its dilation, above which the CPU's program omits the zeros.
_MOST_GROWTH = 4


def _correlate(
  input, weight, stride, padding, dilation, groups, input_dilation=None, order=(0, 1)
):
  """Correlate with a weight (out, in/groups, …); `order` has their positions."""
  spatial = tuple(range(2, weight.ndim))
  sizes = (stride, padding, input_dilation or (1,) * len(stride), dilation)
  if jax.default_backend() == "cpu":
    by_output = weight.transpose(*order, *spatial)
    result = _correlate_by_parts(input, by_output, *sizes, groups)
    if result is not None:
      return result
  layout = (0, 1, *spatial)
  return lax.conv_general_dilated(
    input,
    weight,
    *sizes,
    lax.ConvDimensionNumbers(layout, (*order, *spatial), layout),
    feature_group_count=groups,
  )


def _correlate_by_parts(
  input, weight, stride, padding, input_dilation, dilation, groups
):
  """Correlate by smaller convolutions or sums; None if XLA's CPU program is fast."""
  positions = math.prod(weight.shape[2:])
  is_depthwise = groups > 1 and weight.shape[1] == 1
  # For a kernel that is larger than the input, XLA exchanges them, which is slow. A
  # single dimension may be a padded sequence, and its program serves several sizes.
  space = [size for size in input.shape[2:] if isinstance(size, int)]  # not symbolic
  is_static = len(space) == len(stride)
  is_large = is_static and groups == 1 < len(space) and positions > math.prod(space) > 0
  if (is_depthwise or is_large) and positions <= _UNROLLED_POSITIONS:
    return _sum_over_kernel(
      input, weight, is_depthwise, stride, padding, input_dilation, dilation
    )
  is_sparse = is_static and math.prod(input_dilation) > _MOST_GROWTH
  if is_sparse and max(stride) == max(dilation) == 1:
    return _by_phase(input, weight, padding, input_dilation, groups)
  if groups > 1:
    batch, channels = input.shape[:2]
    inputs = input.reshape(batch, groups, channels // groups, *input.shape[2:])
    pairs = jnp.moveaxis(inputs, 1, 0), weight.reshape(groups, -1, *weight.shape[1:])

    def correlate_group(pair):
      return _correlate(*pair, stride, padding, dilation, 1, input_dilation)

    if groups <= _UNROLLED_GROUPS:
      results = jnp.stack(list(map(correlate_group, zip(*pairs))), 1)
    else:
      results = jnp.moveaxis(lax.map(correlate_group, pairs), 0, 1)
    return lax.collapse(results, 1, 3)
  if len(stride) == 3:
    return _fold_depth(input, weight, stride, padding, input_dilation, dilation)
  return None


def _windows(input, axis, length, stride, dilation) -> list:
  """Return the elements that each position of a kernel meets along an axis."""
  starts = [dilation * index for index in range(length)]
  span = (input.shape[axis] - starts[-1] - 1) // stride * stride + 1
  return [lax.slice_in_dim(input, i, i + span, stride, axis) for i in starts]


def _pad(input, padding, dilation):
  edges = [(low, high, d - 1) for (low, high), d in zip(padding, dilation)]
  unpadded = [(0, 0, 0)] * (input.ndim - len(edges))
  return lax.pad(input, np.zeros((), input.dtype), unpadded + edges)


def _sum_over_kernel(
  input, weight, is_depthwise, stride, padding, input_dilation, dilation
):
  """Sum over the kernel's positions, in float32 for half precision."""
  dtype, rank = input.dtype, len(stride)
  padded, weight = _pad(widen(input), padding, input_dilation), widen(weight)
  if is_depthwise:
    padded = jnp.repeat(padded, weight.shape[0] // input.shape[1], 1)
  parts = [padded]
  for axis, sizes in enumerate(zip(weight.shape[2:], stride, dilation), 2):
    parts = [window for part in parts for window in _windows(part, axis, *sizes)]

  def term(part, factors):
    if is_depthwise:
      return part * factors.reshape(-1, *[1] * rank)
    return jnp.einsum("nc...,oc->no...", part, factors)

  factors = jnp.moveaxis(lax.collapse(weight, 2), 2, 0)
  return functools.reduce(jnp.add, map(term, parts, factors)).astype(dtype)


def _fold_depth(input, weight, stride, padding, input_dilation, dilation):
  """Correlate images of some depth as a batch of images.

  An image has the channels of all depths that the kernel covers.
  """
  flat = [(0, 0), (0, 0)]
  padded = _pad(input, [padding[0], *flat], [input_dilation[0], 1, 1])
  covered = _windows(padded, 2, weight.shape[2], stride[0], dilation[0])
  images = jnp.moveaxis(jnp.concatenate(covered, 1), 2, 1)
  result = _correlate(
    lax.collapse(images, 0, 2),
    lax.collapse(jnp.moveaxis(weight, 2, 1), 1, 3),
    stride[1:],
    padding[1:],
    dilation[1:],
    1,
    input_dilation[1:],
  )
  return jnp.moveaxis(result.reshape(*images.shape[:2], *result.shape[1:]), 1, 2)


def _by_phase(input, weight, padding, input_dilation, groups):
  """Correlate with a dilated input, without products of its zeros.

  Every `d`-th result, for the dilation `d`, meets the same positions of the kernel. So
  these positions are a kernel of their own, and the results of all are interleaved.
  """
  rank, (channels, _, *kernel) = len(padding), weight.shape
  sizes = [
    (size - 1) * d + low + high - length + 2
    for size, d, (low, high), length in zip(
      input.shape[2:], input_dilation, padding, kernel
    )
  ]
  # With zeros around the kernel, all these kernels start at one element of the input.
  fronts = [-(low + 1) % d for d, (low, _) in zip(input_dilation, padding)]
  ends = [-(front + n) % d for front, n, d in zip(fronts, kernel, input_dilation)]
  weight = _pad(weight, zip(fronts, ends), (1,) * rank)
  lengths = [n // d for n, d in zip(weight.shape[2:], input_dilation)]
  outer, inner = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
  pairs = itertools.chain.from_iterable(zip(lengths, input_dilation))
  weight = lax.rev(weight.reshape(*weight.shape[:2], *pairs), inner)
  weight = lax.collapse(weight.transpose(0, *inner, 1, *outer), 0, 1 + rank)
  counts = [-(-size // d) for size, d in zip(sizes, input_dilation)]
  lows = [low // d for (low, _), d in zip(padding, input_dilation)]
  padding = [
    (low, count + length - 1 - size - low)
    for low, count, length, size in zip(lows, counts, lengths, input.shape[2:])
  ]
  ones = (1,) * rank
  result = _correlate(input, weight, ones, padding, ones, groups)
  result = result.reshape(input.shape[0], channels, *input_dilation, *counts)
  places = zip(range(2 + rank, 2 + 2 * rank), range(2, 2 + rank))
  result = result.transpose(0, 1, *itertools.chain.from_iterable(places))
  for axis in range(2, 2 + rank):
    result = lax.collapse(result, axis, axis + 2)
  return lax.slice(result, (0,) * result.ndim, (*result.shape[:2], *sizes))


def _conv_transpose(input, weight, stride, padding, dilation, output_padding, groups):
  """Compute the transposed convolution, the gradient of a convolution's input.

  Reverse the kernel, exchange its channels within groups, and correlate with the
  input, which gets `stride - 1` zeros between its elements.
  """
  spatial = tuple(range(2, weight.ndim))
  extents = [d * (kernel - 1) for kernel, d in zip(weight.shape[2:], dilation)]
  if groups > 1:
    by_group = weight.reshape(groups, -1, *weight.shape[1:])
    weight = lax.collapse(jnp.swapaxes(by_group, 0, 1), 1, 3)
  padding = [
    (extent - low, extent - high + extra)
    for extent, (low, high), extra in zip(extents, padding, output_padding)
  ]
  weight, ones = lax.rev(weight, spatial), (1,) * len(spatial)
  return _correlate(input, weight, ones, padding, dilation, groups, stride, (1, 0))


def _check(weight, bias, stride, padding, dilation, transposed, groups):
  outputs = weight.shape[1] * groups if transposed else weight.shape[0]
  if bias is not None and bias.shape != (outputs,):
    raise RuntimeError(
      f"Expected bias to have shape ({outputs},), but got {bias.shape}."
    )
  if min(stride) < 1 or min(dilation) < 1:
    raise RuntimeError(
      f"stride and dilation must be positive, but got {stride} and {dilation}."
    )
  if any(pad < 0 for pair in padding for pad in pair):
    raise RuntimeError(f"negative padding is not supported, but got {padding}.")


def _convolve(
  input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
  """Convolve; `padding` has (low, high) pairs, the other sizes a number a dimension."""
  _check(weight, bias, stride, padding, dilation, transposed, groups)
  if transposed:
    result = _conv_transpose(
      input, weight, stride, padding, dilation, output_padding, groups
    )
  else:
    result = _correlate(input, weight, stride, padding, dilation, groups)
  if bias is None:
    return result
  return result + bias.reshape((1, -1) + (1,) * (input.ndim - 2))


def _sizes(rank, stride, padding, dilation, output_padding):
  """Expand each argument to `rank` entries, and padding to (low, high) pairs."""
  pairs = tuple((p, p) for p in expand_sizes(padding, rank))
  stride, dilation = expand_sizes(stride, rank), expand_sizes(dilation, rank)
  return stride, pairs, dilation, expand_sizes(output_padding, rank)


@op(aten.convolution, aten.convolution_overrideable)
def _aten_convolution(
  input,
  weight,
  bias,
  stride,
  padding,
  dilation,
  transposed,
  output_padding,
  groups,
):
  stride, padding, dilation, output_padding = _sizes(
    input.ndim - 2, stride, padding, dilation, output_padding
  )
  return _convolve(
    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
  )


@op(aten._convolution.default)
def _aten__convolution(*args):
  *args, benchmark, deterministic, cudnn_enabled, allow_tf32 = args
  return _aten_convolution(*args)


@op(aten.convolution_backward)
def _aten_convolution_backward(
  grad_output,
  input,
  weight,
  bias_sizes,
  stride,
  padding,
  dilation,
  transposed,
  output_padding,
  groups,
  output_mask,
):
  """Return gradients of input, weight and bias; None where `output_mask` is False."""
  stride, padding, dilation, output_padding = _sizes(
    input.ndim - 2, stride, padding, dilation, output_padding
  )
  sizes = (stride, padding, dilation)
  spatial = tuple(range(2, grad_output.ndim))
  input_grad = weight_grad = bias_grad = None
  # With an output padding of a stride or more, the convolutions below are too long.
  if output_mask[0]:
    extra = (0,) * len(spatial) if transposed else _uncovered(input, weight, *sizes)
    input_grad = _convolve(
      grad_output, weight, None, *sizes, not transposed, extra, groups
    )
    input_grad = lax.slice(input_grad, (0,) * input.ndim, input.shape)
  if output_mask[1]:
    # A transposed convolution exchanges input and result; its own transpose is slow.
    source, target = (grad_output, input) if transposed else (input, grad_output)

    def convolve(weight):
      result = _convolve(source, weight, None, *sizes, False, output_padding, groups)
      return lax.slice(result, (0,) * result.ndim, target.shape)

    (weight_grad,) = jax.linear_transpose(convolve, weight)(target)
  if output_mask[2]:
    bias_grad = jnp.sum(grad_output, axis=(0, *spatial))
  return input_grad, weight_grad, bias_grad


def _uncovered(input, weight, stride, padding, dilation) -> tuple[int, ...]:
  """Return how many elements at the end of each dimension no kernel position covers."""
  return tuple(
    (size + low + high - d * (kernel - 1) - 1) % s
    for size, kernel, (low, high), d, s in zip(
      input.shape[2:], weight.shape[2:], padding, dilation, stride
    )
  )


@op(aten.convolution_backward_overrideable)
def _aten_convolution_backward_overrideable(grad_output, input, weight, *args, **named):
  return _aten_convolution_backward(grad_output, input, weight, None, *args, **named)


@op(aten.conv2d)
def _aten_conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
  """Convolve (N, C, H, W) or (C, H, W); `padding` may be "valid" or "same"."""
  stride, dilation = expand_sizes(stride, 2), expand_sizes(dilation, 2)
  if isinstance(padding, str):
    is_same = padding == "same"
    extents = [is_same * d * (k - 1) for k, d in zip(weight.shape[2:], dilation)]
    # For "same", an odd cell goes to the end.
    pairs = tuple((extent // 2, extent - extent // 2) for extent in extents)
  else:
    pairs = tuple((p, p) for p in expand_sizes(padding, 2))
  batched = input if input.ndim == 4 else input[None]
  result = _convolve(
    batched, weight, bias, stride, pairs, dilation, False, (0, 0), groups
  )
  return result if input.ndim == 4 else result[0]


@op(aten.conv_tbc)
def _aten_conv_tbc(self, weight, bias, pad=0):
  """Convolve (time, N, C) with a weight (time, in, out)."""
  input, weight = self.transpose(1, 2, 0), weight.transpose(2, 1, 0)
  result = _convolve(input, weight, bias, (1,), [(pad, pad)], (1,), False, (0,), 1)
  return result.transpose(2, 0, 1)


@op(aten.conv_tbc_backward)
def _aten_conv_tbc_backward(self, input, weight, bias, pad):
  function = functools.partial(_aten_conv_tbc, pad=pad)
  return jax.vjp(function, input, weight, bias)[1](self)
