"""Reads of views from their base arrays, each in one compiled call.

While the shape of a base is new, numpy reads views that only move elements
(`numpy_fallback.py`). `chains.py` has the steps of a view and its writes.
"""

import functools
from typing import Any

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.core import explicit_axes, numpy_fallback, program_limit
from torchax.core.bounded_cache import BoundedCache
from torchax.core.chains import Chain, MovingChain
from torchax.core.program_limit import Program
from torchax.core.view_steps import ViewInfo


def _read(array, chain):
  return explicit_axes.call(chain.read, (array,), "a view", (_read, chain))


@functools.cache
def _reading() -> Program:
  """Return the compiled function (base array, chain) -> view."""
  return program_limit.jit(_read, static_argnums=1)


# Compiled read of each chain, with numpy as fallback while shapes are new.
_readers: BoundedCache[Chain | MovingChain, Program] = BoundedCache(4096)


def _reader(chain: Chain | MovingChain) -> Program:
  """Return the function (base array or (base, starts)) -> view of a chain.

  It may run in numpy if the steps only move elements.
  """

  def read(operand):
    return _reading()(operand, chain)

  def on_host(operands):
    view = chain.picked(*operands)
    return np.array(view) if numpy_fallback.is_small(view) else None

  program: Any = read
  program.in_traces = lambda operand: _reading().in_traces(operand, chain)
  if any(type(info).picked is ViewInfo.picked for info in chain.infos):
    return program
  return numpy_fallback.with_warmup(program, on_host)


def read_chain(array: jax.Array, chain: Chain) -> jax.Array:
  """Return the view of a base array, in one compiled call."""
  if isinstance(array, jax.core.Tracer):
    return _read(array, chain)
  operand: Any = array
  form: Chain | MovingChain = chain
  if chain.moving is not None:
    form, starts = chain.moving
    operand = (array, starts)
  reader = _readers.get(form)
  if reader is None:
    reader = _readers[form] = _reader(form)
  return (reader if jax_compat.is_top_level() else reader.in_traces)(operand)
