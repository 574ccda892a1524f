"""Families of PyTorch's operators, by patterns of their names in `op_db`.

The first family with a pattern that matches the whole name has the operator. The part
of the name after the variant's dot belongs to the name.
"""

import re

OTHER = "Other operators"

# Heading -> patterns, separated by blanks.
_FAMILIES = {
  "Activations and softmax": r"""
    (log_)?softmax.* _softmax_backward_data .*_safe_softmax.*
    nn\.functional\.(celu|elu|gelu|glu|hard(shrink|sigmoid|swish|tanh)|leaky_relu)
    nn\.functional\.(logsigmoid|mish|prelu|relu6?|rrelu|selu|silu.*|softmin.*|softplus)
    nn\.functional\.(softshrink|softsign|tanhshrink|threshold)
  """,
  "Losses": r"""
    nn\.functional\..*loss nn\.functional\..*cross_entropy.* nn\.functional\.kl_div
  """,
  "Convolution, pooling and images": r"""
    nn\.functional\.(conv|.*pool|interpolate|upsample|grid_sample|pixel_|channel_).*
    nn\.functional\.(unfold|pad\..*) max_pool2d_with_indices_backward grid_sampler_.*
    _upsample_.* constant_pad_nd
  """,
  "Normalization": r"""
    .*(batch|layer|group|instance|rms)_norm.* _native_batch_norm_legit
    nn\.functional\.(local_response_norm|normalize)
  """,
  "Random numbers": r"""
    .*dropout.* bernoulli cauchy exponential geometric log_normal multinomial normal.*
    rand.* uniform
  """,
  "Other layers": r"nn\.functional\..*",
  "Linear algebra": r"""
    linalg\..* addbmm addmm.* addmv addr baddbmm bmm.* cholesky.* corrcoef cov cross dot
    einsum geqrf inner kron logdet lu.* matmul matrix_exp mm mv norm.* ormqr outer
    pca_lowrank pinverse qr svd.* tensordot trace triangular_solve vdot __rmatmul__
    cdist dist renorm sparse\..*
  """,
  "Fourier transforms and windows": r"fft\..* signal\..* stft istft",
  "Special functions": r"""
    special\..* digamma erf erfc erfinv i0 igammac? lgamma mvlgamma.* polygamma.* xlogy
    sinc logit
  """,
  "Masked reductions": r"masked\..*",
  "Reductions and scans": r"""
    all allclose amax amin aminmax any argmax argmin count_nonzero cum.* diff equal
    gradient hash_tensor logcumsumexp logsumexp (max|min)\.reduction.* mean median mode
    nan(mean|median|quantile|sum) prod quantile std.* sum trapezoid trapz var.*
    sum_to_size _segment_reduce.*
  """,
  "Sorting, searching and counting": r"""
    argsort argwhere bincount bucketize hist.* isin kthvalue msort nonzero.*
    searchsorted sort topk unique.*
  """,
  "Indexing": r"""
    __getitem__ _unsafe_masked_.* gather index_.* masked_(fill|scatter|select) put
    .*scatter.* select slice take.* narrow.* where unravel_index tri[lu]_indices
  """,
  "Creation": r"""
    arange empty.* eye full.* linspace.* logspace.* new_.* ones.* zeros.* scalar_tensor
    complex polar fill zero_ clone
  """,
  "Types and dtypes": r"""
    bfloat16 bool byte cdouble cfloat chalf char double float half int long short to
    to_sparse item
  """,
  "Shapes, views and joins": r"""
    H T mH mT t t_copy alias_copy as_strided.* atleast_.* block_diag broadcast_.*
    cartesian_prod _chunk_cat cat chunk column_stack combinations contiguous diag.*
    [dhv]?split.* [dhv]?stack expand.* flatten flip.* meshgrid.* movedim permute.*
    ravel repeat.* reshape.* resize_.* resolve_.* roll rot90 squeeze.* tensor_split
    tile transpose.* tri[lu] unbind.* unflatten unfold.* unsafe_.* unsqueeze.* view.*
  """,
  "Pointwise operations": r"""
    __r(add|and|div|mod|mul|or|pow|sub|xor)__ abs a?(cos|sin|tan)h? atan2 add addcdiv
    addcmul angle bitwise_.* ceil clamp.* conj.* copysign deg2rad div\..* eq exp exp2
    expm1 float_power floor.* f?(max|min) (max|min)\.binary (max|min)imum fmod frac
    frexp gcd ge gt heaviside hypot imag is(close|finite|inf|nan|neginf|posinf|real)
    lcm ldexp le lerp log log10 log1p log2 logaddexp.* logical_.* lt mul nan_to_num ne
    neg nextafter positive pow rad2deg real reciprocal remainder round.* rsqrt rsub sgn
    sigmoid sign(bit)? sqrt square sub true_divide trunc jiterator_.*
  """,
}
_PATTERNS = {
  family: re.compile("|".join(f"(?:{pattern})" for pattern in patterns.split()))
  for family, patterns in _FAMILIES.items()
}


def family_of(operator: str) -> str:
  """Return the heading under which the page has an operator of `op_db`."""
  matching = (name for name, p in _PATTERNS.items() if p.fullmatch(operator))
  return next(matching, OTHER)


def by_family(operators: list[str]) -> dict[str, list[str]]:
  """Return the operators of each family that has any, in the order of the page."""
  families: dict[str, list[str]] = {name: [] for name in sorted(_PATTERNS)}
  families[OTHER] = []
  for operator in sorted(operators):
    families[family_of(operator)].append(operator)
  return {name: found for name, found in families.items() if found}
