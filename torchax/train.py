"""Training with functional optimizers, and stacks of layers compiled once.

For programs written in JAX's way, with explicit weights and Optax. A plain torch
training step compiles as it is written: `torchax.interop.jax_jit(step)`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import jax
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from torchax import _torch_compat
from torchax.core.bounded_cache import BoundedCache
from torchax.core.partitions import Partition
from torchax.environment import env_on
from torchax.interop import call_jax, gradient_checkpoint, jax_value_and_grad, scan
from torchax.interop.options import CheckpointOptions
from torchax.interop.views import torch_view
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
  remat_policy: Callable[..., Any] | None = None,
) -> Callable[[Weights, Buffers, Any, Args, Label], tuple[torch.Tensor, Weights, Any]]:
  """A training step as a function of everything it changes.

  Args:
    model_fn: `(weights, buffers, args) -> result`; it may draw random numbers, from the
      current stream.
    loss_fn: `(result, label) -> scalar tensor`.
    optax_optimizer: an `optax.GradientTransformation`.
    remat_policy: of `jax.checkpoint`: what of the forward pass is kept. By default
      everything is.

  Returns:
    `step(weights, buffers, opt_state, args, label) -> (loss, weights, opt_state)`, of
    trees of tensors; compile it with `jax_jit`. The first `opt_state` is
    `torch_view(optax_optimizer.init(jax_view(weights)))`.
  """

  def loss(
    weights: Weights, buffers: Buffers, args: Args, label: Label
  ) -> torch.Tensor:
    return loss_fn(model_fn(weights, buffers, args), label)

  if remat_policy is not None:
    loss = gradient_checkpoint(loss, {"policy": remat_policy})
  value_and_grad = jax_value_and_grad(loss)

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


def _add_updates(weights, updates):
  return jax.tree.map(lambda w, update: (w + update).astype(w.dtype), weights, updates)


class Container:
  """Holds a module without making it a part of the one that holds the container."""

  one_mod: torch.nn.Module


# Of one module: for each form of its arguments.
MOST_BODIES = 64


class ScannedModule(torch.nn.Module):
  """A stack of equal layers, run by a loop that is compiled for one layer.

  Compile time does not grow with the depth. The tensors of the layers are stacked: a
  parameter `weight` of shape (…) is here one of shape (layers, …) in `params`.
  Dropouts draw what the unrolled stack would draw (in the order mode of
  `torchax.rng.address_by`: all layers are one site).

  Args:
    module_list: layers of one structure. The first argument of a layer is its input,
      and its result is the input of the next; all other arguments go to every layer.
    checkpoint_policy: of `jax.checkpoint`; where given, layers are recomputed in the
      backward pass, but for what the policy keeps.

  Raises:
    ValueError: no layers, or layers whose tensors differ in name, shape or dtype.
  """

  def __init__(self, module_list: Sequence[torch.nn.Module], checkpoint_policy=None):
    super().__init__()
    layers = list(module_list)
    if not layers:
      raise ValueError("ScannedModule needs at least one layer, but got none.")
    self.c = Container()
    self.c.one_mod = layers[0]
    self.checkpoint_policy = checkpoint_policy
    self._count = len(layers)
    self._bodies: BoundedCache[Any, Callable] = BoundedCache(MOST_BODIES)
    stacked = self._stack_layer_weights(layers)
    parameters = {name for name, _ in layers[0].named_parameters()}
    self.params = torch.nn.ParameterDict(
      {
        self._param_name_new(name): torch.nn.Parameter(tensor, trained)
        for name, (tensor, trained) in stacked.items()
        if name in parameters
      }
    )
    self._layer_buffers = [name for name in stacked if name not in parameters]
    for name in self._layer_buffers:
      self.register_buffer(self._param_name_new(name), stacked[name][0])

  def _param_name_new(self, old: str) -> str:
    """The name of a layer's tensor as one that a ParameterDict takes."""
    return "___".join(old.split("."))

  def _param_name_old(self, new: str) -> str:
    """The name that `_param_name_new` was given."""
    return ".".join(new.split("___"))

  def _stack_layer_weights(self, module_list) -> dict[str, tuple[torch.Tensor, bool]]:
    """Tensors of shape (layers, …) and whether they are trained, by name."""
    tables = [
      {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
      for layer in module_list
    ]
    for number, table in enumerate(tables):
      kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in table.items()}
      first = {name: (tensor.shape, tensor.dtype) for name, tensor in tables[0].items()}
      different = {n for n in {*kinds, *first} if kinds.get(n) != first.get(n)}
      if different:
        raise ValueError(
          f"The layers of ScannedModule have one structure, but layer {number} differs "
          f"from the first in {sorted(different)}."
        )
    with torch.no_grad():
      return {
        name: (torch.stack([table[name] for table in tables]), tensor.requires_grad)
        for name, tensor in tables[0].items()
      }

  def train(self, mode: bool = True) -> "ScannedModule":
    """Sets the mode of the layers too."""
    self.c.one_mod.train(mode)
    return super().train(mode)

  def forward(self, *args, **kwargs):
    """Runs all layers; the arguments are those of a layer."""
    if not args:
      raise TypeError(
        "ScannedModule needs the input of the first layer as an argument."
      )
    others = Partition((args[1:], kwargs))
    stacked = {self._param_name_old(name): t for name, t in self.params.items()}
    for name in self._layer_buffers:
      stacked[name] = getattr(self, self._param_name_new(name))
    body = self._bodies.get(others)
    if body is None:
      static = others.without_arrays()
      body = self._bodies[static] = functools.partial(self._run_layer, static)
    carry = (args[0], others.dynamic)
    (result, _), buffers = scan(body, carry, stacked, length=self._count)
    with torch.no_grad():
      for name, updated in buffers.items():
        getattr(self, self._param_name_new(name)).copy_(updated)
    return result

  def _run_layer(self, arguments: Partition, carry, tensors):
    value, others = carry
    args, kwargs = arguments.filled(others)

    def layer(value, tensors):
      with _torch_compat.reparametrized(self.c.one_mod, tensors):
        result = self.c.one_mod(value, *args, **kwargs)
      return result, {name: tensors[name] for name in self._layer_buffers}

    if self.checkpoint_policy is not None:
      layer = gradient_checkpoint(layer, {"policy": self.checkpoint_policy})
    result, buffers = layer(value, tensors)
    return (result, others), buffers
