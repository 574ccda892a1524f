"""The JAX backend of `torch.compile`."""

from torchax.dynamo.backend import backend
from torchax.dynamo.options import Options

__all__ = ["Options", "backend"]
