"""Public issues about random numbers in other libraries, one symptom a test.

`docs/rng-evidence.md` has the list of issues, with the name of the test for each.
"""

import random

import jax
import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import all_equal
from torch.utils.checkpoint import checkpoint

import torchax
from torchax import rng
from torchax.errors import TracedDrawError
from torchax.interop import functional_rng, jax_jit

N = 1 << 12
COMPILERS = {
  "jax_jit": jax_jit,
  "torch.compile": lambda f: torch.compile(f, backend="jax", fullgraph=True),
}
each_compiler = pytest.mark.parametrize(
  "compiles", COMPILERS.values(), ids=COMPILERS.keys()
)


def ones(*shape) -> torch.Tensor:
  return torch.ones(*shape or (N,), device="jax")


def from_seed(function, *args):
  torch.manual_seed(0)
  return function(*args)


@each_compiler
def test_a_compiled_module_draws_new_numbers_in_each_call(compiles):
  dropout = torch.nn.Dropout(0.5)
  compiled = compiles(dropout)
  masks = from_seed(lambda: [compiled(ones()) for _ in range(3)])
  assert all_equal(masks, from_seed(lambda: [dropout(ones()) for _ in range(3)]))
  assert not torch.equal(masks[0], masks[1])


def branches(large, small):
  return F.dropout(large, 0.3).sum() * F.dropout(small, 0.7)


def second_of_two(x):
  torch.rand(6, device="jax")
  return torch.rand(6, device="jax")


def permuted(x):
  return x[torch.rand(2, N, device="jax").argsort(-1)[:, :3]]


@each_compiler
@pytest.mark.parametrize(
  "function, sizes",
  ((branches, (N, 6)), (second_of_two, (6,)), (permuted, (N,))),
  ids=("branches", "unused draw", "permutation"),
)
def test_compiled_draws_are_the_eager_ones(compiles, function, sizes):
  args = [torch.arange(float(size)).to("jax") for size in sizes]
  compiled = from_seed(compiles(function), *args)
  torch.testing.assert_close(compiled, from_seed(function, *args), rtol=1e-5, atol=0)


@each_compiler
def test_the_gradient_has_the_mask_of_the_forward_pass(compiles):
  def block(x):
    return F.dropout(x.T.contiguous() * 1, 0.5)

  step = compiles(lambda x: checkpoint(block, x, use_reentrant=False))
  x = ones(64, 64).requires_grad_()
  output = step(x)
  output.backward(torch.ones_like(output))
  assert torch.equal(x.grad.T, output.detach())


def test_the_elements_of_a_mask_are_independent():
  """Groups of four neighbors agree as often as pairs far apart."""
  mask = jax_jit(lambda x: F.dropout(x.transpose(1, 2).contiguous()))(ones(8, 64, N))
  kept = mask > 0
  for distance in (1, 2, 3, 32):
    agreement = (kept == kept.roll(distance, -1)).float().mean().item()
    # Five standard deviations of two million fair coins.
    assert abs(agreement - 0.5) < 0.0018


@pytest.mark.parametrize("draw", (random.random, lambda: random.shuffle([1, 2])))
def test_a_draw_of_python_is_not_frozen_into_a_program(draw):
  state = random.getstate()
  with pytest.raises(TracedDrawError, match="random"):
    jax_jit(lambda x: (x, draw()))(ones())
  assert random.getstate() == state


def test_dropout_keeps_its_numbers_while_others_change():
  model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5))
  with torchax.Environment(torchax.Configuration(rng_addressing="site"), seed=0) as env:
    plain = model(ones())
    model[0].register_forward_hook(lambda module, args, x: x + 0 * torch.rand_like(x))
    env.manual_seed(0)
    assert torch.equal(model(ones()), plain)


def test_a_function_repeats_its_numbers_if_asked():
  noisy = functional_rng(lambda x: F.dropout(x, 0.5))
  first, state = noisy(jax.random.key(1), ones().jax())
  assert (noisy(jax.random.key(1), ones().jax())[0] == first).all()
  assert (noisy(state, ones().jax())[0] != first).any()


def test_a_draw_needs_none_of_the_earlier_ones(env):
  with env.rng_scope(0):
    draws = [torch.rand(6, device="jax") for _ in range(3)]
  with env.rng_scope(rng.RngState.from_seed(0).advance(2)):
    assert torch.equal(torch.rand(6, device="jax"), draws[2])
