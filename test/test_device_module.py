"""`torch.jax`: devices, and torch's random functions."""

import contextlib
import pickle
import threading

import jax
import opt_einsum
import pytest
import torch

import torchax
from torchax import rng
from torchax.errors import NoSuchDeviceError, SeedError
from torchax.interop import jax_jit
from torchax.rng import RngState
from torchax.rng import state as rng_state


@pytest.fixture(autouse=True)
def seed_zero():
  torch.manual_seed(0)


def _rand() -> torch.Tensor:
  return torch.rand(4, device="jax")


def _state() -> dict:
  return torchax.default_env().rng.state.state_dict()


# Devices; devices/test_placement.py has those of a process with several -----------


def test_torch_finds_the_device():
  assert torch.jax.is_available() and torch.accelerator.is_available()
  assert torch.jax.is_initialized()
  assert torch.accelerator.current_accelerator(True) == torch.device("jax")
  assert torch.jax.device_count() == torch.accelerator.device_count() == 1
  assert torch.jax.current_device() == torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("device", [0, -1, None, "jax", "jax:0", torch.device("jax")])
def test_set_device_accepts_the_only_device(device):
  torch.jax.set_device(device)
  with torch.jax.device(device):
    assert _rand().device == torch.device("jax:0")
  with torch.accelerator.device_index(0):
    assert _rand().get_device() == 0


def _draw_in(context):
  with context:
    torch.rand(2)


# By a name, what takes an index, "jax:1" or a `torch.device`.
TAKE_A_DEVICE = {
  "set_device": torch.jax.set_device,
  "device": lambda device: torch.jax.device(device).__enter__(),
  "get_rng_state": torch.jax.get_rng_state,
  "set_rng_state": lambda device: torch.jax.set_rng_state(
    torch.jax.get_rng_state(), device
  ),
  "synchronize": torch.jax.synchronize,
  "jax.Stream": torch.jax.Stream,
  "jax.Event": torch.jax.Event,
  "current_stream": torch.jax.current_stream,
  "default_stream": torch.jax.default_stream,
  "name": torch.jax.get_device_name,
  "properties": torch.jax.get_device_properties,
  "capability": torch.jax.get_device_capability,
  "memory_allocated": torch.jax.memory_allocated,
  "max_memory_allocated": torch.jax.max_memory_allocated,
  "memory_reserved": torch.jax.memory_reserved,
  "mem_get_info": torch.jax.mem_get_info,
  "memory_summary": torch.jax.memory_summary,
  "reset_peak": torch.jax.reset_peak_memory_stats,
  "fork_rng": lambda device: _draw_in(
    torch.random.fork_rng([device], device_type="jax")
  ),
  "jax": lambda device: torch.ones(2).jax(device),
  "accelerator.synchronize": torch.accelerator.synchronize,
  "accelerator.stream": torch.accelerator.current_stream,
  "accelerator.memory": torch.accelerator.memory_allocated,
  "accelerator.capability": torch.accelerator.get_device_capability,
  "accelerator.index": torch.accelerator.set_device_index,
}
# What takes a name or a `torch.device` alone.
TAKE_A_NAME = {
  "Generator": torch.Generator,
  "to": lambda device: torch.ones(2).to(device),
  "module": lambda device: torch.nn.Linear(2, 2).to(device),
  "made there": lambda device: torch.nn.Linear(2, 2, device=device),
  "factory": lambda device: torch.zeros(2, device=device),
  "like": lambda device: torch.rand_like(torch.ones(2), device=device),
  "with device": lambda device: _draw_in(torch.device(device)),
  "storage": lambda device: torch.ones(2).untyped_storage().to(device=device),
}
REFUSALS = [(name, device) for name in TAKE_A_DEVICE for device in (1, "jax:3")]
REFUSALS += [
  (name, device) for name in TAKE_A_NAME for device in ("jax:3", torch.device("jax:1"))
]


@pytest.mark.parametrize("name, device", REFUSALS)
def test_nonexistent_device_raises(name, device):
  before = _state()
  with pytest.raises(NoSuchDeviceError, match="does not exist.*only jax:0"):
    (TAKE_A_DEVICE | TAKE_A_NAME)[name](device)
  assert _state() == before and torch.jax.current_device() == 0


@pytest.mark.parametrize("use", [torch.jax.stream, torch.jax.set_stream])
def test_device_passed_as_stream_raises(use):
  with pytest.raises(TypeError, match="Expected a stream.*torch.jax.device"):
    use("jax:0")


def test_device_of_another_type_raises():
  with pytest.raises(ValueError, match='type "jax".*cuda:0'):
    torch.jax.set_device("cuda:0")


def test_synchronize_waits_and_draws_nothing():
  before = _state()
  product = torch.ones(400, 400, device="jax") @ torch.ones(400, 400, device="jax")
  torch.accelerator.synchronize()
  assert product.jax().is_ready() and torch.jax.current_stream().query()
  assert _state() == before


def test_device_properties_equal_jax_properties():
  (device,) = jax.local_devices()
  found = torch.jax.get_device_properties("jax:0")
  assert found.name == torch.jax.get_device_name() == device.device_kind
  assert found.platform == device.platform and found.total_memory > 0
  assert torch.jax.get_device_capability() == (found.major, found.minor)
  assert torch.jax.is_bf16_supported()
  assert torch.float32 in torch.accelerator.get_device_capability()["supported_dtypes"]


# Seeds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "seed",
  [torch.manual_seed, torch.random.manual_seed, torch.jax.manual_seed]
  + [torch.jax.manual_seed_all],
  ids=["torch", "torch.random", "torch.jax", "torch.jax all"],
)
@pytest.mark.parametrize("number", [0, 17, -1, 2**40, 2**64 - 1])
def test_all_seed_functions_give_the_same_stream(seed, number):
  seed(number)
  assert _state() == RngState.from_seed(number).state_dict()


def test_seeding_jax_keeps_the_cpu_generator():
  before = torch.get_rng_state()
  torch.jax.manual_seed(5)
  assert torch.equal(torch.get_rng_state(), before)


def test_drawing_on_jax_keeps_the_cpu_generator():
  before = torch.get_rng_state()
  _rand()
  jax_jit(_rand)()
  assert torch.equal(torch.get_rng_state(), before)


def test_drawing_on_the_cpu_keeps_the_jax_stream():
  before = _state()
  torch.rand(4)
  assert _state() == before


def test_initial_seed_is_the_last_seed():
  torch.manual_seed(11)
  _rand()
  assert torch.jax.initial_seed() == torch.initial_seed() == 11
  torch.jax.manual_seed(12)
  assert torch.jax.initial_seed() == 12


@pytest.mark.parametrize("seed", [torch.jax.seed, torch.jax.seed_all])
def test_seed_returns_a_new_seed_each_time(seed):
  numbers = [seed(), seed()]
  assert numbers[0] != numbers[1]
  first = _rand()
  torch.manual_seed(numbers[1])
  assert torch.equal(_rand(), first)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seed_out_of_range_raises_and_keeps_the_stream(seed):
  before = _state()
  with pytest.raises(ValueError):
    torch.jax.manual_seed(seed)
  assert _state() == before


@pytest.mark.parametrize("seed", [1.5, "1", None])
def test_seed_of_wrong_type_raises_and_keeps_the_stream(seed):
  before = _state()
  with pytest.raises(SeedError):
    torch.jax.manual_seed(seed)
  assert _state() == before and rng.initial_seed() == 0


# States -----------------------------------------------------------------------------


def test_set_rng_state_replays_draws():
  _rand()
  state = torch.jax.get_rng_state()
  expected = [_rand(), _rand()]
  torch.jax.set_rng_state(state)
  assert all(map(torch.equal, [_rand(), _rand()], expected))


def _kind(state) -> tuple:
  return state.dtype, state.device.type, state.dim()


def test_a_state_is_a_uint8_tensor_on_the_cpu():
  assert _kind(torch.jax.get_rng_state()) == (torch.uint8, "cpu", 1)
  _rand()
  state = torch.jax.get_rng_state()
  assert _kind(state) == (torch.uint8, "cpu", 1)
  assert RngState.from_tensor(state).state_dict() == _state()


@pytest.mark.parametrize("in_scope", [False, True])
def test_state_before_first_draw_replays_all_draws(in_scope):
  state = torch.jax.get_rng_state()
  expected = [_rand(), _rand()]
  torch.manual_seed(7)
  with torchax.rng_scope(3) if in_scope else contextlib.nullcontext():
    torch.jax.set_rng_state(state)
    assert all(map(torch.equal, [_rand(), _rand()], expected))
    torch.jax.set_rng_state(state)
    assert torch.equal(torch.jax.get_rng_state()[:4], state[:4])
    assert torch.equal(_rand(), expected[0])


def test_state_before_first_draw_in_thread_is_thread_local():
  drawn = []

  def work():
    state = torch.jax.get_rng_state()
    drawn.append(_rand().tolist())
    torch.manual_seed(9)
    torch.jax.set_rng_state(state)
    drawn.append(_rand().tolist())

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert drawn[0] == drawn[1]
  # The thread that has seeded is the first one; this is the second that draws.
  key = rng_state.thread_key(RngState.from_seed(9).key, 1)
  assert _state() == RngState(key).state_dict()


@pytest.mark.parametrize("length", [1, 14, 20, 30, 39, 41])
def test_damaged_state_from_before_first_draw_raises(length):
  state = torch.jax.get_rng_state()
  damaged = torch.cat([state, state])[:length]
  _rand()
  before = _state()
  with pytest.raises(ValueError):
    torch.jax.set_rng_state(damaged)
  assert _state() == before


def test_snapshot_does_not_change_with_later_draws():
  state = torch.jax.get_rng_state()
  copy = state.clone()
  _rand()
  assert torch.equal(state, copy)


def test_get_rng_state_does_not_advance_the_stream():
  expected = _rand()
  torch.manual_seed(0)
  torch.jax.get_rng_state()
  torch.jax.get_rng_state_all()
  assert torch.equal(_rand(), expected)


def test_all_devices_share_one_state():
  _rand()
  states = torch.jax.get_rng_state_all()
  expected = _rand()
  assert len(states) == 1
  torch.jax.set_rng_state_all(states)
  assert torch.equal(_rand(), expected)


def test_set_rng_state_all_with_wrong_count_raises():
  before = _state()
  for states in ([], [torch.jax.get_rng_state()] * 2):
    with pytest.raises(ValueError, match="each of 1 devices"):
      torch.jax.set_rng_state_all(states)
  assert _state() == before


def _damaged() -> dict:
  good = torch.jax.get_rng_state()
  return {
    "empty": (good[:0], ValueError),
    "cut": (good[:-1], ValueError),
    "longer": (torch.cat([good, good]), ValueError),
    "the CPU's": (torch.get_rng_state(), ValueError),
    "zeros": (torch.zeros_like(good), ValueError),
    "another dtype": (good.to(torch.int8), SeedError),
    "floats": (good.float(), SeedError),
    "no tensor": (bytes(good.numpy()), SeedError),
    "none": (None, SeedError),
  }


@pytest.mark.parametrize("kind", _damaged())
def test_damaged_state_raises_and_keeps_the_old_one(kind):
  _rand()
  before = _state()
  value, error = _damaged()[kind]
  with pytest.raises(error):
    torch.jax.set_rng_state(value)
  assert _state() == before


def test_state_may_be_a_jax_tensor():
  state = torch.jax.get_rng_state()
  expected = _rand()
  torch.jax.set_rng_state(state.to("jax"))
  assert torch.equal(_rand(), expected)


def test_state_belongs_to_the_current_scope():
  before = _state()
  with torchax.rng_scope(5):
    state = torch.jax.get_rng_state()
    first = _rand()
    torch.jax.set_rng_state(state)
    assert torch.equal(_rand(), first)
  assert _state() == before


# fork_rng ---------------------------------------------------------------------------


def test_fork_rng_restores_the_stream_after_seeding_inside():
  expected = _rand()
  torch.manual_seed(0)
  with torch.random.fork_rng(device_type="jax"):
    torch.manual_seed(8)
    inside = _rand()
  assert torch.equal(_rand(), expected)
  torch.manual_seed(8)
  assert torch.equal(_rand(), inside)


def test_fork_rng_without_seed_repeats_draws_after_it():
  with torch.random.fork_rng(device_type="jax"):
    inside = _rand()
  assert torch.equal(_rand(), inside)


def test_fork_rng_restores_after_an_exception():
  before = _state()
  with pytest.raises(KeyError), torch.random.fork_rng(device_type="jax"):
    _rand()
    raise KeyError
  assert _state() == before


def test_fork_rng_nests():
  draws = [_rand(), _rand()]
  torch.manual_seed(0)
  with torch.random.fork_rng(device_type="jax"):
    assert torch.equal(_rand(), draws[0])
    with torch.random.fork_rng(device_type="jax"):
      torch.manual_seed(3)
      _rand()
    assert torch.equal(_rand(), draws[1])
  assert torch.equal(_rand(), draws[0])


def test_fork_rng_covers_compiled_functions():
  compiled = jax_jit(_rand)
  with torch.random.fork_rng(device_type="jax"):
    inside = compiled()
  assert torch.equal(compiled(), inside)


def test_fork_rng_of_listed_devices_and_disabled():
  with torch.random.fork_rng(devices=[0], device_type="jax"):
    first = _rand()
  assert torch.equal(_rand(), first)
  with torch.random.fork_rng(enabled=False, device_type="jax"):
    second = _rand()
  assert not torch.equal(_rand(), second)


def test_fork_rng_applies_to_one_thread():
  before = _state()

  def work():
    with torch.random.fork_rng(device_type="jax"):
      _rand()

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert _state() == before


def test_fork_rng_of_other_devices_works_like_in_torch():
  expected = torch.rand(4)
  torch.manual_seed(0)
  with torch.random.fork_rng():
    torch.manual_seed(3)
    torch.rand(4)
  assert torch.equal(torch.rand(4), expected)


def test_classes_of_tensors_have_a_name_of_torch():
  x = torch.ones(3, device="jax")
  assert type(x) is torch.jax.Tensor is torchax.tensor.Tensor
  assert type(x[1:]) is torch.jax.View is torchax.view.View
  assert f"{type(x).__module__}.{type(x).__name__}" == "torch.jax.Tensor"
  assert pickle.loads(pickle.dumps(type(x))) is type(x)


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk,ki->i", "ij,jk,kl->"])
def test_libraries_find_functions_of_torch_by_that_name(subscripts):
  found = []
  for device in ("cpu", "jax"):
    leaf = torch.linspace(-1, 1, 9).view(3, 3).to(device).requires_grad_()
    operands = [leaf, leaf.T, leaf * 2][: subscripts.count(",") + 1]
    result = opt_einsum.contract(subscripts, *operands)
    result.sum().backward()
    assert result.device.type == device
    found.append([result.detach().cpu(), leaf.grad.cpu()])
  torch.testing.assert_close(*found)
