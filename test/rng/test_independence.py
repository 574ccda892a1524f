"""Independence of draws: correlations of dropout masks.

A mask has 10,000 bits, so two independent masks correlate by less than 5 / sqrt(n). The
bits of neighbouring keys are tested in `test_stream_dump.py`.
"""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.goodness import FACTOR, N, require_independent

from torchax.interop import fori_loop, jax_jit, jax_vmap, scan, while_loop
from torchax.rng import state as rng_state

pytestmark = [pytest.mark.distributions, pytest.mark.statistics]


def _mask(x=None) -> np.ndarray:
  x = torch.ones(N, device="jax") if x is None else x
  return F.dropout(x, 0.5).numpy() > 0


# Keys -------------------------------------------------------------------------------


def test_the_test_of_independence_sees_dependence():
  masks = [_mask() for _ in range(3)]
  for dependent in (
    [*masks, masks[1]],
    [*masks, ~masks[0]],
    [masks[0], np.where(np.arange(N) % 8, masks[1], masks[0])],
    [np.repeat(masks[0][: N // 2], 2)],
  ):
    with pytest.raises(AssertionError):
      require_independent(dependent)


def test_masks_of_successive_draws_are_independent():
  require_independent([_mask() for _ in range(30 * FACTOR)])


def test_masks_across_layers_and_compiled_calls_are_independent():
  @jax_jit
  def model(x):
    return [F.dropout(x, 0.5) for _ in range(5)]

  ones = torch.ones(N, device="jax")
  masks = [mask.numpy() > 0 for _ in range(4 * FACTOR) for mask in model(ones)]
  require_independent(masks)


def test_masks_of_threads_are_independent():
  masks = [_mask()]
  for _ in range(8 * FACTOR):
    thread = threading.Thread(target=lambda: masks.append(_mask()))
    thread.start()
    thread.join()
  require_independent(masks)


def test_masks_of_related_keys_are_independent(env):
  """Neighbouring seeds and threads, forks, and keys read after draws."""
  key = rng_state.key_from_seed(0)
  some = range(1, 3 * FACTOR + 1)
  keys = [rng_state.key_from_seed(seed) for seed in (0, *some, -1, 2**32, 2**63)]
  keys += [rng_state.thread_key(key, ordinal) for ordinal in some]
  keys += [rng_state.named_key(key, name) for name in map(str, some)]
  keys += [rng_state.rebase_key(key, count) for count in some]
  keys += [rng_state.shard_key(key, index) for index in (0, *some)]
  # A loop of unknown length has a stream that starts with the key of a draw.
  keys += [rng_state.fold_in(rng_state.fold_in(key, 1), count) for count in (0, *some)]
  keys += [rng_state.rekey(key)]
  masks = []
  for key in keys:
    with env.rng_scope(key):
      masks += [_mask(), _mask()]
  require_independent(masks)


def test_masks_of_generators_are_independent():
  masks = []
  for seed in range(5 * FACTOR):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
      drawn = torch.zeros(N, device="jax").bernoulli_(0.5, generator=generator)
      masks.append(drawn.numpy() > 0)
  masks += [_mask() for _ in range(3)]
  require_independent(masks)


# Loops, rows and shards -------------------------------------------------------------

ROUNDS = 6 * FACTOR


def _layers(x) -> torch.Tensor:
  """Draw two masks in one iteration or row."""
  return torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5)])


def _scanned() -> torch.Tensor:
  ones = torch.ones(N, device="jax")
  return scan(lambda carry, x: (carry, _layers(ones)), ones, length=ROUNDS)[1]


def _put(masks: torch.Tensor, place) -> torch.Tensor:
  is_here = torch.arange(ROUNDS, device="jax") == place
  return torch.where(is_here[:, None, None], _layers(masks.new_ones(N)), masks)


def _in_fori_loop() -> torch.Tensor:
  empty = torch.zeros(ROUNDS, 2, N, device="jax")
  return fori_loop(0, ROUNDS, lambda place, masks: _put(masks, place), empty)


def _in_while_loop() -> torch.Tensor:
  start = (torch.zeros((), dtype=torch.int32, device="jax"), _in_fori_loop() * 0)
  is_open = lambda state: state[0] < ROUNDS  # noqa: E731
  return while_loop(is_open, lambda s: (s[0] + 1, _put(s[1], s[0])), start)[1]


def _of_rows() -> torch.Tensor:
  rows = torch.ones(ROUNDS, N, device="jax")
  return jax_vmap(_layers, randomness="different")(rows)


def _of_rows_of_scans() -> torch.Tensor:
  def row(x):
    return scan(lambda carry, _: (carry, F.dropout(x, 0.5)), x, length=3)[1]

  return jax_vmap(row, randomness="different")(torch.ones(ROUNDS, N, device="jax"))


@pytest.mark.parametrize(
  "draw", [_scanned, _in_fori_loop, _in_while_loop, _of_rows, _of_rows_of_scans]
)
def test_masks_of_iterations_and_rows_are_independent(draw, env):
  masks = [_mask()]
  with env:
    masks += list(draw().reshape(-1, N).numpy() > 0)
    masks += list(jax_jit(draw)().reshape(-1, N).numpy() > 0)
  require_independent([*masks, _mask()])


_SHARDS = """
import sys
import jax, numpy as np, torch, torchax
from jax.sharding import PartitionSpec
from torchax.interop import jax_shard_map

torch.manual_seed(0)
spec = PartitionSpec("data")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
options = dict(mesh=mesh, in_specs=(spec,), out_specs=spec)
drop = jax_shard_map(lambda x: torch.nn.functional.dropout(x, 0.5), options)
ones = torch.ones(8, int(sys.argv[2]), device="jax")
masks = [drop(ones).numpy() > 0 for _ in range(int(sys.argv[3]))]
masks += [torch.nn.functional.dropout(ones, 0.5).numpy() > 0]
np.save(sys.argv[1], np.concatenate(masks))
"""


def test_masks_of_shards_are_independent(tmp_path):
  path = tmp_path / "masks.npy"
  subprocess.run(
    [sys.executable, "-c", _SHARDS, str(path), str(N), str(2 * FACTOR)],
    env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    check=True,
  )
  masks = np.load(path)
  assert masks.shape == (8 * (2 * FACTOR + 1), N)
  require_independent(masks)
