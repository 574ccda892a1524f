"""Laws of draws on a mesh, for all generators; `mesh_cases.py` runs them."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from distributed.mesh_parts import case, mesh_of
from jax.sharding import AxisType, PartitionSpec

import torchax
from torchax.dispatch import sampling
from torchax.interop import jax_jit, jax_shard_map

# Not philox4x32: XLA fails to partition `lax.mulhi` in JAX's own implementation.
GENERATORS = ("threefry2x32", "threefry4x32", "torch_philox", "rbg", "unsafe_rbg")
ONES = torch.ones(8, 8)


def draws(x) -> list[torch.Tensor]:
  return [F.dropout(x, 0.3), torch.randn_like(x)]


def sharded() -> torch.Tensor:
  """Return ones of the active environment, sharded over eight devices."""
  return ONES.to("jax").shard_(mesh_of(AxisType.Auto, x=8).sharding(("x",)))


def _environment(impl: str) -> torchax.Environment:
  return torchax.Environment(torchax.Configuration(prng_impl=impl), seed=0)


@case
def draws_of_every_generator_equal_one_device():
  for impl in GENERATORS:
    for function in (draws, jax_jit(draws)):
      with _environment(impl):
        expected = function(ONES.to("jax"))
      with _environment(impl):
        found = function(sharded())
      for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want, check_device=False, msg=impl)


@case
def only_rbg_warns_on_a_mesh_and_once():
  for impl in GENERATORS:
    for function in (F.dropout, jax_jit(F.dropout)):
      sampling._warn_of_shards.cache_clear()
      with warnings.catch_warnings(record=True) as caught, _environment(impl):
        warnings.simplefilter("always")
        if function is F.dropout:
          function(ONES.to("jax"))
          assert not caught, "one device"
        for _ in range(2):
          function(sharded())
      messages = [str(warning.message) for warning in caught]
      assert len(messages) == impl.endswith("rbg"), impl
      assert all(f"A stream of {impl} draws on a mesh" in m for m in messages)


@case
def each_shard_draws_from_its_stateless_key():
  random = pytest.importorskip(
    "torch.func._random", reason="torch has stateless random numbers since 2.13"
  )
  keys = random.split(random.key(7, device="jax"), 8)
  draw = jax_shard_map(
    lambda keys: random.uniform(keys[0], (1, 4)),
    mesh=mesh_of(AxisType.Auto, x=8).jax_mesh,
    in_specs=PartitionSpec("x"),
    out_specs=PartitionSpec("x"),
  )
  expected = torch.cat([random.uniform(key, (1, 4)) for key in keys])
  assert torch.equal(draw(keys).cpu(), expected.cpu())
