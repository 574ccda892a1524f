"""The JAX backend of `torch.compile`: `torch.compile(f, backend="jax")`.

Start at `backend.py`; `docs/compile.md` has examples. Importing this package sets
`torch._dynamo.config.allow_rnn`, so that Dynamo traces recurrent layers instead of
leaving them to CPU torch.
"""

from torchax.dynamo.backend import backend
from torchax.dynamo.options import Options
from torchax.logs import set_logs

__all__ = ["Options", "backend", "set_logs"]


def __dir__() -> list[str]:
  return list(__all__)
