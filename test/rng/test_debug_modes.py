"""Boundaries pass JAX's checks for reused keys and for leaked tracers.

All tests of this folder refuse raw uint32 keys (`conftest.py`).
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.errors import KeyReuseError
from jax.sharding import Mesh, PartitionSpec

from torchax.errors import TracedDrawError
from torchax.interop import (
  cond,
  fori_loop,
  gradient_checkpoint,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
  while_loop,
)


def _x() -> torch.Tensor:
  return torch.ones(4, device="jax")


def _drop(x):
  return F.dropout(x, 0.5) + F.dropout(x, 0.5) * torch.rand_like(x)


def _while(x):
  return while_loop(lambda v: v.sum() < 9, lambda v: _drop(v) + 3, x)


def _with_changes(x):
  """Loop whose body changes a tensor that it closes over."""
  noise = torch.zeros(4, device="jax")
  return scan(lambda c, _: (c + noise.uniform_(), None), x, length=2)[0] + noise


def _rows(x):
  return jax_vmap(_drop, randomness="different")(torch.stack([x, x]))


def _shards(x):
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  spec = PartitionSpec("data")
  options = {"mesh": mesh, "in_specs": (spec,), "out_specs": spec}
  return jax_shard_map(_drop, options)(x)


def _of_loss(function):
  return jax_value_and_grad(lambda x: function(x).sum())


def _by_torch(function):
  """Return a function that computes torch's gradient of a function."""

  def gradient(x):
    leaf = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return found

  return gradient


BOUNDARIES = {
  "scan": lambda x: scan(lambda c, _: (_drop(c), _drop(c)), x, length=3),
  "scan with changes": _with_changes,
  "fori_loop": lambda x: fori_loop(0, 3, lambda i, v: _drop(v), x),
  "while_loop": _while,
  "cond": lambda x: cond(x.sum() > 0, _drop, lambda x: x, x),
  "jax_vmap": _rows,
  "jax_shard_map": _shards,
  "checkpoint": gradient_checkpoint(_drop),
  "value_and_grad of checkpoint": _of_loss(gradient_checkpoint(_drop)),
  "value_and_grad of a loop": _of_loss(
    lambda x: fori_loop(0, 2, lambda i, v: _drop(v), x)
  ),
  "gradient of jit": _by_torch(lambda x: jax_jit(_drop)(x)),
  "gradient of a loop": _by_torch(lambda x: fori_loop(0, 2, lambda i, v: _drop(v), x)),
  "gradient of rows": _by_torch(_rows),
}
LEAKING = ("scan with changes", "while_loop")
each_boundary = pytest.mark.parametrize("name", BOUNDARIES)


def _run(name: str) -> None:
  compiled = jax_jit(lambda x: BOUNDARIES[name](x))
  for program in (BOUNDARIES[name], compiled, compiled):
    program(_x())


@each_boundary
def test_no_key_is_used_twice_and_no_tracer_leaks(env, name):
  leaks = contextlib.nullcontext() if name in LEAKING else jax.checking_leaks()
  with jax.debug_key_reuse(True), leaks:
    _run(name)
  assert isinstance(env.rng.state.count, int)
  assert not isinstance(env.rng.state.key, jax.core.Tracer)


@pytest.mark.parametrize("name", LEAKING)
def test_no_tracer_leaks_from_the_first_trace_of_a_loop(name):
  with jax.checking_leaks():
    BOUNDARIES[name](_x())


@each_boundary
def test_no_tracer_leaks_from_a_refused_draw(env, name):
  view, before = jax_view(BOUNDARIES[name]), env.rng.state.state_dict()
  with jax.checking_leaks(), pytest.raises(TracedDrawError):
    jax.jit(view)(_x().jax())
  assert env.rng.state.state_dict() == before


REUSED = {
  "twice": lambda key: [jax.random.uniform(key), jax.random.uniform(key)],
  "in jit": jax.jit(lambda key: [jax.random.uniform(key), jax.random.uniform(key)]),
  "in a loop": lambda key: jax.lax.scan(
    lambda c, _: (c, jax.random.uniform(key)), 0, None, length=2
  ),
}


@pytest.mark.parametrize("name", REUSED)
def test_the_check_of_keys_sees_a_key_used_twice(name):
  with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
    REUSED[name](jax.random.key(0))


def test_the_check_of_leaks_sees_a_leak():
  leaked = []
  with jax.checking_leaks(), pytest.raises(Exception, match="[Ll]eaked"):
    jax.jit(lambda x: leaked.append(x + 1) or x)(jnp.ones(3))
