"""Convolutions, transposed convolutions, and their gradients.

Layouts are torch's: input (N, C, spatial…), weight (out, in/groups, spatial…), and
for a transposed convolution (in, out/groups, spatial…). A convolution is bilinear, so
both gradients are linear transposes by JAX.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import expand_sizes
from torchax.registry.names import aten


def _conv_transpose(input, weight, stride, padding, dilation, output_padding, groups):
  """Compute the transposed convolution, the gradient of a convolution's input.

  Reverse the kernel, exchange its channels within groups, and correlate with the
  input, which gets `stride - 1` zeros between its elements.
  """
  spatial = tuple(range(2, weight.ndim))
  extents = [d * (kernel - 1) for kernel, d in zip(weight.shape[2:], dilation)]
  if groups > 1:
    by_group = weight.reshape(groups, -1, *weight.shape[1:])
    weight = jnp.swapaxes(by_group, 0, 1).reshape(
      by_group.shape[1], -1, *weight.shape[2:]
    )
  order = (0, 1, *spatial)
  return lax.conv_general_dilated(
    input,
    lax.rev(weight, spatial),
    window_strides=(1,) * len(spatial),
    padding=[
      (extent - low, extent - high + extra)
      for extent, (low, high), extra in zip(extents, padding, output_padding)
    ],
    lhs_dilation=stride,
    rhs_dilation=dilation,
    dimension_numbers=lax.ConvDimensionNumbers(order, (1, 0, *spatial), order),
    feature_group_count=groups,
  )


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
    result = lax.conv_general_dilated(
      input, weight, stride, padding, rhs_dilation=dilation, feature_group_count=groups
    )
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
  sizes = (None, stride, padding, dilation, transposed, output_padding, groups)

  def gradient(function, primal):
    (cotangent,) = jax.linear_transpose(function, primal)(grad_output)
    return cotangent

  spatial = tuple(range(2, grad_output.ndim))
  return (
    gradient(lambda x: _convolve(x, weight, *sizes), input) if output_mask[0] else None,
    gradient(lambda w: _convolve(input, w, *sizes), weight) if output_mask[1] else None,
    jnp.sum(grad_output, axis=(0, *spatial)) if output_mask[2] else None,
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
