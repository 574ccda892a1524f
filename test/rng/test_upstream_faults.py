"""Faults of google/torchax that the design of the random state removes, one a test.

Each test is named after its symptom there; `docs/rng-design.md` has the table.
"""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import drop
from torch.utils.checkpoint import checkpoint

from torchax.errors import TracedDrawError
from torchax.interop import (
  cond,
  fori_loop,
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
)
from torchax.rng import is_typed_key
from torchax.train import ScannedModule

N = 64


def _ones(n=N) -> torch.Tensor:
  return torch.ones(n, device="jax")


def _state(env) -> dict:
  return env.rng.state.state_dict()


def _on_thread(function):
  out = []
  thread = threading.Thread(target=lambda: out.append(function()))
  thread.start()
  thread.join()
  return out[0]


def test_raw_jit_of_jax_view_raises_instead_of_baking_a_mask(env):
  compiled = jax.jit(jax_view(drop))
  before = _state(env)
  for _ in range(2):
    with pytest.raises(TracedDrawError, match="rng=key"):
      compiled(jnp.ones(N))
  assert _state(env) == before
  assert set(drop(_ones()).tolist()) == {0.0, 2.0}  # eager draws continue


def test_raw_jit_of_a_jax_view_takes_the_key_as_an_operand():
  compiled = jax.jit(jax_view(drop))
  keys = [jax.random.key(seed) for seed in (0, 1)]
  masks = [compiled(jnp.ones(N), rng=key) for key in keys]
  assert not jnp.array_equal(*masks)
  assert jnp.array_equal(masks[0], compiled(jnp.ones(N), rng=keys[0]))
  assert compiled._cache_size() == 1
  jaxpr = jax.make_jaxpr(jax_view(drop))(jnp.ones(N), rng=keys[0]).jaxpr
  assert "key<fry>[]" in [str(var.aval) for var in jaxpr.invars]


def test_jitted_function_called_twice_in_another_has_two_masks():
  inner = jax_jit(drop)
  x = _ones()
  expected = [drop(x), drop(x)]
  torch.manual_seed(0)
  masks = jax_jit(lambda x: (inner(x), inner(x)))(x)
  assert not torch.equal(*masks)
  assert all(map(torch.equal, masks, expected))


def test_gradient_checkpoint_twice_uses_two_masks_in_backward():
  block = gradient_checkpoint(drop)

  def loss(x, y):
    first, second = block(x), block(y)
    return (first + second).sum(), (first, second)

  options = {"argnums": (0, 1), "has_aux": True}
  step = jax_jit(jax_value_and_grad(loss, options))
  x = _ones()
  (_, forward), grads = step(x, x.clone())
  assert not torch.equal(*forward)
  # On ones, the output of dropout is its scaled mask, which is also its gradient.
  assert all(map(torch.equal, forward, grads))
  torch.manual_seed(0)
  assert all(map(torch.equal, forward, [drop(x), drop(x)]))


def test_gradient_checkpoint_recomputes():
  """Otherwise the test above would not cover the recomputation."""
  block = gradient_checkpoint(lambda x: torch.sin(drop(x)))
  step = jax_jit(jax_value_and_grad(lambda x: block(x).sum()))
  jaxpr = str(step.trace(_ones()).jaxpr)
  assert "remat" in jaxpr or "checkpoint" in jaxpr
  assert jaxpr.count("= random_unwrap") >= 2


def test_eval_shape_leaves_the_state_untouched(env):
  before = _state(env)
  key = jax.random.key(0)
  for function in (drop, jax_jit(drop), gradient_checkpoint(drop)):
    out = jax.eval_shape(jax_view(function), jnp.ones(N), rng=key)
    assert out.shape == (N,)
    with pytest.raises(TracedDrawError):
      jax.eval_shape(jax_view(function), jnp.ones(N))
  jax.eval_shape(functional_rng(drop), env.rng.state, jnp.ones(N))
  assert _state(env) == before
  assert is_typed_key(env.rng.state.key) and isinstance(env.rng.state.count, int)


def test_make_jaxpr_leaves_the_state_untouched(env):
  before = _state(env)
  key = jax.random.key(0)
  for function in (drop, jax_jit(drop), gradient_checkpoint(drop)):
    jaxpr = jax.make_jaxpr(jax_view(function))(jnp.ones(N), rng=key)
    assert "random_unwrap" in str(jaxpr)
    with pytest.raises(TracedDrawError):
      jax.make_jaxpr(jax_view(function))(jnp.ones(N))
  jax.make_jaxpr(functional_rng(drop))(env.rng.state, jnp.ones(N))
  assert _state(env) == before


def test_tracing_and_lowering_leave_the_state_untouched(env):
  compiled = jax_jit(drop)
  x = _ones()
  before = _state(env)
  compiled.trace(x)
  compiled.lower(x).compile()
  assert _state(env) == before
  first = compiled(x)
  torch.manual_seed(0)
  assert torch.equal(first, drop(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["environment", "plain"])
def test_torch_checkpoint_has_the_backward_mask_of_the_forward(
  env, use_reentrant, inside
):
  with env if inside else env.disabled():
    x = _ones().requires_grad_()
    # x * dropout(1): the gradient needs the mask of the recomputed forward pass.
    y = checkpoint(lambda x: x * drop(_ones()), x, use_reentrant=use_reentrant)
    torch.rand(3, device="jax")  # the stream advances before the backward pass
    y.sum().backward()
  assert set(y.tolist()) == {0.0, 2.0}
  assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_checkpoint_backward_does_not_move_the_stream(env, use_reentrant):
  x = _ones().requires_grad_()
  expected = [drop(_ones()), torch.rand(3, device="jax")]
  torch.manual_seed(0)
  y = checkpoint(lambda x: x * drop(_ones()), x, use_reentrant=use_reentrant)
  y.sum().backward()
  assert torch.equal(y.detach(), expected[0])
  assert torch.equal(torch.rand(3, device="jax"), expected[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_checkpoint_twice_uses_two_masks_in_backward(use_reentrant):
  block = lambda x: x * drop(_ones())  # noqa: E731
  first, second = _ones().requires_grad_(), _ones().requires_grad_()
  outs = [checkpoint(block, x, use_reentrant=use_reentrant) for x in (first, second)]
  sum(outs).sum().backward()
  assert not torch.equal(*outs)
  assert torch.equal(first.grad, outs[0].detach())
  assert torch.equal(second.grad, outs[1].detach())


def test_torch_checkpoint_in_a_compiled_function_has_one_mask(env):
  def masks():
    x = _ones().requires_grad_()
    y = checkpoint(lambda x: x * drop(_ones()), x, use_reentrant=False)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]

  expected = masks()
  torch.manual_seed(0)
  compiled = jax_jit(masks)()
  assert torch.equal(*compiled)
  assert torch.equal(compiled[0], expected[0])


def test_torch_manual_seed_is_honoured():
  torch.manual_seed(3)
  first = torch.rand(4, device="jax")
  torch.manual_seed(3)
  assert torch.equal(torch.rand(4, device="jax"), first)
  torch.manual_seed(4)
  assert not torch.equal(torch.rand(4, device="jax"), first)


def test_torch_manual_seed_is_honoured_by_compiled_functions():
  draw = jax_jit(lambda: torch.rand(4, device="jax"))
  torch.manual_seed(3)
  first = draw()
  assert not torch.equal(draw(), first)
  torch.manual_seed(3)
  assert torch.equal(draw(), first)


def test_fork_rng_restores_the_stream():
  expected = torch.rand(4, device="jax")
  torch.manual_seed(0)
  with torch.random.fork_rng(device_type="jax"):
    torch.manual_seed(9)
    inside = torch.rand(4, device="jax")
  assert torch.equal(torch.rand(4, device="jax"), expected)
  assert not torch.equal(inside, expected)


def test_get_rng_state_is_a_state():
  state = torch.jax.get_rng_state()
  first = torch.rand(4, device="jax")
  torch.jax.set_rng_state(state)
  assert torch.equal(torch.rand(4, device="jax"), first)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "compiled"])
def test_a_generator_advances(wrap):
  generator = torch.Generator().manual_seed(0)
  draw = wrap(lambda: torch.rand(4, device="jax", generator=generator))
  assert not torch.equal(draw(), draw())


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["exponential_", "cauchy_"])
def test_exponential_and_cauchy_are_random(name, wrap):
  draw = wrap(lambda: getattr(torch.zeros(4, device="jax"), name)())
  first, second = draw(), draw()
  assert not torch.equal(first, second)
  torch.manual_seed(0)
  assert torch.equal(draw(), first)
  torch.manual_seed(1)
  assert not torch.equal(draw(), first)


def test_two_threads_have_two_streams():
  here = drop(_ones())
  there = _on_thread(lambda: drop(_ones()))
  elsewhere = _on_thread(lambda: drop(_ones()))
  assert len({tuple(mask.tolist()) for mask in (here, there, elsewhere)}) == 3


@pytest.mark.parametrize("argnums", [-1, (-1,), 1, (1,)], ids=repr)
def test_static_argnums_count_the_users_arguments(argnums):
  compiled = jax_jit(F.dropout, {"static_argnums": argnums})
  x = _ones()
  for p in (0.5, 0.25):
    torch.manual_seed(0)
    expected = F.dropout(x, p)
    torch.manual_seed(0)
    assert torch.equal(compiled(x, p), expected)


TURNS = {
  "fori_loop": lambda x: fori_loop(0, 3, lambda i, x: drop(x), x),
  "scan": lambda x: scan(lambda x, _: (drop(x), None), x, length=3)[0],
  "cond": lambda x: cond(
    x.sum() > 0, lambda x: drop(drop(drop(x))), lambda x: drop(x), x
  ),
  "ScannedModule": lambda x: ScannedModule([torch.nn.Dropout(0.5)] * 3)(x),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TURNS)
def test_a_body_that_draws_has_a_mask_of_its_own_in_each_turn(env, name, wrap):
  out = wrap(TURNS[name])(_ones(512))
  torch.manual_seed(0)
  assert torch.equal(out, drop(drop(drop(_ones(512)))))
  # One mask for all iterations would keep a half, three masks keep an eighth.
  assert 0.06 < (out != 0).float().mean().item() < 0.2
  assert _state(env)["count"] == 3


def test_rows_of_a_vmap_have_the_masks_that_are_declared(env):
  rows = torch.ones(4, N, device="jax")
  with pytest.raises(TracedDrawError, match='jax_vmap.*randomness="different"'):
    jax.vmap(jax_view(drop))(rows.jax())
  different = jax_vmap(drop, randomness="different")(rows)
  same = jax_vmap(drop, randomness="same")(rows)
  assert len({tuple(row) for row in different.tolist()}) == 4
  assert len({tuple(row) for row in same.tolist()}) == 1


_SHARDS = """
import jax, numpy as np, torch, torchax
from jax.sharding import Mesh, PartitionSpec as P
from torchax.interop import jax_shard_map
torchax.enable_globally()
mesh = Mesh(np.array(jax.devices()), ("data",))
drop = lambda x: torch.nn.functional.dropout(x, 0.5)
x = torch.ones(4, 64, device="jax")
for specs in (P("data"), (P("data"),)):
  options = {"mesh": mesh, "in_specs": specs, "out_specs": P("data")}
  for word in ("different", "same"):
    out = jax_shard_map(drop, options, randomness=word)(x)
    print(len({tuple(row) for row in out.tolist()}))
"""


def test_shard_masks_follow_the_policy_for_any_in_specs():
  flags = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  done = subprocess.run(
    [sys.executable, "-c", _SHARDS],
    env={**os.environ, **flags},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.split() == ["4", "1", "4", "1"]


def test_exported_train_mode_dropout_takes_the_key_as_input():
  exported = jax.export.export(jax.jit(jax_view(torch.nn.Dropout(0.5).train())))
  program = exported(jnp.ones(N), rng=jax.random.key(0))
  assert sum("key" in str(aval.dtype) for aval in program.in_avals) == 1
  outs = [program.call(jnp.ones(N), rng=jax.random.key(seed)) for seed in (0, 1, 0)]
  assert (outs[0] == outs[2]).all() and (outs[0] != outs[1]).any()
  assert set(outs[0].tolist()) == {0.0, 2.0}


PRESENT = {
  "poisson": lambda: torch.poisson(4 * _ones()),
  "binomial": lambda: torch.binomial(9 * _ones(), 0.5 * _ones()),
  "gamma": lambda: torch._standard_gamma(2 * _ones()),
  "dirichlet": lambda: torch._sample_dirichlet(torch.ones(8, 8, device="jax")),
  "rrelu": lambda: F.rrelu(-_ones(), training=True),
  "fractional max-pool": lambda: F.fractional_max_pool2d(
    torch.arange(256.0).to("jax").view(1, 1, 16, 16), 2, output_size=6
  ),
}


@pytest.mark.parametrize("name", PRESENT)
def test_samplers_that_had_no_lowering_draw_new_numbers(name):
  first, second = PRESENT[name](), PRESENT[name]()
  assert not torch.equal(first, second)
  torch.manual_seed(0)
  assert torch.equal(jax_jit(PRESENT[name])(), first)


def test_the_key_is_always_typed(env):
  generator = torch.Generator()

  def keys():
    yield env.prng_key
    yield env.rng.state.key
    yield env.param.prng
    yield env.get_and_rotate_prng_key()
    yield env.get_and_rotate_prng_key(generator)

  seeds = [None, 5, torch.tensor(5), jax.random.key(5), jnp.array([0, 5], jnp.uint32)]
  for seed in seeds:
    if seed is not None:
      env.manual_seed(seed)
    assert all(is_typed_key(key) and key.shape == () for key in keys())
  env.prng_key = jnp.array([0, 5], jnp.uint32)
  assert all(is_typed_key(key) for key in keys())
  with env.override_property(prng=jnp.array([0, 5], jnp.uint32)):
    assert all(is_typed_key(key) for key in keys())
  assert all(jax_jit(lambda: [is_typed_key(key) for key in keys()])())
