"""The random state as a value: a typed key and a number of draws.

Draw i of a stream uses `fold_in(key, i)` with i < 2**31. The upper half of the 32-bit
space derives children (threads, forks, new keys of a stream), so no child's key is ever
the key of a draw.
"""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.errors import SeedError, TracedStateError
from torchax.rng import serialization

DEFAULT_IMPL = "threefry2x32"

# Draws of a key; then a stream takes the next one. A compiled call keeps its key, and
# may count on to the first child index.
REKEY_AT = 1 << 30
# A site counts all its draws, whatever key they had.
_MOST_OF_A_SITE = 1 << 62

# Children of a key: fold_in(fold_in(key, index), identifier).
_FIRST_CHILD = 1 << 31
_THREAD, _REKEY, _NAME, _REBASE, _SHARD = (_FIRST_CHILD + i for i in range(5))

# Keys of 32 bits collide among a few thousand streams.
_REFUSED_IMPLS = {"philox2x32": "its 32-bit keys collide"}


def check_impl(impl: str) -> str:
  """Returns the name, if streams may use that PRNG implementation.

  Under `rbg` and `unsafe_rbg` a vmapped draw differs from a loop of draws, and
  `unsafe_rbg` derives keys without a cryptographic hash.

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
  """A key for the rest of a stream after `count` draws."""
  return _child(key, _REBASE, count)


def rekeyed(key: jax.Array) -> jax.Array:
  """The key that follows one whose counts are used up."""
  return _child(key, _REKEY, 0)


def resolved(key: jax.Array, count: int) -> tuple[jax.Array, int]:
  """Key and count of the same draw, with a count below `REKEY_AT`."""
  while count >= REKEY_AT:
    key, count = rekeyed(key), count - REKEY_AT
  return key, count


def thread_key(key: jax.Array, ordinal: int) -> jax.Array:
  """The root key of a thread; the main thread, ordinal 0, has the seed's own."""
  return _child(key, _THREAD, ordinal) if ordinal else key


def named_key(key: jax.Array, name: str) -> jax.Array:
  """The root key of an independent stream with a name.

  64 bits of the name's hash count: two of a million names collide with p = 3e-8.
  """
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  low, high = np.frombuffer(digest, "<u4").astype(np.uint32)
  return fold_in(_child(key, _NAME, low), high)


def shard_key(key: jax.Array, index) -> jax.Array:
  """The key of one shard of a computation; `index` may be traced."""
  return _child(key, _SHARD, index)


def _child(key: jax.Array, kind: int, identifier) -> jax.Array:
  return fold_in(fold_in(key, np.uint32(kind)), identifier)


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
    tensor: Any = value
    value = np.asarray(tensor) if tensor.device.type == "cpu" else tensor.jax()
  if is_typed_key(value):
    if value.shape:
      raise SeedError(
        f"A stream takes one scalar key, but got keys of shape {value.shape}. "
        "Pick one; or give each row of a batch its key: "
        "`jax.vmap(lambda key, x: jax_view(f)(x, rng=key))(keys, x)`."
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
  expected = key_data_shape(impl)
  if words.shape != expected:
    raise SeedError(
      f"Raw key data of {impl} has shape {expected}, but got {words.shape}. Pass a "
      "typed key (`jax.random.key(0)`) or a seed."
    )
  return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def key_data_shape(impl: str) -> tuple[int, ...]:
  key_data = lambda: jax.random.key_data(jax.random.key(0, impl=impl))  # noqa: E731
  return jax.eval_shape(key_data).shape


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class RngState:
  """Position of a stream; a JAX pytree of the key, the count and the sites' counts.

  Attributes:
    key: typed key (`key<fry>[]`).
    count: draws made with the key: a Python int on the host, uint32[] inside a trace.
    sites: draws made at each site, where draws are addressed by site (`address_by`);
      else None.

  >>> RngState.from_seed(0).advance(3)
  RngState(threefry2x32, key=0:0, count=3)
  """

  key: jax.Array
  count: Any = 0
  sites: dict[str, Any] | None = None

  @classmethod
  def from_seed(cls, seed: int, impl: str = DEFAULT_IMPL) -> "RngState":
    """The state that `torch.manual_seed(seed)` gives the main thread."""
    return cls(key_from_seed(seed, check_impl(impl)), 0)

  @property
  def impl(self) -> str:
    """Name of the PRNG implementation."""
    return str(jax.random.key_impl(self.key))

  def advance(self, draws: int) -> "RngState":
    """The state after that many more draws.

    Raises:
      ValueError: draws are addressed by site, so a number alone says too little.
    """
    if self.sites is not None:
      raise ValueError(
        "The draws of this state are addressed by site: it advances by drawing, inside "
        "`with rng_scope(state) as stream`; `stream.state` is the state after that."
      )
    return RngState(self.key, self.count + draws)

  def draw_key(self, ahead: int = 0) -> jax.Array:
    """The key of the next draw, or of one further ahead."""
    if isinstance(self.count, int) and isinstance(ahead, int):
      return fold_in(*resolved(self.key, self.count + ahead))
    return fold_in(self.key, self.count + ahead)

  def fork(self, name: str) -> "RngState":
    """An independent stream; the same name gives the same one, at any count."""
    return RngState(named_key(self.key, name), 0, None if self.sites is None else {})

  def state_dict(self) -> dict[str, Any]:
    """Plain data: impl name, key data (list of ints), count; sites where they count.

    Raises:
      TracedStateError: inside a JAX transformation.
    """
    leaves = jax.tree.leaves(self)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
      raise TracedStateError(
        "The random state is being traced and has no value yet. Read it outside of the "
        "compiled function, or return it (it is a pytree)."
      )
    key, count = self.key, int(self.count)
    if self.sites is None:
      key, count = resolved(key, count)
    words = np.asarray(jax.random.key_data(key)).tolist()
    data = {"impl": self.impl, "key_data": words, "count": count}
    if self.sites is not None:
      data["sites"] = {path: int(count) for path, count in self.sites.items()}
    return data

  @classmethod
  def from_state_dict(cls, data: dict[str, Any]) -> "RngState":
    """The state of a `state_dict`.

    Raises:
      ValueError: a missing field, an unknown impl, key data of a wrong length, or a
        count outside [0, 2**30].
    """
    fields = {"impl", "key_data", "count"}
    if not isinstance(data, dict) or set(data) - {"sites"} != fields:
      raise ValueError(
        "Expected a dict with impl, key_data and count, as `RngState.state_dict` "
        f"returns it, but got {data!r}."
      )
    impl = check_impl(data["impl"])
    words = np.asarray(data["key_data"])
    expected = key_data_shape(impl)
    if words.shape != expected:
      raise ValueError(
        f"Key data of {impl} has shape {expected}, but got {words.shape}."
      )
    if words.dtype.kind not in "iu" or (words < 0).any() or (words >> 32).any():
      raise ValueError(f"Key data are 32-bit unsigned integers, but got {words}.")
    sites = data.get("sites")
    if sites is not None and not isinstance(sites, dict):
      raise ValueError(f"Sites are a dict of counts by path, but got {sites!r}.")
    _check_count(data["count"], REKEY_AT)
    for count in (sites or {}).values():
      _check_count(count, _MOST_OF_A_SITE)
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=impl)
    return cls(key, int(data["count"]), None if sites is None else dict(sites))

  def to_tensor(self) -> torch.Tensor:
    """The state as a CPU uint8 tensor of shape (n,), for `from_tensor`."""
    payload = serialization.encode(self.state_dict())
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

  @classmethod
  def from_tensor(cls, tensor: torch.Tensor) -> "RngState":
    """The state of `to_tensor`, or of the environment on in `get_rng_state()`.

    Raises:
      SeedError: not a uint8 tensor.
      ValueError: truncated, or written by something else.
    """
    _, payload = serialization.split(bytes_of(tensor))[0]
    return cls.from_state_dict(serialization.decode(payload))

  def __repr__(self):
    sites = "" if self.sites is None else f", sites={self.sites}"
    if isinstance(self.key, jax.core.Tracer):
      return f"RngState(traced, count={self.count}{sites})"
    words = ":".join(f"{word:x}" for word in np.asarray(jax.random.key_data(self.key)))
    return f"RngState({self.impl}, key={words}, count={self.count}{sites})"

  def tree_flatten(self):
    if self.sites is None:
      return (self.key, self.count), None
    return (self.key, self.count, *self.sites.values()), tuple(self.sites)

  @classmethod
  def tree_unflatten(cls, paths, children):
    key, count, *counts = children
    return cls(key, count, None if paths is None else dict(zip(paths, counts)))


def bytes_of(tensor: torch.Tensor) -> bytes:
  """The bytes of a saved state; raises SeedError for other than a uint8 tensor."""
  if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
    kind = getattr(tensor, "dtype", type(tensor).__name__)
    raise SeedError(f"A random state is a uint8 tensor, but got {kind}.")
  return bytes(tensor.tolist())


def _check_count(count, most: int) -> None:
  if not isinstance(count, int | np.integer) or not 0 <= count <= most:
    bits = most.bit_length() - 1
    raise ValueError(f"A draw count is an int in [0, 2**{bits}], but got {count!r}.")


def as_state(value, impl: str = DEFAULT_IMPL) -> RngState:
  """An RngState from a state, or from anything that `as_key` takes."""
  return value if isinstance(value, RngState) else RngState(as_key(value, impl), 0)
