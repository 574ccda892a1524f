"""View steps on arrays: reads, and writes through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torchax.core.view_steps import (
  AsStridedInfo,
  ComplexAsRealInfo,
  DiagonalInfo,
  DtypeInfo,
  ExpandInfo,
  IndexInfo,
  NarrowInfo,
  PermuteInfo,
  RealAsComplexInfo,
  ReshapeInfo,
  SelectInfo,
  ViewInfo,
  ViewInfoType,
  slice_of,
)
from torchax.interop import jax_jit, jax_value_and_grad

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
COMPLEX = (BASE[:, :2] + 1j * BASE[:, 2:4]).astype(np.complex64)

# (step, source, the same view in numpy, which aliases the source).
ROWS = {
  "narrow": (NarrowInfo((slice(1, 4), slice(0, 6, 2))), BASE, lambda a: a[1:4, ::2]),
  "narrow_one": (NarrowInfo(slice(1, 3)), BASE, lambda a: a[1:3]),
  "slice": (slice_of(1, 1, 5, 2), BASE, lambda a: a[:, 1:5:2]),
  "empty_slice": (slice_of(1, 2, 2, 1), BASE, lambda a: a[:, 2:2]),
  "select": (SelectInfo(1, 0, 6, 3), BASE, lambda a: a[:, 0:6:3]),
  "select_no_stride": (SelectInfo(0, 1, 3, 0), BASE, lambda a: a[1:3]),
  "index": (IndexInfo(1, 4), BASE, lambda a: a[:, 4]),
  "reshape": (ReshapeInfo((2, 12)), BASE, lambda a: a.reshape(2, 12)),
  "permute": (PermuteInfo((1, 0)), BASE, lambda a: a.transpose(1, 0)),
  "permute_three": (
    PermuteInfo((2, 0, 1)),
    BASE.reshape(2, 3, 4),
    lambda a: a.transpose(2, 0, 1),
  ),
  "as_strided": (
    AsStridedInfo((6, 2), 1, (3, 2)),
    BASE,
    lambda a: np.lib.stride_tricks.as_strided(a.reshape(-1)[1:], (3, 2), (24, 8)),
  ),
  "dtype": (DtypeInfo(np.dtype(np.int32)), BASE, lambda a: a.view(np.int32)),
  "dtype_narrower": (DtypeInfo(np.dtype(np.int16)), BASE, lambda a: a.view(np.int16)),
  "complex_as_real": (
    ComplexAsRealInfo(),
    COMPLEX,
    lambda a: a.view(np.float32).reshape(4, 2, 2),
  ),
  "real_as_complex": (
    RealAsComplexInfo(),
    BASE.reshape(4, 3, 2),
    lambda a: a.view(np.complex64)[..., 0],
  ),
}
DIAGONALS = [(0, 0, 1), (1, 0, 1), (-2, 0, 1), (0, 1, 0), (3, 1, 0)]
for _offset, _dim1, _dim2 in DIAGONALS:
  ROWS[f"diagonal_{_offset}_{_dim1}_{_dim2}"] = (
    DiagonalInfo(_offset, _dim1, _dim2),
    BASE,
    lambda a, row=(_offset, _dim1, _dim2): np.einsum(
      "ii->i", _square(a if row[1] == 0 else a.T, row[0])
    ),
  )


def _square(array, offset):
  """Return the largest square block whose main diagonal is the requested one."""
  block = array[:, offset:] if offset >= 0 else array[-offset:]
  size = min(block.shape)
  return block[:size, :size]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_reads_through_a_step_equal_numpy(row):
  info, source, oracle = row
  shown = info.transform_tensor(jnp.asarray(source))
  np.testing.assert_array_equal(shown, oracle(source))
  assert info.calculate_output_shape(jnp.asarray(source)) == list(shown.shape)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_write_changes_the_shown_elements_and_no_others(row):
  info, source, oracle = row
  expected = source.copy()
  view = oracle(expected)
  view[...] = np.arange(100, 100 + view.size).reshape(view.shape)
  written = info.update_tensor(jnp.asarray(view.copy()), jnp.asarray(source))
  np.testing.assert_array_equal(written, expected)
  assert written.dtype == source.dtype


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_write_can_be_traced(row):
  info, source, oracle = row
  value = jnp.asarray(oracle(source.copy()).copy())
  eager = info.update_tensor(value, jnp.asarray(source))
  traced = jax.jit(info.update_tensor)(value, jnp.asarray(source))
  np.testing.assert_array_equal(traced, eager)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_steps_that_are_equal_have_one_hash(row):
  info, _, _ = row
  again = (
    type(info)(**{name: getattr(info, name) for name in info.__dict__})
    if (not isinstance(info, NarrowInfo))
    else NarrowInfo(tuple(slice(*part) for part in info.slices))
  )
  assert again == info and hash(again) == hash(info)
  assert info != ViewInfo()


def test_an_expanded_array_repeats_and_writes_back_one_value():
  info = ExpandInfo((3, 2, 2))
  source = jnp.asarray([[1.0], [2.0]])
  shown = info.transform_tensor(source)
  np.testing.assert_array_equal(shown, np.broadcast_to(source, (3, 2, 2)))
  np.testing.assert_array_equal(info.update_tensor(shown * 5, source), source * 5)


@pytest.mark.parametrize("later", [lambda x: x, lambda x: x[:, :2], lambda x: x.t()])
def test_a_write_to_an_array_expanded_to_nothing_has_no_effect(later):
  for device in ("cpu", "jax"):
    base = torch.zeros(3, device=device)
    later(base.expand(0, 3)).add_(1)
    assert not base.any()


def test_the_base_class_of_steps_has_no_transform():
  with pytest.raises(NotImplementedError, match="ViewInfo"):
    ViewInfo().transform_tensor(jnp.ones(2))


KINDS = {
  NarrowInfo(slice(0, 1)): ViewInfoType.NARROW,
  SelectInfo(): ViewInfoType.SELECT,
  AsStridedInfo((1,)): ViewInfoType.AS_STRIDED,
  DiagonalInfo(): ViewInfoType.DIAGONAL,
  ReshapeInfo((1,)): ViewInfoType.RESHAPE,
  PermuteInfo((0,)): ViewInfoType.PERMUTE,
  ExpandInfo((1,)): ViewInfoType.EXPAND,
  ViewInfo(): ViewInfoType.INVALID,
}


@pytest.mark.parametrize("info", KINDS, ids=lambda info: type(info).__name__)
def test_a_step_says_its_kind(info):
  assert info.view_info_type is KINDS[info]


def test_as_strided_without_size_keeps_the_shape():
  source = jnp.asarray(BASE)
  np.testing.assert_array_equal(AsStridedInfo((6, 1)).transform_tensor(source), source)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit])
def test_a_write_to_a_detached_tensor_is_unknown_to_derivatives(wrap):
  """The clamped values keep the derivative of the old values, as in torch."""

  def loss(x):
    doubled = x * 2
    doubled.detach()[1:].clamp_(min=0)
    return (doubled * torch.arange(1.0, 4.0, device="jax")).sum()

  value, gradient = wrap(jax_value_and_grad(loss))(torch.tensor([1.0, -2, 3]).to("jax"))
  assert value.item() == 2 + 3 * 6
  assert gradient.tolist() == [2, 4, 6]


def test_a_write_to_a_detached_tensor_of_integers_is_a_write():
  def loss(x):
    whole = (x * 2).int()
    whole.detach().clamp_(min=3)
    return (whole * x).sum()

  _, gradient = jax_value_and_grad(loss)(torch.tensor([1.0, 2.0]).to("jax"))
  assert gradient.tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int16], ids=str)
def test_view_as_complex_dtype_keeps_every_bit(dtype):
  bits = torch.tensor([1, 2, -1, 0x7FC00001, 0x7F800000, -(2**31)], dtype=torch.int32)
  x = bits.to("jax").view(dtype)
  assert x.view(torch.complex64).view(torch.int32).tolist() == bits.tolist()
  expected = bits.view(torch.complex64).view(dtype).view(torch.int32)
  found = x.view(torch.complex64).view(dtype).view(torch.int32)
  assert torch.equal(found.cpu(), expected)


def test_write_through_a_complex_dtype_reaches_the_base():
  for device in ("cpu", "jax"):
    x = torch.zeros(2, 4, device=device)
    x.view(torch.complex64)[:, 1] = 1 + 2j
    assert x.tolist() == [[0.0, 0.0, 1.0, 2.0]] * 2


WIDE = (torch.float16, torch.float32, torch.float64, torch.int64)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("complex_dtype", [torch.complex64, torch.complex128], ids=str)
def test_any_bits_survive_views_of_complex_dtypes(dtype, complex_dtype):
  generator = torch.Generator().manual_seed(0)
  bits = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
  with jax.enable_x64(True):
    x = bits.to("jax").view(dtype)
    assert torch.equal(x.view(complex_dtype).view(dtype).view(torch.uint8).cpu(), bits)
    x = bits.to("jax").view(complex_dtype)
    assert torch.equal(x.view(dtype).view(torch.uint8).cpu(), bits)
