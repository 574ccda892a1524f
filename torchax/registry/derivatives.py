"""List of operations whose derivative differs between torch and JAX.

For these, `dispatch/torch_derivatives.py` uses torch's backward formula in JAX's
transformations too. For all others, JAX's derivative of the lowering equals torch's
formula; the sweep of operators compares both at edge points.
"""

from torchax.registry.names import aten, resolve

_PACKETS = (
  # Derivatives at zero, and at equal elements.
  aten.abs,
  aten.sgn,
  aten.i0,
  aten.norm,
  aten.linalg_vector_norm,
  aten.renorm,
  aten.dist,
  aten._cdist_forward,
  aten._pdist_forward,
  aten.std,
  aten.std_mean,
  aten.var,
  aten.var_mean,
  aten.copysign,
  aten.erfinv,
  aten.lgamma,
  aten.digamma,
  aten.logit,
  aten.special_entr,
  aten.special_log_ndtr,
  aten.special_ndtri,
  aten.special_erfcx,
  aten.polar,
  aten.binary_cross_entropy,
  aten.mvlgamma,
  aten.hypot,
  aten.atan2,
  aten.pow,
  aten.xlogy,
  aten.special_xlog1py,
  # Derivatives at bounds.
  aten.clamp,
  aten.clamp_min,
  aten.clamp_max,
  # Ties, and NaN.
  aten.maximum,
  aten.minimum,
  aten.fmax,
  aten.fmin,
  aten.max,
  aten.min,
  aten.median,
  aten.nanmedian,
  aten.cummax,
  aten.cummin,
  # Padding rows, and gradients scaled by the frequency of a row.
  aten.embedding,
  aten._embedding_bag,
  # Repeated indices.
  aten.max_unpool2d,
  aten.max_unpool3d,
  aten.scatter,
  aten.segment_reduce,
  aten.as_strided_scatter,
  # Coordinates on a corner.
  aten.grid_sampler_2d,
  aten.grid_sampler_3d,
  # Infinities: fully masked rows, and limits.
  aten._safe_softmax,
  aten._prelu_kernel,
  aten.binary_cross_entropy_with_logits,
  aten.logaddexp,
  aten.logaddexp2,
  aten.logsumexp,
  aten.smooth_l1_loss,
  aten.huber_loss,
  aten.remainder,
  aten.fmod,
  aten.ldexp,
  # torch's gradient assumes a log-softmax before the loss.
  aten._ctc_loss,
  # Indices out of range, whose gradient JAX drops.
  aten.gather,
  aten.index,
  aten.index_select,
  aten.take,
  # Singular matrices, and which triangle is read.
  aten._linalg_det,
  aten.cholesky,
  aten.cholesky_inverse,
  aten.cholesky_solve,
  aten.linalg_cholesky_ex,
  aten._linalg_eigh,
  aten._linalg_svd,
  aten._linalg_solve_ex,
  aten.linalg_inv_ex,
  aten.linalg_lstsq,
  aten.linalg_pinv,
  aten.linalg_lu,
  aten.linalg_lu_factor_ex,
  aten.linalg_lu_solve,
  # Operations without a derivative in JAX.
  aten.linalg_matrix_exp,
  aten.ormqr,
  aten.linalg_eig,
  aten.linalg_householder_product,
  aten.polygamma,
  aten.nextafter,
  aten.index_reduce,
  aten.scatter_reduce,
)

OTHERWISE = {resolve(packet): resolve(packet) for packet in _PACKETS if packet}
"""Packet -> packet with the formula."""

# torch runs this one instead of `_embedding_bag` if nothing needs a gradient.
OTHERWISE[resolve(aten._embedding_bag_forward_only)] = resolve(aten._embedding_bag)


def formula_of(op):
  """Return the overload whose formula replaces JAX's derivative of `op`, or None."""
  packet = OTHERWISE.get(getattr(op, "overloadpacket", None))
  return None if packet is None else getattr(packet, str(op).rpartition(".")[2])
