"""The one mechanism that takes random streams across a compiled boundary.

  pure = Carried(fn)            # pure(rng, *args, **kwargs) -> (out, advance)
  out = pure.run(jax.jit(pure), *args)

`rng` holds where each stream of the bundle stands (`bundle.py`): its key
(`key<fry>[]`) and count (`u32[]`) are operands. `advance` says how far the streams
moved: static for a trace, so it has no output array and comes back with every cached
call without a device sync; a re-seed inside comes back as a leaf.

Which streams a function draws from is only met while tracing; at first the bundle holds
that of the environment which is on. A trace that meets another one finishes, is thrown
away, and is made anew with an operand for it (`NewOperands`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.errors import RngError, TracedDrawError
from torchax.rng import ledger, running, scope
from torchax.rng.advance import Advance
from torchax.rng.bundle import (
  Bundle,
  Name,
  OfEnvironment,
  OfGenerator,
  Operands,
)
from torchax.rng.generator_draws import GeneratorSlot, Place
from torchax.rng.state import RngState


class NewOperands(BaseException):
  """Ends a trace that met something it has no operand for yet; it is made anew.

  A BaseException, so that no `except Exception` of traced code keeps it.
  """


class _Attempt(threading.local):
  """How this thread is tracing a function.

  Attributes:
    deferred: a trace that misses an operand is finished before it is made anew.
    asked: to be made anew.
  """

  deferred = False
  asked = False


def _once() -> int:
  return 1


_ON = (OfEnvironment(),)


class Carried:
  """A function whose random streams are operands; `pure` for any JAX transformation.

  Attributes:
    names: of the streams, in the order of the operands.
  """

  def __init__(self, function: Callable):
    self.function = function
    self.names: tuple[Name, ...] = _ON
    # How many draws a call makes with each generator, at most.
    self._limits: dict[Name, int] = {}
    self._just_met: list[GeneratorSlot] = []
    self._attempt = _Attempt()
    # Key and count of the last call, and the operands made of them.
    self._last: tuple = (None, None, None)
    self.__name__ = getattr(function, "__name__", type(function).__name__)

  @property
  def generators(self) -> list[torch.Generator]:
    """The generators among the streams."""
    if len(self.names) == 1:
      return []
    return [name.generator for name in self.names if isinstance(name, OfGenerator)]

  def draws_of_generators(self) -> list[int]:
    """How many draws a call makes with each generator, at most."""
    return [self._limits[name] for name in self.names if isinstance(name, OfGenerator)]

  def __call__(self, rng: Operands, *args, **kwargs):
    """The pure function: `(rng, *args, **kwargs) -> (out, Advance or None)`."""
    bundle = Bundle(self.names, rng, self._limits)
    with scope.carrying(bundle), running.followed(), running.boundary():
      out = self.function(*args, **kwargs)
      advance = bundle.advance()
    self._require(bundle)
    for slot in bundle.slots.values():
      slot.require_untouched(self.__name__)
    return out, advance

  def _require(self, bundle: Bundle) -> None:
    """Has the trace made anew if streams were met that have no operands yet."""
    slots = list(bundle.slots.values())
    if not bundle.missing and not any(slot.is_short for slot in slots):
      self._just_met = []
      return
    self._require_old_generators(slots)
    self.names = tuple(dict.fromkeys((*self.names, *bundle.missing)))
    for name, slot in bundle.slots.items():
      self._limits[name] = max(slot.asked, self._limits.get(name, 0))
      slot.restore()  # the function runs again, from the start
    self.retrace()

  def retrace(self) -> None:
    """Has the trace in progress made anew, since it lacks an operand.

    Raises:
      NewOperands: now, or where `deferring` ends.
    """
    if not self._attempt.deferred:
      raise NewOperands
    self._attempt.asked = True

  @contextlib.contextmanager
  def deferring(self) -> Iterator[None]:
    """Finishes traces inside the block that miss an operand.

    JAX keeps a trace that an exception leaves, if it has read an outer one's values.
    """
    attempt = self._attempt
    before = (attempt.deferred, attempt.asked)
    attempt.deferred, attempt.asked = True, False
    try:
      yield
      if attempt.asked:
        raise NewOperands
    finally:
      attempt.deferred, attempt.asked = before

  def _require_old_generators(self, slots: list[GeneratorSlot]) -> None:
    """Raises RngError if each trace meets other generators: it would never end."""
    met = [slot for slot in slots if slot.words is None]
    unasked = {OfGenerator(slot.generator) for slot in slots if not slot.asked}
    missed = unasked & {OfGenerator(slot.generator) for slot in self._just_met}
    self._just_met = met
    if met and missed:
      self.names = tuple([name for name in self.names if name not in missed])
      raise RngError(
        f"{self.__name__} makes a torch.Generator while it is compiled, which would be "
        "one generator for ever. Make it outside of the function."
      )

  @contextlib.contextmanager
  def again(self, rng: Operands) -> Iterator[None]:
    """Draws inside the block are those of the call that had these operands.

    For a trace in which the function is run once more; nothing moves.
    """
    with scope.carrying(Bundle(self.names, rng, self._limits)):
      yield

  def operands(self, times: int = 1) -> Operands:
    """The operands of the next call: where the caller's streams stand.

    Inside a raw JAX transformation they are good for a function that draws nothing
    only; `commit` raises for another.

    Args:
      times: how often the function is going to be run; generators give as many words.
    """
    stream = scope.current()
    try:
      stream.check_now(self.__name__)
    except TracedDrawError:
      if self.generators:
        raise
    if self.names is _ON and not stream.by_site:
      return self._plain_operands(*stream.next())
    return tuple(
      [
        name.position(self._limits.get(name, 0) * times, self.__name__)
        for name in self.names
      ]
    )

  def _plain_operands(self, key, count) -> Operands:
    """Key and count in plain tuples, which a call takes in quicker.

    A function that draws nothing is called again at the same place of the stream; it
    gets the same operands, with the count on the device.
    """
    if type(count) is not int:
      return ((key, count),)
    last_key, last_count, operands = self._last
    if last_key is not key or last_count != count:
      operands = ((key, np.uint32(count)),)
    elif type(operands[0][1]) is np.uint32 and jax_compat.is_top_level():
      operands = ((key, jax.numpy.asarray(operands[0][1])),)
    self._last = (key, count, operands)
    return operands

  def commit(self, advance: Advance | None) -> None:
    """Moves the caller's streams as far as the function did.

    Raises:
      TracedDrawError: the function drew inside a raw JAX transformation.
    """
    if advance is None:
      return
    on = scope.current()
    if advance.total and not jax_compat.is_top_level():
      on.check(self.__name__)
    if advance.log and (ledger.Recording.count or on.log is not None):
      ledger.commit(on.log, advance.log, self.streams())
    for name, move in zip(self.names, advance.moves):
      if move.draws:
        name.advance(move.draws)
    for (place, count, sites), key in zip(advance.seedings, advance.keys):
      by_site = None if sites is None else dict(sites)
      stream = scope.current(self.names[place].owner)
      stream.reseed(RngState(key, count, by_site))

  def drawn_from(self, advance: Advance) -> dict:
    """The caller's streams of environments that a function moves, by their owners."""
    return {
      name.owner: scope.current(name.owner)
      for name, move in zip(self.names, advance.moves)
      if isinstance(name, OfEnvironment) and move.draws
    }

  def streams(self) -> dict:
    """The caller's streams, by the numbers of their environments."""
    names = [name for name in self.names if isinstance(name, OfEnvironment)]
    owners = [name.owner or scope.streams_on() for name in names]
    return {owner.number: scope.current(owner) for owner in owners}

  def run(
    self, transformed: Callable[[Operands], Any], times: Callable[[], int] = _once
  ):
    """Calls a transformed function with the caller's streams as its operands.

    Args:
      transformed: `operands -> (out, Advance)`; called again where the trace met
        something that it has no operand for yet.
      times: tells how often it runs the function.

    Returns:
      `out`; the streams stand where the function left them, or, after an exception,
      where they stood before.
    """
    while True:
      places = self._places()
      try:
        with scope.current().held:
          out, advance = transformed(self.operands(times()))
          self.commit(advance)
      except BaseException as error:
        for place in places.values():
          place.restore()
        if isinstance(error, NewOperands):
          continue
        raise
      if places and advance is not None:
        for name, move in zip(self.names, advance.moves):
          # More was taken than was drawn, in a call that draws less than others.
          if name in places and move.draws < self._limits[name] * times():
            places[name].restore()
            places[name].skip(move.draws)
      return out

  def _places(self) -> dict[Name, Place]:
    return {OfGenerator(g): Place(g, self.__name__) for g in self.generators}

  def try_abstractly(self, transformed: Callable[[Operands], Any]):
    """Like `run` for something that only traces: no stream, no generator advances."""
    while True:
      places = self._places()
      try:
        return transformed(self.operands())
      except NewOperands:
        continue
      finally:
        for place in places.values():
          place.restore()
