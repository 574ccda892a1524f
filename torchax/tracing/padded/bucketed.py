"""Compiled functions whose programs serve all sizes of a bucket: `Bucketed`.

A call with sizes that were not seen before is traced, which takes a fraction of the
time of compilation. A call in a new bucket is also traced at the padded sizes, and
compiled. Results have the true sizes.
"""

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from torchax.compat import jax_compat
from torchax.core.program_limit import Counted, ProgramCache
from torchax.core.static_values import StaticValue
from torchax.tracing.autograd_bridge import Tape
from torchax.tracing.buckets import PaddedSizes
from torchax.tracing.padded.arrays import crop, pad
from torchax.tracing.padded.backward import PaddedBackward
from torchax.tracing.padded.programs import Program, Programs
from torchax.tracing.static_arguments import convert_static

# Numbers of sizes, and of padded sizes, that one function keeps.
MOST_SIZES, MOST_BUCKETS = 4096, 256
_OPTIONS_OF_PROGRAMS = ("backend", "compiler_options", "device", "inline")


class _Bucket(NamedTuple):
  """Padded trace and its programs.

  Attributes:
    traced: JAX's trace at the padded sizes.
    programs: compiled programs of this trace.
    backward: programs of the backward passes of its tapes.
  """

  traced: jax.stages.Traced
  programs: Programs
  backward: list[PaddedBackward]


class _Entry(NamedTuple):
  """Call of a program for one combination of sizes.

  Attributes:
    program: the compiled program.
    operands: true sizes, and other numbers and constants that depend on them.
    padded: shape of each argument leaf to pad, by its index.
    cropped: true shape of each padded result, by its index.
    treedef: structure of the result.
  """

  program: Program
  operands: dict[str, Any]
  padded: dict[int, tuple[int, ...]]
  cropped: dict[int, tuple[int, ...]]
  treedef: Any

  def __call__(self, leaves: list) -> Any:
    leaves = self.pad(leaves)
    results = list(self.program.jitted(self.operands, *leaves))
    for index, shape in self.cropped.items():
      results[index] = crop(results[index], shape)
    return jax.tree.unflatten(self.treedef, results)

  def pad(self, leaves: list) -> list:
    """Return the leaves with padded arrays."""
    leaves = list(leaves)
    for index, shape in self.padded.items():
      leaves[index] = pad(leaves[index], shape)
    return leaves


class Bucketed:
  """Compiled function of arrays whose sizes fall into buckets, in place of `jax.jit`.

  Args:
    function: pure function of arrays.
    on_program: called in the trace of each bucket with the function's arguments, or
      None.
    sizes: padded sizes of the arguments.
    counted: counter of programs.
    options: options of `jax.jit`.
  """

  def __init__(
    self,
    function: Callable,
    on_program: Callable | None,
    sizes: PaddedSizes,
    counted: Counted,
    options: dict[str, Any],
  ):
    self._function, self._on_program = function, on_program
    self._sizes, self._counted = sizes, counted
    self._options = options
    self._in_traces = jax.jit(function, **options)
    self._entries: ProgramCache = ProgramCache(MOST_SIZES)
    self._padded: ProgramCache = ProgramCache(MOST_BUCKETS)
    self._lock = threading.RLock()

  def __call__(self, *args, **kwargs) -> Any:
    leaves, treedef = self._flatten(args, kwargs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
      return self._in_traces(*args, **kwargs)
    return self._entry(leaves, treedef)(leaves)

  def eval_shape(self, *args, **kwargs) -> Any:
    """Return the shapes of the results; see `jax.eval_shape`."""
    return self._in_traces.eval_shape(*args, **kwargs)

  def trace(self, *args, **kwargs) -> jax.stages.Traced:
    """Return the trace at the true sizes."""
    return self._in_traces.trace(*args, **kwargs)

  def lower(self, *args, **kwargs) -> jax.stages.Lowered:
    """Return the lowered program of the bucket."""
    leaves, treedef = self._flatten(args, kwargs)
    entry = self._entry(leaves, treedef)
    return entry.program.jitted.lower(entry.operands, *entry.pad(leaves))

  def clear_cache(self) -> None:
    """Drop the programs."""
    self._entries.clear()
    self._padded.clear()
    in_traces: Any = self._in_traces  # JAX's annotations lack its methods
    in_traces.clear_cache()

  def _flatten(self, args: tuple, kwargs: dict) -> tuple[list, Any]:
    """Return the array leaves, and the structure with the static arguments."""
    return jax.tree.flatten(convert_static(self._options, StaticValue, args, kwargs))

  # Entries --------------------------------------------------------------------------

  def _entry(self, leaves: list, treedef) -> _Entry:
    types = tuple(map(jax.typeof, leaves))
    key = (treedef, types, jax_compat.trace_context())
    entry = self._entries.get(key)
    if entry is None:
      with self._lock:
        entry = self._entries[key] = self._new_entry(leaves, treedef)
    return entry

  def _new_entry(self, leaves: list, treedef) -> _Entry:
    padded, padded_treedef = self._sizes.padded(leaves, treedef)
    traced = None
    if padded or padded_treedef != treedef:
      traced = self._trace(self._function, leaves, treedef)
    leaves = [
      _with_shape(leaf, padded[index]) if index in padded else leaf
      for index, leaf in enumerate(leaves)
    ]
    bucket = self._bucket(leaves, padded_treedef, list(padded.values()))
    jaxpr = None if traced is None else traced.lojax.jaxpr
    program, operands = bucket.programs.find(jaxpr, leaves)
    result = (traced or bucket.traced).out_info
    for tape, backward in zip(_tapes(result), bucket.backward):
      backward.attach(tape)
    outputs, out_treedef = jax.tree.flatten(result)
    whole = jax.tree.leaves(bucket.traced.out_info)
    residuals = _residuals(result)  # a tape keeps them padded
    cropped = {
      index: tuple(out.shape)
      for index, (out, other) in enumerate(zip(outputs, whole))
      if out.shape != other.shape and index not in residuals
    }
    return _Entry(program, operands, padded, cropped, out_treedef)

  def _bucket(self, leaves: list, treedef, padded: list[tuple[int, ...]]) -> _Bucket:
    key = (treedef, tuple(map(jax.typeof, leaves)), jax_compat.trace_context())
    bucket = self._padded.get(key)
    if bucket is None:
      try:
        traced = self._trace(self._recorded, leaves, treedef)
      except Exception as error:
        if padded:
          error.add_note(
            f"The function was traced at the padded sizes {[*map(list, padded)]}, for "
            "which `buckets` asks. Name buckets up to the largest size that it takes."
          )
        raise
      bucket = self._padded[key] = self._new_bucket(traced)
    return bucket

  def _new_bucket(self, traced: jax.stages.Traced) -> _Bucket:
    infos = jax.tree.leaves(traced.args_info)
    donated = [index for index, info in enumerate(infos) if info.donated]
    options = {k: v for k, v in self._options.items() if k in _OPTIONS_OF_PROGRAMS}
    name = self._function.__name__
    programs = Programs(traced.lojax.jaxpr, name, self._counted, donated, options)
    tapes = _tapes(traced.out_info)
    return _Bucket(traced, programs, [*map(PaddedBackward, tapes)])

  def _recorded(self, *args, **kwargs):
    result = self._function(*args, **kwargs)
    if self._on_program is not None:
      self._on_program(*args, **kwargs)
    return result

  def _trace(self, function: Callable, leaves: list, treedef) -> jax.stages.Traced:
    # JAX keeps a trace as long as its function: a new one is dropped after use.
    def traced(*args, **kwargs):
      return function(*args, **kwargs)

    args, kwargs = jax.tree.unflatten(treedef, leaves)
    unbox = operator.attrgetter("value")
    args, kwargs = convert_static(self._options, unbox, args, kwargs)
    return jax.jit(traced, **self._options).trace(*args, **kwargs)


def _with_shape(leaf, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  kind = jax.typeof(leaf)
  return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def _is_tape(value) -> bool:
  return isinstance(value, Tape)


def _tapes(result) -> list[Tape]:
  return list(filter(_is_tape, jax.tree.leaves(result, is_leaf=_is_tape)))


def _residuals(result) -> set[int]:
  """Return the indices of the leaves that are residuals of a tape."""
  found: set[int] = set()
  start = 0
  for value in jax.tree.leaves(result, is_leaf=_is_tape):
    count = len(value.residuals) if _is_tape(value) else 1
    found.update(range(start, start + count) if _is_tape(value) else ())
    start += count
  return found
