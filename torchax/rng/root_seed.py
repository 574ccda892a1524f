"""Where a thread's root stream starts, before it has been drawn from.

Seeding and `torch.random.fork_rng` must not start JAX's backend, which takes a GPU's
memory, in code that never uses a jax tensor. So a root stream that was not drawn from
is only this record; its key is computed at the first draw.
"""

import dataclasses
import struct

import torch

from torchax.rng import state as rng_state
from torchax.rng.state import RngState

_MAGIC = b"torchax-seed-1\0"
_HEADER = struct.Struct("<QIB")


@dataclasses.dataclass(frozen=True)
class RootSeed:
  """A seed in [0, 2**64), the ordinal of a thread, and the PRNG implementation."""

  seed: int
  ordinal: int
  impl: str

  def state(self) -> RngState:
    """The state of the root stream."""
    key = rng_state.key_from_seed(self.seed, self.impl)
    return RngState(rng_state.thread_key(key, self.ordinal), 0)

  def to_tensor(self) -> torch.Tensor:
    """The record as a CPU uint8 tensor of shape (n,)."""
    impl = self.impl.encode()
    header = _HEADER.pack(self.seed % (1 << 64), self.ordinal, len(impl))
    return torch.frombuffer(bytearray(_MAGIC + header + impl), dtype=torch.uint8)

  @classmethod
  def from_tensor(cls, tensor: torch.Tensor) -> "RootSeed | None":
    """The record that `to_tensor` wrote; None for any other tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
      return None
    payload = bytes(tensor.cpu().tolist())
    start = len(_MAGIC) + _HEADER.size
    if not payload.startswith(_MAGIC) or len(payload) < start:
      return None
    seed, ordinal, length = _HEADER.unpack_from(payload, len(_MAGIC))
    impl = payload[start:].decode(errors="replace")
    return cls(seed, ordinal, impl) if len(payload) == start + length else None
