"""The random number state as a value: a typed key and a number of draws.

Draw i of a stream uses `fold_in(key, i)` with i < 2**31; the upper half of the 32-bit
space derives children (threads, forks, re-keyed streams), so that no child's key is
ever the key of a draw. Who advances a state is in `stream.py`.
"""

import dataclasses
import struct
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.errors import SeedError, TracedStateError

DEFAULT_IMPL = "threefry2x32"

# A stream re-keys itself here, far below the first child index.
REKEY_AT = 1 << 30

# Children of a key: fold_in(fold_in(key, index), identifier).
_FIRST_CHILD = 1 << 31
_THREAD, _REKEY, _NAME, _REBASE = (_FIRST_CHILD + i for i in range(4))

_MAGIC = b"torchax-rng-1\0"
# Keys of 32 bits collide among a few thousand streams.
_REFUSED_IMPLS = {"philox2x32": "its 32-bit keys collide"}


def check_impl(impl: str) -> str:
  """The name, if streams may use that PRNG implementation.

  `rbg` and `unsafe_rbg` are accepted, but under them a vmapped draw differs from a
  loop of draws, and `unsafe_rbg` derives keys without a cryptographic hash.

  Raises:
    ValueError: an implementation unknown to JAX, or refused because keys collide.
  """
  if impl in _REFUSED_IMPLS:
    raise ValueError(
      f"prng_impl={impl!r} is refused for streams: {_REFUSED_IMPLS[impl]}. "
      f"Use {DEFAULT_IMPL!r}."
    )
  try:
    jax.eval_shape(lambda: jax.random.key(0, impl=impl))
  except (KeyError, ValueError, TypeError) as error:
    raise ValueError(
      f"JAX has no PRNG implementation {impl!r}: {error}. Use {DEFAULT_IMPL!r}."
    ) from None
  return impl


def is_typed_key(value) -> bool:
  """True for a JAX array of typed keys (`jax.random.key`)."""
  if not isinstance(value, jax.Array):
    return False
  return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def check_seed(seed: int) -> int:
  """The seed in [0, 2**64); negative ones wrap modulo 2**64, as torch's.

  Raises:
    SeedError: not an integer.
    ValueError: an integer outside of [-2**63, 2**64).
  """
  if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
    raise SeedError(
      "A seed is an integer in [-2**63, 2**64), but got "
      f"{type(seed).__name__}: {seed!r}."
    )
  seed = int(seed)
  if not -(1 << 63) <= seed < 1 << 64:
    raise ValueError(f"A seed is an integer in [-2**63, 2**64), but got {seed}.")
  return seed % (1 << 64)


def key_from_seed(seed: int, impl: str = DEFAULT_IMPL) -> jax.Array:
  """The root key of an integer seed; raises what `check_seed` raises."""
  seed = check_seed(seed)
  key = jax.random.key(np.uint32(seed & 0xFFFFFFFF), impl=impl)
  if seed >> 32:
    key = _child(key, _NAME, np.uint32(seed >> 32))
  return key


def _key_from_traced_seed(seed: jax.Array, impl: str) -> jax.Array:
  """`key_from_seed` of a seed that has no value yet."""
  low = seed.astype(jnp.uint32)
  if jnp.iinfo(seed.dtype).bits == 64:
    high = (seed >> 32).astype(jnp.uint32)
  else:  # the sign extends to the upper word
    high = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
  key = jax.random.key(low, impl=impl)
  return jnp.where(high == 0, key, _child(key, _NAME, high))


def key_from_words(words: jax.Array, impl: str) -> jax.Array:
  """A key from two uint32 words, shape (2,); traceable. For `torch.Generator`."""
  return jax.random.fold_in(jax.random.key(words[0], impl=impl), words[1])


def fold_in(key: jax.Array, count) -> jax.Array:
  """The key of draw `count` of a stream; traceable."""
  return jax.random.fold_in(key, count)


def rebased_key(key: jax.Array, count) -> jax.Array:
  """A key for the rest of a stream of which `count` draws are used up."""
  return _child(key, _REBASE, count)


def rekeyed(key: jax.Array) -> jax.Array:
  """The key that follows one whose counts are used up."""
  return _child(key, _REKEY, 0)


def thread_key(key: jax.Array, ordinal: int) -> jax.Array:
  """The root key of a thread; the main thread, ordinal 0, has the seed's own."""
  return _child(key, _THREAD, ordinal) if ordinal else key


def named_key(key: jax.Array, name: str) -> jax.Array:
  """The root key of an independent stream with a name."""
  return _child(key, _NAME, np.uint32(zlib.crc32(name.encode())))


def _child(key: jax.Array, kind: int, identifier) -> jax.Array:
  return jax.random.fold_in(jax.random.fold_in(key, np.uint32(kind)), identifier)


def as_key(value, impl: str = DEFAULT_IMPL) -> jax.Array:
  """A typed scalar key from a typed key, raw uint32 key data, a seed or a 0-d tensor.

  Args:
    value: see above; arrays may be traced.
    impl: implementation for seeds and raw key data.

  Raises:
    SeedError: any other type, a key array that is not scalar, or a float.
  """
  if isinstance(value, torch.Tensor):
    # Every torch tensor has a method `jax`; a CPU tensor's is a copy to the device.
    value = np.asarray(value) if value.device.type == "cpu" else value.jax()
  if is_typed_key(value):
    if value.shape:
      raise SeedError(
        f"A stream takes one scalar key, but got keys of shape {value.shape}. "
        "Pick one, or use `jax.vmap` over them."
      )
    return value
  if isinstance(value, jax.Array | np.ndarray) and value.ndim == 1:
    if value.dtype == jnp.uint32:
      return _wrapped(value, impl)
  elif isinstance(value, jax.Array | np.ndarray | np.integer) and not np.ndim(value):
    if jnp.issubdtype(value.dtype, jnp.integer):
      if isinstance(value, jax.core.Tracer):
        return _key_from_traced_seed(value, impl)
      return key_from_seed(int(value), impl)
  elif isinstance(value, int) and not isinstance(value, bool):
    return key_from_seed(value, impl)
  kind = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
  raise SeedError(
    "Expected a seed (int), a 0-d integer tensor, a typed key (`jax.random.key(0)`) or "
    f"raw uint32 key data, but got {type(value).__name__}: {kind}."
  )


def _wrapped(words, impl: str) -> jax.Array:
  expected = _key_data_shape(impl)
  if words.shape != expected:
    raise SeedError(
      f"Raw key data of {impl} has shape {expected}, but got {words.shape}. Pass a "
      "typed key (`jax.random.key(0)`) or a seed."
    )
  return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def _key_data_shape(impl: str) -> tuple[int, ...]:
  key_data = lambda: jax.random.key_data(jax.random.key(0, impl=impl))  # noqa: E731
  return jax.eval_shape(key_data).shape


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class RngState:
  """Where a stream stands; a JAX pytree with two leaves.

  Attributes:
    key: typed scalar key (`key<fry>[]`).
    count: draws made so far: a Python int on the host, uint32[] inside a trace.

  >>> RngState.from_seed(0).advance(3)
  RngState(threefry2x32, key=0:0, count=3)
  """

  key: jax.Array
  count: Any = 0

  @classmethod
  def from_seed(cls, seed: int, impl: str = DEFAULT_IMPL) -> "RngState":
    """The state that `torch.manual_seed(seed)` gives the main thread."""
    return cls(key_from_seed(seed, check_impl(impl)), 0)

  @property
  def impl(self) -> str:
    """Name of the PRNG implementation."""
    return str(jax.random.key_impl(self.key))

  def advance(self, draws: int) -> "RngState":
    """The state after that many more draws."""
    return RngState(self.key, self.count + draws)

  def draw_key(self, ahead: int = 0) -> jax.Array:
    """The key of the next draw, or of one further ahead."""
    return fold_in(self.key, self.count + ahead)

  def fork(self, name: str) -> "RngState":
    """An independent stream; the same name gives the same one, at any count."""
    return RngState(named_key(self.key, name), 0)

  def state_dict(self) -> dict[str, Any]:
    """Plain data: impl name, key data (list of ints), count.

    Raises:
      TracedStateError: inside a JAX transformation.
    """
    if isinstance(self.key, jax.core.Tracer) or isinstance(self.count, jax.core.Tracer):
      raise TracedStateError(
        "The random state is being traced and has no value yet. Read it outside of the "
        "compiled function, or return it (it is a pytree)."
      )
    words = np.asarray(jax.random.key_data(self.key)).tolist()
    return {"impl": self.impl, "key_data": words, "count": int(self.count)}

  @classmethod
  def from_state_dict(cls, data: dict[str, Any]) -> "RngState":
    """The state that `state_dict` described.

    Raises:
      ValueError: a missing field, an unknown impl, key data of a wrong length, or a
        count outside [0, 2**30].
    """
    if not isinstance(data, dict) or set(data) != {"impl", "key_data", "count"}:
      raise ValueError(
        "Expected a dict with impl, key_data and count, as `RngState.state_dict` "
        f"returns it, but got {data!r}."
      )
    impl = check_impl(data["impl"])
    words = np.asarray(data["key_data"])
    expected = _key_data_shape(impl)
    if words.shape != expected:
      raise ValueError(
        f"Key data of {impl} has shape {expected}, but got {words.shape}."
      )
    if words.dtype.kind not in "iu" or (words < 0).any() or (words >> 32).any():
      raise ValueError(f"Key data are 32-bit unsigned integers, but got {words}.")
    count = data["count"]
    if not isinstance(count, int | np.integer) or not 0 <= count <= REKEY_AT:
      raise ValueError(f"A draw count is an int in [0, 2**30], but got {count!r}.")
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=impl)
    return cls(key, int(count))

  def to_tensor(self) -> torch.Tensor:
    """The state as a CPU uint8 tensor of shape (n,), for `from_tensor`."""
    data = self.state_dict()
    impl = data["impl"].encode()
    words = np.asarray(data["key_data"], "<u4")
    payload = _MAGIC + struct.pack("<BQB", len(impl), data["count"], words.size)
    payload += impl + words.tobytes()
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

  @classmethod
  def from_tensor(cls, tensor: torch.Tensor) -> "RngState":
    """The state that `to_tensor` wrote.

    Raises:
      SeedError: not a uint8 tensor.
      ValueError: truncated, or written by something else.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
      kind = getattr(tensor, "dtype", type(tensor).__name__)
      raise SeedError(f"A random state is a uint8 tensor, but got {kind}.")
    payload = bytes(tensor.cpu().numpy())
    header = struct.Struct("<BQB")
    start = len(_MAGIC) + header.size
    if not payload.startswith(_MAGIC) or len(payload) < start:
      raise ValueError(
        "The tensor holds no random state of torchax. Expected what "
        f"`torch.jax.get_rng_state()` returned, but got {len(payload)} other bytes."
      )
    name_length, count, n_words = header.unpack_from(payload, len(_MAGIC))
    if len(payload) != start + name_length + 4 * n_words:
      raise ValueError(
        f"The random state is truncated: expected {start + name_length + 4 * n_words} "
        f"bytes, but got {len(payload)}."
      )
    impl = payload[start : start + name_length].decode()
    words = np.frombuffer(payload, "<u4", n_words, start + name_length)
    return cls.from_state_dict({"impl": impl, "key_data": words, "count": count})

  def __repr__(self):
    if isinstance(self.key, jax.core.Tracer):
      return f"RngState(traced, count={self.count})"
    words = ":".join(f"{word:x}" for word in np.asarray(jax.random.key_data(self.key)))
    return f"RngState({self.impl}, key={words}, count={self.count})"

  def tree_flatten(self):
    return (self.key, self.count), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


def as_state(value, impl: str = DEFAULT_IMPL) -> RngState:
  """An RngState from a state, or from anything that `as_key` takes."""
  return value if isinstance(value, RngState) else RngState(as_key(value, impl), 0)
