"""Matrix products of narrow floats and integers, with the scales of their operands.

Products of float8 and float4 accumulate in float32, those of int8 in int32. XLA gets
the narrow operands, so it can choose a kernel of the hardware. Integer weights, of 4
or 8 bits, are in `packed_weights.py`.
"""

import jax.numpy as jnp
from jax import lax
from torch.nn.functional import ScalingType, SwizzleType

from torchax.core import mappings
from torchax.ops.builtin import op
from torchax.ops.casting import FLOAT8, cast
from torchax.ops.jaten.matmul import grouped_product, require_groups
from torchax.registry.names import aten

_TENSOR, _ROWS = ScalingType.TensorWise, ScalingType.RowWise
_16, _32 = ScalingType.BlockWise1x16, ScalingType.BlockWise1x32
_128, _SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
# Recipes of two float8 operands, in the order in which `_scaled_mm` tries them.
_RECIPES = (
  (_TENSOR, _TENSOR),
  (_ROWS, _ROWS),
  (_32, _32),
  (_128, _SQUARE),
  (_128, _128),
  (_SQUARE, _128),
)
_FLOAT4_RECIPES = ((_32, _32), (_16, _16))
_FLOAT8 = FLOAT8 - {jnp.dtype(jnp.float8_e8m0fnu)}
# Size of a block along the inner dimension.
_BLOCKS = {_16: 16, _32: 32, _128: 128, _SQUARE: 128}
# Dtype of scales in the layout SWIZZLE_32_4_4; other scales are float32.
_TILED = {_16: jnp.float8_e4m3fn, _32: jnp.float8_e8m0fnu}


def _contract(left, right, dtype):
  dims = (((1,), (0,)), ((), ()))
  return lax.dot_general(left, right, dims, preferred_element_type=dtype)


@op(aten._int_mm)
def _aten__int_mm(self, mat2):
  """Multiply int8 or uint8 by int8 without overflow."""
  return _contract(self, mat2, jnp.int32)


# --- Scales -------------------------------------------------------------------------
# Both operands are described as (rows, inner); `mat2` and its scale are transposed.


def _ceil_div(size: int, block: int) -> int:
  return -(-size // block)


def _fits(recipe: ScalingType, scale, rows: int, inner: int) -> bool:
  """Return True if a scale has the dtype and shape of the recipe."""
  dtype = _TILED.get(recipe, jnp.float32)
  if scale.dtype != dtype or recipe == _TENSOR:
    return scale.dtype == dtype and scale.size == 1
  if recipe == _ROWS:
    return scale.shape == (rows, 1)
  blocks = _ceil_div(inner, _BLOCKS[recipe])
  if recipe in _TILED:
    return scale.size == 512 * _ceil_div(rows, 128) * _ceil_div(blocks, 4)
  return scale.shape == (_ceil_div(rows, 128) if recipe == _SQUARE else rows, blocks)


def _in_tiles(scale, row, block, across: int, first=0):
  """Return scales of rows and blocks, stored in the layout SWIZZLE_32_4_4.

  The layout has tiles of 128 rows and 4 blocks, `across` side by side, from tile
  `first` on. Row `r` of a tile is at `[r % 32, r // 32]`.
  """
  tile = first + row // 128 * across + block // 4
  within = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
  return scale.reshape(-1)[tile * 512 + within]


def _per_row(recipe: ScalingType, scale, rows: int, inner: int):
  """Return a scale as an array of shape (rows or 1, blocks)."""
  if recipe == _TENSOR:
    return scale.reshape(1, 1)
  if recipe == _SQUARE:
    return jnp.repeat(scale, 128, axis=0)[:rows]
  if recipe in _TILED:
    blocks = _ceil_div(inner, _BLOCKS[recipe])
    row, block = jnp.arange(rows)[:, None], jnp.arange(blocks)
    return _in_tiles(scale, row, block, _ceil_div(blocks, 4))
  return scale


def _in_small_blocks(left, right, scale_left, scale_right):
  """Multiply with scales of blocks; XLA may use the hardware's block-scaled product.

  Elsewhere JAX multiplies scales and numbers in bfloat16, which is exact here.
  """
  scales = {"lhs_scale": scale_left, "rhs_scale": scale_right}
  return lax.scaled_dot(left, right, **scales, preferred_element_type=jnp.float32)


def _in_blocks(left, right, scale_left, scale_right):
  """Multiply block by block; each partial product has float32 scales of its own."""
  blocks = scale_left.shape[1]
  left = left.reshape(left.shape[0], blocks, -1).swapaxes(0, 1)
  right = right.reshape(blocks, -1, right.shape[1])

  def add(total, block):
    left, right, scale_left, scale_right = block
    product = _contract(left, right, jnp.float32)
    return total + product * scale_left[:, None] * scale_right, None

  zeros = jnp.zeros((left.shape[1], right.shape[2]), jnp.float32)
  return lax.scan(add, zeros, (left, right, scale_left.T, scale_right))[0]


def _scaled_product(left, right, recipes, scale_left, scale_right, bias, whole=1):
  """Return the float32 product of two matrices.

  Args:
    left, right: matrices of shapes (rows, inner) and (inner, columns).
    recipes: pair that fits `scale_left` and the transposed `scale_right`.
    bias: None, or an array of shape (columns,) that is added last.
    whole: factor of the product beside the scales.
  """
  (rows, inner), columns = left.shape, right.shape[1]
  if bias is not None and bias.shape != (columns,):
    raise RuntimeError(f"Bias must be size {columns} but got {bias.size}")
  scale_left = _per_row(recipes[0], scale_left, rows, inner)
  scale_right = _per_row(recipes[1], scale_right, columns, inner).T
  block = _BLOCKS.get(recipes[0])
  if block is None:
    product = _contract(left, right, jnp.float32) * scale_left * scale_right
  else:
    missing = -inner % block
    left = jnp.pad(left, ((0, 0), (0, missing)))
    right = jnp.pad(right, ((0, missing), (0, 0)))
    multiply = _in_blocks if block == 128 else _in_small_blocks
    product = multiply(left, right, scale_left, scale_right)
  product = product * whole
  return product if bias is None else product + bias.astype(jnp.float32)


# --- Scaled products ----------------------------------------------------------------


def _describe(array) -> str:
  return f"{array.dtype}{list(array.shape)}"


def _operands(left, right):
  """Return the matrices of a scaled product, with packed numbers unpacked.

  Raises:
    RuntimeError: torch's error if they are no float8 or float4 matrices, or their sizes
      differ.
  """
  if not left.ndim == right.ndim == 2:
    raise RuntimeError(
      f"Inputs must be 2D but got self.dim()={left.ndim} and mat2.dim()={right.ndim}"
    )
  dtypes = {left.dtype, right.dtype}
  if not (dtypes <= _FLOAT8 or dtypes == {mappings.PACKED}):
    first, second = (mappings.j2t_dtype(operand.dtype) for operand in (left, right))
    raise RuntimeError(
      f"Expected both inputs to be fp8 or fp4 types but got self.dtype={first} and "
      f"mat2.dtype={second}"
    )
  if left.shape[1] != right.shape[0]:
    sizes = ["x".join(map(str, operand.shape)) for operand in (left, right)]
    raise RuntimeError(
      f"mat_a and mat_b shapes cannot be multiplied ({sizes[0]} and {sizes[1]})"
    )
  if dtypes <= _FLOAT8:
    return left, right
  return _unpacked(left), _unpacked(right.T).T


def _unpacked(packed):
  """Return rows of float4_e2m1fn; the low half of a byte is the first number."""
  numbers = lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)
  return numbers.reshape(packed.shape[0], -1)


def _require_recipe(left, right, recipes, scale_left, scale_right):
  """Return the first pair of recipes that fits the scales; `scale_right` is transposed.

  Raises:
    RuntimeError: the scales fit no recipe. The CPU kernel's ValueError would name only
      the recipes that it has.
  """
  (rows, inner), columns = left.shape, right.shape[1]
  allowed = _RECIPES if left.dtype in _FLOAT8 else _FLOAT4_RECIPES
  recipes = [pair for pair in allowed if pair in recipes]
  for first, second in recipes:
    if _fits(first, scale_left, rows, inner) and _fits(
      second, scale_right, columns, inner
    ):
      return first, second
  raise RuntimeError(
    "Invalid scaling configuration. A scaled product expects scales of the tensors, of "
    f"their rows, or of blocks, but got {_describe(scale_left)} for {_describe(left)} "
    f"and {_describe(scale_right)} (transposed) for {_describe(right)}. "
    "See the recipes of torch.nn.functional.scaled_mm."
  )


@op(aten._scaled_mm, meta=False)
def _aten__scaled_mm(
  self,
  mat2,
  scale_a,
  scale_b,
  bias=None,
  scale_result=None,
  out_dtype=None,
  use_fast_accum=False,
):
  """Multiply float8 matrices; the shapes and dtypes of the scales tell the recipe.

  As on the CPU, a float8 `out_dtype` divides by `scale_result`, and others ignore it.
  XLA decides how to accumulate, whatever `use_fast_accum`.
  """
  if scale_result is not None and not (
    scale_result.size == 1 and scale_result.dtype == jnp.float32
  ):
    raise RuntimeError("scale_result must be a float scalar")
  left, right = _operands(self, mat2)
  recipes = (*_RECIPES, *_FLOAT4_RECIPES)
  recipes = _require_recipe(left, right, recipes, scale_a, scale_b.T)
  product = _scaled_product(left, right, recipes, scale_a, scale_b.T, bias)
  dtype = mappings.t2j_dtype(out_dtype)
  if scale_result is not None and dtype in _FLOAT8:
    product = product / scale_result.reshape(())
  return cast(product, dtype or self.dtype)


def _levels(recipes, scales, swizzles, inner: int):
  """Return the recipe and scale of an operand, and the scale of the whole tensor.

  Raises:
    RuntimeError: there are other levels than these, or the scales are not in the layout
      of the recipe.
  """
  recipe, *others = map(ScalingType, recipes)
  if len(scales) != len(recipes) or (others and (recipe, *others) != (_16, _TENSOR)):
    raise RuntimeError(
      "scaled_mm expects one scale and recipe for each operand, or two for "
      f"BlockWise1x16 with TensorWise, but got {len(scales)} scales for "
      f"{[each.name for each in (recipe, *others)]}."
    )
  swizzle = SwizzleType(swizzles[0]) if swizzles else SwizzleType.NO_SWIZZLE
  is_tiled = recipe in _TILED
  needed = SwizzleType.SWIZZLE_32_4_4 if is_tiled else SwizzleType.NO_SWIZZLE
  if swizzle != needed:
    raise RuntimeError(
      f"scaled_mm expects scales of {recipe.name} with {needed.name}, but got "
      f"{swizzle.name}."
    )
  scale, *whole = scales
  if recipe == _SQUARE:  # torch has (inner blocks padded to 4, row blocks)
    scale = scale[: _ceil_div(inner, 128)].T
  return recipe, scale, whole[0].reshape(()) if whole else 1


@op(aten._scaled_mm_v2, meta=False)
def _aten__scaled_mm_v2(
  self,
  mat2,
  scale_a,
  recipe_a,
  swizzle_a,
  scale_b,
  recipe_b,
  swizzle_b,
  bias,
  out_dtype,
  contraction_dim=(),
  use_fast_accum=False,
):
  """Multiply by recipes: `torch.nn.functional.scaled_mm`."""
  if tuple(contraction_dim) not in ((), (1, 0)):
    raise ValueError(
      "scaled_mm contracts dimension 1 of mat_a with 0 of mat_b, but got "
      f"{contraction_dim}. Transpose the operands."
    )
  left, right = _operands(self, mat2)
  inner = left.shape[1]
  first, scale_a, whole_a = _levels(recipe_a, scale_a, swizzle_a, inner)
  second, scale_b, whole_b = _levels(recipe_b, scale_b, swizzle_b, inner)
  if second == _ROWS:
    scale_b = scale_b.T
  recipes = _require_recipe(left, right, [(first, second)], scale_a, scale_b)
  whole = whole_a * whole_b
  product = _scaled_product(left, right, recipes, scale_a, scale_b, bias, whole)
  return cast(product, mappings.t2j_dtype(out_dtype) or self.dtype)


# --- Scaled products of groups ------------------------------------------------------


def _require_group_scale(name: str, scale, matrices, rows: int, groups: int) -> None:
  """Raise unless a scale has one float32 number for each row of a group."""
  expected = (matrices.shape[0], rows) if matrices.ndim == 3 else (groups * rows,)
  if scale.dtype != jnp.float32 or scale.shape != expected:
    raise RuntimeError(
      f"_scaled_grouped_mm expects {name} with a float32 number for each row, shape "
      f"{list(expected)}, but got {_describe(scale)}."
    )


def _of_group(values, offs, index):
  """Return the values that belong to the groups of some rows or inner indices."""
  group = jnp.searchsorted(offs, index, side="right")
  return values[jnp.minimum(group, offs.shape[0] - 1)]


def _scale_rows(left, right, scale_left, scale_right, offs):
  """Return the float32 products of groups, with scales of rows and columns."""
  rows, columns = left.shape[-2], right.shape[-1]
  groups = offs.shape[0] if left.ndim == right.ndim == 2 else 1
  _require_group_scale("scale_a", scale_left, left, rows, groups)
  _require_group_scale("scale_b", scale_right, right, columns, groups)
  product = grouped_product(left, right, offs, jnp.float32)
  if left.ndim == right.ndim:
    scale_left = scale_left.reshape(-1, rows, 1)
    scale_right = scale_right.reshape(-1, 1, columns)
  elif left.ndim == 2:
    scale_left = scale_left[:, None]
    scale_right = _of_group(scale_right, offs, jnp.arange(rows))
  else:
    scale_left = _of_group(scale_left, offs, jnp.arange(columns)).T
  return product * scale_left * scale_right


def _scale_blocks(left, right, scale_left, scale_right, offs):
  """Return the float32 products of groups, with e8m0 scales of blocks of 32."""
  if left.ndim == 3:
    raise RuntimeError(
      "_scaled_grouped_mm with scales of blocks expects a matrix mat_a, but got a "
      "stack. Use scales of rows, or scaled_mm for each group."
    )
  is_inner = right.ndim == 2
  columns = jnp.swapaxes(right, -1, -2)
  left = _times_blocks("scale_a", left, scale_left, offs, is_inner)
  columns = _times_blocks("scale_b", columns, scale_right, offs, is_inner)
  return grouped_product(left, jnp.swapaxes(columns, -1, -2), offs, jnp.float32)


def _times_blocks(name: str, matrices, scale, offs, is_inner: bool):
  """Multiply groups by the scales of their blocks, in bfloat16, which is exact.

  Each group of a matrix has tiles of its own, so their positions depend on `offs`.

  Args:
    name: name of the scale, for the error.
    matrices: (rows, inner) with groups of rows or of the inner dimension, or a stack.
    scale: a row for each matrix of a stack; else the tiles of all groups. Those that
      are missing count as NaN.
    offs: end of each group.
    is_inner: True if the inner dimension is grouped.
  """
  rows, inner = matrices.shape[-2:]
  down, across = _ceil_div(rows, 128), _ceil_div(inner, 128)
  least = 512 * down * across
  is_stack = matrices.ndim == 3
  fits = scale.shape == (len(matrices), least) if is_stack else scale.size >= least
  if not fits or scale.dtype != _TILED[_32]:
    expected = f"shape {[len(matrices), least]}" if is_stack else f"at least {least}"
    raise RuntimeError(
      f"_scaled_grouped_mm expects {name} with {expected} float8_e8m0fnu numbers in "
      f"the layout SWIZZLE_32_4_4, but got {_describe(scale)}."
    )
  row, block = jnp.arange(rows)[:, None], jnp.arange(_ceil_div(inner, 32))
  sizes = jnp.diff(offs, prepend=0)
  start, tiles = offs - sizes, _ceil_div(sizes, 128)
  before = jnp.cumsum(tiles) - tiles
  if is_stack:
    first = jnp.arange(len(matrices))[:, None, None] * down * across
  elif is_inner:
    at = 32 * block
    first, across = _of_group(before, offs, at) * down, _of_group(tiles, offs, at)
    block = block - _of_group(start, offs, at) // 32
  else:
    first = _of_group(before, offs, row) * across
    row = row - _of_group(start, offs, row)
  scale = _in_tiles(scale, row, block, across, first).astype(jnp.bfloat16)
  return matrices.astype(jnp.bfloat16) * jnp.repeat(scale, 32, axis=-1)[..., :inner]


def _scaled_groups(multiply, left, right, scale_left, scale_right, offs, bias, dtype):
  """Return `multiply(left, right, scale_left, scale_right, offs)` in a torch dtype."""
  if {left.dtype, right.dtype} != {jnp.dtype(jnp.float8_e4m3fn)}:
    raise RuntimeError(
      "Expected inputs of E4M3 FP8 type but got mat_a.dtype="
      f"{mappings.j2t_dtype(left.dtype)} and mat_b.dtype="
      f"{mappings.j2t_dtype(right.dtype)}."
    )
  require_groups(left, right, offs, bias)
  product = multiply(left, right, scale_left, scale_right, offs)
  return cast(product, mappings.t2j_dtype(dtype) or jnp.bfloat16)


@op(aten._scaled_grouped_mm, meta=False)
def _aten__scaled_grouped_mm(
  self,
  mat2,
  scale_a,
  scale_b,
  offs=None,
  bias=None,
  scale_result=None,
  out_dtype=None,
  use_fast_accum=False,
):
  """Multiply groups of float8 matrices; the dtype of the scales tells the recipe."""
  if scale_result is not None:
    raise RuntimeError("Scale result tensor provided, but it is not supported yet.")
  is_in_blocks = {scale_a.dtype, scale_b.dtype} == {jnp.dtype(_TILED[_32])}
  multiply = _scale_blocks if is_in_blocks else _scale_rows
  return _scaled_groups(multiply, self, mat2, scale_a, scale_b, offs, bias, out_dtype)


@op(aten._scaled_grouped_mm_v2, meta=False)
def _aten__scaled_grouped_mm_v2(
  self,
  mat2,
  scale_a,
  recipe_a,
  swizzle_a,
  scale_b,
  recipe_b,
  swizzle_b,
  offs=None,
  bias=None,
  out_dtype=None,
  contraction_dim=(),
  use_fast_accum=False,
):
  """Multiply groups by recipes: `torch.nn.functional.scaled_grouped_mm`."""
  recipes = [ScalingType(recipe) for recipe in (*recipe_a, *recipe_b)]
  swizzles = [SwizzleType(swizzle) for swizzle in (*swizzle_a, *swizzle_b)]
  if recipes == [_32, _32] and swizzles == [SwizzleType.SWIZZLE_32_4_4] * 2:
    multiply = _scale_blocks
  elif recipes == [_ROWS, _ROWS]:
    multiply = _scale_rows
  else:
    raise NotImplementedError(
      "scaled_grouped_mm on jax expects the recipe RowWise, or BlockWise1x32 with "
      f"SWIZZLE_32_4_4, but got {[each.name for each in (*recipes, *swizzles)]}. "
      "Multiply group by group with scaled_mm."
    )
  return _scaled_groups(
    multiply, self, mat2, scale_a[0], scale_b[0], offs, bias, out_dtype
  )
