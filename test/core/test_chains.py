"""Chains of view steps: reads, writes, interning, and slices with many starts."""

import jax.numpy as jnp
import numpy as np
import torch

import torchax
from torchax.core import program_limit
from torchax.core.chains import WHOLE, Chain, chain_of
from torchax.core.view_steps import (
  IndexInfo,
  PermuteInfo,
  ReshapeInfo,
  slice_of,
)

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


# Chains -------------------------------------------------------------------------------

CHAIN = (PermuteInfo((1, 0)), slice_of(0, 1, 5, 2), IndexInfo(1, 2))


def _numpy_chain(array):
  return array.T[1:5:2][:, 2]


def test_a_chain_reads_step_by_step():
  shown = chain_of(*CHAIN).read(jnp.asarray(BASE))
  np.testing.assert_array_equal(shown, _numpy_chain(BASE))


def test_a_chain_writes_back_through_every_step():
  expected = BASE.copy()
  _numpy_chain(expected)[:] = [100, 200]
  written = chain_of(*CHAIN).write(jnp.asarray(BASE), jnp.asarray([100.0, 200.0]))
  np.testing.assert_array_equal(written, expected)


def test_the_empty_chain_is_the_array_itself():
  array, other = jnp.asarray(BASE), jnp.zeros((4, 6))
  assert WHOLE.read(array) is array
  assert WHOLE.write(array, other) is other


def test_chains_are_interned():
  assert chain_of(*CHAIN) is chain_of(*CHAIN)
  assert chain_of() is WHOLE
  assert WHOLE.append(CHAIN[0]) is chain_of(CHAIN[0])
  assert chain_of(CHAIN[0]) is not chain_of(CHAIN[1])


def test_a_reshape_of_a_reshape_is_one_step():
  chain = chain_of(ReshapeInfo((24,)), ReshapeInfo((2, 12)))
  assert chain is chain_of(ReshapeInfo((2, 12)))
  longer = chain_of(CHAIN[0], ReshapeInfo((24,)), ReshapeInfo((2, 12)))
  assert longer.infos == (CHAIN[0], ReshapeInfo((2, 12)))


def test_a_chain_prints_its_steps():
  assert "PermuteInfo" in repr(chain_of(*CHAIN))
  assert isinstance(chain_of(*CHAIN), Chain)


# Slices with many starts ------------------------------------------------------------


def _many_places(x: torch.Tensor) -> torch.Tensor:
  for i in range(3 * Chain.LIMIT):
    x[i].mul_(2)
    x[i : i + 2, 1:3].add_(i)
    x[i + 1][1:][0] = -1.0
  rows = [row * 3 for row in x]
  return torch.stack(rows) + torch.stack([x[i] for i in range(len(x))])


def test_slices_in_many_places_read_and_write_as_on_the_cpu():
  cpu = torch.arange(4.0 * 30).reshape(30, 4)
  on_jax = cpu.clone().to("jax")
  expected = _many_places(cpu)
  assert torch.equal(_many_places(on_jax).cpu(), expected)
  assert torch.equal(on_jax.cpu(), cpu)


def test_elements_in_many_places_share_programs():
  """Indices along three dimensions are operands of reads and writes."""
  x = torch.zeros(7, 7, 7).to("jax")
  before = program_limit.count()
  for n in range(60):
    x[n % 7, n % 5, n % 3] += x[n % 5, n % 7, n % 2]
  assert program_limit.count() - before <= 4 * Chain.LIMIT


def test_slices_in_many_places_share_one_program():
  x = torch.ones(50, 7).to("jax")
  env = torchax.default_env()
  x[0] + 1.5
  plan = env._dispatcher._plans[id(torch.ops.aten.add.Tensor)][0]
  before = len(plan.programs)
  for i in range(50):
    x[i] + 1.5
  assert len(plan.programs) - before <= Chain.LIMIT + 1


def test_a_chain_in_a_further_place_moves_and_is_not_kept(monkeypatch):
  monkeypatch.setattr(Chain, "_counts", {})
  chain = Chain()
  first = [chain.append(IndexInfo(0, i)) for i in range(Chain.LIMIT)]
  assert all(one.moving is None for one in first)
  further = chain.append(IndexInfo(0, Chain.LIMIT))
  moving, starts = further.moving
  assert starts.tolist() == [Chain.LIMIT]
  assert chain.append(IndexInfo(0, Chain.LIMIT + 1)).moving[0] == moving
  assert len(chain._longer) == Chain.LIMIT
  base = jnp.arange(40.0).reshape(20, 2)
  assert (moving.read((base, starts)) == further.read(base)).all()
  value = jnp.array([-1.0, -2.0])
  assert (moving.write((base, starts), value) == further.write(base, value)).all()


def test_starts_beyond_int32_are_constants():
  for start in range(2**31, 2**31 + 8):
    for info in (IndexInfo(0, start), slice_of(0, start, start + 2, 1)):
      assert WHOLE.append(info).moving is None
