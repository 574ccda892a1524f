"""Torch functions under JAX's transformations, and JAX functions under torch.

Start at `jit.py`. The captures, guards and effects of a compiled function are in
`tracing`.
"""

from jax import shard_map

from torchax.interop import (
  jit,
  loops,
  maps,
  module,
  transforms,
  views,
)
from torchax.interop.inspection import Explanation, explain
from torchax.interop.jit import Jitted, jax_jit, wrap_jax_jit
from torchax.interop.loops import cond, fori_loop, scan, switch, while_loop
from torchax.interop.maps import jax_shard_map, jax_vmap
from torchax.interop.module import (
  JittableModule,
  extract_all_buffers,
  extract_jax,
  set_all_buffers,
)
from torchax.interop.native import torch_call
from torchax.interop.transforms import gradient_checkpoint, jax_value_and_grad
from torchax.interop.views import (
  _jax_view,
  _torch_view,
  call_jax,
  call_torch,
  functional_rng,
  j2t_autograd,
  jax_view,
  jax_view_elem,
  torch_view,
  torch_view_elem,
)
from torchax.tracing import autograd_bridge, optimizers, transform

MODULES = (jit, loops, maps, module, transforms, views, autograd_bridge, transform)
"""Modules whose functions run torch code under JAX's transformations."""

__all__ = [
  "Explanation",
  "Jitted",
  "JittableModule",
  "_jax_view",
  "_torch_view",
  "call_jax",
  "call_torch",
  "cond",
  "explain",
  "extract_all_buffers",
  "extract_jax",
  "fori_loop",
  "functional_rng",
  "gradient_checkpoint",
  "j2t_autograd",
  "jax_jit",
  "jax_shard_map",
  "jax_value_and_grad",
  "jax_view",
  "jax_view_elem",
  "jax_vmap",
  "optimizers",
  "scan",
  "set_all_buffers",
  "shard_map",
  "switch",
  "torch_call",
  "torch_view",
  "torch_view_elem",
  "while_loop",
  "wrap_jax_jit",
]


def __dir__() -> list[str]:
  return [name for name in __all__ if not name.startswith("_")]
