"""Loops, branches and nested functions at padded sizes."""

import jax
import pytest
import torch
from tracing.padded.sizes import SIZES, C, close, x_of

from torchax import interop
from torchax.interop import call_jax, jax_jit


def decay(carry, element):
  return carry * 0.5 + element, carry


def over_positions(x):
  return interop.scan(decay, x[:, 0], x.transpose(0, 1))


def layer(carry, scale):
  return torch.tanh(carry * scale), carry.sum(1)


def last_of_reversed(x):
  def step(carry, element):
    return carry * 0.5 + element, carry

  return jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1), reverse=True)[0]


def attention(x):
  x = x[:, :, None]
  return jax.nn.dot_product_attention(x, x, x, is_causal=True)


@jax.custom_vjp
def clipped(x):
  return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (g.clip(-0.1, 0.1),))


def loss(x):
  return x.softmax(1).square().sum()


CALLS = {
  "scan over layers": lambda x: interop.scan(
    layer, x, torch.ones(3, C, device=x.device)
  )[1],
  "carry of a scan over positions": lambda x: over_positions(x)[0],
  "results of a scan over positions": lambda x: over_positions(x)[1],
  "carry of a reversed scan": lambda x: call_jax(last_of_reversed, x),
  "fori_loop": lambda x: interop.fori_loop(0, 3, lambda i, v: v.softmax(1) * i, x),
  "fori_loop up to the size": lambda x: interop.fori_loop(
    0, x.shape[1], lambda i, v: v * 0.5 + 1, x
  ).sum(1),
  "while_loop": lambda x: interop.while_loop(
    lambda v: v.sum() < 100, lambda v: v.abs() * 2, x
  ),
  "cond": lambda x: interop.cond(
    x.sum() > 0, lambda v: v.mean(1), lambda v: v.sum(1), x
  ),
  "checkpoint": lambda x: interop.gradient_checkpoint(lambda v: v.softmax(1))(x),
  "custom JVP": lambda x: call_jax(jax.nn.relu, x),
  "custom VJP": lambda x: call_jax(clipped, x),
  "gradient with a custom VJP": lambda x: call_jax(
    jax.grad(lambda v: (clipped(v) ** 2).sum()), x
  ),
  "attention of JAX": lambda x: call_jax(attention, x),
  "gradient of JAX": lambda x: interop.jax_value_and_grad(loss)(x)[1],
  "gradient of a checkpoint": lambda x: interop.jax_value_and_grad(
    interop.gradient_checkpoint(loss)
  )(x)[1],
  "vmap": lambda x: interop.jax_vmap(lambda row: row.softmax(0).sum(0))(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_padded_call_equals_unpadded(name):
  function = CALLS[name]
  padded, plain = jax_jit(function, buckets={"x": {1: "pow2"}}), jax_jit(function)
  inputs = [x_of(n).to("jax") for n in SIZES]
  results = [padded(x) for x in inputs]
  assert padded._jitted._counted.programs == 1
  for x, result in zip(inputs, results):
    close([result], [plain(x)])
