"""Time of a call of a compiled function, against `jax.jit`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.timing import Row, compare
from torchax.interop import JittableModule, jax_jit, scan

N_PARAMETERS = 200


class ManyParameters(torch.nn.Module):
  """Module that adds many small parameters to its input."""

  def __init__(self):
    super().__init__()
    self.parts = torch.nn.ParameterList(torch.ones(4) for _ in range(N_PARAMETERS))

  def forward(self, x):
    for part in self.parts:
      x = x + part
    return x


def rows() -> list[Row]:
  """Return the rows of calls."""
  return [_add_one(), *_module(), _dropout(), _scan()]


def _add_one() -> Row:
  x = torch.ones(32, 32, device="jax")
  array = x.jax()
  ours = jax_jit(lambda x: x + 1)
  plain = jax.jit(lambda x: x + 1)
  return compare("call of a jitted x + 1", lambda: ours(x), lambda: plain(array), 2)


def _module() -> list[Row]:
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

  def without_gradient():
    with torch.no_grad():
      return jitted(x)

  gradient = jax.jit(jax.grad(lambda params, x: plain(params, x).sum()))
  parameters = list(model.parameters())
  return [
    compare(
      f"jitted module, {N_PARAMETERS} parameters, no_grad",
      without_gradient,
      lambda: plain(params, array),
      1,
    ),
    compare(
      f"jitted module, {N_PARAMETERS} parameters, gradients recorded",
      lambda: jitted(x),
      lambda: plain(params, array),
      2,
    ),
    compare(
      f"jitted module, {N_PARAMETERS} parameters, torch.autograd.grad",
      lambda: torch.autograd.grad(jitted(x).sum(), parameters),
      lambda: gradient(params, array),
      None,
    ),
  ]


def _scan() -> Row:
  """Measure twelve layers in a compiled loop, each with a dropout."""
  x = torch.ones(32, 32, device="jax")
  array = x.jax()

  @jax_jit
  def ours(x):
    return scan(lambda c, _: (F.dropout(torch.sin(c), 0.5), None), x, length=12)[0]

  @jax.jit
  def plain(key, count, x):
    def layer(x, key):
      mask = jax.random.bernoulli(key, 0.5, x.shape)
      return jnp.where(mask, jnp.sin(x) * 2, 0), None

    keys = jax.random.split(jax.random.fold_in(key, count), 12)
    return jax.lax.scan(layer, x, keys)[0]

  key, counts = jax.random.key(0), itertools.count()
  return compare(
    "a jitted scan of 12 layers with dropout",
    lambda: ours(x),
    lambda: plain(key, np.uint32(next(counts)), array),
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
