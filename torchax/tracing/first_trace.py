"""First trace of a function, completed instead of repeated when it lacks operands.

Only the trace finds which tensors and numbers a function reads, such as the state that
an optimizer creates in its first step. In a first trace each of them gets a stand-in, a
tracer of the trace in progress. The function is recorded as a jaxpr around these. JAX's
own trace is then repeated with all operands, and gets the equations of the jaxpr. So
Python runs the function once.

`trace.py` uses it for `jax_jit`. A random stream that the trace has met still needs a
second trace.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax

from torchax.compat import jax_compat
from torchax.tracing.specialization import Specialization


@dataclasses.dataclass(frozen=True)
class Operands:
  """Operands of a trace.

  Attributes:
    named: arrays by name: a position, a captured `Storage`, or an expression.
    call: static part of the call, except for what depends on captured tensors.
  """

  named: dict[Hashable, Any]
  call: tuple

  @classmethod
  def of(
    cls, rng, args: tuple, captured: dict, specialization: Specialization
  ) -> "Operands":
    """Build operands.

    Args:
      rng: operands for the random streams.
      args: arguments of the function, a tree of arrays and static values.
      captured: arrays of storages and expressions.
      specialization: static part of the call.
    """
    leaves, treedef = jax.tree.flatten((rng, args))
    flags = (specialization.wants_grad or ())[: len(jax.tree.leaves(args))]
    call = dataclasses.replace(
      specialization,
      captures=None,
      has_grad=(),
      wants_grad=flags if any(flags) else None,
    )
    key = specialization.captures
    edition = 0 if key is None else key.edition
    named = {**dict(enumerate(leaves)), **captured}
    return cls(named, (treedef, call.interned(), edition))


class FirstTrace:
  """Recorded first trace.

  Args:
    run: callback that traces the function, given a callback `(value, name) -> tracer`
      that makes stand-ins; returns a tree of arrays.
    operands: operands of the trace.
    trace: JAX's trace in progress.
  """

  def __init__(self, run: Callable[[Callable], Any], operands: Operands, trace):
    self._call = operands.call
    named = dict(operands.named)

    def stand_in(value, name: Hashable):
      named[name] = jax_compat.stand_in(value, trace)
      return named[name]

    def record():
      leaves, self._treedef = jax.tree.flatten(run(stand_in))
      return leaves

    closed = jax.make_jaxpr(record)()
    names = {id(array): name for name, array in named.items()}
    self._jaxpr = jax_compat.without_constants(closed)
    # Name of each operand of the jaxpr, or the constant in its place.
    self._names = [names.get(id(value), _NO_NAME) for value in closed.consts]
    self._constants = [
      value if name is _NO_NAME else None
      for name, value in zip(self._names, closed.consts)
    ]

  def applies_to(self, operands: Operands) -> bool:
    """Return True if a trace with these operands would be the same."""
    return (
      self._call == operands.call
      and operands.named.keys() >= set(self._names) - {_NO_NAME}
      and not any(isinstance(each, jax.core.Tracer) for each in self._constants)
    )

  def replay(self, operands: Operands):
    """Return the result for these operands, in the trace in progress."""
    values = [
      constant if name is _NO_NAME else operands.named[name]
      for name, constant in zip(self._names, self._constants)
    ]
    results = jax_compat.repeat(self._jaxpr, values)
    return jax.tree.unflatten(self._treedef, results)


_NO_NAME = object()
