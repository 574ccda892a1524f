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


def _without_swizzle(scale, rows: int, blocks: int):
  """Reorder scales from SWIZZLE_32_4_4 to (rows, blocks).

  The layout has tiles of 128 rows and 4 blocks. Row `r` of a tile is at
  `[r % 32, r // 32]`.
  """
  tiles = scale.reshape(-1, _ceil_div(blocks, 4), 32, 4, 4)
  ordered = tiles.transpose(0, 3, 2, 1, 4)
  return ordered.reshape(128 * tiles.shape[0], -1)[:rows, :blocks]


def _per_row(recipe: ScalingType, scale, rows: int, inner: int):
  """Return a scale as an array of shape (rows or 1, blocks)."""
  if recipe == _TENSOR:
    return scale.reshape(1, 1)
  if recipe == _SQUARE:
    return jnp.repeat(scale, 128, axis=0)[:rows]
  if recipe in _TILED:
    return _without_swizzle(scale, rows, _ceil_div(inner, _BLOCKS[recipe]))
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
  """Multiply groups of float8 matrices with scales of the rows and columns."""
  if {self.dtype, mat2.dtype} != {jnp.dtype(jnp.float8_e4m3fn)}:
    raise RuntimeError(
      "Expected inputs of E4M3 FP8 type but got mat_a.dtype="
      f"{mappings.j2t_dtype(self.dtype)} and mat_b.dtype="
      f"{mappings.j2t_dtype(mat2.dtype)}."
    )
  require_groups(self, mat2, offs, bias)
  if scale_result is not None:
    raise RuntimeError("Scale result tensor provided, but it is not supported yet.")
  rows, columns = self.shape[-2], mat2.shape[-1]
  groups = offs.shape[0] if self.ndim == mat2.ndim == 2 else 1
  _require_group_scale("scale_a", scale_a, self, rows, groups)
  _require_group_scale("scale_b", scale_b, mat2, columns, groups)
  product = grouped_product(self, mat2, offs, jnp.float32)
  if self.ndim == mat2.ndim:
    scale_a, scale_b = scale_a.reshape(-1, rows, 1), scale_b.reshape(-1, 1, columns)
  elif self.ndim == 2:
    scale_a, scale_b = scale_a[:, None], _of_groups(scale_b, offs, rows)
  else:
    scale_a, scale_b = _of_groups(scale_a, offs, columns).T, scale_b
  dtype = jnp.bfloat16 if out_dtype is None else mappings.t2j_dtype(out_dtype)
  return cast(product * scale_a * scale_b, dtype)


def _of_groups(scale, offs, count: int):
  """Return the row of `scale` that belongs to each of `count` grouped vectors."""
  group = jnp.searchsorted(offs, jnp.arange(count), side="right")
  return scale[jnp.minimum(group, offs.shape[0] - 1)]


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
  """Multiply groups with scales of rows: `torch.nn.functional.scaled_grouped_mm`."""
  if {*recipe_a, *recipe_b} != {_ROWS.value}:
    raise NotImplementedError(
      "scaled_grouped_mm expects the recipe RowWise on jax, but got "
      f"{[ScalingType(recipe).name for recipe in (*recipe_a, *recipe_b)]}: the layout "
      "of block scales depends on the offsets. Multiply group by group with scaled_mm."
    )
  return _aten__scaled_grouped_mm(
    self, mat2, scale_a[0], scale_b[0], offs, bias, None, out_dtype
  )
