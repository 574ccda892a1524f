"""Program of a user, with the types that a checker must infer; it also runs.

`test_typing.py` runs a type checker on this file, which must report no error.
"""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import torchax
from torchax.interop import (
  Jitted,
  call_jax,
  call_torch,
  cond,
  extract_jax,
  fori_loop,
  functional_rng,
  gradient_checkpoint,
  j2t_autograd,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
  switch,
  torch_view,
  while_loop,
  wrap_jax_jit,
)
from torchax.rng import RngState, RngStream, rng_scope
from torchax.tensor import Tensor
from torchax.train import make_train_step, mark_sharding, remat


def power(x: torch.Tensor, n: int = 2) -> torch.Tensor:
  """Return x to the n."""
  return x**n


def norm(x: torch.Tensor) -> torch.Tensor:
  """Return the sum of squares."""
  return (x * x).sum()


def double(x: jax.Array) -> jax.Array:
  """Return twice x, in JAX."""
  return 2 * x


class Model(torch.nn.Module):
  """Linear layer with a method that is compiled."""

  def __init__(self) -> None:
    super().__init__()
    self.layer = torch.nn.Linear(3, 3)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x)

  @jax_jit(static_argnums=0)
  def twice(self, x: torch.Tensor) -> torch.Tensor:
    """Apply the layer twice."""
    return self.layer(self.layer(x))


def compiling(x: torch.Tensor, model: Model) -> None:
  """Compile in all ways to write `jax_jit`, which keep the function's signature."""
  compiled = jax_jit(power, static_argnums=1)
  assert_type(compiled(x, 3), torch.Tensor)
  assert_type(compiled(x, n=3), torch.Tensor)
  assert_type(jax_jit(power, {"static_argnums": 1})(x, 3), torch.Tensor)
  options = {"static_argnames": "n"}
  assert_type(jax_jit(power, kwargs_for_jax_jit=options)(x, n=3), torch.Tensor)
  jitted: Jitted[[torch.Tensor], torch.Tensor] = jax_jit(norm)
  assert_type(jitted(x), torch.Tensor)
  assert_type(wrap_jax_jit(norm)(x), torch.Tensor)
  assert_type(compiled.lower(x, 3), jax.stages.Lowered)

  @jax_jit
  def bare(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, x - y

  assert_type(bare(x, x), tuple[torch.Tensor, torch.Tensor])

  @jax_jit(donate_argnums=0)
  def donating(x: torch.Tensor) -> torch.Tensor:
    return x + 1

  assert_type(donating(x + 1), torch.Tensor)
  assert_type(model.twice(x), torch.Tensor)
  assert_type(torchax.compile(norm)(x), torch.Tensor)
  assert_type(torchax.compile(model), Model)


def views(x: torch.Tensor, model: Model) -> None:
  """Convert tensors, dtypes and functions in both directions, with their types."""
  array = jax_view(x)
  assert_type(array, jax.Array)
  assert_type(torch_view(array), Tensor)
  assert_type(torch_view(array).jax(), jax.Array)
  assert_type(jax_view(torch.float32), np.dtype)
  assert_type(jax_view({"x": x}), dict[str, jax.Array])
  assert_type(torch_view({"x": array}), dict[str, torch.Tensor])
  assert_type(jax_view([x]), list[jax.Array])
  assert_type(jax_view(norm)(array), jax.Array)
  assert_type(jax_view(norm)(array, rng=0), jax.Array)
  assert_type(torch_view(double)(x), Tensor)
  assert_type(call_jax(double, x), Tensor)
  assert_type(call_torch(norm, array), jax.Array)
  assert_type(j2t_autograd(double)(x), Tensor)
  assert_type(functional_rng(norm)(0, array), tuple[jax.Array, RngState])
  assert_type(extract_jax(model)[0], dict[str, jax.Array])


def transformations(x: torch.Tensor) -> None:
  """Transform functions, which keeps their signatures."""
  value, gradients = jax_value_and_grad(norm, argnums=0)(x)
  assert_type(value, torch.Tensor)
  assert_type(gradients, Any)
  assert_type(gradient_checkpoint(power, static_argnums=1)(x, 3), torch.Tensor)
  assert_type(remat(norm, prevent_cse=False)(x), torch.Tensor)
  assert_type(jax_vmap(norm)(x), torch.Tensor)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
  rows = jax.sharding.PartitionSpec("rows")
  sharded = jax_shard_map(power, mesh=mesh, in_specs=(rows,), out_specs=rows)
  assert_type(sharded(x), torch.Tensor)
  placed = jax.sharding.NamedSharding(mesh, rows)
  assert_type(mark_sharding(x, placed), torch.Tensor)


def add(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
  """Add; body of a scan."""
  return carry + x, carry


def loops(x: torch.Tensor) -> None:
  """Run loops whose carry has one type."""
  total, sums = scan(add, x[0], x)
  assert_type(total, torch.Tensor)
  assert_type(sums, torch.Tensor)
  assert_type(fori_loop(0, 3, lambda i, v: v + i, x), torch.Tensor)
  assert_type(while_loop(lambda v: v.sum() < 100, lambda v: v + 1, x), torch.Tensor)
  assert_type(cond(True, norm, norm, x), torch.Tensor)
  assert_type(switch(1, [norm, norm], x), torch.Tensor)


def random_numbers(x: torch.Tensor) -> None:
  """Use environments and scopes."""
  env = torchax.default_env()
  assert_type(env, torchax.Environment)
  assert_type(env.rng, RngStream)
  with torchax.default_env() as entered:
    assert_type(entered, torchax.Environment)
  with rng_scope(0) as stream:
    assert_type(stream, RngStream)
  with env.rng_scope(0) as stream:
    assert_type(stream, RngStream)


Weights = dict[str, torch.Tensor]


def training(x: torch.Tensor) -> None:
  """Train with a step that takes the arguments of the model and the loss."""

  def model(weights: Weights, buffers: Weights, args: torch.Tensor) -> torch.Tensor:
    return args * weights["w"]

  def loss(result: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((result - label) ** 2).sum()

  optimizer = optax.sgd(0.1)
  step = make_train_step(model, loss, optimizer)
  assert_type(
    step,
    Callable[
      [Weights, Weights, Any, torch.Tensor, torch.Tensor],
      tuple[torch.Tensor, Weights, Any],
    ],
  )
  weights = {"w": x[0]}
  state = torch_view(optimizer.init(jax_view(weights)))
  value, weights, state = jax_jit(step)(weights, {}, state, x, x)
  assert_type(value, torch.Tensor)
  assert_type(weights, Weights)


def main() -> None:
  """Run all functions."""
  x = torch_view(jnp.ones((3, 3)))
  model = Model().to("jax")
  with torchax.default_env():
    compiling(x, model)
    views(x, model)
    transformations(x)
    loops(x)
    random_numbers(x)
    training(x)


if __name__ == "__main__":
  main()
