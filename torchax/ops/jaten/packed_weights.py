"""Products with weights of 8-bit and 4-bit integers, and the packing of 4-bit weights.

A weight has the shape (out features, in features). int8 weights have one scale for each
row. A 4-bit weight `q` is unsigned, with a scale and a zero for each group of a row:
`(q - 8) * scale + zero`. `low_precision.py` has products of two narrow operands.

Packed weights have the layouts of torch, so checkpoints of other devices can be read.
"""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import require_one_dtype
from torchax.registry.names import aten

_GROUP_SIZES = (32, 64, 128, 256)


def _times(x, weight):
  """Return `x @ weight.T` in float32; both have the dtype of `x`."""
  dims = (((1,), (1,)), ((), ()))
  return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)


@op(aten._weight_int8pack_mm)
def _aten__weight_int8pack_mm(self, mat2, scales):
  """Multiply by an int8 weight, which every dtype of `self` represents exactly."""
  require_one_dtype("_weight_int8pack_mm", self, scales)
  product = _times(self, mat2.astype(self.dtype))
  return (product * scales.astype(jnp.float32)).astype(self.dtype)


def _grouped_times(name: str, x, numbers, group_size: int, scales_and_zeros):
  """Return `x @ weight.T` for 4-bit numbers of shape (out features, in features).

  Args:
    name: operation, for errors.
    x: floats of shape (rows, in features).
    numbers: the unpacked weight.
    group_size: length of a group along the in features.
    scales_and_zeros: array of shape (groups, out features, 2) with the dtype of `x`.
  """
  if group_size not in _GROUP_SIZES:
    raise RuntimeError(
      f"{name}: expect qGroupSize to be 32, 64, 128 or 256, got {group_size}"
    )
  outputs, inputs = numbers.shape
  expected = (inputs // group_size, outputs, 2)
  if inputs % group_size or scales_and_zeros.shape != expected:
    raise RuntimeError(
      f"{name}: expect qScaleAndZeros to be 3d tensor with sizes {list(expected)}, got "
      f"{list(scales_and_zeros.shape)}, for {inputs} inputs in groups of {group_size}."
    )
  require_one_dtype(name, x, scales_and_zeros)
  if x.shape[1] != inputs:
    raise RuntimeError(
      f"{name} expects a weight of {x.shape[1]} inputs, but got {inputs}."
    )
  scale, zero = scales_and_zeros.astype(jnp.float32).transpose(2, 1, 0)[..., None]
  grouped = numbers.reshape(outputs, -1, group_size).astype(jnp.float32)
  weight = ((grouped - 8) * scale + zero).reshape(outputs, inputs)
  return _times(x, weight.astype(x.dtype)).astype(x.dtype)


# --- Layout of CUDA's tensor cores --------------------------------------------------
# Shape: (out features / 8, in features / (16 * innerKTiles), 32, innerKTiles / 2).
# An int32 has the eight numbers of a lane from two tiles, first those of even columns.

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


@op(aten._convert_weight_to_int4pack)
def _aten__convert_weight_to_int4pack(self, innerKTiles):
  """Pack bytes of shape (out features, in features / 2), even columns in high bits."""
  outputs, pairs = self.shape
  if innerKTiles not in (2, 4, 8) or outputs % 8 or pairs % (8 * innerKTiles):
    raise RuntimeError(
      "_convert_weight_to_int4pack expects innerKTiles of 2, 4 or 8, out features "
      "divisible by 8, and in features divisible by 16 * innerKTiles, but got "
      f"innerKTiles={innerKTiles} for shape [{outputs}, {2 * pairs}]."
    )
  tiles = self.reshape(outputs // 8, 8, -1, innerKTiles // 2, 4, 4)
  lanes = tiles.transpose(0, 2, 1, 5, 3, 4)
  lanes = lanes.reshape(*lanes.shape[:2], 32, innerKTiles // 2, 4)
  numbers = jnp.concatenate([lanes >> 4, lanes & 15], axis=-1).astype(jnp.uint32)
  packed = jnp.sum(numbers << _SHIFTS, axis=-1, dtype=jnp.uint32)
  return lax.bitcast_convert_type(packed, jnp.int32)


def _of_lanes(packed):
  """Return the weight, of shape (out features, in features), of a packed one."""
  out_tiles, in_tiles, _, inner = packed.shape
  words = lax.bitcast_convert_type(packed, jnp.uint32)
  numbers = (words[..., None] >> _SHIFTS) & 15
  # Dimensions: row and column of the lane, pair of tiles, parity, quarter of the pair.
  numbers = numbers.reshape(out_tiles, in_tiles, 8, 4, inner, 2, 4)
  return numbers.transpose(0, 2, 1, 4, 6, 3, 5).reshape(8 * out_tiles, -1)


@op(aten._weight_int4pack_mm)
def _aten__weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros):
  """Multiply by a 4-bit weight in the layout of CUDA's tensor cores."""
  if mat2.ndim != 4 or mat2.shape[2] != 32 or mat2.dtype != jnp.int32:
    raise RuntimeError(
      "_weight_int4pack_mm expects the result of _convert_weight_to_int4pack, but got "
      f"{mat2.dtype}{list(mat2.shape)}."
    )
  numbers = _of_lanes(mat2)
  return _grouped_times(
    "_weight_int4pack_mm", self, numbers, qGroupSize, qScaleAndZeros
  )


# --- Layout of the CPU --------------------------------------------------------------
# torch stores blocks of rows, each transposed, with two rows in a byte. Its vector
# kernels pair the halves of a block, the others even and odd rows. The block depends on
# the CPU, so these operations use the layout that torch has in this process.


def _cpu_parts(outputs: int) -> list[tuple[slice, int, bool]]:
  """Return (rows, height of its blocks, whether halves are paired) for each part."""
  capability = torch.backends.cpu.get_cpu_capability()
  height = 64 if capability == "AVX512" else 32
  full = outputs - outputs % height
  parts = [
    (slice(0, full), height, capability in ("AVX512", "AVX2")),
    (slice(full, outputs), outputs - full, False),
  ]
  return [part for part in parts if part[0].start < part[0].stop]


@op(aten._convert_weight_to_int4pack_for_cpu)
def _aten__convert_weight_to_int4pack_for_cpu(self, innerKTiles):
  """Pack int32 numbers of shape (out features, in features)."""
  outputs, inputs = self.shape
  if outputs % 16 or inputs % 2:
    raise RuntimeError(
      "_convert_weight_to_int4pack_cpu : expect N to be dividable by 16 and K by 2, "
      f"but got shape {[outputs, inputs]}."
    )
  packed = []
  for rows, height, has_halves in _cpu_parts(outputs):
    pair = (2, height // 2) if has_halves else (height // 2, 2)
    blocks = self[rows].astype(jnp.uint8).reshape(-1, *pair, inputs)
    low, high = jnp.moveaxis(blocks, 1 if has_halves else 2, 0)
    packed.append((low | high << 4).swapaxes(1, 2).reshape(-1))
  return jnp.concatenate(packed).reshape(outputs, inputs // 2)


@op(aten._weight_int4pack_mm_for_cpu)
def _aten__weight_int4pack_mm_for_cpu(self, mat2, qGroupSize, qScaleAndZeros):
  """Multiply by a 4-bit weight in the layout of torch's CPU kernels."""
  outputs, pairs = mat2.shape
  numbers = []
  for rows, height, has_halves in _cpu_parts(outputs):
    blocks = mat2[rows].reshape(-1, 2 * pairs, height // 2).swapaxes(1, 2)
    both = jnp.stack([blocks & 15, blocks >> 4], axis=1 if has_halves else 2)
    numbers.append(both.reshape(-1, 2 * pairs))
  return _grouped_times(
    "_weight_int4pack_mm_cpu",
    self,
    jnp.concatenate(numbers),
    qGroupSize,
    qScaleAndZeros,
  )
