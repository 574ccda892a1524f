"""`RngState`: known bits, children that never collide, and states that round-trip.

The known answers (T1) change only with a line in the changelog.
"""

import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torchax
from torchax.errors import SeedError, TracedStateError
from torchax.rng import RngState, as_key, as_state, is_typed_key
from torchax.rng import state as rng_state

seeds = st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, rng_state.REKEY_AT)


def _words(key) -> tuple[int, ...]:
  return tuple(np.asarray(jax.random.key_data(key)).tolist())


# T1: known answers ------------------------------------------------------------------

# (seed, impl, count) -> the key data of that draw.
GOLDEN_KEYS = {
  (0, "threefry2x32", 0): (1797259609, 2579123966),
  (0, "threefry2x32", 1): (928981903, 3453687069),
  (0, "threefry2x32", 1073741823): (2549668167, 899670534),
  (1, "threefry2x32", 0): (507451445, 1853169794),
  (1, "threefry2x32", 1): (1948878966, 4237131848),
  (1, "threefry2x32", 1073741823): (1772264901, 4052206606),
  (-1, "threefry2x32", 0): (2372119873, 3879177707),
  (-1, "threefry2x32", 1): (423671527, 574772556),
  (-1, "threefry2x32", 1073741823): (1922690825, 3558494719),
  (1099511627781, "threefry2x32", 0): (747481626, 3240764180),
  (1099511627781, "threefry2x32", 1): (1419846134, 2560371556),
  (1099511627781, "threefry2x32", 1073741823): (3706945411, 1641302609),
  (0, "rbg", 0): (1797259609, 2579123966, 1797259609, 2579123966),
  (0, "rbg", 3): (2467461003, 3840466878, 2467461003, 3840466878),
  (0, "unsafe_rbg", 0): (2531852732, 718943162, 4068121405, 453177554),
  (0, "unsafe_rbg", 3): (56543296, 1826787333, 2453521982, 2503663989),
}

# (seed, impl, count) -> the first two 32-bit words of the draw.
GOLDEN_BITS = {
  (0, "threefry2x32", 0): (3617712097, 783310428),
  (0, "threefry2x32", 1): (31327077, 89727312),
  (0, "threefry2x32", 1073741823): (2928897969, 2463534185),
  (1, "threefry2x32", 0): (3017709682, 1008607346),
  (1, "threefry2x32", 1): (1733648124, 2357486511),
  (1, "threefry2x32", 1073741823): (2994917366, 4193664784),
  (-1, "threefry2x32", 0): (2254759911, 4072803985),
  (-1, "threefry2x32", 1): (2076225852, 1233768700),
  (-1, "threefry2x32", 1073741823): (2466117757, 2634565738),
  (1099511627781, "threefry2x32", 0): (4047788455, 1916751420),
  (1099511627781, "threefry2x32", 1): (787505950, 4193488166),
  (1099511627781, "threefry2x32", 1073741823): (416894936, 408419750),
}


def _golden_id(row) -> str:
  return "-".join(map(str, row))


@pytest.mark.parametrize("row", GOLDEN_KEYS, ids=_golden_id)
def test_a_draw_has_the_known_key(row):
  seed, impl, count = row
  key = RngState.from_seed(seed, impl).advance(count).draw_key()
  assert _words(key) == GOLDEN_KEYS[row]


@pytest.mark.parametrize("row", GOLDEN_BITS, ids=_golden_id)
def test_a_draw_has_the_known_bits(row):
  seed, impl, count = row
  key = RngState.from_seed(seed, impl).advance(count).draw_key()
  assert tuple(jax.random.bits(key, (2,), jnp.uint32).tolist()) == GOLDEN_BITS[row]


GOLDEN_CHILDREN = {
  "thread 1": (2472010705, 292398502),
  "thread 2": (958774230, 2427526498),
  "fork 'data'": (1939297978, 4092096256),
  "rebased at 3": (2378823461, 2056917532),
  "rekeyed": (2102568876, 3855215076),
  "generator words 7, 8": (3660856790, 3420992349),
}


@pytest.mark.parametrize("name", GOLDEN_CHILDREN)
def test_a_child_of_seed_0_has_the_known_key(name):
  key = rng_state.key_from_seed(0)
  child = {
    "thread 1": lambda: rng_state.thread_key(key, 1),
    "thread 2": lambda: rng_state.thread_key(key, 2),
    "fork 'data'": lambda: rng_state.named_key(key, "data"),
    "rebased at 3": lambda: rng_state.rebase_key(key, 3),
    "rekeyed": lambda: rng_state.rekey(key),
    "generator words 7, 8": lambda: rng_state.key_from_words(
      np.array([7, 8], np.uint32), rng_state.DEFAULT_IMPL
    ),
  }[name]()
  assert _words(child) == GOLDEN_CHILDREN[name]


# Draws of users at seed 0, one after another in one stream.
GOLDEN_DRAWS = {
  "rand": [0.8423141837120056, 0.1823786497116089, 0.227178156375885],
  "dropout": [2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0],
  "randint": [902, 912, 341, 220],
  "randperm": [2, 1, 4, 3, 5, 0],
  "bernoulli_": [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
  "random_": [1584972724, 1342952490],
  "bfloat16": [0.83984375, 0.4296875, 0.4453125],
}


def _golden_draws() -> dict[str, list]:
  torch.manual_seed(0)
  ones = torch.ones(8, device="jax")
  return {
    "rand": torch.rand(3, device="jax").tolist(),
    "dropout": torch.nn.functional.dropout(ones, 0.5).tolist(),
    "randint": torch.randint(0, 1000, (4,), device="jax").tolist(),
    "randperm": torch.randperm(6, device="jax").tolist(),
    "bernoulli_": ones.clone().bernoulli_(0.25).tolist(),
    "random_": torch.zeros(2, dtype=torch.int32, device="jax").random_().tolist(),
    "bfloat16": torch.rand(3, device="jax", dtype=torch.bfloat16).tolist(),
  }


def test_seed_0_draws_the_known_numbers():
  assert _golden_draws() == GOLDEN_DRAWS


def test_a_generator_of_seed_0_draws_the_known_numbers():
  generator = torch.Generator().manual_seed(0)
  drawn = [torch.randint(0, 1000, (3,), device="jax", generator=generator).tolist()]
  drawn += [torch.randint(0, 1000, (3,), device="jax", generator=generator).tolist()]
  assert drawn == [[656, 805, 572], [269, 762, 487]]


# Seeds ------------------------------------------------------------------------------


def test_the_main_thread_starts_at_the_state_of_the_seed(env):
  torch.manual_seed(1234)
  assert env.rng.state.state_dict() == RngState.from_seed(1234).state_dict()


def test_a_seed_of_32_bits_is_the_key_that_jax_users_know():
  assert _words(rng_state.key_from_seed(77)) == _words(jax.random.key(77))


@pytest.mark.parametrize(
  "negative, wrapped", [(-1, 2**64 - 1), (-5, 2**64 - 5), (-(2**63), 2**63)]
)
def test_a_negative_seed_wraps_as_torchs(negative, wrapped):
  assert torch.Generator().manual_seed(negative).initial_seed() == wrapped
  state = RngState.from_seed(negative)
  assert state.state_dict() == RngState.from_seed(wrapped).state_dict()


def test_the_upper_half_of_a_seed_counts():
  seeds_apart = [5, 5 + 2**32, 5 + 2**33, 5 + 2**63, -5, 2**32 - 5]
  assert len({_words(rng_state.key_from_seed(seed)) for seed in seeds_apart}) == 6


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_a_seed_beyond_64_bits_is_refused(seed):
  with pytest.raises(ValueError, match=r"2\*\*64"):
    RngState.from_seed(seed)


@pytest.mark.parametrize("seed", [1.0, True, "1", None, np.float32(1), np.bool_(True)])
def test_a_seed_of_another_type_is_refused(seed):
  with pytest.raises(SeedError, match="[Ss]eed"):
    as_key(seed)


def test_a_traced_seed_gives_the_key_of_the_same_integer():
  traced = jax.jit(lambda seed: as_key(seed))
  for seed in (0, 5, -1, 2**31 - 1, -(2**31)):
    assert _words(traced(jnp.int32(seed))) == _words(as_key(seed))


@pytest.mark.parametrize(
  "value",
  [
    3,
    np.int64(3),
    np.array(3),
    torch.tensor(3),
    torch.tensor(3, dtype=torch.uint8),
    np.array([0, 3], np.uint32),
    torch.tensor([0, 3], dtype=torch.uint32),
  ],
  ids=repr,
)
def test_every_way_to_write_a_seed_gives_one_key(value):
  key = as_key(value)
  assert is_typed_key(key) and _words(key) == (0, 3)


def test_raw_key_data_is_stored_as_a_typed_key():
  key = as_key(jnp.array([1, 2], jnp.uint32))
  assert is_typed_key(key) and _words(key) == (1, 2)


@pytest.mark.parametrize(
  "value",
  [
    np.zeros(3, np.uint32),
    np.zeros((2, 2), np.uint32),
    np.zeros(2, np.int32),
    torch.zeros(()),
    torch.tensor([1, 2]),
  ],
  ids=repr,
)
def test_arrays_that_are_no_key_are_refused(value):
  with pytest.raises(SeedError, match="jax.random.key"):
    as_key(value)


def test_batch_of_keys_raises_with_the_vmap_remedy():
  with pytest.raises(SeedError, match="one scalar key.*jax.vmap"):
    as_key(jax.random.split(jax.random.key(0), 3))


def test_a_state_passes_through_as_state_unchanged():
  state = RngState.from_seed(3).advance(2)
  assert as_state(state) is state
  assert as_state(jax.random.key(3)).count == 0


@pytest.mark.parametrize(
  "impl, why", [("philox2x32", "32-bit keys collide"), ("mersenne", "no PRNG")]
)
def test_an_implementation_that_streams_cannot_use_is_refused(impl, why):
  with pytest.raises(ValueError, match=f"{why}.*threefry2x32"):
    RngState.from_seed(0, impl)


@pytest.mark.parametrize("impl", ["philox2x32", "mersenne", 3])
def test_a_refused_implementation_leaves_the_default_in_force(env, impl):
  before = env.rng.state.state_dict()
  with pytest.raises((ValueError, TypeError)):
    torchax.rng.manual_seed(1, impl)
  assert torchax.rng.default_impl() == "threefry2x32"
  assert env.rng.state.state_dict() == before


# Children ---------------------------------------------------------------------------


def test_keys_of_draws_and_of_children_never_meet():
  fold = jax.jit(jax.vmap(rng_state.fold_in, (None, 0)))
  rows = []
  for seed in (0, 1, -1):
    key = rng_state.key_from_seed(seed)
    first_draws = np.arange(20_000, dtype=np.uint32)
    last_draws = rng_state.REKEY_AT - 1 - np.arange(1_000, dtype=np.uint32)
    children = [rng_state.thread_key(key, ordinal) for ordinal in range(1, 30)]
    children += [rng_state.named_key(key, f"stream {i}") for i in range(30)]
    children += [rng_state.rebase_key(key, count) for count in range(30)]
    children += [rng_state.rekey(key), rng_state.rekey(rng_state.rekey(key))]
    for parent in (key, children[0], children[-1]):  # and grandchildren
      rows.append(fold(parent, first_draws))
      rows.append(fold(parent, last_draws))
    rows.append(jnp.stack([key, *children]))
  words = np.concatenate([np.asarray(jax.random.key_data(row)) for row in rows])
  assert len(np.unique(words, axis=0)) == len(words)


def test_the_main_thread_has_the_seeds_own_key():
  key = rng_state.key_from_seed(3)
  assert rng_state.thread_key(key, 0) is key


def test_a_fork_depends_on_the_name_and_not_on_the_count():
  state = RngState.from_seed(0)
  fork = state.fork("data")
  assert fork.state_dict() == state.advance(7).fork("data").state_dict()
  assert fork.state_dict() != state.fork("model").state_dict()


# Round trips ------------------------------------------------------------------------


@hypothesis.given(seed=seeds, count=counts)
@hypothesis.settings(max_examples=50)
def test_a_state_survives_every_serialisation(seed, count):
  state = RngState.from_seed(seed).advance(count)
  data = state.state_dict()
  assert data["count"] == count
  through_json = json.loads(json.dumps(data))
  assert RngState.from_state_dict(through_json).state_dict() == data
  assert RngState.from_tensor(state.to_tensor()).state_dict() == data
  leaves, treedef = jax.tree.flatten(state)
  assert jax.tree.unflatten(treedef, leaves).state_dict() == data


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_state_keeps_its_implementation(impl):
  state = RngState.from_seed(9, impl).advance(4)
  restored = RngState.from_tensor(state.to_tensor())
  assert restored.impl == impl
  assert _words(restored.draw_key()) == _words(state.draw_key())


_CONTINUE = """
import json, sys
import torch, torchax

tensor, data, out = sys.argv[1:]
torch.jax.set_rng_state(torch.load(tensor))
draws = [torch.randn(5, device="jax").numpy().tobytes().hex() for _ in range(3)]
with torchax.rng_scope(torchax.RngState.from_state_dict(json.load(open(data)))):
  again = [torch.randn(5, device="jax").numpy().tobytes().hex() for _ in range(3)]
with open(out, "w") as file:
  json.dump([draws, again], file)
"""


def test_a_stream_goes_on_in_a_new_process_as_if_uninterrupted(tmp_path, env):
  paths = [tmp_path / name for name in ("state.pt", "state.json", "draws.json")]
  torch.manual_seed(2**40 + 1)
  for _ in range(4):
    torch.rand(2, device="jax")
  torch.save(torch.jax.get_rng_state(), paths[0])
  paths[1].write_text(json.dumps(env.rng.state.state_dict()))
  expected = [torch.randn(5, device="jax").numpy().tobytes().hex() for _ in range(3)]
  subprocess.run([sys.executable, "-c", _CONTINUE, *map(str, paths)], check=True)
  assert json.loads(paths[2].read_text()) == [expected, expected]


GOOD = RngState.from_seed(1).advance(2)


@pytest.mark.parametrize("length", [0, 3, 14, 23, 30, 43])
def test_a_truncated_state_is_refused(length):
  with pytest.raises(ValueError, match="truncated|no random state"):
    RngState.from_tensor(GOOD.to_tensor()[:length])


def test_a_state_with_more_bytes_is_refused():
  tensor = GOOD.to_tensor()
  with pytest.raises(ValueError, match=f"expected {len(tensor)} bytes"):
    RngState.from_tensor(torch.cat([tensor, tensor[:1]]))


def test_a_foreign_state_is_refused():
  with pytest.raises(ValueError, match=r"torch\.jax\.get_rng_state"):
    RngState.from_tensor(torch.get_rng_state())


def _replaced(old: bytes, new: bytes) -> torch.Tensor:
  payload = bytes(GOOD.to_tensor().numpy()).replace(old, new)
  return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@pytest.mark.parametrize(
  "name", [b"threefry9x99", b"philox2x32\0\0", b"\xff" * 12], ids=repr
)
def test_a_state_of_an_unusable_implementation_is_refused(name):
  with pytest.raises(ValueError):
    RngState.from_tensor(_replaced(b"threefry2x32", name))


def test_a_state_of_another_implementations_size_is_refused():
  state = RngState.from_seed(1, "rbg").to_tensor()
  payload = bytearray(bytes(state.numpy()).replace(b"rbg", b"unsafe_rbg"))
  assert len(payload) != len(state)
  with pytest.raises(ValueError):
    RngState.from_tensor(torch.frombuffer(payload, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.int64])
def test_a_state_of_another_dtype_is_refused(dtype):
  with pytest.raises(SeedError, match="uint8"):
    RngState.from_tensor(GOOD.to_tensor().to(dtype))


@pytest.mark.parametrize("value", ["state", None, b"torchax-rng-1\0", [1, 2]])
def test_values_other_than_tensors_are_no_state(value):
  with pytest.raises(SeedError, match="uint8 tensor"):
    RngState.from_tensor(value)


@pytest.mark.parametrize("count", [-1, rng_state.REKEY_AT + 1, 2**31, 2**64, 0.5, "1"])
def test_a_count_out_of_range_is_refused(count):
  with pytest.raises(ValueError, match="count"):
    RngState.from_state_dict({**GOOD.state_dict(), "count": count})


@pytest.mark.parametrize(
  "data",
  [
    {},
    None,
    "threefry2x32",
    {"impl": "threefry2x32", "key_data": [0, 1]},
    {**GOOD.state_dict(), "extra": 1},
    {**GOOD.state_dict(), "key_data": [0, 1, 2]},
    {**GOOD.state_dict(), "key_data": []},
    {**GOOD.state_dict(), "impl": "philox2x32"},
  ],
  ids=str,
)
def test_a_malformed_state_dict_is_refused(data):
  with pytest.raises(ValueError):
    RngState.from_state_dict(data)


@pytest.mark.parametrize("words", [[0, -1], [0, 2**32], [0.5, 1], ["a", "b"]], ids=str)
def test_key_data_that_is_no_uint32_is_refused(words):
  with pytest.raises(ValueError, match="32-bit unsigned"):
    RngState.from_state_dict({**GOOD.state_dict(), "key_data": words})


def test_a_state_that_is_traced_has_no_value_to_write_down():
  for read in (RngState.state_dict, RngState.to_tensor):
    with pytest.raises(TracedStateError, match="outside"):
      jax.jit(lambda state, read=read: read(state) and 0)(GOOD)


def test_a_traced_state_can_be_shown():
  shown = []
  jax.jit(lambda state: shown.append(repr(state)))(GOOD)
  assert shown[0].startswith("RngState(traced")


def test_a_state_is_a_value():
  state = RngState.from_seed(0)
  later = state.advance(3)
  assert (state.count, later.count) == (0, 3)
  with pytest.raises(AttributeError):
    state.count = 1


def test_a_state_is_a_pytree_of_its_key_and_its_count():
  key, count = jax.tree.leaves(GOOD)
  assert is_typed_key(key) and count == 2
  doubled = jax.jit(lambda state: state.advance(3))(GOOD)
  assert doubled.state_dict() == GOOD.advance(3).state_dict()


BY_SITE = RngState(RngState.from_seed(0).key, 5, {"a.b": 2, "": 3})


def test_a_state_with_sites_survives_every_serialisation():
  state = BY_SITE
  for copy in (
    RngState.from_state_dict(state.state_dict()),
    RngState.from_tensor(state.to_tensor()),
  ):
    assert copy.state_dict() == state.state_dict()
    assert copy.key.shape == state.key.shape


def test_a_truncated_state_with_sites_is_refused():
  tensor = BY_SITE.to_tensor()
  for length in range(len(tensor)):
    with pytest.raises(ValueError, match="truncated|no random state|JAX has no PRNG"):
      RngState.from_tensor(tensor[:length])
