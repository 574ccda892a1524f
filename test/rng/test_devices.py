"""Draws on several devices: sharded arrays, and shards with a policy.

`device_program.py` runs once for each number of devices, in a process of its own.
"""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec
from rng.boundaries import drop
from rng.goodness import require_independent

from torchax.errors import MutationError, RngError
from torchax.interop import jax_jit, jax_shard_map

pytestmark = pytest.mark.programs

COUNTS = (1, 2, 4, 8)
_PROGRAM = pathlib.Path(__file__).with_name("device_program.py")


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> dict[int, dict[str, np.ndarray]]:
  """Return the arrays that the program wrote, by the number of devices."""
  folder = tmp_path_factory.mktemp("devices")
  running = {}
  for count in COUNTS:
    flag = f"--xla_force_host_platform_device_count={count}"
    running[count] = subprocess.Popen(
      [sys.executable, str(_PROGRAM), str(folder / f"{count}.npz")],
      env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
      stderr=subprocess.PIPE,
      text=True,
    )
  found = {}
  for count, process in running.items():
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    found[count] = dict(np.load(folder / f"{count}.npz"))
    assert found[count].pop("devices") == count
  return found


# Sharded arrays ----------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS[1:])
def test_compiled_draws_do_not_depend_on_the_number_of_devices(arrays, count):
  compared = 0
  for name, expected in arrays[1].items():
    if name.startswith("sharded ") or name.endswith("masks"):
      assert np.array_equal(arrays[count][name], expected), name
      compared += 1
  assert compared == 17
  first, second = (arrays[count][f"sharded {n} mask"] for n in ("first", "second"))
  assert not np.array_equal(first, second)


@pytest.mark.parametrize("placed", ["replicated", "sharded"])
def test_training_has_the_same_losses_on_any_number_of_devices(arrays, placed):
  """Sums over a batch have another order, so losses are equal up to rounding."""
  name = f"sharded, parameters {placed}: losses"
  expected = arrays[1][name]
  assert (np.diff(expected) != 0).all()
  for count in COUNTS[1:]:
    np.testing.assert_allclose(arrays[count][name], expected, rtol=1e-6, atol=0)


# Shards ------------------------------------------------------------------------------

POLICIES = ("different", "same", "same along model", "same along data")
each_policy = pytest.mark.parametrize("policy", POLICIES)


def _shards(array) -> np.ndarray:
  """Reshape to (4, 2, n): the numbers of each shard along data and model."""
  rows, columns = array.shape[0] // 4, array.shape[1] // 2
  blocks = array.reshape(4, rows, 2, columns).transpose(0, 2, 1, 3)
  return blocks.reshape(4, 2, -1)


def _groups(policy: str, shards: np.ndarray) -> np.ndarray:
  """Reshape to (different, same, n): shards of one row must draw the same numbers."""
  if policy == "different":
    return shards.reshape(8, 1, -1)
  if policy == "same":
    return shards.reshape(1, 8, -1)
  return shards if policy == "same along model" else shards.swapaxes(0, 1)


@each_policy
def test_shards_draw_by_their_policy(arrays, policy):
  groups = _groups(policy, _shards(arrays[8][f"shards {policy} jit"]))
  assert (groups == groups[:, :1]).all()
  require_independent(groups[:, 0] > 0)


def test_shards_of_two_calls_are_independent(arrays):
  calls = [arrays[8][f"shards different jit{name}"] for name in ("", " again")]
  masks = [mask for call in calls for mask in _shards(call).reshape(8, -1) > 0]
  require_independent(masks)


@each_policy
def test_gradients_of_shards_have_their_masks(arrays, policy):
  name = f"shards {policy} jit"
  drawn = arrays[8][name]
  assert set(np.unique(drawn)) == {0.0, 2.0}
  assert np.array_equal(arrays[8][f"{name} gradient of x"], drawn)
  # The weight is closed over: each shard has the whole weight.
  of_weight = drawn.reshape(-1, 2, drawn.shape[1] // 2).sum((0, 1))
  assert np.array_equal(arrays[8][f"{name} gradient of weight"], of_weight)


def test_shards_draw_the_same_eager_and_compiled(arrays):
  eager = [name for name in arrays[8] if " eager" in name]
  assert len(eager) == 4
  for name in eager:
    compiled = arrays[8][name.replace("eager", "jit")]
    assert np.array_equal(arrays[8][name], compiled), name


def test_numbers_after_shards_do_not_depend_on_their_policy(arrays):
  after = [arrays[8][f"shards {policy} jit after"] for policy in POLICIES]
  assert all(np.array_equal(numbers, after[0]) for numbers in after)


def test_a_generator_draws_in_shards_by_their_policy(arrays):
  different = _shards(arrays[8]["shards generator different"]).reshape(8, -1)
  require_independent(different > 0.5)
  same = _shards(arrays[8]["shards generator same"]).reshape(8, -1)
  assert (same == same[0]).all()
  states = [arrays[8][f"shards generator {n} state"] for n in ("different", "same")]
  once = torch.Generator().manual_seed(5)
  torch.rand(1, generator=once, device="jax")
  assert all(np.array_equal(state, once.get_state().numpy()) for state in states)


# On one device -----------------------------------------------------------------------

_SPEC = PartitionSpec("data")


def _options(*names) -> dict:
  names = names or ("data",)
  mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(names)), names)
  return {"mesh": mesh, "in_specs": (_SPEC,), "out_specs": _SPEC}


@pytest.fixture
def state_stays(env):
  before = env.rng.state.state_dict()
  yield
  assert env.rng.state.state_dict() == before


@pytest.mark.parametrize(
  "randomness", ["error", "diferent", {"data": "error"}, {"data": None}], ids=repr
)
def test_another_policy_is_refused_before_anything_is_drawn(state_stays, randomness):
  with pytest.raises(ValueError, match='"different" or "same"'):
    jax_shard_map(drop, _options(), randomness=randomness)


def test_an_axis_that_the_mesh_lacks_is_refused(state_stays):
  with pytest.raises(ValueError, match=r"\['model'\].*mesh has \('data',\)"):
    jax_shard_map(drop, _options(), randomness={"model": "same"})


def test_specs_that_do_not_fit_are_refused(state_stays):
  options = {**_options(), "in_specs": (_SPEC, _SPEC)}
  with pytest.raises(ValueError, match="specs"):
    jax_shard_map(drop, options)(torch.ones(4, device="jax"))


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_a_shard_may_neither_seed_nor_change_outer_tensors(state_stays, wrap):
  noise = torch.zeros(4, device="jax")

  def seeds(x):
    torch.manual_seed(3)
    return drop(x)

  def changes(x):
    return noise.uniform_() + x

  x = torch.ones(4, device="jax")
  with pytest.raises(RngError, match="seeds"):
    wrap(jax_shard_map(seeds, _options()))(x)
  with pytest.raises(MutationError, match="jax_shard_map changes 1 tensor"):
    wrap(jax_shard_map(changes, _options()))(x)
  assert not noise.any()


def test_shards_that_draw_nothing_leave_the_stream_alone(state_stays):
  x = torch.ones(4, device="jax")
  assert torch.equal(jax_shard_map(lambda x: x * 2, _options())(x), x * 2)


def test_by_same_a_shard_draws_the_numbers_of_the_stream(env):
  x = torch.ones(64, device="jax")
  expected = [drop(x), torch.rand(3, device="jax")]
  torch.manual_seed(0)
  sharded = jax_shard_map(drop, _options(), randomness="same")
  assert torch.equal(sharded(x), expected[0])
  assert torch.equal(torch.rand(3, device="jax"), expected[1])


def test_by_different_even_one_shard_draws_numbers_of_its_own(env):
  """Otherwise a shard on one device would repeat the numbers of the stream."""
  x = torch.ones(64, device="jax")
  expected = drop(x)
  torch.manual_seed(0)
  with env.rng.record() as ledger:
    drawn = jax_shard_map(drop, _options())(x)
    again = drop(x)
  assert not torch.equal(drawn, expected) and not torch.equal(drawn, again)
  assert env.rng.state.count == 2
  ledger.require_unique()
  first, second = (draw.stream for draw in ledger)
  assert "shard" in first and not second
