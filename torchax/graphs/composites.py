"""Composite operations that an exported program keeps whole: attention, recurrence.

They compute and draw what their eager forms do, which are caught above ATen
(`torchax/ops/jtorch`), on arrays whose sizes may be symbols.
"""

import jax
import jax.numpy as jnp

from torchax.environment import default_env
from torchax.ops.jaten import attention, rnn
from torchax.ops.names import aten


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
    shape = (*_batch_shape(query, key), query.shape[-2], key.shape[-2])
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


def _batch_shape(query, key) -> tuple:
  """The dimensions before (positions, features); grouped heads are the query's."""
  batch, key_batch = query.shape[:-2], key.shape[:-2]
  if batch and key_batch and batch[-1] != key_batch[-1]:
    return (*jnp.broadcast_shapes(batch[:-1], key_batch[:-1]), batch[-1])
  return jnp.broadcast_shapes(batch, key_batch)


_compiled_layer = jax.jit(rnn.layer, static_argnums=(4, 5))


def _recurrent(cell: str):
  """All layers of a recurrent network, with dropout between them."""

  def run(
    input,
    hx,
    params,
    biases,
    num_layers,
    dropout,
    train,
    bidirectional,
    batch_first,
  ):
    states = list(hx) if cell == "lstm" else [hx]
    has_projections = cell == "lstm" and states[0].shape[-1] != states[1].shape[-1]
    weights = rnn.layer_weights(params, biases, has_projections)
    directions = 2 if bidirectional else 1
    input = jnp.swapaxes(input, 0, 1) if batch_first else input
    finals = []
    for layer in range(num_layers):
      outputs = []
      for place in range(layer * directions, (layer + 1) * directions):
        state = [part[place] for part in states]
        is_reverse = place % directions == 1
        output, final = _compiled_layer(
          input, state, None, weights[place], cell, is_reverse
        )
        outputs.append(output)
        finals.append(final)
      input = jnp.concatenate(outputs, axis=-1)
      if dropout and train and layer < num_layers - 1:
        input = _run(aten.native_dropout.default, input, dropout, True)[0]
    output = jnp.swapaxes(input, 0, 1) if batch_first else input
    return (output, *[jnp.stack(parts) for parts in zip(*finals)])

  return run


ON_ARRAYS: dict = {
  aten.scaled_dot_product_attention.default: _attention,
  aten.lstm.input: _recurrent("lstm"),
  aten.gru.input: _recurrent("gru"),
  aten.rnn_tanh.input: _recurrent("tanh"),
  aten.rnn_relu.input: _recurrent("relu"),
}
