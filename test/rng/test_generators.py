"""The laws of randomness with each counter-based generator that JAX can name."""

import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import BOUNDARIES, all_equal, ramp, stream_state

import torchax
from torchax.interop import (
  functional_rng,
  jax_jit,
  jax_view,
  jax_vmap,
  torch_view,
)

GENERATORS = ("threefry4x32", "philox4x32", "torch_philox")


@pytest.fixture(params=GENERATORS)
def env(request):
  env = torchax.Environment(torchax.Configuration(prng_impl=request.param), seed=0)
  with env:
    yield env


def draws(x) -> list[torch.Tensor]:
  return [
    torch.rand(6, device="jax"),
    F.dropout(x, 0.3),
    torch.randn_like(x),
    torch.randint(-5, 100, (6,), device="jax"),
    torch.multinomial(x.detach(), 3),
  ]


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_draw_is_the_eager_one(env, name):
  expected = draws(ramp()) + draws(ramp())
  after = stream_state(env)
  env.manual_seed(0)
  wrapped = BOUNDARIES[name](draws)
  assert all_equal(wrapped(ramp()) + wrapped(ramp()), expected)
  assert stream_state(env) == after


def test_a_jax_view_draws_from_the_active_environment(env):
  expected = draws(ramp())
  env.manual_seed(0)
  assert all_equal(torch_view(jax_view(draws)(ramp().jax())), expected)
  state = env.rng.state
  (drawn, _), scoped = functional_rng(draws)(0, ramp().jax()), env.rng_scope(0)
  with scoped:
    assert all_equal(torch_view(drawn), draws(ramp()))
  assert env.rng.state == state


def test_draws_are_uniform_and_independent(env):
  first, second = torch.rand(2, 1 << 16, device="jax").cpu().double()
  third = jax_jit(lambda: torch.rand(1 << 16, device="jax"))().cpu().double()
  for sample in (first, second, third):
    counts = torch.histc(sample, 64, 0, 1)
    chi = ((counts - 1024) ** 2 / 1024).sum()
    assert 22 < chi < 127  # 1e-6 on each side, 63 degrees of freedom
  correlations = torch.corrcoef(torch.stack([first, second, third])).triu(1)
  assert correlations.abs().max() < 5 / 256  # five standard deviations


def test_rows_of_a_map_draw_other_numbers(env):
  rows = jax_vmap(lambda x: x + torch.rand(3, device="jax"), randomness="different")(
    torch.zeros(5, 3, device="jax")
  )
  assert rows.unique().numel() == 15


def test_attention_in_blocks_drops_as_plain_attention(env, monkeypatch):
  query, key, value = torch.randn(3, 1, 2, 5, 4, device="jax").requires_grad_()
  found = {}
  for form in ("plain", "blockwise"):
    monkeypatch.setattr(env.config, "attention", form)
    env.manual_seed(1)
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
    gradient = torch.autograd.grad(output.sin().sum(), value, retain_graph=True)
    found[form] = [output.detach(), *gradient]
  assert (found["plain"][0] == 0).sum() == (found["blockwise"][0] == 0).sum()
  torch.testing.assert_close(found["blockwise"], found["plain"])
