"""Training with functional optimizers, and stacks of layers compiled once.

For programs written in JAX's way, with explicit weights and Optax. A plain torch
training step compiles as it is written: `torchax.interop.jax_jit(step)`.
"""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from torchax.environment import env_on
from torchax.interop import call_jax, gradient_checkpoint, jax_value_and_grad, scan
from torchax.interop.options import CheckpointOptions
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
  """`jax.lax.with_sharding_constraint` of a tensor, or of a tree of tensors.

  Args:
    x: the tensors.
    shardings: a sharding, or a tree of them; explicit axes are taken as well. A bare
      `PartitionSpec` is about the mesh of the environment (`with mesh_util.Mesh(…):`).
  """
  mesh = env_on()._mesh
  if mesh is not None:
    shardings = jax.tree.map(
      lambda s: NamedSharding(mesh, s) if isinstance(s, PartitionSpec) else s,
      shardings,
      is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
  leaves = jax.tree.leaves(shardings, is_leaf=lambda s: isinstance(s, PartitionSpec))
  if any(isinstance(s, NamedSharding) and _is_explicit(s) for s in leaves):
    return call_jax(jax.sharding.reshard, x, shardings)
  return call_jax(jax.lax.with_sharding_constraint, x, shardings)


def _is_explicit(sharding: NamedSharding) -> bool:
  return AxisType.Explicit in sharding.mesh.axis_types


def remat(fun: Callable[P, R], **kwargs: Unpack[CheckpointOptions]) -> Callable[P, R]:
  """`gradient_checkpoint` with the keyword arguments of `jax.remat`."""
  return gradient_checkpoint(fun, **kwargs)


def make_train_step(
  model_fn: Callable[[Weights, Buffers, Args], Result],
  loss_fn: Callable[[Result, Label], torch.Tensor],
  optax_optimizer: Any,
  remat_policy: str | Callable[..., Any] | None = None,
  microbatches: int = 1,
) -> Callable[[Weights, Buffers, Any, Args, Label], tuple[torch.Tensor, Weights, Any]]:
  """A training step as a function of everything it changes.

  Args:
    model_fn: `(weights, buffers, args) -> result`; it may draw random numbers, from the
      current stream.
    loss_fn: `(result, label) -> scalar tensor`.
    optax_optimizer: an `optax.GradientTransformation`.
    remat_policy: of `jax.checkpoint`, or its name there: what of the forward pass is
      kept. By default everything is.
    microbatches: in how many equal parts, one after another, the batch is taken: the
      tensors of `args` and `label`, along their first dimension. The memory is that of
      one part; loss and gradients are the means over the parts.

  Returns:
    `step(weights, buffers, opt_state, args, label) -> (loss, weights, opt_state)`, of
    trees of tensors; compile it with `jax_jit`. The first `opt_state` is
    `torch_view(optax_optimizer.init(jax_view(weights)))`.

  Raises:
    ValueError: `microbatches` is no positive integer, there is no such policy, or a
      batch that does not divide.
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
  """The mean of a loss and of its gradients over parts of the batch, in a loop."""
  if count < 1:
    raise ValueError(f"microbatches is 1 or more, but got {count}.")
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
    def part(total, given):
      value, gradients = value_and_grad(weights, buffers, *given)
      return jax.tree.map(torch.add, total, gradients), value

    total = jax.tree.map(torch.zeros_like, weights)
    total, values = scan(part, total, jax.tree.map(split, (args, label)))
    return values.mean(), jax.tree.map(lambda tensor: tensor / count, total)

  return in_parts


def _add_updates(weights, updates):
  return jax.tree.map(lambda w, update: (w + update).astype(w.dtype), weights, updates)
