"""Compiled programs of one padded trace: `Programs`.

One program serves all sizes of a bucket, unless numbers that were equal at the first
sizes differ at a later one. Then another program takes the place of the first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from torchax.core.program_limit import Counted
from torchax.errors import BucketError
from torchax.tracing.padded import arrays, calls, indexing, positions, rules, windows
from torchax.tracing.padded.graphs import Graph, Values, align
from torchax.tracing.padded.program import Partition, Size, Trace

# Rules register themselves.
_RULES = (calls, indexing, positions, rules, windows)


class Program(NamedTuple):
  """Compiled program.

  Attributes:
    partition: numbers that are its operands.
    jitted: `(operands, *leaves) -> leaves of the result`.
    equal: products of dims that have to be equal at all sizes.
  """

  partition: Partition
  jitted: Any
  equal: list


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

  def find(self, jaxpr: core.ClosedJaxpr | None, leaves: Sequence) -> tuple:
    """Return the program for a trace, compiled if needed, and its operands.

    Args:
      jaxpr: trace at the true sizes; None if these are the padded ones.
      leaves: operands of the padded trace, or their shapes.

    Raises:
      BucketError: the traces differ in their operations, or one has no rule.
    """
    values = Values.of(self._template)
    if jaxpr is not None:
      template = self._template.copy()
      values, has_added = align(Graph.of(jaxpr), template)
      if has_added:
        self._template, self._program = template, None
    program = self._program
    if program is not None:
      operands = program.partition.operands(values)
      if operands is not None and _holds(program, operands):
        return program, _as_arrays(operands)
    partition = Partition(self._template)
    for each in () if program is None else program.partition.traces[1:]:
      partition.add(each)
    partition.add(values)
    operands = _as_arrays(partition.operands(values))
    self._program = self._compile(partition, operands, leaves)
    return self._program, operands

  def _compile(self, partition: Partition, operands: dict, leaves: Sequence) -> Program:
    equal: list = []

    def padded(operands, *leaves):
      trace = Trace(partition, operands["numbers"], operands["arrays"])
      results = trace.run(leaves)
      equal[:] = trace.equal
      return results

    def program(operands, *leaves):
      return self._counted.trace(padded, operands, *leaves)

    program.__name__ = self._name
    jitted = jax.jit(program, **self._options)
    jitted.trace(operands, *leaves)  # a call reuses this trace
    return Program(partition, jitted, equal)


def _holds(program: Program, operands: dict) -> bool:
  """Return True if the reshapes of a program hold at these sizes."""

  def count(dims) -> int:
    number = 1
    for dim in dims:
      is_size = isinstance(dim, Size)
      number *= operands["numbers"][dim.group[0]][dim.group[1]] if is_size else dim
    return number

  return all(count(old) == count(new) for old, new in program.equal)


def _as_arrays(operands: dict | None) -> dict:
  if operands is None:
    raise BucketError("A trace has other numbers than it had a moment ago.")
  numbers = {
    kind: np.asarray(values, np.int32 if kind == "sizes" else np.dtype(kind))
    for kind, values in operands["numbers"].items()
  }
  return {
    "numbers": {kind: jax.device_put(values) for kind, values in numbers.items()},
    "arrays": [arrays.pad(array, shape) for array, shape in operands["arrays"]],
  }
