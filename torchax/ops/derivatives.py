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
  aten.std_mean,
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
  # At places out of range, whose gradient JAX drops.
  aten.gather,
  aten.index,
  aten.index_select,
  aten.take,
  # Singular matrices.
  aten._linalg_det,
)

OTHERWISE = {resolve(packet): resolve(packet) for packet in _PACKETS if packet}
"""The packet that has the formula, by packet."""

# What torch runs in place of the other one where nothing needs a gradient.
OTHERWISE[resolve(aten._embedding_bag_forward_only)] = resolve(aten._embedding_bag)


def formula_of(op):
  """The overload whose formula JAX is to take for another one; None for its own."""
  packet = OTHERWISE.get(getattr(op, "overloadpacket", None))
  return None if packet is None else getattr(packet, str(op).rpartition(".")[2])
