"""The JAX backend of `torch.compile`: `torch.compile(f, backend="jax")`.

`docs/compile.md` shows it at work. Start at `backend.py`. Loading it lets Dynamo trace
recurrent layers (`torch._dynamo.config.allow_rnn`), which it would leave to CPU torch
otherwise.
"""

from torchax.dynamo.backend import backend
from torchax.dynamo.options import Options
from torchax.logs import set_logs

__all__ = ["Options", "backend", "set_logs"]


def __dir__() -> list[str]:
  return list(__all__)
