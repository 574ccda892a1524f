"""Random states as tensors: `torch.jax.get_rng_state()` and `set_rng_state`.

What torch saves and brings back around a block (`fork_rng`, a checkpoint) are the
states of all environments, as those of all devices elsewhere: that of the one which is
on, and behind it the others', each with the number of its environment.
"""

import struct
import weakref

import torch

from torchax.rng import serialization, sites
from torchax.rng.root_seed import RootSeed
from torchax.rng.scope import current, has_scope, owners_here, streams_on
from torchax.rng.state import RngState
from torchax.rng.streams import Streams

# A traced state has no value; what stands for it is good in its compiled function only.
_TICKET = b"torchax-mark-1\0"
_TICKET_BODY = struct.Struct("<Q")


def snapshot() -> torch.Tensor:
  """The states of all environments as a uint8 tensor of shape (n,), for `restore`.

  A root stream that was not drawn from stays unopened: no JAX backend is started.
  Inside a compiled function the tensor is a mark that `restore` knows there alone.
  """
  first = streams_on()
  others = [owner for owner in owners_here() if owner is not first]
  if not others:
    return _snapshot(first)
  # Modules are remembered for the tensor that the user has.
  states = [(owner.number, _bytes(_snapshot(owner))) for owner in (first, *others)]
  payload = bytearray(serialization.joined(states))
  tensor = torch.frombuffer(payload, dtype=torch.uint8)
  if current(first).by_site and not current(first).is_traced:
    _saved_in.keep(tensor, sites.here())
  return tensor


def _snapshot(owner: Streams) -> torch.Tensor:
  """The state of the current stream of one environment."""
  if is_unopened(owner) and not owner.by_site:
    return owner.root_seed().to_tensor()
  stream = current(owner)
  if stream.is_traced:
    ticket = _TICKET + _TICKET_BODY.pack(stream.mark())
    return torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
  tensor = stream.state.to_tensor()
  if stream.by_site:
    _saved_in.keep(tensor, sites.here())
  return tensor


def _bytes(tensor: torch.Tensor) -> bytes:
  return bytes(tensor.tolist())


def is_unopened(owner: Streams) -> bool:
  """True where the current stream is a root that is only a seed so far."""
  return owner.is_unopened() and not has_scope(owner)


class _SavedIn:
  """Which modules ran when a state was saved, as long as its tensor is there."""

  def __init__(self):
    self._modules: dict[int, tuple] = {}

  def keep(self, state: torch.Tensor, modules: tuple) -> None:
    """Remembers the modules for a state; None among them is a boundary."""
    place = id(state)
    reference = weakref.ref(state, lambda _: self._modules.pop(place, None))
    references = [
      module if module is None else weakref.ref(module) for module in modules
    ]
    self._modules[place] = (reference, references)

  def find(self, state: torch.Tensor) -> tuple | None:
    """The modules; None if they are not known or not there any more."""
    reference, references = self._modules.get(id(state), (None, ()))
    if reference is None or reference() is not state:
      return None
    modules = [None if module is None else module() for module in references]
    return tuple(modules) if modules.count(None) == references.count(None) else None


_saved_in = _SavedIn()


def restore(tensor: torch.Tensor) -> None:
  """Makes the current streams go on where `snapshot` was called.

  Raises:
    SeedError: not a uint8 tensor.
    ValueError: not a state, a damaged one, or one from inside another compiled
      function. The streams stay as they were.
  """
  parts = _parts(tensor)
  first = streams_on()
  restored = [(first, _read(parts[0][1], first))]
  by_number = {owner.number: owner for owner in owners_here() if owner is not first}
  for number, part in parts[1:]:
    owner = by_number.get(number)
    # One that has not moved stays; a compiled function carries the one that is on.
    if owner is not None and _bytes(_snapshot(owner)) != _bytes(part):
      restored.append((owner, _read(part, owner)))
  for owner, value in restored:
    _restore(owner, value, tensor)


def _parts(tensor: torch.Tensor) -> list[tuple[int | None, torch.Tensor]]:
  """The states of the environments, with their numbers; the first is the current one's.

  Raises:
    ValueError: the tensor is truncated.
  """
  if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
    return [(None, tensor)]
  states = serialization.parted(_bytes(tensor))
  if len(states) == 1 and states[0][0] is None:
    return [(None, tensor)]
  return [
    (number, torch.frombuffer(bytearray(state), dtype=torch.uint8))
    for number, state in states
  ]


def _read(tensor: torch.Tensor, owner: Streams) -> RootSeed | RngState | int:
  """What a tensor stands for: a root, a state, or the number of a mark.

  Raises:
    SeedError, ValueError: nothing that the current stream could go on from.
  """
  root_seed = RootSeed.from_tensor(tensor)
  if root_seed is not None:
    _require_impl(root_seed.impl, owner)
    return root_seed
  payload = b""
  if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.uint8:
    payload = _bytes(tensor)
  if payload.startswith(_TICKET):
    return _TICKET_BODY.unpack(payload[len(_TICKET) :])[0]
  state = RngState.from_tensor(tensor)
  _require_impl(state.impl, owner)
  return state


def _restore(owner: Streams, value, tensor: torch.Tensor) -> None:
  if isinstance(value, int):
    current(owner).return_to(value)
  elif isinstance(value, RngState):
    stream = current(owner)
    stream.reseed(value)
    if value.sites is not None:
      stream.return_below(_saved_in.find(tensor))
  elif has_scope(owner):
    current(owner).reseed(owner.addressed(value.state()))
  else:
    owner.restore(value)


def _require_impl(impl: str, owner: Streams) -> None:
  """Raises ValueError unless it is the PRNG implementation of the current stream."""
  ours = owner.impl if is_unopened(owner) else current(owner).state.impl
  if impl != ours:
    raise ValueError(
      f"The state was saved from a stream of {impl}, but the current one uses {ours}. "
      f"Make the environment with `Configuration(prng_impl={impl!r})`, or draw inside "
      "`with env.rng_scope(RngState.from_tensor(state)):`."
    )
