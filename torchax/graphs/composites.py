"""Composite operations that an exported program keeps whole: attention, recurrence.

Each computes and draws the same as its eager form, which is caught above ATen
(`torchax/functions`). Sizes may be symbols here.
"""

import functools

import jax
import jax.numpy as jnp

from torchax.environment import default_env
from torchax.ops.jaten import attention, rnn
from torchax.registry.names import aten


def _run(op, *args):
  """An operation with a lowering of its own."""
  return default_env().plan_for(op).on_arrays(args, {}, caches=False)


def _attention(
  query,
  key,
  value,
  attn_mask=None,
  dropout_p=0.0,
  is_causal=False,
  *,
  scale=None,
  enable_gqa=False,
):
  """Attention with one draw for its dropout."""
  keep_mask = None
  if dropout_p > 0.0:
    shape = attention.noise_shape(query.shape, key.shape)
    noise = _run(aten.bernoulli.p, jnp.zeros(shape, query.dtype), 1.0 - dropout_p)
    keep_mask = noise.astype(bool)
  return _compiled_attention(
    query,
    key,
    value,
    attn_mask,
    keep_mask,
    dropout_p=dropout_p,
    is_causal=is_causal,
    scale=scale,
    enable_gqa=enable_gqa,
  )


_compiled_attention = jax.jit(
  attention.scaled_dot_product_attention,
  static_argnames=("dropout_p", "is_causal", "scale", "enable_gqa"),
)

_PARTS = rnn.Parts(
  jax.jit(rnn.layer, static_argnums=(4, 5)),
  concatenate=lambda outputs: jnp.concatenate(outputs, axis=-1),
  stack=jnp.stack,
  dropout=lambda input, p: _run(aten.native_dropout.default, input, p, True)[0],
)


def _recurrent(cell: str):
  return functools.partial(rnn.network, _PARTS, cell)


ON_ARRAYS: dict = {
  aten.scaled_dot_product_attention.default: _attention,
  aten.lstm.input: _recurrent("lstm"),
  aten.gru.input: _recurrent("gru"),
  aten.rnn_tanh.input: _recurrent("tanh"),
  aten.rnn_relu.input: _recurrent("relu"),
}
