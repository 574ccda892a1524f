"""Automatic mixed precision: the precision of each operation.

`torch.autocast("jax")` uses torch's own dispatch key for autocast. The key is masked
while autocast is off, so it costs nothing then. The kernels registered here run above
autograd, which records their casts. The lists join torch's lists for CUDA and the CPU.

`dispatch/torch_functions.py` calls `policy_of_function` for functions that the
environment handles above ATen.
"""

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.registry.names import aten, present, resolve

DEVICE = torch_compat.BACKEND


class CastPolicy(enum.Enum):
  """Cast that autocast applies to the floating-point arguments of an operation.

  Attributes:
    LOWER_PRECISION_FP: cast them to autocast's dtype.
    FP32: cast them to float32.
    FP32_SET_OPT_DTYPE: cast nothing; request a float32 result, unless the caller
      passed a dtype.
    FP32_APPEND_DTYPE: the same for operations whose dtype is in another overload.
    PROMOTE: cast them to the widest dtype among them.

  >>> autocast_policy[torch.ops.aten.mm.default].name
  'LOWER_PRECISION_FP'
  """

  LOWER_PRECISION_FP = 0
  FP32 = 1
  FP32_SET_OPT_DTYPE = 2
  FP32_APPEND_DTYPE = 3
  PROMOTE = 4


def _is_castable(value) -> bool:
  # Like torch, keep float64: the user chose it.
  return (
    isinstance(value, torch.Tensor)
    and value.is_floating_point()
    and value.dtype is not torch.float64
  )


def _cast(tree, dtype: torch.dtype):
  def cast(value):
    if _is_castable(value) and value.dtype is not dtype:
      return aten._to_copy.default(value, dtype=dtype)
    return value

  return torch_pytree.tree_map(cast, tree)


def _widest(tree, target_lower_fp: torch.dtype) -> torch.dtype:
  leaves = torch_pytree.tree_leaves(tree)
  dtypes = {leaf.dtype for leaf in leaves if _is_castable(leaf)}
  return target_lower_fp if dtypes <= {target_lower_fp} else torch.float32


def _with_dtype(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
  """Add `dtype=torch.float32` to the arguments, unless they contain a dtype."""
  has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
  if has_dtype or not args or not _is_castable(args[0]):
    return args, kwargs
  return args, {**kwargs, "dtype": torch.float32}


def execute_policy(
  policy: CastPolicy, args: tuple, kwargs: dict, target_lower_fp: torch.dtype
) -> tuple[tuple, dict]:
  """Apply a policy of autocast to the arguments of an operation.

  Args:
    policy: the cast to apply.
    args, kwargs: trees of tensors and other values. Integer, complex and float64
      tensors stay unchanged.
    target_lower_fp: autocast's dtype.

  Returns:
    The new `args` and `kwargs`.

  Raises:
    TypeError: `policy` is not a `CastPolicy`.

  >>> x = torch.ones(2, dtype=torch.bfloat16, device="jax")
  >>> args, kwargs = execute_policy(CastPolicy.FP32, (x, 1), {}, torch.bfloat16)
  >>> args[0].dtype, args[1]
  (torch.float32, 1)
  """
  match policy:
    case CastPolicy.LOWER_PRECISION_FP:
      return _cast((args, kwargs), target_lower_fp)
    case CastPolicy.FP32:
      return _cast((args, kwargs), torch.float32)
    case CastPolicy.PROMOTE:
      return _cast((args, kwargs), _widest((args, kwargs), target_lower_fp))
    case CastPolicy.FP32_SET_OPT_DTYPE | CastPolicy.FP32_APPEND_DTYPE:
      return _with_dtype(args, kwargs)
  raise TypeError(
    f"execute_policy expects a torchax.amp.CastPolicy, but got {policy!r}."
  )


# Execution under autocast -------------------------------------------------------------

# An overload without a dtype -> the overload that has one.
_WITH_DTYPE = present(
  {
    aten.norm.Scalar: aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim: aten.norm.ScalarOpt_dim_dtype,
  }
)


def _run(op, *args, **kwargs):
  """Run an operation under autocast; the policy is read at each call."""
  policy = autocast_policy.get(op)
  dtype = torch.get_autocast_dtype(DEVICE)
  with torch_compat.without_autocast():
    if policy is None:
      return op(*args, **kwargs)
    args, kwargs = execute_policy(policy, args, kwargs, dtype)
    if policy is CastPolicy.FP32_APPEND_DTYPE and "dtype" in kwargs:
      missing = op._schema.arguments[len(args) :]
      args = (*args, *[argument.default_value for argument in missing])
      op = _WITH_DTYPE[op]
    return op(*args, **kwargs)


def _name_of(op) -> str:
  return op._schema.name.rpartition("::")[2]


class _Policies(dict):
  """Policies by overload; setting an entry registers an autocast kernel."""

  def __init__(self):
    super().__init__()
    self._seen: set = set()
    self._by_name: dict[str, Any] = {}

  def __setitem__(self, op, policy: CastPolicy) -> None:
    if not isinstance(op, torch_compat.OpOverload):
      raise TypeError(
        "autocast_policy expects an overload, such as torch.ops.aten.mm.default, but "
        f"got {op!r}. For all overloads of an operation, set each of `.overloads()`."
      )
    if op not in self._seen:
      torch_compat.register_autocast_kernel(op, functools.partial(_run, op))
      self._seen.add(op)
      self._by_name.setdefault(_name_of(op), op)
    super().__setitem__(op, policy)

  def of_name(self, name: str) -> CastPolicy | None:
    """Return the policy of the first registered overload of an operation."""
    return self.get(self._by_name.get(name))


autocast_policy = _Policies()
"""Policies by ATen overload, for the whole process; entries may be set and deleted."""


def dtype_in_force() -> torch.dtype | None:
  """Return autocast's dtype for jax tensors on this thread; None if it is off.

  >>> with torch.autocast("jax", dtype=torch.bfloat16):
  ...   dtype_in_force()
  torch.bfloat16
  """
  if not torch.is_autocast_enabled(DEVICE):
    return None
  return torch.get_autocast_dtype(DEVICE)


def policy_of_function(func: Callable) -> CastPolicy | None:
  """Return the policy of the ATen operation that has the name of a torch function.

  Args:
    func: torch function, such as `torch.mm`.

  Returns:
    The policy; None if autocast leaves the operation unchanged.

  >>> policy_of_function(torch.softmax).name
  'FP32_SET_OPT_DTYPE'
  """
  name = getattr(func, "__name__", "")
  if name.startswith("__") and name.endswith("__"):
    name = name.strip("_")
  return autocast_policy.of_name(name)


def autocast(
  device: str | torch.device, dtype: torch.dtype = torch.bfloat16, env: Any = None
) -> torch.autocast:
  """Return `torch.autocast` for jax tensors: a context manager and a decorator.

  Args:
    device: "jax".
    dtype: torch.bfloat16 or torch.float16.
    env: ignored; upstream's callers pass it. The state belongs to the thread.

  Returns:
    A `torch.autocast` for the device "jax".

  Raises:
    ValueError: `device` is not "jax".
    TypeError: `dtype` is neither bfloat16 nor float16.

  >>> import torch, torchax
  >>> x = torch.ones(2, 2, device="jax")
  >>> with autocast("jax", dtype=torch.bfloat16):
  ...   (x @ x).dtype
  torch.bfloat16
  """
  if torch.device(device).type != DEVICE:
    raise ValueError(
      f'torchax.amp.autocast expects the device "{DEVICE}", but got {str(device)!r}. '
      "Use torch.autocast for another device."
    )
  _require_lower_precision(dtype)
  return torch.autocast(DEVICE, dtype=dtype)


def restore_autocast(dtype: torch.dtype | None) -> torch.autocast:
  """Return a context with autocast on in this dtype, or off for None.

  Args:
    dtype: torch.bfloat16, torch.float16 or None.

  Returns:
    A `torch.autocast` for the device "jax".

  Raises:
    TypeError: autocast does not support this dtype.

  >>> with autocast("jax", dtype=torch.bfloat16), restore_autocast(None):
  ...   dtype_in_force() is None
  True
  """
  if dtype is not None:
    _require_lower_precision(dtype)
  return torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not None)


LOWER_PRECISION = (torch.bfloat16, torch.float16)


def _require_lower_precision(dtype) -> None:
  if dtype not in LOWER_PRECISION:
    expected = " or ".join(map(str, LOWER_PRECISION))
    raise TypeError(f"autocast expects the dtype {expected}, but got {dtype}.")


# The lists ----------------------------------------------------------------------------
# Source: aten/src/ATen/autocast_mode.h for CUDA, autocast_mode.cpp for the CPU. A name
# selects all functional overloads of the operation.

_MATRIX_PRODUCTS = """
  _addmm_activation _convolution _native_multi_head_attention addbmm addmm addmv addr
  baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
  conv_transpose2d conv_transpose3d convolution einsum gru gru_cell linalg_matmul
  linalg_multi_dot linalg_vecdot linear lstm lstm_cell matmul mm mv prelu rnn_relu
  rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention
"""

_WIDE_RANGE = """
  acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow reciprocal rsqrt
  sinh softplus tan
"""

_NORMS = """
  cdist cosine_similarity dist frobenius_norm group_norm layer_norm native_layer_norm
  nuclear_norm pdist renorm rms_norm
"""

_LOSSES = """
  binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
  cross_entropy_loss ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss
  margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
  nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""

_RESIZING = """
  _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
  _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d
  upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
  upsample_nearest3d upsample_trilinear3d
"""

# The CPU's list: operations without a kernel in a lower precision, on JAX as well.
_FULL_PRECISION_ONLY = """
  adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cholesky cholesky_inverse
  cholesky_solve fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn
  fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
  fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler_2d grid_sampler_3d
  inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh
  linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
  linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals
  linalg_tensorinv linalg_tensorsolve lu_solve max_pool3d max_unpool2d max_unpool3d
  nanquantile orgqr ormqr pinverse polar qr quantile reflection_pad1d reflection_pad2d
  replication_pad1d replication_pad2d replication_pad3d stft svd trace
  triangular_solve view_as_complex
"""

# torch computes these with `mm`. Here each is one lowering that sums squares.
_STATISTICS = "corrcoef cov"

# In inference mode torch would run these composites by their lowerings, without casts.
# Decomposed above autograd, they are cast in every mode.
_COMPOSITES = """
  arccos arcsin cumulative_trapezoid float_power linalg_matrix_power linalg_norm
  matrix_power nll_loss_nd norm_except_dim pad pairwise_distance special_erfinv
  special_expm1 special_log1p special_log_softmax special_logsumexp special_softmax
  square trapezoid trapz
"""

_WITH_OPTIONAL_DTYPE = (
  *(aten.cumprod.default, aten.cumsum.default),
  *(aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord),
  *(aten.linalg_vector_norm.default, aten.log_softmax.int, aten.softmax.int),
  *(aten.prod.default, aten.prod.dim_int, aten.sum.default, aten.sum.dim_IntList),
)

_PROMOTING = """
  addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put
  scatter_add stack tensordot vdot
"""


def _functional_overloads(names: str) -> Iterable:
  """Yield the overloads of named operations that take tensors and write to none."""
  for name in names.split():
    packet = resolve(getattr(aten, name))
    if packet is None:  # this version of torch lacks it
      continue
    for overload_name in packet.overloads():
      schema = getattr(packet, overload_name)._schema
      takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
      # The overload `dtype` receives the dtype of its result.
      if takes_tensors and not schema.is_mutable and overload_name != "dtype":
        yield getattr(packet, overload_name)


_LISTS = (
  (CastPolicy.LOWER_PRECISION_FP, _MATRIX_PRODUCTS),
  (CastPolicy.FP32, _WIDE_RANGE),
  (CastPolicy.FP32, _NORMS),
  (CastPolicy.FP32, _LOSSES),
  (CastPolicy.FP32, _RESIZING),
  (CastPolicy.FP32, _FULL_PRECISION_ONLY),
  (CastPolicy.FP32, _STATISTICS),
  (CastPolicy.PROMOTE, _PROMOTING),
)

for policy, names in _LISTS:
  for op in _functional_overloads(names):
    autocast_policy[op] = policy
for op in present(_WITH_OPTIONAL_DTYPE):
  autocast_policy[op] = CastPolicy.FP32_SET_OPT_DTYPE
for op in _WITH_DTYPE:
  autocast_policy[op] = CastPolicy.FP32_APPEND_DTYPE
for op in _functional_overloads(_COMPOSITES):
  torch_compat.register_autocast_kernel(op, torch_compat.composite_kernel(op))
