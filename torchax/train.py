"""Training steps with Optax, and stacks of layers that are compiled once.

For programs in JAX's style, with explicit weights. A plain torch training step needs
none of this: `torchax.interop.jax_jit(step)` compiles it. Stacks are in `stacks.py`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchax.core import explicit_axes
from torchax.environment import env_on
from torchax.interop import call_jax, gradient_checkpoint, jax_value_and_grad, scan
from torchax.interop.jit_options import CheckpointOptions
from torchax.interop.views import torch_view
from torchax.stacks import Container, ScannedModule, policy_of, scan_layers
from torchax.types import P, R

Args = TypeVar("Args")
Buffers = TypeVar("Buffers")
Label = TypeVar("Label")
Result = TypeVar("Result")
Sharded = TypeVar("Sharded")
Weights = TypeVar("Weights")

__all__ = [
  "Container",
  "ScannedModule",
  "make_train_step",
  "mark_sharding",
  "remat",
  "scan_layers",
  "torch_view",
]


def __dir__() -> list[str]:
  return list(__all__)


def mark_sharding(x: Sharded, shardings: Any) -> Sharded:
  """Apply `jax.lax.with_sharding_constraint` to tensors.

  Args:
    x: a tensor, or a tree of tensors, of any shape and dtype.
    shardings: a sharding, or a tree of them; explicit mesh axes are supported. A bare
      `PartitionSpec` refers to the environment's mesh (`with mesh_util.Mesh(…):`).

  Returns:
    `x` with these shardings.

  >>> mesh = jax.make_mesh((1,), ("batch",))
  >>> x = torch.ones(4, 2, device="jax")
  >>> mark_sharding(x, NamedSharding(mesh, PartitionSpec("batch"))).shape
  torch.Size([4, 2])
  """
  mesh = env_on()._mesh
  if mesh is not None:
    shardings = jax.tree.map(
      lambda s: NamedSharding(mesh, s) if isinstance(s, PartitionSpec) else s,
      shardings,
      is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
  leaves = jax.tree.leaves(shardings, is_leaf=lambda s: isinstance(s, PartitionSpec))
  if any(
    isinstance(s, NamedSharding) and explicit_axes.is_explicit(s.mesh) for s in leaves
  ):
    return call_jax(jax.sharding.reshard, x, shardings)
  return call_jax(jax.lax.with_sharding_constraint, x, shardings)


def remat(fun: Callable[P, R], **kwargs: Unpack[CheckpointOptions]) -> Callable[P, R]:
  """Return `gradient_checkpoint(fun)`, with the keyword arguments of `jax.remat`.

  Args:
    fun: function or module of tensors.
    **kwargs: `policy`, `prevent_cse`, `static_argnums`, `static_argnames`.

  Returns:
    A function with the same arguments and results.

  >>> x = torch.ones(2, device="jax")
  >>> jax_value_and_grad(remat(lambda x: x.sin().sum()))(x)[1].shape
  torch.Size([2])
  """
  return gradient_checkpoint(fun, **kwargs)


def make_train_step(
  model_fn: Callable[[Weights, Buffers, Args], Result],
  loss_fn: Callable[[Result, Label], torch.Tensor],
  optax_optimizer: Any,
  remat_policy: str | Callable[..., Any] | None = None,
  microbatches: int = 1,
) -> Callable[[Weights, Buffers, Any, Args, Label], tuple[torch.Tensor, Weights, Any]]:
  """Return a training step as a pure function of weights and optimizer state.

  Args:
    model_fn: `(weights, buffers, args) -> result`; it may draw random numbers from the
      current stream.
    loss_fn: `(result, label) -> scalar tensor`.
    optax_optimizer: an `optax.GradientTransformation`.
    remat_policy: policy of `jax.checkpoint`, or its name: values of the forward pass to
      save. By default all are saved.
    microbatches: number of equal parts of a batch, run one after another. The tensors
      in `args` and `label` are split along their first dim, so activations need the
      memory of one part. Loss and gradients are means over the parts.

  Returns:
    `step(weights, buffers, opt_state, args, label) -> (loss, weights, opt_state)` on
    trees of tensors; compile it with `jax_jit`. The first `opt_state` is
    `torch_view(optax_optimizer.init(jax_view(weights)))`.

  Raises:
    ValueError: `microbatches` is below 1, or the policy does not exist. The step raises
      it for a batch that `microbatches` does not divide.

  >>> import optax
  >>> from torchax.interop import jax_view
  >>> sgd = optax.sgd(0.5)
  >>> model = lambda weights, buffers, x: x @ weights["w"]
  >>> step = make_train_step(model, torch.nn.functional.mse_loss, sgd)
  >>> weights = {"w": torch.zeros(1, device="jax")}
  >>> state = torch_view(sgd.init(jax_view(weights)))
  >>> x, y = torch.ones(4, 1, device="jax"), torch.ones(4, device="jax")
  >>> loss, weights, state = step(weights, {}, state, x, y)
  >>> loss.item(), weights["w"].item()
  (1.0, 1.0)
  """

  def loss(
    weights: Weights, buffers: Buffers, args: Args, label: Label
  ) -> torch.Tensor:
    return loss_fn(model_fn(weights, buffers, args), label)

  if remat_policy is not None:
    loss = gradient_checkpoint(loss, {"policy": policy_of(remat_policy)})
  value_and_grad = _in_parts(jax_value_and_grad(loss), microbatches)

  def step(
    weights: Weights, buffers: Buffers, opt_state: Any, args: Args, label: Label
  ) -> tuple[torch.Tensor, Weights, Any]:
    with torch.no_grad():
      value, gradients = value_and_grad(weights, buffers, args, label)
      updates, opt_state = call_jax(
        optax_optimizer.update, gradients, opt_state, weights
      )
      weights = call_jax(_add_updates, weights, updates)
    return value, weights, opt_state

  return step


def _in_parts(value_and_grad: Callable, count: int) -> Callable:
  """Average a loss and its gradients over parts of the batch, in a loop."""
  if count < 1:
    raise ValueError(f"microbatches expects 1 or more, but got {count}.")
  if count == 1:
    return value_and_grad

  def split(tensor):
    rows = tensor.shape[0] if tensor.ndim else 0
    if not rows or rows % count:
      raise ValueError(
        f"A batch is taken in {count} parts, but a tensor of shape "
        f"{list(tensor.shape)} does not divide into them along its first dimension."
      )
    return tensor.reshape(count, rows // count, *tensor.shape[1:])

  def in_parts(weights, buffers, args, label):
    def part(total, chunk):
      value, gradients = value_and_grad(weights, buffers, *chunk)
      return jax.tree.map(torch.add, total, gradients), value

    total = jax.tree.map(torch.zeros_like, weights)
    total, values = scan(part, total, jax.tree.map(split, (args, label)))
    return values.mean(), jax.tree.map(lambda tensor: tensor / count, total)

  return in_parts


def _add_updates(weights, updates):
  return jax.tree.map(lambda w, update: (w + update).astype(w.dtype), weights, updates)
