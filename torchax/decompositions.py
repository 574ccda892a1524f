"""Decompositions: operations in terms of others, used where there is no lowering.

Most are torch's own; what torch lacks or has only for its devices is here. Random
operations are lowered, never decomposed, so that eager and compiled runs draw alike.
"""

import torch

from torchax import _torch_compat
from torchax.ops import ops_registry

DECOMPOSITIONS: dict = {
  op: function
  for op, function in _torch_compat.decomposition_table().items()
  if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
}

ops_registry.decompositions = DECOMPOSITIONS
