"""`torch.jax`: the device module that torch asks about devices and random states.

`torch.manual_seed` calls `manual_seed_all`; `torch.random.fork_rng` and
`torch.utils.checkpoint` read and restore the state of the current stream.
"""

import contextlib
import os
from collections.abc import Iterator

import jax
import torch

from torchax import _jax_compat, _torch_compat, amp, grad_mode, rng

# torch.utils.checkpoint saves the random state of initialised devices only.
_initialized = True


def is_available() -> bool:
  """False: torch would look for streams and pinned memory, which JAX has not.

  `DataLoader(pin_memory=True)` and Dynamo ask this of every registered device. Jax
  tensors can be made all the same: `device_count()` is 1.
  """
  return False


def is_initialized() -> bool:
  """True; JAX sets up its devices when the first array is made."""
  return True


def device_count() -> int:
  """1: arrays may be sharded over many JAX devices, torch sees one."""
  return 1


def current_device() -> int:
  """0, the only one."""
  return 0


def set_device(device) -> None:
  """Does nothing for the only device.

  Raises:
    ValueError: another index than 0.
  """
  _check_device(device)


@contextlib.contextmanager
def device(index) -> Iterator[None]:
  """The context in which torch switches devices; there is one."""
  _check_device(index)
  yield


def _check_device(index) -> None:
  if isinstance(index, torch.device):
    index = index.index
  elif isinstance(index, str):
    index = torch.device(index).index
  # torch passes -1 for wrappers, which have no index.
  if index not in (None, -1, 0):
    raise ValueError(f"torchax has one device, jax:0, but was asked for index {index}.")


class _Fork:
  """Whether this process was forked from one that had started JAX."""

  is_bad = False
  has_started = False

  @classmethod
  def before(cls) -> None:
    # Asked here: in the child, JAX's lock may be held by a thread that is not there.
    cls.has_started = _jax_compat.has_started()

  @classmethod
  def in_child(cls) -> None:
    cls.is_bad = cls.is_bad or cls.has_started


os.register_at_fork(before=_Fork.before, after_in_child=_Fork.in_child)


def _is_in_bad_fork() -> bool:
  """True where JAX would hang; torch then seeds the CPU alone, as workers need."""
  return _Fork.is_bad


def get_amp_supported_dtype() -> list[torch.dtype]:
  """The dtypes that automatic mixed precision may use; `torch.autocast` asks.

  Raises:
    PrivateApiError: this version of torch would cast nothing.
  """
  _torch_compat.require_autocast()
  return list(amp.LOWER_PRECISION)


def synchronize(device=None) -> None:
  """Waits until all JAX computations that were started have finished."""
  _check_device(device)
  (jax.device_put(0.0) + 0).block_until_ready()


def manual_seed(seed: int) -> None:
  """Seeds the random streams of all threads; see `torchax.rng.manual_seed`."""
  rng.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
  """Seeds the random streams of all threads; `torch.manual_seed` calls it."""
  rng.manual_seed(seed)


def initial_seed() -> int:
  """The seed that the random streams were started with."""
  return rng.initial_seed()


def seed() -> int:
  """Seeds the random streams with a number from the operating system; returns it."""
  number = torch.Generator().seed()
  rng.manual_seed(number)
  return number


def seed_all() -> int:
  """The same as `seed`."""
  return seed()


def get_rng_state(device: int | str | torch.device = "jax") -> torch.Tensor:
  """Snapshot of this thread's current stream, for `set_rng_state`.

  Returns:
    A CPU uint8 tensor of shape (n,): impl name, key data and number of draws; or the
    seed, as long as nothing was drawn.

  Inside a compiled function, where the state has no value yet, the tensor is a mark
  that `set_rng_state` knows in that function alone.
  """
  _check_device(device)
  grad_mode.Recomputation.expected = True
  return rng.snapshot()


def get_rng_state_all() -> list[torch.Tensor]:
  """`get_rng_state` of every device: a list of one."""
  return [get_rng_state()]


def set_rng_state(
  new_state: torch.Tensor, device: int | str | torch.device = "jax"
) -> None:
  """Makes this thread's current stream go on where `get_rng_state` was called.

  Raises:
    SeedError: not a uint8 tensor.
    ValueError: not a state, or a damaged one. The stream stays as it was.
  """
  _check_device(device)
  rng.restore(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
  """`set_rng_state` of every device: a list of one.

  Raises:
    ValueError: another number of states.
  """
  if len(new_states) != 1:
    raise ValueError(f"torchax has one device, but got {len(new_states)} states.")
  set_rng_state(new_states[0])
