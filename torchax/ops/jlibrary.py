"""Public name of `interop/composites.py`: functions as composites of StableHLO."""

from torchax.interop.composites import (
  _jit_composite_impl,
  register_jax_composite,
  register_torch_composite,
)

__all__ = ["_jit_composite_impl", "register_jax_composite", "register_torch_composite"]
