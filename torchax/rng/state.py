"""Random state as a value: a typed key and a number of draws.

Draw i of a stream uses `fold_in(key, i)` with i < 2**31. The upper half of the 32-bit
space derives children: threads, forks, new keys of a stream. So no child's key is ever
the key of a draw. `counter.py` and `stream.py` advance a state.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat.jax_compat import StatefulPRNG
from torchax.errors import SeedError, TracedStateError
from torchax.rng import philox, serialization

DEFAULT_IMPL = "threefry2x32"

# Draws after which a stream switches to its next key. A compiled call keeps its key,
# and its count may reach the first child index.
REKEY_AT = 1 << 30
# Largest count of a site, which covers the draws with all its keys.
_MOST_OF_A_SITE = 1 << 62

# Children of a key: fold_in(fold_in(key, index), identifier).
_FIRST_CHILD = 1 << 31
_THREAD, _REKEY, _NAME, _REBASE, _SHARD = (_FIRST_CHILD + i for i in range(5))

# With 32-bit keys, a few thousand streams collide.
_REFUSED_IMPLS = {"philox2x32": "its 32-bit keys collide"}


def check_impl(impl: str) -> str:
  """Return the name of a PRNG implementation if streams may use it.

  Under `rbg` and `unsafe_rbg` a vmapped draw differs from a loop of draws, and draws on
  a mesh may depend on it. `unsafe_rbg` derives keys without a cryptographic hash.

  Raises:
    ValueError: JAX does not have the implementation, or its keys collide.
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


def is_typed_key(value: Any) -> bool:
  """Return True for a JAX array of typed keys (`jax.random.key`).

  >>> is_typed_key(jax.random.key(0)), is_typed_key(jax.random.PRNGKey(0))
  (True, False)
  """
  if not isinstance(value, jax.Array):
    return False
  return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def check_seed(seed: int) -> int:
  """Return the seed modulo 2**64, as torch does with negative seeds.

  Raises:
    SeedError: the seed is no integer.
    ValueError: the seed is outside of [-2**63, 2**64).
  """
  if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
    raise SeedError(
      "Expected an integer seed in [-2**63, 2**64), but got "
      f"{type(seed).__name__}: {seed!r}."
    )
  seed = int(seed)
  if not -(1 << 63) <= seed < 1 << 64:
    raise ValueError(f"Expected an integer seed in [-2**63, 2**64), but got {seed}.")
  return seed % (1 << 64)


def key_from_seed(seed: int, impl: str = DEFAULT_IMPL) -> jax.Array:
  """Return the root key of an integer seed; raise the errors of `check_seed`."""
  seed = check_seed(seed)
  key = jax.random.key(np.uint32(seed & 0xFFFFFFFF), impl=impl)
  if seed >> 32:
    key = _child(key, _NAME, np.uint32(seed >> 32))
  return key


def _key_from_traced_seed(seed: jax.Array, impl: str) -> jax.Array:
  low = seed.astype(jnp.uint32)
  if jnp.iinfo(seed.dtype).bits == 64:
    high = (seed >> 32).astype(jnp.uint32)
  else:  # sign extension
    high = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
  key = jax.random.key(low, impl=impl)
  return jnp.where(high == 0, key, _child(key, _NAME, high))


def key_from_words(words: jax.Array, impl: str) -> jax.Array:
  """Return the key of two uint32 words (2,), for `torch.Generator`; traceable."""
  return jax.random.fold_in(jax.random.key(words[0], impl=impl), words[1])


def fold_in(key: jax.Array, count: Any) -> jax.Array:
  """Return the key of draw `count` of a stream; traceable.

  Args:
    key: typed key.
    count: number of the draw, an int or a uint32 array of shape ().

  >>> state = RngState.from_seed(0)
  >>> bool(fold_in(state.key, 3) == state.draw_key(ahead=3))
  True
  """
  return jax.random.fold_in(key, count)


def rebase_key(key: jax.Array, count) -> jax.Array:
  """Return a key for the rest of a stream after `count` draws."""
  return _child(key, _REBASE, count)


def rekey(key: jax.Array) -> jax.Array:
  """Return the next key of a stream, after `REKEY_AT` draws."""
  return _child(key, _REKEY, 0)


def rekey_if_due(key: jax.Array, count: int) -> tuple[jax.Array, int]:
  """Re-key until `count` is below `REKEY_AT`; return the key and count of that draw."""
  while count >= REKEY_AT:
    key, count = rekey(key), count - REKEY_AT
  return key, count


def thread_key(key: jax.Array, ordinal: int) -> jax.Array:
  """Return the root key of a thread; ordinal 0, the main thread, has the seed's key."""
  return _child(key, _THREAD, ordinal) if ordinal else key


def named_key(key: jax.Array, name: str) -> jax.Array:
  """Return the root key of an independent stream with a name.

  It uses 64 bits of the name's hash: among a million names, two collide with p = 3e-8.
  """
  digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
  low, high = np.frombuffer(digest, "<u4").astype(np.uint32)
  return fold_in(_child(key, _NAME, low), high)


def shard_key(key: jax.Array, index) -> jax.Array:
  """Return the key of one shard of a computation; `index` may be traced."""
  return _child(key, _SHARD, index)


def _child(key: jax.Array, kind: int, identifier) -> jax.Array:
  return fold_in(fold_in(key, np.uint32(kind)), identifier)


def as_key(value: Any, impl: str = DEFAULT_IMPL) -> jax.Array:
  """Return the typed scalar key of a key, raw key data or a seed.

  Args:
    value: a typed key, uint32 key data, a key of `torch.func._random` (uint64 of shape
      (2,)), an int or a 0-d integer tensor or array; may be traced. Or a stateful
      generator of keys, which gives its next one: a `StatefulPRNG` of JAX, an
      `nnx.Rngs` or one of its streams.
    impl: PRNG implementation of seeds and raw key data.

  Raises:
    SeedError: `value` has another type, or is an array of several keys.

  >>> bool(as_key(0) == jax.random.key(0)), bool(as_key(1 << 32) == as_key(0))
  (True, False)
  """
  if isinstance(value, torch.Tensor):
    # `Tensor.jax()` of a CPU tensor would copy it to the device.
    tensor: Any = value
    value = np.asarray(tensor) if tensor.device.type == "cpu" else tensor.jax()
  if is_typed_key(value):
    if value.shape:
      raise SeedError(
        f"A stream expects one scalar key, but got keys of shape {value.shape}. "
        "Pick one; or give each row of a batch its key: "
        "`jax.vmap(lambda key, x: jax_view(f)(x, rng=key))(keys, x)`."
      )
    return value
  if isinstance(value, jax.Array | np.ndarray) and value.ndim == 1:
    if value.dtype == jnp.uint32:
      return _wrap(value, impl)
    if value.dtype == jnp.uint64 and value.shape == (2,):
      return philox.typed_key(value)
  elif isinstance(value, jax.Array | np.ndarray | np.integer) and not np.ndim(value):
    if jnp.issubdtype(value.dtype, jnp.integer):
      if isinstance(value, jax.core.Tracer):
        return _key_from_traced_seed(value, impl)
      return key_from_seed(int(value), impl)
  elif isinstance(value, int) and not isinstance(value, bool):
    return key_from_seed(value, impl)
  next_key = _next_key_of(value)
  if next_key is not None:
    return as_key(next_key())
  kind = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
  raise SeedError(
    "Expected a seed (int), a 0-d integer tensor, a typed key (`jax.random.key(0)`), "
    "raw uint32 key data, or a generator of keys (`StatefulPRNG`, `nnx.Rngs`), but got "
    f"{type(value).__name__}: {kind}."
  )


def _next_key_of(generator) -> Callable | None:
  """Return the function that draws a key from a stateful generator; None for others."""
  if isinstance(generator, StatefulPRNG):
    return generator.key
  nnx = sys.modules.get("flax.nnx")
  if nnx is not None and isinstance(generator, nnx.Rngs | nnx.RngStream):
    return generator
  return None


def _wrap(words, impl: str) -> jax.Array:
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
  """Position of a stream: a JAX pytree of the key, the count and the sites' counts.

  Attributes:
    key: typed key (`key<fry>[]`).
    count: draws made with the key: a Python int on the host, uint32[] inside a trace.
    sites: draws per site if draws are addressed by site (`address_by`), else None.

  >>> RngState.from_seed(0).advance(3)
  RngState(threefry2x32, key=0:0, count=3)
  """

  key: jax.Array
  count: Any = 0
  sites: dict[str, Any] | None = None

  @classmethod
  def from_seed(cls, seed: int, impl: str = DEFAULT_IMPL) -> "RngState":
    """Return the main thread's state after `torch.manual_seed(seed)`.

    Args:
      seed: an int in [-2**63, 2**64).
      impl: PRNG implementation.

    Raises:
      SeedError: the seed is no integer.
      ValueError: the seed is out of range, or `impl` is unknown or refused.

    >>> RngState.from_seed(7)
    RngState(threefry2x32, key=0:7, count=0)
    """
    return cls(key_from_seed(seed, check_impl(impl)), 0)

  @property
  def impl(self) -> str:
    """Name of the PRNG implementation.

    >>> RngState.from_seed(0).impl
    'threefry2x32'
    """
    return str(jax.random.key_impl(self.key))

  def advance(self, draws: int) -> "RngState":
    """Return the state after `draws` more draws.

    Args:
      draws: number of draws, an int or a uint32 array of shape ().

    Raises:
      ValueError: draws are addressed by site, so their sites are needed.

    >>> RngState.from_seed(0).advance(2).count
    2
    """
    if self.sites is not None:
      raise ValueError(
        "The draws of this state are addressed by site: it advances by drawing, inside "
        "`with rng_scope(state) as stream`; `stream.state` is the state after that."
      )
    return RngState(self.key, self.count + draws)

  def draw_key(self, ahead: int = 0) -> jax.Array:
    """Return the key of the next draw, or of the one `ahead` draws later.

    Args:
      ahead: number of draws to skip.

    Returns:
      A typed key.

    >>> state = RngState.from_seed(0)
    >>> bool(state.draw_key(1) == state.advance(1).draw_key())
    True
    """
    if isinstance(self.count, int) and isinstance(ahead, int):
      return fold_in(*rekey_if_due(self.key, self.count + ahead))
    return fold_in(self.key, self.count + ahead)

  def fork(self, name: str) -> "RngState":
    """Return an independent state, which depends on the name and not on the count.

    Args:
      name: purpose of the state, such as "augmentation".

    >>> state = RngState.from_seed(0)
    >>> state.fork("noise") == state.advance(3).fork("noise")
    True
    """
    return RngState(named_key(self.key, name), 0, None if self.sites is None else {})

  def state_dict(self) -> dict[str, Any]:
    """Return the state as plain data.

    Returns:
      Dict with `impl` (str), `key_data` (list of ints), `count` (int) and, if draws are
      addressed by site, `sites` (dict of ints).

    Raises:
      TracedStateError: the state is traced.

    >>> RngState.from_seed(7).advance(2).state_dict()
    {'impl': 'threefry2x32', 'key_data': [0, 7], 'count': 2}
    """
    leaves = jax.tree.leaves(self)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
      raise TracedStateError(
        "The random state is being traced and has no value yet. Read it outside of the "
        "compiled function, or return it (it is a pytree)."
      )
    key, count = self.key, int(self.count)
    if self.sites is None:
      key, count = rekey_if_due(key, count)
    words = np.asarray(jax.random.key_data(key)).tolist()
    data = {"impl": self.impl, "key_data": words, "count": count}
    if self.sites is not None:
      data["sites"] = {path: int(count) for path, count in self.sites.items()}
    return data

  @classmethod
  def from_state_dict(cls, data: dict[str, Any]) -> "RngState":
    """Create the state from the result of `state_dict`.

    Args:
      data: dict with the fields of `state_dict`.

    Raises:
      ValueError: a field is missing, `impl` is unknown, key data has the wrong length,
        or `count` is outside [0, 2**30].

    >>> state = RngState.from_seed(7).advance(2)
    >>> RngState.from_state_dict(state.state_dict()) == state
    True
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
      raise ValueError(f"Expected key data, 32-bit unsigned integers, but got {words}.")
    sites = data.get("sites")
    if sites is not None and not isinstance(sites, dict):
      raise ValueError(
        f"Expected sites as a dict of counts by path, but got {sites!r}."
      )
    _check_count(data["count"], REKEY_AT)
    for count in (sites or {}).values():
      _check_count(count, _MOST_OF_A_SITE)
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=impl)
    return cls(key, int(data["count"]), None if sites is None else dict(sites))

  def to_tensor(self) -> torch.Tensor:
    """Return the state as a CPU uint8 tensor of shape (n,), for `from_tensor`.

    >>> RngState.from_seed(7).to_tensor().dtype
    torch.uint8
    """
    return tensor_of(serialization.encode(self.state_dict()))

  @classmethod
  def from_tensor(cls, tensor: torch.Tensor) -> "RngState":
    """Read the result of `to_tensor`, or the active environment's of `get_rng_state()`.

    Args:
      tensor: CPU uint8 tensor of shape (n,).

    Raises:
      SeedError: `tensor` is no uint8 tensor.
      ValueError: its content is truncated or no state.

    >>> state = RngState.from_seed(7).advance(2)
    >>> RngState.from_tensor(state.to_tensor()) == state
    True
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


def tensor_of(payload: bytes) -> torch.Tensor:
  return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
  """Return the bytes of a saved state; raise SeedError if it is no uint8 tensor."""
  if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
    kind = getattr(tensor, "dtype", type(tensor).__name__)
    raise SeedError(f"Expected a random state, a uint8 tensor, but got {kind}.")
  return bytes(tensor.tolist())


def _check_count(count, most: int) -> None:
  if not isinstance(count, int | np.integer) or not 0 <= count <= most:
    bits = most.bit_length() - 1
    raise ValueError(
      f"Expected an int draw count in [0, 2**{bits}], but got {count!r}."
    )


def as_state(value: Any, impl: str = DEFAULT_IMPL) -> RngState:
  """Return a state unchanged, or the state of any value that `as_key` takes.

  Args:
    value: a state, or any value that `as_key` takes.
    impl: PRNG implementation of seeds and raw key data.

  Raises:
    SeedError: `value` has another type.

  >>> as_state(7)
  RngState(threefry2x32, key=0:7, count=0)
  """
  return value if isinstance(value, RngState) else RngState(as_key(value, impl), 0)
