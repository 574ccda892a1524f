"""Draws with a `torch.Generator`: on the host, and in a function that is being traced.

In a trace the words are an operand, and a `GeneratorSlot` hands them out.
"""

import jax
import numpy as np
import torch

from torchax.errors import RngError
from torchax.rng import generator as generators
from torchax.rng import ledger, scope, sites
from torchax.rng.counter import DrawOperands
from torchax.rng.draw import Draw


class GeneratorSlot:
  """A generator in a traced function.

  Args:
    generator: the generator itself.
    words: uint32 (n, 2), traced; None where the trace has met it for the first time.
    used: how many of them were used by earlier turns of a loop; None for none.
    limit: how many of the others are for this call of the function.

  Attributes:
    draws: how many draws were made.
    asked: for how many draws words were asked; more, if some were given back.
  """

  __slots__ = ("generator", "words", "used", "limit", "draws", "asked", "_before")

  def __init__(self, generator: torch.Generator, words=None, used=None, limit: int = 0):
    self.generator = generator
    self.words, self.used, self.limit = words, used, limit
    self.draws = 0
    self.asked = 0
    self._before = generator.get_state()

  def take(self, draws: int):
    """Words of the generator's next draws; a stand-in while there are not enough."""
    start = self.draws
    self.draws += draws
    self.asked = max(self.asked, self.draws)
    if self.is_short or not draws or not len(self.words):  # of a loop without turns
      return np.zeros((draws, generators.WORDS), np.uint32)
    if self.used is None:
      return self.words[start : self.draws]
    return jax.lax.dynamic_slice_in_dim(self.words, self.used + np.uint32(start), draws)

  @property
  def is_short(self) -> bool:
    """True when words were asked for that are no operands yet."""
    return self.asked > self.limit

  def require_untouched(self, name: str) -> None:
    """Raises RngError if the generator itself was changed during the trace."""
    if not torch.equal(self.generator.get_state(), self._before):
      self.restore()
      raise RngError(
        f"{name} seeds a torch.Generator, or draws from it on the CPU. That would "
        "happen while it is compiled and never again. Do it before the call."
      )

  def restore(self) -> None:
    """Puts the generator itself back to where it was when the slot was made."""
    self.generator.set_state(self._before)


class Place:
  """Where a generator stands, itself or in the trace in progress; to go back there."""

  __slots__ = ("generator", "slot", "before")

  def __init__(self, generator: torch.Generator, name: str):
    self.generator = generator
    self.slot = _slot(generator, name)
    self.before = generator.get_state() if self.slot is None else self.slot.draws

  def restore(self) -> None:
    """Leaves the generator as if nothing had been drawn since."""
    if self.slot is None:
      self.generator.set_state(self.before)
    else:
      self.slot.draws = self.before

  def skip(self, draws: int) -> None:
    """Advances the generator by some draws."""
    if self.slot is None:
      generators.draw_words(self.generator, draws)
    else:
      self.slot.draws += draws


def _slot(generator: torch.Generator, name: str) -> GeneratorSlot | None:
  """Where a generator's words come from in the trace in progress; None on the host.

  Raises:
    TracedDrawError: inside a raw JAX transformation, also with a key in `rng_scope`,
      since nothing carries the generator.
  """
  bundle = scope.bundle_here()
  if bundle is None:
    scope.streams_on().root().check(name)
    return None
  bundle.check(name)
  return bundle.slot(generator)


def take_words(generator: torch.Generator, draws: int, name: str):
  """Key material for draws, from the generator or, in a trace, from its operand."""
  slot = _slot(generator, name)
  if slot is None:
    return generators.draw_words(generator, draws)
  return slot.take(draws)


def generator_operands(generator: torch.Generator, name: str) -> DrawOperands:
  """Operands of one draw with `generator=`; the current stream does not advance."""
  generators.check_generator(generator)
  words = take_words(generator, 1, name)
  return DrawOperands(generators.key_of(words[0], scope.default_impl()), 0)


def note_generator_draw(op, distribution: str, result, arguments, key) -> None:
  """Notes a draw with `generator=` in the ledgers that are open."""
  stream = scope.current()
  if not ledger.Recording.count and stream.log is None:
    return
  site = sites.path(from_boundary=stream.log is not None)
  where = {"stream": "generator", "arguments": arguments}
  draw = Draw.of(0, op, site, distribution, result, **where)
  ledger.note(stream.log, draw, DrawOperands(key, draw.index))
