"""Operations for LSTM, GRU and RNN in a graph, one for each layer and direction.

AOTAutograd would unroll the layers over time, or choose oneDNN's kernel for plain
tensors. It keeps a custom operation whole, and we run it as one `lax.scan`.
`rnn.network` joins the layers as in eager mode, so dropout between them makes the same
draws. `backend.py` calls `replace`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from torch import fx

from torchax import amp
from torchax.compat import torch_compat
from torchax.functions import recurrent as eager
from torchax.graphs.fx import copy_graph
from torchax.ops.builtin import op
from torchax.ops.jaten import rnn

# Weights are [w_ih, w_hh], then [b_ih, b_hh] with biases, then [w_hr] with projections.
# The first operation returns the outputs and the last state, the second the gradients.
_library = torch.library.Library("torchax", "FRAGMENT")
_library.define(
  "recurrent_layer(Tensor input, Tensor[] state, Tensor[] weights, str cell, "
  "bool reverse) -> Tensor[]"
)
_library.define(
  "recurrent_layer_backward(Tensor?[] grads, Tensor input, Tensor[] state, "
  "Tensor[] weights, str cell, bool reverse) -> Tensor[]"
)
_forward = torch.ops.torchax.recurrent_layer.default
_backward = torch.ops.torchax.recurrent_layer_backward.default


@op(_forward)
def _recurrent_layer(input, state, weights, cell, reverse):
  has_biases, has_projections = len(weights) >= 4, len(weights) % 2 == 1
  (grouped,) = rnn.layer_weights(weights, has_biases, has_projections)
  outputs, last = rnn.layer(input, state, None, grouped, cell, reverse)
  return [outputs, *last]


@op(_backward)
def _recurrent_layer_backward(grads, input, state, weights, cell, reverse):
  """Recompute the layer for its gradient, so that the graph saves no residuals."""

  def forward(*primals):
    return _recurrent_layer(*primals, cell, reverse)

  results, pullback = jax.vjp(forward, input, list(state), list(weights))
  tangents = [
    jnp.zeros_like(result) if grad is None else grad
    for grad, result in zip(grads, results)
  ]
  input_grad, state_grads, weight_grads = pullback(tangents)
  return [input_grad, *state_grads, *weight_grads]


def _empty(shapes_of, like) -> list[torch.Tensor]:
  return [like.new_empty(tensor.shape) for tensor in shapes_of]


@torch.library.register_fake(_forward, lib=_library)
def _fake_forward(input, state, weights, cell, reverse):
  outputs = input.new_empty((*input.shape[:2], state[0].shape[-1]))
  return [outputs, *_empty(state, input)]


@torch.library.register_fake(_backward, lib=_library)
def _fake_backward(grads, input, state, weights, cell, reverse):
  return _empty([input, *state, *weights], input)


def _save(ctx, inputs, output):
  input, state, weights, ctx.cell, ctx.reverse = inputs
  ctx.n_states = len(state)
  ctx.save_for_backward(input, *state, *weights)


def _differentiate(ctx, grads):
  input, *rest = ctx.saved_tensors
  n = ctx.n_states
  input_grad, *other_grads = _backward(
    grads, input, rest[:n], rest[n:], ctx.cell, ctx.reverse
  )
  return input_grad, other_grads[:n], other_grads[n:], None, None


torch.library.register_autograd(
  _forward, _differentiate, setup_context=_save, lib=_library
)


def _run_layer(input, state, mask, weights, cell, reverse):
  """Run one layer like `rnn.layer`, for the tensors that AOTAutograd traces with."""
  present = [weight for weight in weights if weight is not None]
  outputs, *last = _forward(input, state, present, cell, reverse)
  return outputs, last


_PARTS = eager.tensor_parts(_run_layer)


def _layers(function: Callable, cell: str) -> Callable:
  """Return the replacement of a recurrent function of torch in graphs."""

  def run(*args):
    if not eager.is_padded(args) or torch_compat.is_transforming():
      # The graph does not know the lengths of a packed sequence, and the operations
      # here have no rule for `torch.vmap`.
      return function(*args)
    if torch.is_autocast_enabled("cpu"):
      return _with_autocast(cell, args)
    return rnn.network(_PARTS, cell, *args)

  run.__name__ = f"{function.__name__}_by_layers"
  return run


def _with_autocast(cell: str, args) -> tuple:
  """Compute in the dtypes of eager mode on jax; cast the results to CPU torch's."""
  policy, lower = amp.CastPolicy.LOWER_PRECISION_FP, torch.get_autocast_dtype("cpu")
  cast, _ = amp.execute_policy(policy, args, {}, lower)
  results = rnn.network(_PARTS, cell, *cast)
  # CPU torch lowers the precision of matrix products only, except in oneDNN's LSTM.
  if cell == "gru":
    return tuple(result.to(args[1].dtype) for result in results)
  if cell == "lstm" and args[1][0].shape != args[1][1].shape:
    return (*results[:2], results[2].to(args[1][1].dtype))
  return results


_REPLACEMENTS = {
  function: _layers(function, cell)
  for function, cell in (
    (torch_compat.lstm, "lstm"),
    (torch_compat.gru, "gru"),
    (torch_compat.rnn_tanh, "tanh"),
    (torch_compat.rnn_relu, "relu"),
  )
}


def replace(module: fx.GraphModule) -> None:
  """Replace the recurrent functions in a Dynamo graph by operations on single layers.

  Calls with keyword arguments are not replaced.

  Args:
    module: the graph; changed. Inner graphs, such as those of checkpoints, are
      replaced by changed copies.
  """
  for node in module.graph.nodes:
    is_known = node.op == "call_function" and node.target in _REPLACEMENTS
    if is_known and not node.kwargs:
      node.target = _REPLACEMENTS[node.target]
  for name, inner in module.named_children():
    if isinstance(inner, fx.GraphModule):
      changed = fx.GraphModule(inner, copy_graph(inner.graph))
      changed.meta = dict(inner.meta)
      replace(changed)
      setattr(module, name, changed)
  module.recompile()
