"""Operations whose derivative JAX would take otherwise than torch does.

Of all others, JAX's derivative of the lowering is the one that torch's formula gives;
the sweep of operators compares both at edge points. These take torch's formula in
JAX's transformations too (`dispatch/derivatives.py`).
"""

from torchax.ops.names import aten, resolve

_PACKETS = (
  # At zero, and at equal elements.
  aten.abs,
  aten.i0,
  aten.norm,
  aten.linalg_vector_norm,
  aten.renorm,
  aten.dist,
  aten._cdist_forward,
  aten._pdist_forward,
  aten.std,
  aten.var,
  aten.std_mean,
  aten.var_mean,
  aten.hypot,
  aten.atan2,
  aten.pow,
  aten.xlogy,
  # At their bounds.
  aten.clamp,
  aten.clamp_min,
  aten.clamp_max,
  # Ties, and NaN.
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
  aten._embedding_bag_forward_only,
  # Singular matrices.
  aten._linalg_det,
)

OTHERWISE = frozenset(resolve(packet) for packet in _PACKETS if packet)
