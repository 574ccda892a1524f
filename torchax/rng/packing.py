"""A stream's operands as plain words, for borders that carry no typed key.

AOTAutograd passes torch tensors between the forward and the backward pass of a compiled
graph; a key crosses as its key data, with the count behind it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from torchax import _jax_compat
from torchax.errors import RngError, TracedDrawError
from torchax.rng import ledger, scope
from torchax.rng import state as rng_state
from torchax.rng.carry import CarriedStream, RngOperands


def by_site_error(name: str) -> RngError:
  """What a compiled graph raises whose draws have no site.

  Args:
    name: what is called.
  """
  return RngError(
    f'{name} draws, and draws are addressed by "site", which torch.compile does '
    'not support. Call torchax.rng.address_by("order"), or compile with '
    "torchax.interop.jax_jit."
  )


class Packer:
  """Packs the current stream's operands, call after call.

  Key data is read from the device once for a key, not for every call.
  """

  def __init__(self):
    self._last: tuple = (None, None, "")

  def pack(self, name: str) -> tuple[np.ndarray, str]:
    """The operands of the current stream's next draw.

    Args:
      name: what is called, for error messages.

    Returns:
      uint32 (words + 1,), key data and then the count; and the key's implementation.
      Where the counts may run out, the data of the key that follows is in between.

    Raises:
      TracedDrawError: a JAX transformation is in progress, in which a key has no words.
      RngError: draws are addressed by site.
    """
    stream = scope.current()
    stream.check_now(name)
    if stream.is_traced or not _jax_compat.is_top_level():
      raise TracedDrawError(
        f"{name} draws, and is called inside a JAX transformation. Call it outside, or "
        "compile with torchax.interop.jax_jit in its place."
      )
    if stream.by_site:
      raise by_site_error(name)
    key, count = stream.position()
    last, data, impl = self._last
    if last is not key:
      data = np.asarray(jax.random.key_data(key)).reshape(-1)
      impl = str(jax.random.key_impl(key))
      self._last = (key, data, impl)
    if count >= rng_state.NEAR_THE_END:
      following = jax.random.key_data(rng_state.rekeyed(key))
      data = np.concatenate([data, np.asarray(following).reshape(-1)])
    words = np.empty(data.size + 1, np.uint32)
    words[:-1], words[-1] = data, count
    return words, impl


class PackedStream(CarriedStream):
  """The stream of a graph in which every draw has a number."""

  __slots__ = ()

  def __init__(self, words: jax.Array, impl: str):
    (size,) = rng_state.key_data_shape(impl)
    key, *following = [
      jax.random.wrap_key_data(words[start : start + size], impl=impl)
      for start in range(0, words.size - 1, size)
    ]
    super().__init__(RngOperands(key, words[-1], (), None, *following))
    self.log = []

  @contextlib.contextmanager
  def draw_number(self, number: int, site: str, line: str) -> Iterator[None]:
    """Draws inside the block are the ones from `number` on, and made at a site."""
    self._count = number
    noted = len(self.log)
    yield
    for place in range(noted, len(self.log)):
      self.log[place] = dataclasses.replace(self.log[place], site=site, line=line)


def commit(draws: int, log: tuple) -> None:
  """Moves the current stream past the draws of a graph that was run."""
  stream = scope.current()
  if log and (ledger.Recording.count or stream.log is not None):
    ledger.commit(stream.log, log, stream)
  stream.advance(draws)
