"""Helpers for lowerings: promotion, dtype arguments, in-place and `out=` variants."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops.harness import HALF_COMPLEX, NARROWED

from torchax.ops import jaten, mappings, op_base

DTYPES = (
  torch.bool,
  torch.uint8,
  torch.int8,
  torch.int32,
  torch.int64,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.complex64,
)
NUMBERS = (True, 2, 2.5, 1j)


def tensors(dtype: torch.dtype) -> list:
  """Return a tensor with dimensions and one without."""
  return [torch.ones(2, dtype=dtype), torch.ones((), dtype=dtype)]


def arrays(values) -> list:
  return [mappings.t2j(v) if isinstance(v, torch.Tensor) else v for v in values]


def expected(values) -> jnp.dtype:
  """Return torch's dtype, narrowed without x64; JAX has no 32-bit complex numbers."""
  dtype = torch.result_type(*values)
  narrowed = {**NARROWED, **dict.fromkeys(HALF_COMPLEX, torch.complex64)}
  return mappings.t2j_dtype(narrowed.get(dtype, dtype))


PAIRS = [
  (a, b)
  for left, right in itertools.product(DTYPES, repeat=2)
  for a, b in itertools.product(tensors(left), tensors(right))
]
PAIRS += [(t, n) for dtype in DTYPES for t in tensors(dtype) for n in NUMBERS]


def test_result_dtype_equals_torch_for_every_pair():
  wrong = [
    (a.dtype, a.dim(), b if not isinstance(b, torch.Tensor) else (b.dtype, b.dim()))
    for a, b in PAIRS
    if op_base.result_dtype(*arrays((a, b))) != expected((a, b))
  ]
  assert not wrong


def test_promotion_is_symmetric():
  for a, b in PAIRS:
    left, right = arrays((a, b))
    assert op_base.result_dtype(left, right) == op_base.result_dtype(right, left)


def test_a_python_float_has_the_default_dtype():
  torch.set_default_dtype(torch.bfloat16)
  try:
    assert op_base.default_float() == jnp.bfloat16
    assert op_base.result_dtype(jnp.ones(2, jnp.int32), 2.5) == jnp.bfloat16
    assert op_base.to_float(jnp.ones(2, jnp.int32)).dtype == jnp.bfloat16
  finally:
    torch.set_default_dtype(torch.float32)
  assert op_base.default_float() == jnp.float32


def test_a_traced_number_promotes_as_a_number():
  dtypes = []

  def traced(number):
    dtypes.append(op_base.result_dtype(jnp.ones(2, jnp.bfloat16), number))
    return number

  jax.jit(traced)(2.5)
  assert dtypes == [jnp.bfloat16]


def test_promotion_ignores_none():
  assert op_base.result_dtype(None, jnp.ones(2, jnp.float16), None) == jnp.float16


def test_promote_converts_dtypes_and_keeps_shapes():
  left, right = op_base.promote(jnp.ones((2, 1), jnp.int32), 2.5)
  assert left.dtype == right.dtype == jnp.float32
  assert left.shape == (2, 1) and right.shape == ()
  assert float(right) == 2.5


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.uint8])
def test_to_float_converts_integers(dtype):
  assert op_base.to_float(jnp.ones(2, dtype)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_to_float_keeps_inexact_dtypes(dtype):
  array = jnp.ones(2, dtype)
  assert op_base.to_float(array).dtype == dtype


def test_promote_int_input_converts_only_the_first_argument():
  @op_base.promote_int_input
  def lowering(x, other, scale=1):
    return x.dtype, other.dtype, scale

  ones = jnp.ones(2, jnp.int32)
  assert lowering(ones, ones, scale=3) == (jnp.float32, jnp.int32, 3)
  assert lowering.__name__ == "lowering"


def test_convert_dtype_passes_a_jax_dtype():
  @op_base.convert_dtype()
  def with_default(n, *, dtype=None):
    return dtype

  @op_base.convert_dtype(use_default_dtype=False)
  def without_default(n, *, dtype=None):
    return dtype

  assert with_default(1, dtype=torch.bfloat16) == jnp.bfloat16
  assert with_default(1) == jnp.float32
  assert without_default(1, dtype=torch.int8) == jnp.int8
  assert without_default(1, dtype=jnp.dtype("int8")) == jnp.int8
  assert without_default(1) is None


def test_constants_are_converted_to_the_dtype():
  convert = op_base.maybe_convert_constant_dtype
  assert convert(2, jnp.dtype("float32")).dtype == jnp.float32
  assert convert(jnp.ones((), jnp.int32), jnp.dtype("bfloat16")).dtype == jnp.bfloat16
  array = jnp.ones(2, jnp.int32)
  assert convert(array, jnp.dtype("float32")) is array
  assert convert(None, jnp.dtype("float32")) is None
  assert convert(2, None) == 2


def test_foreach_loop_folds_in_order():
  seq = jnp.array([1.0, 2.0, 3.0])
  folded = op_base.foreach_loop(seq, lambda carry, x: carry * 10 + x)
  assert float(folded) == 123
  assert float(op_base.foreach_loop(seq, jnp.subtract, 1.0)) == -5
  np.testing.assert_allclose(
    jax.grad(lambda s: op_base.foreach_loop(s, jnp.multiply, 1.0))(seq), [6, 3, 2]
  )


# Forms that write ---------------------------------------------------------------------


def on_jax(*values, dtype=torch.float32) -> torch.Tensor:
  return torch.tensor(values, dtype=dtype).to("jax")


def test_inplace_op_writes_through_views_and_keeps_the_dtype():
  base = on_jax(1, 2, 3, dtype=torch.int32)
  halved_ = op_base.InplaceOp(lambda x, by: x / by)
  view = base[1:]
  assert halved_(view, 2) is view
  assert base.tolist() == [1, 1, 1] and base.dtype == torch.int32


def test_inplace_op_can_replace_the_tensor():
  tensor = on_jax(1, 2, 3, dtype=torch.int32)
  halved_ = op_base.InplaceOp(lambda x: x[:2] / 2, replace=True)
  assert halved_(tensor) is tensor
  assert tensor.tolist() == [0.5, 1.0] and tensor.dtype == torch.float32


def test_inplace_op_of_a_jax_function_writes_any_argument():
  source, target = on_jax(1, 2), on_jax(5, 5)
  write = op_base.InplaceOp(jnp.subtract, position_to_mutate=1, is_jax_func=True)
  assert write(source, target) is target
  assert target.tolist() == [-4, -3] and source.tolist() == [1, 2]


def test_inplace_op_of_an_aten_operation_equals_torch():
  expected, actual = torch.tensor([1.0, 2.0]), on_jax(1, 2)
  add_ = op_base.InplaceOp(torch.ops.aten.add)
  assert (
    add_(actual, actual, alpha=2).tolist() == expected.add_(expected, alpha=2).tolist()
  )


def test_inplace_op_raises_for_a_cpu_tensor():
  with pytest.raises(TypeError, match="expects a jax tensor as argument 0"):
    op_base.InplaceOp(torch.neg)(torch.ones(2))


def test_out_variant_writes_one_or_several_results():
  double_out = op_base.OutVariant(lambda x: x * 2)
  out = on_jax(0, 0)
  assert double_out(on_jax(1, 2), out=out) is out and out.tolist() == [2, 4]
  empty = torch.empty(0).to("jax")
  assert double_out(on_jax(1, 2), out=empty).tolist() == [2, 4]
  outs = (on_jax(0), on_jax(0, dtype=torch.int32))
  op_base.OutVariant(lambda x: (x, x.int() + 1))(on_jax(3), out=outs)
  assert [o.tolist() for o in outs] == [[3], [4]]


def test_out_variant_resizes_with_a_warning_and_checks_dtypes():
  double_out = op_base.OutVariant(lambda x: x * 2)
  out = on_jax(1, 1, 1)
  with pytest.warns(UserWarning, match="one or more elements was resized"):
    assert double_out(on_jax(1, 2), out=out).tolist() == [2, 4]
  whole = on_jax(1, dtype=torch.int32)
  with pytest.raises(RuntimeError, match="can't be cast"):
    double_out(on_jax(1.5), out=whole)
  assert whole.tolist() == [1]


def test_mutation_tables_map_in_place_to_functional_forms():
  aten = torch.ops.aten
  forms = jaten.mutation_ops_to_functional
  assert forms[aten.add_] is aten.add and forms[aten.relu_] is aten.relu
  assert aten.add not in forms
  assert aten.uniform_ in jaten.mutation_needs_env
  assert jaten.mutation_needs_env < set(forms)
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    jaten.nothing  # noqa: B018
