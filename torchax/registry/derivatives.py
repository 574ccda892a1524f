"""Operations whose derivative JAX would take otherwise than torch does.

Of all others, JAX's derivative of the lowering is the one that torch's formula gives;
the sweep of operators compares both at edge points. These take torch's formula in
JAX's transformations too (`dispatch/derivatives.py`).
"""

from torchax.registry.names import aten, resolve

_PACKETS = (
  # At zero, and at equal elements.
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
  # At their bounds.
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
  # Rows that are not trained, or by how often they are.
  aten.embedding,
  aten._embedding_bag,
  # Indices that are given twice.
  aten.max_unpool2d,
  aten.max_unpool3d,
  aten.scatter,
  aten.segment_reduce,
  aten.as_strided_scatter,
  # Coordinates on a corner.
  aten.grid_sampler_2d,
  aten.grid_sampler_3d,
  # Infinities: rows that are masked throughout, and limits.
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
  # The gradient of what a softmax before it leaves of it.
  aten._ctc_loss,
  # At places out of range, whose gradient JAX drops.
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
  # What JAX has no derivative of.
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
"""The packet that has the formula, by packet."""

# What torch runs in place of the other one where nothing needs a gradient.
OTHERWISE[resolve(aten._embedding_bag_forward_only)] = resolve(aten._embedding_bag)


def formula_of(op):
  """The overload whose formula JAX is to take for another one; None for its own."""
  packet = OTHERWISE.get(getattr(op, "overloadpacket", None))
  return None if packet is None else getattr(packet, str(op).rpartition(".")[2])
