"""Ways to run a function of tensors, and the helpers of their tests."""

import jax
import pytest
import torch
import torch.nn.functional as F

from torchax.interop import gradient_checkpoint, jax_jit, jax_value_and_grad


def ramp(n=6) -> torch.Tensor:
  return torch.arange(1.0, n + 1).to("jax")


def drop(x):
  return F.dropout(x, 0.5)


def rand(n=6, generator=None) -> torch.Tensor:
  return torch.rand(n, device="jax", generator=generator)


def all_equal(first, second) -> bool:
  return len(first) == len(second) and all(map(torch.equal, first, second))


def leaves(tree) -> list[torch.Tensor]:
  found = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))
  return [leaf.detach() for leaf in found]


def from_seed(program, *args, **kwargs) -> list[torch.Tensor]:
  """Return the results of a program from seed 0 on, and the draw after it."""
  torch.manual_seed(0)
  return [*leaves(program(*args, **kwargs)), rand()]


def stream_state(env) -> dict:
  return env.rng.state.state_dict()


def identity(function):
  return function


def _with_gradient(wrap):
  """Return a wrapper that runs a function as the auxiliary output of a gradient."""

  def run(function):
    def loss(x):
      return (x * x).sum(), function(x)

    differentiated = wrap(jax_value_and_grad(loss, {"has_aux": True}))
    return lambda x: differentiated(x)[0][1]

  return run


# For functions of one tensor.
BOUNDARIES = {
  "jit": jax_jit,
  "nested jit": lambda f: jax_jit(lambda x: jax_jit(f)(x)),
  "checkpoint": gradient_checkpoint,
  "jit of checkpoint": lambda f: jax_jit(gradient_checkpoint(f)),
  "checkpoint of jit": lambda f: gradient_checkpoint(jax_jit(f)),
  "value_and_grad": _with_gradient(identity),
  "jit of value_and_grad": _with_gradient(jax_jit),
  "value_and_grad of jit of checkpoint": lambda f: _with_gradient(identity)(
    jax_jit(gradient_checkpoint(f))
  ),
}
# For programs with loops and branches; those without a gradient take several arguments.
FORMS = {
  "eager": identity,
  "jit": jax_jit,
  "nested jit of checkpoint": lambda f: jax_jit(
    lambda *args: jax_jit(gradient_checkpoint(f))(*args)
  ),
  "jit of value_and_grad": lambda f: jax_jit(_with_gradient(identity)(f)),
}
each_wrap = pytest.mark.parametrize("wrap", ["eager", "nested jit of checkpoint"])
