"""float4_e2m1fn_x2: bytes of two 4-bit numbers, which operations move but not compute.

Scaled products read the numbers. All other arithmetic raises torch's error, because JAX
would compute with the dtype that carries the bytes (`mappings.PACKED`).
"""

from torchax.core import mappings, narrowing
from torchax.core.error_messages import packed_error

_MOVES = """
_scaled_mm _scaled_mm_v2 _to_copy alias cat clone copy embedding empty_like flip gather
index index_put index_select new_empty new_zeros repeat roll stack where zeros_like
"""
# Types compare much faster than dtypes.
_Packed = type(mappings.PACKED)
_ALLOWED = frozenset(f"aten.{name}" for name in _MOVES.split())


def may_compute(name: str) -> bool:
  """Return True if the overload of this name does more than move its tensors."""
  return name.rpartition(".")[0] not in _ALLOWED


def require_none(name: str, args, kwargs) -> None:
  """Raise NotImplementedError if an argument of an operation has packed numbers."""
  for value in narrowing.flat((*args, *kwargs.values())):
    if type(getattr(value, "dtype", None)) is _Packed:
      raise packed_error(name)
