"""Random states as tensors: `torch.jax.get_rng_state()` and `set_rng_state`.

For other devices torch saves and restores the states of all devices around a block
(`fork_rng`, a checkpoint). Here one tensor has the states of all environments: first
the active one, then the others with their numbers. `serialization.py` has the format.
"""

import itertools
import weakref

import torch

from torchax.rng import paths, serialization
from torchax.rng.environment_streams import RootSeed, Streams, root_state
from torchax.rng.scope import current, has_scope, owners_here, streams_on
from torchax.rng.state import RngState, bytes_of, tensor_of
from torchax.rng.stream import RngStream


def snapshot() -> torch.Tensor:
  """Return the states of all environments as a uint8 tensor (n,), for `restore`.

  A root stream without draws stays unopened, so no JAX backend is initialized. Inside a
  compiled function the tensor is a mark, which `restore` accepts only there.

  >>> state = snapshot()
  >>> x = torch.rand(3, device="jax")
  >>> restore(state)
  >>> torch.equal(torch.rand(3, device="jax"), x)
  True
  """
  first = streams_on()
  owners = [first, *[owner for owner in owners_here() if owner is not first]]
  states = [(owner.number, _encode(owner)) for owner in owners]
  payload = states[0][1] if len(states) == 1 else serialization.join(states)
  tensor = tensor_of(payload)
  # A checkpoint that restores the state recomputes inside the current modules.
  stream = None if is_unopened(first) else current(first)
  if stream is not None and stream.by_site and not stream.is_traced:
    key, modules = id(tensor), paths.here()
    reference = weakref.ref(tensor, lambda _: _modules_of.pop(key, None))
    _modules_of[key] = reference, [m if m is None else weakref.ref(m) for m in modules]
  return tensor


def _encode(owner: Streams) -> bytes:
  """Encode the current stream of one environment."""
  if is_unopened(owner) and not owner.by_site:
    return serialization.encode_seed(*owner.root_seed())
  stream = current(owner)
  if stream.is_traced:
    return serialization.encode_mark(_mark(stream))
  return serialization.encode(stream.state.state_dict())


def is_unopened(owner: Streams) -> bool:
  """Return True if the current stream is a root without draws: only a seed."""
  return owner.is_unopened() and not has_scope(owner)


# Identity of a state tensor -> weak references to it, and to the modules that ran when
# it was saved; None is a boundary.
_modules_of: dict[int, tuple] = {}


def _find_modules(state: torch.Tensor) -> tuple | None:
  """Return the modules of a state; None if unknown or no longer alive."""
  reference, references = _modules_of.get(id(state), (None, ()))
  if reference is None or reference() is not state:
    return None
  modules = [None if module is None else module() for module in references]
  return tuple(modules) if modules.count(None) == references.count(None) else None


# Marks: positions of traced streams, which have no value to save ----------------------

_marks = itertools.count()


def _mark(stream: RngStream) -> int:
  """Save the position of a stream under a new number, for `_restore_mark`."""
  stream.check("saving the random state")
  mark = next(_marks)
  position = (stream.counter.copy(), stream.draws, stream.reseeded)
  stream.marks[mark] = (position, paths.here())
  return mark


def _restore_mark(stream: RngStream, mark: int) -> None:
  """Return a stream to a mark, as if the draws since had not been made.

  Raises:
    ValueError: the mark belongs to another stream.
  """
  stream.check("restoring the random state")
  if mark not in stream.marks:
    raise ValueError(
      "This random state was saved inside a compiled function, where it has no "
      "value, and is restored outside of it. Save and restore on the same side."
    )
  (counter, stream.draws, stream.reseeded), modules = stream.marks[mark]
  stream.counter = counter.copy()
  stream.counter.replayed = paths.replay(modules)


def restore(tensor: torch.Tensor) -> None:
  """Restore the current streams to the state that `snapshot` returned.

  Args:
    tensor: CPU uint8 tensor of shape (n,).

  Raises:
    SeedError: the state is no uint8 tensor.
    ValueError: the tensor holds no state, a damaged one, or one from inside another
      compiled function. The streams are unchanged.

  >>> state, draws = snapshot(), []
  >>> for _ in range(2):
  ...   restore(state)
  ...   draws.append(torch.rand(3, device="jax"))
  >>> torch.equal(*draws)
  True
  """
  (_, state), *others = serialization.split(bytes_of(tensor))
  first = streams_on()
  restored = [(first, _read(state, first))]
  by_number: dict[int | None, Streams] = {
    owner.number: owner for owner in owners_here() if owner is not first
  }
  for number, state in others:
    owner = by_number.get(number)
    # Skip unmoved streams: a compiled function may have only the active one as operand.
    if owner is not None and _encode(owner) != state:
      restored.append((owner, _read(state, owner)))
  for owner, value in restored:
    _restore(owner, value, tensor)


def _read(state: bytes, owner: Streams) -> RootSeed | RngState | int:
  """Decode a saved state: a seed, a state, or the number of a mark.

  Raises:
    ValueError: the bytes are no state, or have another PRNG implementation.
  """
  seed = serialization.decode_seed(state)
  if seed is not None:
    _require_impl(seed[2], owner)
    return seed
  mark = serialization.decode_mark(state)
  if mark is not None:
    return mark
  decoded = RngState.from_state_dict(serialization.decode(state))
  _require_impl(decoded.impl, owner)
  return decoded


def _restore(owner: Streams, value: RootSeed | RngState | int, tensor) -> None:
  if isinstance(value, int):
    _restore_mark(current(owner), value)
  elif isinstance(value, RngState):
    stream = current(owner)
    stream.reseed(value)
    if value.sites is not None:
      stream.counter.replayed = paths.replay(_find_modules(tensor))
  elif has_scope(owner):
    current(owner).reseed(owner.with_addressing(root_state(value)))
  else:
    owner.restore(value)


def _require_impl(impl: str, owner: Streams) -> None:
  """Raise ValueError unless `impl` is the current stream's PRNG implementation."""
  ours = owner.impl if is_unopened(owner) else current(owner).state.impl
  if impl != ours:
    raise ValueError(
      f"The state was saved from a stream of {impl}, but the current one uses {ours}. "
      f"Make the environment with `Configuration(prng_impl={impl!r})`, or draw inside "
      "`with env.rng_scope(RngState.from_tensor(state)):`."
    )
