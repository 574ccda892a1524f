"""Compiled programs of one padded trace: `Programs`.

One program serves all sizes of a bucket, unless numbers that were equal at the first
sizes differ at a later one. Then another program takes the place of the first.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from torchax.core.program_limit import Counted
from torchax.tracing.padded import calls, indexing, positions, rules, windows
from torchax.tracing.padded.graphs import Graph, Values, align
from torchax.tracing.padded.program import Grouping, Size, Trace

# Rules register themselves.
_RULES = (calls, indexing, positions, rules, windows)


class Program(NamedTuple):
  """Compiled program.

  Attributes:
    grouping: numbers that are its operands.
    jitted: `(operands, *leaves) -> leaves of the result`.
    equal: products of dims that have to be equal at all sizes.
  """

  grouping: Grouping
  jitted: Any
  equal: list

  def operands(self, values: Values) -> dict[str, Any] | None:
    """Return the operands for a trace, or None if it needs another program."""
    found = self.grouping.operands(values)
    if found is None:
      return None
    numbers = found["numbers"]

    def size(dim):
      return numbers[dim.group[0]][dim.group[1]] if isinstance(dim, Size) else dim

    def count(dims) -> int:
      return math.prod([int(size(dim)) for dim in dims])

    holds = all(count(old) == count(new) for old, new in self.equal)
    return found if holds else None


class Programs:
  """Programs of one padded trace, and the numbers that select them.

  Args:
    jaxpr: padded trace.
    name: name of the function.
    counted: counter of programs.
    donated: indices of the operands to donate.
    options: options of `jax.jit`.
  """

  def __init__(
    self,
    jaxpr: core.ClosedJaxpr,
    name: str,
    counted: Counted,
    donated: Sequence[int] = (),
    options: dict[str, Any] | None = None,
  ):
    self._template = Graph.of(jaxpr)
    self._name, self._counted = name, counted
    self._options = {"donate_argnums": [n + 1 for n in donated], **(options or {})}
    self._program: Program | None = None
    self._lock = threading.RLock()

  def find(self, jaxpr: core.ClosedJaxpr | None, leaves: Sequence) -> tuple:
    """Return the program for a trace, compiled if needed, and its operands.

    Args:
      jaxpr: trace at the true sizes; None if these are the padded ones.
      leaves: operands of the padded trace, or their shapes.

    Raises:
      BucketError: the traces differ in their operations, or one has no rule.
    """
    # Backward passes of several threads may need a program at the same time.
    with self._lock:
      values = Values.of(self._template)
      if jaxpr is not None:
        template = self._template.copy()
        values, has_added = align(Graph.of(jaxpr), template)
        if has_added:
          self._template, self._program = template, None
      operands = None if self._program is None else self._program.operands(values)
      if operands is None:
        self._program, operands = self._compile(values, leaves)
      return self._program, jax.device_put(operands)

  def _compile(self, values: Values, leaves: Sequence) -> tuple[Program, Any]:
    compared = [] if self._program is None else self._program.grouping.traces[1:]
    grouping = Grouping(self._template, [*compared, values])
    operands = grouping.operands(values)
    equal: list = []

    def padded(operands, *leaves):
      trace = Trace(grouping, operands["numbers"], operands["arrays"])
      results = trace.run(leaves)
      equal[:] = trace.equal
      return results

    def program(operands, *leaves):
      return self._counted.trace(padded, operands, *leaves)

    program.__name__ = self._name
    jitted = jax.jit(program, **self._options)
    jitted.trace(operands, *leaves)  # a call reuses this trace
    return Program(grouping, jitted, equal), operands
