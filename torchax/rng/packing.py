"""Key and count of a stream as uint32 words, for callers that cannot pass a typed key.

AOTAutograd passes only torch tensors between the forward and the backward pass of a
compiled graph. So a key is passed as its key data, followed by the count.
`dynamo/backend.py` packs, and `dynamo/program.py` unpacks.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions
from torchax.errors import TracedDrawError
from torchax.rng import ledger, scope
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, SiteCounter
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream


class Form(NamedTuple):
  """Static part of packed operands.

  Attributes:
    impl: the PRNG implementation of the keys.
    paths: paths of the sites, whose words follow those of the environment's stream;
      None if draws are addressed by order.
  """

  impl: str
  paths: tuple[str, ...] | None


class Packer:
  """Packer of the operands of the current stream and its sites.

  It reads key data from the device once per key, not once per call.
  """

  def __init__(self):
    self._data: dict[str | None, tuple] = {}
    self._impl = ""

  def pack(self, name: str, paths: Sequence[str] = ()) -> tuple[np.ndarray, Form]:
    """Return key data and counts, uint32 (n,), of a graph's next draws, and their form.

    `paths` has the sites of graph `name`, for draws addressed by site.

    Raises:
      TracedDrawError: inside a JAX transformation, where a key has no value.
    """
    stream = scope.current()
    stream.check(name)
    if stream.is_traced or not jax_compat.is_top_level():
      raise TracedDrawError(
        f"{name} draws, and is called inside a JAX transformation. Call it outside, or "
        "compile with torchax.interop.jax_jit in its place."
      )
    counter, words = stream.counter, []
    counters: list[tuple[str | None, Counter]] = [(None, counter)]
    if isinstance(counter, SiteCounter):
      prefix = counter.path()
      counters += [(path, counter.at(ledger.join(prefix, path))) for path in paths]
    for path, each in counters:
      key, count = each.position()
      words += [self._key_data(path, key), np.asarray([count], np.uint32)]
    by_site = tuple(paths) if counter.by_site else None
    return np.concatenate(words), Form(self._impl, by_site)

  def _key_data(self, path: str | None, key: jax.Array) -> np.ndarray:
    last, data = self._data.get(path, (None, None))
    if last is not key:
      data = np.asarray(jax.random.key_data(key)).reshape(-1)
      self._data[path] = (key, data)
      self._impl = str(jax.random.key_impl(key))
    return data


class DrawPosition(NamedTuple):
  """Position of an operation's draw in a graph.

  Attributes:
    number: number among all draws.
    site: path of the module; empty outside of modules.
    turns: pairs of a site at which the operation draws and the draws made there before.
  """

  number: int
  site: str
  turns: tuple[tuple[str, int], ...] = ()


class PackedStream(RngStream):
  """Stream of a graph in which every draw has a fixed position."""

  def __init__(self, words: jax.Array, form: Form):
    (size,) = rng_state.key_data_shape(form.impl)
    (key, count), *of_sites = [
      (jax.random.wrap_key_data(row[:size], impl=form.impl), row[size])
      for row in words.reshape(-1, size + 1)
    ]
    super().__init__(RngState(key, count, None if form.paths is None else {}))
    self.log: list = []
    self.counter.is_operand = True
    if isinstance(self.counter, SiteCounter):
      for path, position in zip(form.paths or (), of_sites):
        self.counter.add(path, *position)

  @contextlib.contextmanager
  def at(self, position: DrawPosition, line: str) -> Iterator[None]:
    """Set the position of the draws in the block, and their line in the ledger."""
    counter, recorded = self.counter, len(self.log)
    counter.count = position.number
    if isinstance(counter, SiteCounter):
      for path, turn in position.turns:
        counter.advance_past(turn - counter.draws.get(path, 0), path)
    with active_functions.boundary(), active_functions.at_path(position.site):
      yield
    for number in range(recorded, len(self.log)):
      self.log[number] = dataclasses.replace(self.log[number], line=line)


def commit(draws: int, by_site: dict[str, int], log: tuple) -> None:
  """Advance the current stream and its sites past the draws of a graph that has run."""
  stream = scope.current()
  if log and (ledger.Recording.count or stream.log is not None):
    ledger.commit(stream.log, log, {None: stream})
  if stream.by_site:
    prefix = stream.counter.path()
    for path, n in by_site.items():
      stream.advance_past(n, ledger.join(prefix, path))
  stream.advance_past(draws)
