"""What a call of a compiled function costs, against `jax.jit`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.timing import Row, compare
from torchax.interop import JittableModule, jax_jit

N_PARAMETERS = 200


class ManyParameters(torch.nn.Module):
  """Adds up many small parameters."""

  def __init__(self):
    super().__init__()
    self.parts = torch.nn.ParameterList(torch.ones(4) for _ in range(N_PARAMETERS))

  def forward(self, x):
    for part in self.parts:
      x = x + part
    return x


def rows() -> list[Row]:
  """All call-overhead rows."""
  return [_add_one(), _module(), _dropout()]


def _add_one() -> Row:
  x = torch.ones(32, 32, device="jax")
  array = x.jax()
  ours = jax_jit(lambda x: x + 1)
  plain = jax.jit(lambda x: x + 1)
  return compare("call of a jitted x + 1", lambda: ours(x), lambda: plain(array), 2)


def _module() -> Row:
  model = ManyParameters().to("jax")
  jitted = JittableModule(model)
  x = torch.ones(4, device="jax")
  array = x.jax()
  params = {name: p.detach().jax() for name, p in model.named_parameters()}

  @jax.jit
  def plain(params, x):
    for part in params.values():
      x = x + part
    return x

  return compare(
    f"call of a jitted module with {N_PARAMETERS} parameters",
    lambda: jitted(x),
    lambda: plain(params, array),
    1,
  )


def _dropout() -> Row:
  x = torch.ones(32, 32, device="jax")
  array = x.jax()
  ours = jax_jit(lambda x: F.dropout(x, 0.5))
  key = jax.random.key(0)
  counts = itertools.count()

  @jax.jit
  def plain(key, count, x):
    mask = jax.random.bernoulli(jax.random.fold_in(key, count), 0.5, x.shape)
    return jnp.where(mask, x * 2, 0)

  return compare(
    "call of a jitted dropout",
    lambda: ours(x),
    lambda: plain(key, np.uint32(next(counts)), array),
    1.3,
  )
