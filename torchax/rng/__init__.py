"""Random numbers: state, streams, scopes, boundaries and samplers.

Start at `stream.py`, then `stream_operands.py`; `docs/rng-design.md` has the design.
Only this package creates or derives keys; lowerings receive them.
"""

from torchax.compat.torch_compat.active_functions import inside
from torchax.rng.environment_streams import Streams
from torchax.rng.generator import generator_operands
from torchax.rng.keyed_function import KeyedFunction, NewOperands
from torchax.rng.ledger import Draw, Ledger, explain
from torchax.rng.philox import torch_key
from torchax.rng.runs import Difference, diff, replay
from torchax.rng.scope import (
  address_by,
  addressed_by,
  current,
  default_impl,
  default_streams,
  initial_seed,
  is_by_site,
  manual_seed,
  rng_scope,
  using_enclosing,
)
from torchax.rng.snapshots import is_unopened, restore, snapshot
from torchax.rng.state import RngState, as_key, as_state, fold_in, is_typed_key
from torchax.rng.stream import RngStream
from torchax.rng.stream_operands import Advance

__all__ = [
  "Advance",
  "Difference",
  "Draw",
  "KeyedFunction",
  "Ledger",
  "NewOperands",
  "RngState",
  "RngStream",
  "Streams",
  "address_by",
  "addressed_by",
  "as_key",
  "as_state",
  "using_enclosing",
  "current",
  "default_impl",
  "default_streams",
  "diff",
  "explain",
  "fold_in",
  "generator_operands",
  "initial_seed",
  "inside",
  "is_by_site",
  "is_unopened",
  "is_typed_key",
  "manual_seed",
  "replay",
  "restore",
  "rng_scope",
  "snapshot",
  "torch_key",
]


def __dir__() -> list[str]:
  return list(__all__)
