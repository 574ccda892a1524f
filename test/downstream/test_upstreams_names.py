"""Lowerings are called by upstream's names, with arguments in upstream's order."""

import inspect
import pathlib
import re

import jax.numpy as jnp
import pytest
import torch
from compare import assert_same

import torchax
from torchax.interop import torch_view
from torchax.ops import jaten, jtorch

# Name -> how many positional arguments upstream's function needs, by that number.
NAMES = {
  0: """
    _aten__assert_tensor_metadata _aten_broadcast_tensors _aten_randint _aten_randn
    _rand
  """,
  1: """
    _aten__linalg_svd _aten__pdist_forward _aten__to_copy _aten_abs _aten_acos
    _aten_acosh _aten_alias _aten_amax _aten_amin _aten_any _aten_arange _aten_argmax
    _aten_argmin _aten_asin _aten_asinh _aten_atan _aten_atanh _aten_atleast_1d
    _aten_atleast_2d _aten_bernoulli _aten_bincount _aten_bitwise_not _aten_cat
    _aten_cauchy_ _aten_ceil _aten_cholesky _aten_cholesky_inverse _aten_clamp
    _aten_clone _aten_conj_physical _aten_cos _aten_cosh _aten_detach _aten_diag
    _aten_diagflat _aten_diagonal _aten_digamma _aten_dim _aten_empty _aten_empty_like
    _aten_erf _aten_erfinv _aten_exp _aten_exp2 _aten_expm1 _aten_exponential_
    _aten_flatten _aten_floor _aten_frexp _aten_gelu _aten_glu _aten_hardtanh
    _aten_histc _aten_i0 _aten_i0e _aten_imag _aten_is_nonzero _aten_isfinite
    _aten_isinf _aten_isnan _aten_leaky_relu _aten_lgamma _aten_lift_fresh
    _aten_lift_fresh_copy _aten_linalg_cholesky_ex _aten_linalg_eig _aten_linalg_eigh
    _aten_linalg_inv_ex _aten_linalg_ldl_factor_ex _aten_linalg_lu
    _aten_linalg_lu_factor_ex _aten_linalg_matrix_exp
    _aten_linalg_pinv_atol_rtol_tensor _aten_linalg_qr _aten_linalg_vector_norm
    _aten_log _aten_log10 _aten_log1p _aten_log2 _aten_log_sigmoid _aten_logical_not
    _aten_logit _aten_max _aten_mean _aten_median _aten_min _aten_mode _aten_nanmedian
    _aten_neg _aten_nonzero _aten_normal _aten_numpy_T _aten_prod _aten_qr
    _aten_randn_like _aten_randperm _aten_real _aten_reciprocal _aten_relu _aten_round
    _aten_rsqrt _aten_scalar_tensor _aten_sigmoid _aten_sign _aten_signbit _aten_silu
    _aten_sin _aten_sinh _aten_slice _aten_sort _aten_special_bessel_j0
    _aten_special_bessel_j1 _aten_special_bessel_y0 _aten_special_bessel_y1
    _aten_special_erfcx _aten_special_i1 _aten_special_i1e
    _aten_special_modified_bessel_i0 _aten_special_modified_bessel_i1
    _aten_special_modified_bessel_k0 _aten_special_modified_bessel_k1
    _aten_special_ndtri _aten_sqrt _aten_squeeze_dim _aten_stack _aten_sum _aten_t
    _aten_tanh _aten_triu _aten_trunc _aten_unbind _aten_uniform _aten_unique
    _aten_unique2 _aten_unique_consecutive _aten_var _aten_var_mean_correction
    _aten_view_as_complex _aten_view_as_real _aten_where _ones _zeros
  """,
  2: """
    _aten__linalg_solve_ex _aten_add _aten_allclose _aten_atan2 _aten_avg_pool
    _aten_bitwise_and _aten_bitwise_left_shift _aten_bitwise_or
    _aten_bitwise_right_shift _aten_bitwise_xor _aten_bmm _aten_broadcast_to
    _aten_bucketize _aten_cdist _aten_cholesky_solve _aten_clamp_min _aten_complex
    _aten_constant_pad_nd _aten_copy _aten_copysign _aten_cummax _aten_cummin
    _aten_cumprod _aten_cumsum _aten_diagonal_scatter _aten_dist _aten_div _aten_dot
    _aten_embedding _aten_empty_permuted _aten_empty_strided _aten_eq _aten_equal
    _aten_expand _aten_fill _aten_flip _aten_floor_divide _aten_fmax _aten_fmin
    _aten_fmod _aten_gcd _aten_ge _aten_gt _aten_hypot _aten_igamma _aten_igammac
    _aten_index _aten_lcm _aten_le _aten_linalg_householder_product _aten_linalg_lstsq
    _aten_logaddexp _aten_logaddexp2 _aten_logical_and _aten_logical_or
    _aten_logical_xor _aten_lt _aten_lu_unpack _aten_masked_select _aten_matmul
    _aten_max_pool2d_with_indices _aten_maximum _aten_minimum _aten_mm _aten_mul
    _aten_multinomial _aten_mvlgamma _aten_ne _aten_nextafter _aten_outer _aten_pad
    _aten_polar _aten_polygamma _aten_pow _aten_reflection_pad1d _aten_remainder
    _aten_repeat _aten_resize_ _aten_resize_as_ _aten_roll _aten_searchsorted
    _aten_slice_scatter _aten_softmax _aten_special_chebyshev_polynomial_t
    _aten_special_chebyshev_polynomial_u _aten_special_hermite_polynomial_h
    _aten_special_hermite_polynomial_he _aten_special_laguerre_polynomial_l
    _aten_special_zeta _aten_sub _aten_sym_size _aten_take _aten_tensor_split
    _aten_topk _aten_triangular_solve _aten_tril_indices _aten_triu_indices
    _aten_true_divide _aten_unique_dim _aten_unsafe_view _aten_unsqueeze _full
    _new_empty adaptive_avg_pool2or3d geometric kthvalue linear permute
    repeat_interleave split_with_sizes
  """,
  3: """
    _aten_addbmm _aten_addmm _aten_as_strided _aten_cdist_forward _aten_gather
    _aten_index_put _aten_index_select _aten_linalg_lu_solve _aten_masked_scatter
    _aten_max_unpoolxd _aten_movedim _aten_put _aten_select _aten_sparse_addmm
    _aten_transpose _aten_unsafe_index_put _aten_upsample_bicubic2d_aa
    _aten_upsample_billinear_aa _new_empty_strided _prims_broadcast_in_dim
  """,
  4: """
    _aten__fft_c2c _aten__fft_c2r _aten__fft_r2c _aten_embedding_renorm_
    _aten_index_copy _aten_narrow _aten_scatter _aten_scatter_add _aten_scatter_src
    _aten_select_scatter _aten_unfold
  """,
  5: """
    _aten_as_strided_scatter
  """,
  7: """
    _aten__native_batch_norm_legit_no_training _aten_conv2d _aten_trilinear
  """,
  8: """
    _aten__native_batch_norm_legit max_pool2d_with_indices_backward_custom
  """,
  9: """
    _aten_convolution
  """,
}

# What upstream has in these modules and programs do not find here; "wider" lowerings
# need more arguments than upstream's. The guide names them all.
LACKING = {
  "jaten": """
    _aten_erfcx _aten_local_scalar_dense _aten_to_device _aten_to_dtype
    _aten_to_dtype_layout _aten_upsample _broadcast_indices _ceil_mode_padding
    _embedding_jvp _euclidean_direct _euclidean_mm _generate_indices _get_median_index
    _hamming_distance _indices_along_axis _is_int _run_binary_pointwise_operator
    _scatter_index _shape_static_boolean_index_put _strided_index
    _torch_binary_scalar_type _with_reduction_scalar diag_indices_with_offset
    highest_precision_int_dtype max_pool pool
  """,
  "jtorch": """
    _as_tensor _aten_allclose _aten_isclose _cdist _diag _einsum _eye _full
    _functional_max_pool2d _ones _pad_sequence _sparse_mm _tensor _torch_angle
    _torch_argsort _zeros arange empty empty_strided functional_interpolate getitem
    linalg_det linalg_slogdet linalg_solve linalg_solve_ex linalg_svd
    linalg_tensorsolve logdet lu lu_solve matrix_power pad rand randint randn svd
    tensor_split torch_Tensor_repeat_interleave
  """,
}

WIDER = """
  _aten__embedding_bag _aten__linalg_check_errors _aten__linalg_slogdet
  _aten_linalg_solve_triangular _aten_log_softmax _aten_logcumsumexp
  _aten_native_batch_norm _aten_native_group_norm _aten_native_layer_norm
  _aten_native_layer_norm_backward _aten_nonzero_static _aten_randint_like
  _aten_scatter_reduce
"""

EACH = [(count, name) for count, names in NAMES.items() for name in names.split()]


def _places(function) -> tuple[int, float]:
  """How many positional arguments a function needs, and how many it takes."""
  parameters = list(inspect.signature(function).parameters.values())
  if hasattr(function, "__wrapped__") and parameters[0].name == "key":
    parameters = parameters[1:]  # a sampler, whose key is drawn for it
  positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
  needed = sum(p.default is p.empty for p in positional)
  has_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
  return needed, float("inf") if has_any else len(positional)


@pytest.mark.parametrize(("count", "name"), EACH)
def test_a_lowering_takes_upstreams_positional_arguments(count, name):
  needed, most = _places(getattr(jaten, name))
  assert needed <= max(count, 1) and count <= most


@pytest.mark.parametrize("name", LACKING)
def test_what_is_lacking_is_lacking(name):
  module = {"jaten": jaten, "jtorch": jtorch}[name]
  assert [n for n in LACKING[name].split() if hasattr(module, n)] == []


def test_the_guide_names_what_is_lacking():
  guide = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"
  text = guide.read_text().partition("## Lowerings by name")[2]
  blocks = [block.split() for block in re.findall(r"```text\n(.*?)```", text, re.S)]
  assert blocks == [LACKING["jaten"].split(), LACKING["jtorch"].split(), WIDER.split()]


def test_lowerings_compute_with_arrays():
  x = jnp.arange(16.0).reshape(1, 1, 4, 4)
  weight = jnp.ones((1, 1, 2, 2))
  out = jaten._aten_conv2d(x, weight, None, [1, 1], [0, 0], [1, 1], 1)
  expected = torch.nn.functional.conv2d(
    torch.arange(16.0).reshape(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
  )
  assert_same(torch_view(out), expected)
  assert jaten._aten_flatten(x).shape == (16,)
  assert jaten._aten_movedim(x, 2, 0).shape == (4, 1, 1, 4)


def test_samplers_draw_their_keys_from_the_environment():
  env = torchax.Environment(seed=3)
  first, second = (jaten._aten_randn((64,), env=env) for _ in range(2))
  assert not jnp.array_equal(first, second) and env.rng.state.count == 2
  again = torchax.Environment(seed=3)
  assert jnp.array_equal(first, jaten._aten_randn((64,), env=again))


def test_attention_is_reached_by_upstreams_names():
  q = torch.randn(1, 1, 4, 8)
  expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
  x = q.to("jax")
  for name in ("_sdpa_reference", "scaled_dot_product_attention"):
    out = getattr(jtorch, name)(x, x, x, is_causal=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
