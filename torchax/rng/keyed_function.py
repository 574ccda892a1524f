"""Functions whose random streams are operands; all JAX wrappers of torchax use them.

  pure = KeyedFunction(fn)      # pure(values, *args, **kwargs) -> (out, advance)
  jitted = jax.jit(pure)
  out = pure.run(lambda values: jitted(values, *args))

Keys and counts are operands (`stream_operands.py`). The number of draws is static per
trace. So it needs no output array, and each cached call returns it without a device
sync. The key of a re-seed inside is an output array.

Tracing discovers the streams that a function draws from. At first the stream of the
active environment is the only operand. If a trace draws from another stream, it runs to
its end, is discarded, and is repeated with all operands it needs (`NewOperands`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions, named_scopes
from torchax.errors import RngError, TracedDrawError
from torchax.rng import generator as generators
from torchax.rng import ledger, scope
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream
from torchax.rng.stream_operands import (
  Advance,
  EnvironmentOperand,
  GeneratorOperand,
  Operand,
  StreamOperands,
  Values,
)

R = TypeVar("R")


class NewOperands(BaseException):
  """Signal that a trace lacks operands and must be repeated.

  It is a BaseException, so that no `except Exception` in traced code catches it.

  Attributes:
    needs: functions that add the missing operands.
  """

  def __init__(self, needs: Sequence[Callable[[], object]] = ()):
    super().__init__()
    self.needs = needs

  def provide(self) -> None:
    """Add the missing operands."""
    for need in self.needs:
      need()


def repeat(attempt: Callable[[], R]) -> R:
  """Return the result of an attempt, repeated until its traces have all operands."""
  while True:
    try:
      return attempt()
    except NewOperands as found:
      found.provide()


_ON = (EnvironmentOperand(),)


class KeyedFunction:
  """Function whose random streams are operands, for any JAX transformation.

  Attributes:
    stream_operands: the streams, in the order of their values.
  """

  def __init__(self, function: Callable):
    self.function = function
    self.stream_operands: tuple[Operand, ...] = _ON
    self._just_met: list[GeneratorOperand] = []
    # Key and count of the last call, and its values.
    self._last: tuple = (None, None, None)
    self.__name__ = getattr(function, "__name__", type(function).__name__)

  def _generators(self) -> list[GeneratorOperand]:
    if len(self.stream_operands) == 1:
      return []
    return [each for each in self.stream_operands if isinstance(each, GeneratorOperand)]

  @property
  def generators(self) -> list[torch.Generator]:
    """Generators among the operands."""
    return [operand.generator for operand in self._generators()]

  def draws_of_generators(self) -> list[int]:
    """Return the largest number of draws that a call makes with each generator."""
    return [operand.limit for operand in self._generators()]

  def __call__(self, values: Values, *args, **kwargs):
    """Call the pure function: `(values, *args, **kwargs) -> (out, Advance or None)`.

    Raises:
      NewOperands: the function draws from a stream that has no operand yet.
    """
    out, advance, needs = self.attempt(values, *args, **kwargs)
    if needs:
      raise NewOperands(needs)
    return out, advance

  def attempt(self, values: Values, *args, **kwargs) -> tuple:
    """Return `(out, advance, needs)` of a trace that may lack operands.

    If an exception leaves a trace that read outer tracers, JAX keeps the trace alive.
    So the caller finishes the trace first, then raises `NewOperands(needs)`.
    """
    traced = StreamOperands(self.stream_operands, values)
    with (
      scope.drawing_from(traced),
      active_functions.following.hold(),
      active_functions.boundary(),
      named_scopes.recording(),
    ):
      out = self.function(*args, **kwargs)
      advance = traced.advance()
    generators = list(traced.generators)
    if traced.missing or any(operand.is_short for operand in generators):
      self._require_old_generators(generators)
      for operand in generators:
        operand.restore()  # the function runs again, from the start
      need = functools.partial(self._add, generators, tuple(traced.missing))
      return out, advance, [need]
    self._just_met = []
    for operand in generators:
      operand.require_untouched(self.__name__)
    return out, advance, []

  def _add(
    self, generators: list[GeneratorOperand], missing: Iterable[Operand]
  ) -> None:
    """Add streams used by a trace to the operands."""
    old_limits = {each: each.limit for each in self._generators()}
    limits = {each: max(each.asked, old_limits.get(each, 0)) for each in generators}
    self.stream_operands = tuple(
      [
        GeneratorOperand(operand.generator, limits.get(operand, operand.limit))
        if isinstance(operand, GeneratorOperand)
        else operand
        for operand in dict.fromkeys((*self.stream_operands, *missing))
      ]
    )

  def _require_old_generators(self, generators: list[GeneratorOperand]) -> None:
    """Raise RngError if each trace creates its own generators: it would never end."""
    met = [operand for operand in generators if operand.words is None]
    missed = {each for each in generators if not each.asked} & {*self._just_met}
    self._just_met = met
    if met and missed:
      self.stream_operands = tuple(
        [each for each in self.stream_operands if each not in missed]
      )
      raise RngError(
        f"{self.__name__} makes a torch.Generator while it is compiled, which would be "
        "one generator for ever. Make it outside of the function."
      )

  def replay(self, values: Values) -> contextlib.AbstractContextManager[None]:
    """Replay in the block the draws of the call that had `values`; advance nothing."""
    return scope.drawing_from(StreamOperands(self.stream_operands, values))

  def values(self, times: int = 1, stream: RngStream | None = None) -> Values:
    """Return the positions of the caller's streams, for `times` runs of the function.

    `stream` is the current stream, if the caller has looked it up.

    Inside a raw JAX transformation the function must not draw; else `commit` raises.
    """
    stream = stream or scope.current()
    try:
      stream.check(self.__name__)
    except TracedDrawError:
      if self.generators:
        raise
    if self.stream_operands is _ON and not stream.by_site:
      return self._plain_values(*stream.counter.position())
    return tuple(
      [operand.read(times, self.__name__) for operand in self.stream_operands]
    )

  def _plain_values(self, key, count) -> Values:
    """Return the values if the only operand is the active environment's stream.

    Calls of a function that draws nothing have the same count. They get the same
    arrays, with the count on the device.
    """
    if type(count) is not int:
      return ((key, count),)
    last_key, last_count, values = self._last
    if last_key is not key or last_count != count:
      values = ((key, np.uint32(count)),)
    elif type(values[0][1]) is np.uint32 and jax_compat.is_top_level():
      values = ((key, jax.numpy.asarray(values[0][1])),)
    self._last = (key, count, values)
    return values

  def children(self, values: Values, keys: dict) -> Values:
    """Return the initial values of child streams; `keys` has their keys by owner."""
    pairs = zip(self.stream_operands, values)
    return tuple([value and operand.child(value, keys) for operand, value in pairs])

  def commit(self, advance: Advance | None) -> None:
    """Advance the caller's streams by the draws of the function.

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
    for operand, draws in zip(self.stream_operands, advance.draws):
      if draws:
        operand.advance(draws)
    for (index, count, sites), key in zip(advance.seedings, advance.keys):
      by_site = None if sites is None else dict(sites)
      stream = scope.current(self.stream_operands[index].owner)
      stream.reseed(RngState(key, count, by_site))

  def drawn_from(self, advance: Advance) -> dict:
    """Return the caller's streams that the function draws from, by owner."""
    return {
      operand.owner: scope.current(operand.owner)
      for operand, draws in zip(self.stream_operands, advance.draws)
      if isinstance(operand, EnvironmentOperand) and draws
    }

  def streams(self) -> dict:
    """Return the caller's streams, by the number of their environment."""
    return {
      (operand.owner or scope.streams_on()).number: scope.current(operand.owner)
      for operand in self.stream_operands
      if isinstance(operand, EnvironmentOperand)
    }

  def run(
    self, transformed: Callable[[Values], Any], times: Callable[[], int] = lambda: 1
  ):
    """Call a transformed function with the caller's streams as operands.

    The streams advance by its draws; after an exception they are restored.

    Args:
      transformed: `values -> (out, Advance)`; repeated if its trace lacked operands.
      times: returns the number of runs of the function by `transformed`.
    """
    return repeat(lambda: self._run(transformed, times))

  def _run(self, transformed: Callable[[Values], Any], times: Callable[[], int]):
    before = self._positions()
    try:
      with scope.current().lock:
        out, advance = transformed(self.values(times()))
        self.commit(advance)
    except BaseException:
      self._restore(before)
      raise
    if before and advance is not None:
      for operand, draws in zip(self.stream_operands, advance.draws):
        if not (isinstance(operand, GeneratorOperand) and operand in before):
          continue
        # The call drew fewer words than it took: other calls draw more.
        if draws < operand.limit * times():
          generators.go_to(operand.generator, before[operand], draws)
    return out

  def _positions(self) -> dict[GeneratorOperand, tuple]:
    return {
      operand: generators.position(operand.generator, self.__name__)
      for operand in self._generators()
    }

  def _restore(self, positions: dict[GeneratorOperand, tuple]) -> None:
    for operand, position in positions.items():
      generators.go_to(operand.generator, position)

  def try_abstractly(self, transformed: Callable[[Values], Any]):
    """Run a function that only traces: no stream and no generator advances."""

    def attempt():
      before = self._positions()
      try:
        return transformed(self.values())
      finally:
        self._restore(before)

    return repeat(attempt)
