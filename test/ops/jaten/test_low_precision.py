"""Products of float8, float4, int8: bits of CPU torch, or of a float64 reference.

The numbers are small integers times powers of two, so every sum is exact in float32 and
no order of addition changes a bit.
"""

import re

import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax.compat import versions
from torchax.export import exported_program_to_jax
from torchax.interop import jax_jit
from torchax.ops.mappings import t2j

F = torch.nn.functional
Scaling, Swizzle = F.ScalingType, F.SwizzleType
bf16, e4m3, e5m2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROWS = Scaling.TensorWise, Scaling.RowWise


def float8(*shape, dtype=e4m3, seed=0):
  return ints(*shape, low=-8, high=9, seed=seed).to(torch.float32).to(dtype)


def powers(*shape, seed=0):
  return 2.0 ** ints(*shape, low=-3, high=4, seed=seed).to(torch.float32)


LEFT, RIGHT = float8(6, 32), float8(10, 32, seed=1).T
# Products below 448, the largest number of float8_e4m3fn.
ONE_A, ONE_B = torch.tensor(0.5), torch.tensor([[2.0]])
ROWS_A, ROWS_B = powers(6, 1), powers(1, 10, seed=1)
BIAS = ints(10, low=-9, high=9).to(bf16)
scaled_mm = torch._scaled_mm

CASES = (
  *(
    Case(scaled_mm, LEFT, RIGHT, ONE_A, ONE_B, out_dtype=dtype, name=f"to {dtype}")
    for dtype in (None, torch.float32, bf16, torch.float16, e5m2)
  ),
  Case(scaled_mm, LEFT.to(e5m2), RIGHT, ONE_A, ONE_B, out_dtype=bf16, name="e5m2"),
  Case(scaled_mm, LEFT, RIGHT, ROWS_A, ROWS_B, BIAS, out_dtype=bf16, name="rows"),
  Case(scaled_mm, LEFT, RIGHT, ONE_A, ONE_B, BIAS.float(), name="bias in float32"),
  *(
    Case(
      scaled_mm,
      *(LEFT, RIGHT, ONE_A, ONE_B),
      scale_result=torch.tensor(4.0),
      out_dtype=dtype,
      name=f"scaled to {dtype}",
    )
    for dtype in (None, e4m3, bf16)
  ),
  Case(F.scaled_mm, LEFT, RIGHT, ONE_A, TENSOR, ONE_B, TENSOR, bias=BIAS),
  Case(F.scaled_mm, LEFT, RIGHT, ROWS_A, ROWS, ROWS_B, ROWS, output_dtype=None),
  Case(
    torch._int_mm,
    *(ints(*s, low=-128, high=128, dtype=torch.int8) for s in ((5, 33), (33, 7))),
  ),
  Case(
    torch._int_mm,
    ints(5, 33, high=256, dtype=torch.uint8),
    ints(33, 7, low=-128, high=128, dtype=torch.int8),
    name="unsigned",
  ),
)


@pytest.mark.skipif(
  versions.is_older(torch.__version__, "2.13"),
  reason="CPU torch before 2.13 rounds its products, or lacks them",
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_have_the_bits_of_torch_on_the_cpu(case):
  check(case)


def test_large_products_saturate_in_float8():
  """CUDA saturates; CPU torch returns NaN on some processors."""
  product = (LEFT.double() @ RIGHT.double()) * 2**20
  operands = (LEFT, RIGHT, ONE_A * 2**20, ONE_B)
  result = scaled_mm(*(tensor.to("jax") for tensor in operands))
  assert result.dtype == e4m3
  expected = product.clamp(-448, 448)
  torch.testing.assert_close(result.cpu().double(), expected, atol=0, rtol=0)


# Block scales, which the CPU kernels of torch lack ------------------------------------

M, K, N = 130, 144, 150
A, B = float8(M, K), float8(N, K, seed=1).T


def expand(scale, block, size):
  return scale.double().repeat_interleave(block, 1)[:, :size]


def squares(scale, rows):
  return scale.repeat_interleave(128, 0)[:rows]


def swizzle(scale, dtype=torch.float8_e8m0fnu):
  """Lay out (rows, blocks) as SWIZZLE_32_4_4, element by element."""
  rows, blocks = scale.shape
  across = -(-blocks // 4)
  out = torch.zeros(-(-rows // 128) * across * 512)
  for row in range(rows):
    for block in range(blocks):
      tile = row // 128 * across + block // 4
      out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scale[
        row, block
      ]
  return out.to(dtype)


def padded(scale):
  """Return square scales as `F.scaled_mm` takes them: inner blocks first, 4 of them."""
  return torch.cat([scale.T, torch.zeros(2, scale.shape[0])])


POWERS_A, POWERS_B = powers(M, 5), powers(N, 5, seed=1)
THIN_A, THIN_B = powers(M, 2), powers(N, 2, seed=1)
WIDE_A, WIDE_B = powers(2, 2), powers(2, 2, seed=1)
THIN, SQUARE, MX = (
  Scaling.BlockWise1x128,
  Scaling.BlockWise128x128,
  Scaling.BlockWise1x32,
)
# Name: scales of `_scaled_mm`, of `F.scaled_mm`, its recipes, scale of each number.
BLOCKS = {
  "powers of two": (
    *2 * ((swizzle(POWERS_A), swizzle(POWERS_B)),),
    (MX, MX),
    (expand(POWERS_A, 32, K), expand(POWERS_B, 32, K)),
  ),
  "rows by rows": (
    (THIN_A, THIN_B.T),
    (THIN_A, THIN_B),
    (THIN, THIN),
    (expand(THIN_A, 128, K), expand(THIN_B, 128, K)),
  ),
  "rows by squares": (
    (THIN_A, WIDE_B.T),
    (THIN_A, padded(WIDE_B)),
    (THIN, SQUARE),
    (expand(THIN_A, 128, K), expand(squares(WIDE_B, N), 128, K)),
  ),
  "squares by rows": (
    (WIDE_A, THIN_B.T),
    (padded(WIDE_A), THIN_B),
    (SQUARE, THIN),
    (expand(squares(WIDE_A, M), 128, K), expand(THIN_B, 128, K)),
  ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scales_equal_a_float64_reference(name):
  scales, scales_of_recipe, recipes, (each_a, each_b) = BLOCKS[name]
  expected = ((A.double() * each_a) @ (B.double() * each_b.T)).float()
  a, b, *scales = (t.to("jax") for t in (A, B, *scales))

  def product(a, b, scale_a, scale_b):
    return scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)

  with torchax.default_env():
    assert torch.equal(product(a, b, *scales).cpu(), expected)
    assert torch.equal(jax_jit(product)(a, b, *scales).cpu(), expected)
    first, second = (scale.to("jax") for scale in scales_of_recipe)
    order = Swizzle.SWIZZLE_32_4_4 if MX in recipes else Swizzle.NO_SWIZZLE
    found = F.scaled_mm(
      *(a, b, first, recipes[0], second, recipes[1], order, order),
      output_dtype=torch.float32,
    )
  assert torch.equal(found.cpu(), expected)


# Packed 4-bit numbers -----------------------------------------------------------------

float4 = torch.float4_e2m1fn_x2
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEVELS = torch.cat([LEVELS, -LEVELS])
CODES_A, CODES_B = ints(M, K, high=16), ints(N, K, high=16, seed=1)
NV = Scaling.BlockWise1x16
# Recipe: size of a block, dtype and numbers of the scales.
FLOAT4 = {
  "nvfp4": (NV, 16, e4m3, [ints(rows, 9, low=1, high=15).float() for rows in (M, N)]),
  "mxfp4": (MX, 32, torch.float8_e8m0fnu, (POWERS_A, POWERS_B)),
}


def packed(codes):
  """Return bytes on jax whose low halves are the even columns."""
  both = codes[:, ::2] | codes[:, 1::2] << 4
  return both.to(torch.uint8).to("jax").view(float4)


@pytest.mark.parametrize("name", FLOAT4)
def test_packed_numbers_equal_a_float64_reference(name):
  recipe, block, dtype, (scale_a, scale_b) = FLOAT4[name]
  left = LEVELS[CODES_A].double() * expand(scale_a, block, K)
  right = LEVELS[CODES_B].double() * expand(scale_b, block, K)
  expected = (left @ right.T).float()
  order = Swizzle.SWIZZLE_32_4_4
  scales = [swizzle(scale, dtype).to("jax") for scale in (scale_a, scale_b)]

  def product(a, b, scale_a, scale_b):
    return scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)

  def by_recipe(a, b, scale_a, scale_b):
    scales = (scale_a, recipe, scale_b, recipe, order, order)
    return F.scaled_mm(a, b, *scales, output_dtype=torch.float32)

  with torchax.default_env():
    a, b = packed(CODES_A), packed(CODES_B).T
    for run in (product, jax_jit(product), by_recipe):
      assert torch.equal(run(a, b, *scales).cpu(), expected)
  on_cpu = torch.compile(product, backend="jax", fullgraph=True)
  assert torch.equal(on_cpu(a.cpu(), b.cpu(), *(s.cpu() for s in scales)), expected)


def test_nvfp4_scales_of_the_tensors_multiply_before_the_bias():
  _, _, dtype, scales = FLOAT4["nvfp4"]
  scales = [swizzle(scale, dtype).to("jax") for scale in scales]
  whole, bias = torch.tensor(0.5, device="jax"), torch.ones(N, device="jax")
  order = Swizzle.SWIZZLE_32_4_4
  with torchax.default_env():
    a, b = packed(CODES_A), packed(CODES_B).T
    plain = scaled_mm(a, b, *scales, out_dtype=torch.float32)
    found = F.scaled_mm(
      *(a, b, [scales[0], whole], [NV, TENSOR], [scales[1], whole], [NV, TENSOR]),
      *(order, order, bias, torch.float32),
    )
    assert torch.equal(found, plain / 4 + 1)


# Groups -------------------------------------------------------------------------------

ENDS = torch.tensor([3, 3, 6, 8], dtype=torch.int32)
TOKENS, EXPERTS = float8(8, 16), float8(4, 32, 16, seed=1).mT
COLUMNS, INNER = float8(8, 16, seed=2).T, float8(8, 32, seed=3)
GROUPS = {
  "rows": (TOKENS, EXPERTS, powers(8), powers(4, 32), ENDS),
  "columns": (EXPERTS.mT, COLUMNS, powers(4, 32), powers(8), ENDS),
  "inner": (TOKENS.T, INNER, powers(4 * 16), powers(4 * 32), ENDS),
  "stacks": (EXPERTS.mT, EXPERTS, powers(4, 32), powers(4, 32)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_scaled_groups_equal_products_of_each_group(name):
  left, right, scale_left, scale_right, *ends = GROUPS[name]
  a, b = left.float(), right.float()
  if name == "inner":
    products = torch._grouped_mm(a, b, *ends)
    expected = products * scale_left.view(4, 16, 1) * scale_right.view(4, 1, 32)
  else:
    expected = torch._grouped_mm(
      a * scale_left[..., None], b * scale_right[..., None, :], *ends
    )
  moved = [t.to("jax") for t in GROUPS[name]]
  with torchax.default_env():
    found = torch._scaled_grouped_mm(*moved)
    recipes = F.scaled_grouped_mm(
      *moved[:2], moved[2], ROWS, moved[3], ROWS, offs=(moved[4:] or [None])[0]
    )
  assert torch.equal(found.cpu(), expected.to(bf16))
  assert torch.equal(recipes.cpu(), expected.to(bf16))


# Tiles of 128 rows and of 128 inner numbers: whole ones, parts, and a group of none.
BLOCK_ENDS = torch.tensor([32, 192, 192, 352], dtype=torch.int32)
SIZES = [32, 160, 0, 160]
LONG, THICK = float8(352, 160), float8(4, 40, 160, seed=1)
TURNED = [part.T for part in LONG.split(SIZES)]
# Operands, and the groups of both as (rows, inner).
BLOCK_GROUPS = {
  "rows": (LONG, THICK.mT, LONG.split(SIZES), THICK),
  "inner": (LONG.T, LONG[:, :40], TURNED, [part[:40] for part in TURNED]),
}


def in_blocks(groups, seed):
  """Return groups times random scales of blocks of 32, and a row of tiles for each."""
  scales = [
    powers(len(part), -(-part.shape[1] // 32), seed=seed + i)
    for i, part in enumerate(groups)
  ]
  scaled = [
    part.double() * expand(scale, 32, part.shape[1])
    for part, scale in zip(groups, scales, strict=True)
  ]
  return scaled, [swizzle(scale, torch.float32) for scale in scales]


@pytest.mark.parametrize("name", BLOCK_GROUPS)
def test_groups_scaled_in_blocks_equal_products_of_each_group(name):
  left, right, *groups = BLOCK_GROUPS[name]
  (a, tiles_a), (b, tiles_b) = in_blocks(groups[0], 0), in_blocks(groups[1], 4)
  products = [x @ y.T for x, y in zip(a, b, strict=True)]
  expected = torch.cat(products) if name == "rows" else torch.stack(products)
  join = torch.stack if name == "rows" else torch.cat
  scales = [
    tiles.to(torch.float8_e8m0fnu) for tiles in (torch.cat(tiles_a), join(tiles_b))
  ]

  @jax_jit
  def run(left, right, scale_left, scale_right, ends):
    plain = torch._scaled_grouped_mm(left, right, scale_left, scale_right, ends)
    order = Swizzle.SWIZZLE_32_4_4
    recipes = F.scaled_grouped_mm(
      *(left, right, scale_left, MX, scale_right, MX, order, order),
      offs=ends,
      output_dtype=torch.float32,
    )
    return plain, recipes

  with torchax.default_env():
    plain, recipes = run(*(t.to("jax") for t in (left, right, *scales, BLOCK_ENDS)))
  assert torch.equal(plain.cpu(), expected.to(bf16))
  assert torch.equal(recipes.cpu(), expected.float())


# Errors -------------------------------------------------------------------------------

REFUSED = {
  "one dimension": (scaled_mm, (LEFT[0], RIGHT, ONE_A, ONE_B), "2D"),
  "floats": (scaled_mm, (LEFT.float(), RIGHT, ONE_A, ONE_B), "fp8"),
  "inner size": (scaled_mm, (LEFT, RIGHT[1:], ONE_A, ONE_B), "6x32 and 31x10"),
  "scale of rows and tensor": (scaled_mm, (LEFT, RIGHT, ROWS_A, ONE_A), "recipes"),
  "scale of bfloat16": (scaled_mm, (LEFT, RIGHT, ONE_A.to(bf16), ONE_B), "recipes"),
  "few scales": (scaled_mm, (LEFT, RIGHT, ROWS_A[1:], ROWS_B), r"\[5, 1\]"),
  "bias": (scaled_mm, (LEFT, RIGHT, ONE_A, ONE_B, BIAS[1:]), "size 10 but got 9"),
  "scale of the result": (
    scaled_mm,
    (LEFT, RIGHT, ONE_A, ONE_B, None, ROWS_A),
    "must be a float scalar",
  ),
  "swizzle": (
    F.scaled_mm,
    (A, B, *(x for scale in BLOCKS["powers of two"][0] for x in (scale, MX))),
    "SWIZZLE_32_4_4",
  ),
  "levels": (
    F.scaled_mm,
    (LEFT, RIGHT, [ONE_A] * 2, [TENSOR] * 2, [ONE_B] * 2, [TENSOR] * 2),
    "one scale",
  ),
  "float4 with float8": (
    scaled_mm,
    (LEFT.view(torch.uint8).view(float4), RIGHT, ONE_A, ONE_B),
    "fp8 or fp4",
  ),
  "float4 without blocks": (
    scaled_mm,
    (*(t.view(torch.uint8).view(float4) for t in (LEFT, RIGHT)), ONE_A, ONE_B),
    "recipes",
  ),
  "groups of bfloat16": (
    torch._scaled_grouped_mm,
    (TOKENS.to(bf16), *GROUPS["rows"][1:]),
    "E4M3",
  ),
  "scales of groups": (
    torch._scaled_grouped_mm,
    (TOKENS, EXPERTS, powers(7), powers(4, 32), ENDS),
    r"scale_a .* \[8\]",
  ),
  "tiles of groups": (
    torch._scaled_grouped_mm,
    (LONG, THICK.mT, *(torch.ones(4, 512).to(torch.float8_e8m0fnu),) * 2, BLOCK_ENDS),
    r"scale_a with at least 3072 .*\[4, 512\]",
  ),
  "blocks of a stack": (
    torch._scaled_grouped_mm,
    (
      *(EXPERTS.mT, COLUMNS),
      *(torch.ones(4, 512).to(torch.float8_e8m0fnu),) * 2,
      ENDS,
    ),
    "expects a matrix mat_a",
  ),
  "recipe of groups": (
    F.scaled_grouped_mm,
    (TOKENS, EXPERTS, powers(8), TENSOR, powers(4, 32), TENSOR, None, None, None, ENDS),
    "recipe RowWise, or BlockWise1x32",
  ),
  "groups without ends": (torch._scaled_grouped_mm, GROUPS["rows"][:4], "offsets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operands_that_do_not_fit_raise(name):
  function, args, message = REFUSED[name]
  moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("jax"), args)
  with torchax.default_env(), pytest.raises(RuntimeError, match=message):
    function(*moved)


@pytest.mark.parametrize(
  "args",
  [
    (ints(4, 8, dtype=torch.int32), ints(8, 4, dtype=torch.int8)),
    (ints(4, 8, dtype=torch.int8), ints(4, 8, dtype=torch.int8)),
    (ints(4, 8, dtype=torch.int8), ints(8, 4, dtype=torch.uint8)),
  ],
  ids=["dtype", "sizes", "unsigned weight"],
)
def test_int_mm_raises_the_error_of_torch(args):
  with pytest.raises(RuntimeError) as of_torch:
    torch._int_mm(*args)
  with (
    torchax.default_env(),
    pytest.raises(RuntimeError, match=re.escape(str(of_torch.value).splitlines()[0])),
  ):
    torch._int_mm(*(t.to("jax") for t in args))


# Compiled graphs ----------------------------------------------------------------------


def _layer(x, weight, scale):
  """Compute a float8 layer with dynamic scales of the rows, then an int8 layer."""
  scale_x = x.abs().amax(1, keepdim=True) / 448
  hidden = scaled_mm((x / scale_x).to(e4m3), weight, scale_x, scale, out_dtype=bf16)
  whole = hidden.float().clamp(-127, 127).to(torch.int8)
  return hidden, torch._int_mm(whole, whole.T)


LAYER = (floats(4, 32), RIGHT, ROWS_B)


def test_torch_compile_gives_the_bits_of_the_eager_layer():
  with torchax.default_env():
    expected = _layer(*(t.to("jax") for t in LAYER))
  found = torch.compile(_layer, backend="jax", fullgraph=True)(*LAYER)
  for ours, eager in zip(found, expected, strict=True):
    assert torch.equal(ours, eager.cpu())


def test_an_exported_layer_equals_the_eager_layer():
  class Layer(torch.nn.Module):
    def forward(self, *args):
      return _layer(*args)

  exported = torch.export.export(Layer(), LAYER)
  with torchax.default_env():
    expected = _layer(*(t.to("jax") for t in LAYER))
  _, program = exported_program_to_jax(exported)
  found = program({}, tuple(t2j(t) for t in LAYER))
  for ours, eager in zip(found, expected, strict=True):
    assert (ours == eager.jax()).all()


def test_the_program_multiplies_narrow_operands():
  """XLA, which sees float8 and int8 operands, can choose a kernel of the hardware."""
  args = [t.to("jax") for t in LAYER]
  with torchax.default_env():
    program = jax_jit(_layer).lower(*args).as_text()
  assert (
    "(tensor<4x32xf8E4M3FN>, tensor<32x10xf8E4M3FN>) -> tensor<4x10xf32>" in program
  )
  assert "(tensor<4x10xi8>, tensor<10x4xi8>) -> tensor<4x4xi32>" in program
