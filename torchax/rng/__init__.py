"""Random numbers: state, streams, scopes, boundaries and samplers.

Start at `stream.py`, then `stream_operands.py`; `docs/rng-design.md` has the design.
Only this package creates or derives keys; lowerings receive them. Names imported with
`as` are for the other parts of torchax.
"""

from torchax.compat.torch_compat.active_functions import inside
from torchax.rng.environment_streams import Streams as Streams
from torchax.rng.generator import generator_operands as generator_operands
from torchax.rng.keyed_function import KeyedFunction as KeyedFunction
from torchax.rng.keyed_function import NewOperands as NewOperands
from torchax.rng.ledger import Draw, Ledger, explain
from torchax.rng.philox import torch_key
from torchax.rng.runs import Difference, diff, replay
from torchax.rng.scope import (
  address_by,
  addressed_by,
  current,
  initial_seed,
  manual_seed,
  rng_scope,
)
from torchax.rng.scope import default_impl as default_impl
from torchax.rng.scope import default_streams as default_streams
from torchax.rng.scope import is_by_site as is_by_site
from torchax.rng.scope import using_enclosing as using_enclosing
from torchax.rng.snapshots import is_unopened as is_unopened
from torchax.rng.snapshots import restore, snapshot
from torchax.rng.state import RngState, as_key, as_state, fold_in
from torchax.rng.state import is_typed_key as is_typed_key
from torchax.rng.stream import RngStream
from torchax.rng.stream_operands import Advance as Advance

__all__ = [
  "Difference",
  "Draw",
  "Ledger",
  "RngState",
  "RngStream",
  "address_by",
  "addressed_by",
  "as_key",
  "as_state",
  "current",
  "diff",
  "explain",
  "fold_in",
  "initial_seed",
  "inside",
  "manual_seed",
  "replay",
  "restore",
  "rng_scope",
  "snapshot",
  "torch_key",
]


def __dir__() -> list[str]:
  return list(__all__)
