"""Mistakes of users; each line ends with the error code that a checker must report.

`test_typing.py` compares them. No program runs this file.
"""

import jax.numpy as jnp
import torch

import torchax
from torchax.interop import (
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
  torch_view,
)
from torchax.train import remat


def power(x: torch.Tensor, n: int = 2) -> torch.Tensor:
  """Return x to the n."""
  return x**n


def body(carry: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
  """Return one result, which is no body of a scan."""
  return carry + x


x = torch.ones(3, device="jax")

jax_jit(power)()  # error: call-arg
jax_jit(power)(x, "3")  # error: arg-type
jax_jit(power)(x, m=3)  # error: call-arg
jax_jit(static_argnums=1)(power)(x, "3")  # error: arg-type
jax_jit(power, static_argnums="n")  # error: arg-type
jax_jit(power, static_argnum=1)  # error: call-overload
jax_jit(3)  # error: call-overload
result: int = jax_jit(power)(x)  # error: assignment
torchax.compile(power)(x, "3")  # error: arg-type
gradient_checkpoint(power)(x, "3")  # error: arg-type
gradient_checkpoint(power, static_argnum=1)  # error: call-arg
remat(power, policies=None)  # error: call-arg
jax_value_and_grad(power, has_auxiliary=True)  # error: call-arg
jax_value_and_grad(power)("x")  # error: arg-type
jax_vmap(power)(x, "3")  # error: arg-type
jax_shard_map(power, in_spec=None)  # error: call-overload
scan(body, x, x)  # error: arg-type
cond(True, power, power, "x")  # error: arg-type
jax_view(x).backward()  # error: attr-defined
torch_view(jnp.ones(3)).at[0].set(1)  # error: attr-defined
torchax.default_env().seed(0)  # error: attr-defined
