"""Modes of eager operations: strict, fused and debug.

In the fused mode `Recorder.call` stands between an operation and its compiled program.
It walks a tree of the sequences seen so far. An operation in a sequence that repeats
often is recorded: its results are `Pending`, with a shape and a dtype. Any other
operation runs at once, and extends the tree if it is new. A segment of operations ends
when a value of it is read, or when an operation starts a known sequence again. Then the
recorded operations run as one compiled program. If the sequence has changed, they run
one after the other. So nothing is compiled that has not repeated.

A tensor whose values are pending has a `Deferred` storage (`storage.py`). Reading its
array ends the segment, so code that does not know of this module gets arrays.
"""

import concurrent.futures
import gc
import itertools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from torchax import logs
from torchax.compat import jax_compat, user_code
from torchax.compat.patches import setting
from torchax.config import EAGER_MODES
from torchax.core import program_limit

VARIABLE = "TORCHAX_EAGER"

# Most operations of a segment, and of the tree of a thread.
_LONGEST, _MOST_STEPS = 8192, 65536
# Most programs of segments with the same operations and other results.
_MOST_PROGRAMS = 8
# A segment is this long before an operation that starts a known sequence ends it.
_SHORTEST = 16
# After so many more new operations than known ones the recorder pauses, so that a
# program that never repeats is not slowed down; first for twice as many.
_PATIENCE, _LONGEST_PAUSE = 2048, 65536

_ArrayImpl = jax_compat.ArrayImpl
_NUMBERS = frozenset({int, float, bool, complex})
_PLAIN = frozenset({_ArrayImpl, *_NUMBERS})
_flatten, _unflatten = jax.tree.flatten, jax.tree.unflatten
_logger = logging.getLogger("torchax.eager")


class _Active(threading.local):
  boundary: Any = None  # a `Boundary`, while a function is traced


active = _Active()


class Pending:
  """Result of an operation in a segment that has not ended.

  Attributes:
    recorder: recorder of its thread.
    index: position among the results of the segment; None when the segment has ended.
    value: the array; None while the operation has not run.
    shape, dtype: those of the array.
  """

  __slots__ = ("recorder", "index", "value", "shape", "dtype", "__weakref__")

  def __init__(self, recorder: Any, index: int, shape, dtype, value: Any = None):
    self.recorder, self.value = recorder, value
    self.index: int | None = index
    self.shape, self.dtype = shape, dtype

  def read(self) -> jax.Array:
    """Return the array; end the segment.

    Raises:
      RuntimeError: an operation of the segment has failed.
    """
    if self.index is not None:
      self.recorder.end()
    if self.value is None:
      raise RuntimeError(
        f"A tensor of shape {list(self.shape)} has no values, because an operation "
        "that was deferred with its own has failed. Compute it again."
      )
    return self.value


ARRAYS = frozenset({_ArrayImpl, Pending})
"""Types that an operation returns for an array."""

_LEAVES = _PLAIN | ARRAYS


class _Step:
  """Operation at the end of a known sequence.

  Args:
    program: compiled program of the operation.
    operands: tree of its operands; None for a flat list.
    references: for each operand, the index of the result that it is, or ~index of the
      input that it is.
    results: shape and dtype of each result.
    structure: tree of the results; None for a single array.

  Attributes:
    is_frequent: it is part of a segment that is compiled, so it is deferred.
    ends: number of segments that have ended here.
    last: number of segments of the recorder that had ended then.
    programs: compiled segments that end here, by the indices of their results.
  """

  def __init__(
    self, program=None, operands=None, references=(), results=(), structure=None
  ):
    self.program, self.operands, self.references = program, operands, references
    self.results, self.structure = results, structure
    self.is_frequent = False
    self.ends: float = 0
    self.last = 0
    self.programs: dict[frozenset, Callable] = {}


class _Segment:
  """Operations since the last segment has ended.

  Attributes:
    state: step of the last operation.
    path: steps of all operations.
    inputs: arrays and numbers that are no results of the segment.
    positions: index of an input by its id.
    results: references to the results that are in use.
    has_run: its operations have run, because its sequence is new or not frequent.
  """

  def __init__(self, root: _Step):
    self.state = root
    self.path: list[_Step] = []
    self.inputs: list[Any] = []
    self.positions: dict[int, int] = {}
    self.results: list[weakref.ref] = []
    self.has_run = False


class Recorder:
  """Recorder of the operations of one thread."""

  def __init__(self):
    self._lock = threading.RLock()
    # Recorded operations are traced and run in this context of JAX, on these devices.
    self._context: tuple = ()
    self._devices: set = set()
    self._others: set = set()  # contexts of blocks, such as a default device
    # A program is called, which may trace code that ends the segment.
    self._is_calling = False
    # New operations over known ones, operations left of a pause, and of the next one.
    self._new, self._paused, self._next_pause = 0, 0, 2 * _PATIENCE
    self._forget()
    program_limit.register(self)

  def clear(self) -> None:
    """End the segment and forget all sequences, unless a program is being called."""
    with self._lock:
      self.end()
      if not self._segment.path:
        self._forget()

  def age(self) -> None:
    """Do nothing: `program_limit` drops programs of segments like all others."""

  def _forget(self) -> None:
    # Steps by the step before, and by program and operands.
    self._root = _Step()
    self._tree: dict[tuple, _Step] = {}
    self._ended = 0  # number of segments that ran one by one
    self._segment = _Segment(self._root)

  def call(self, program, operands: Sequence):
    """Record a call of a program; run it if the sequence is new.

    Args:
      program: compiled function, a `program_limit.Program`.
      operands: its operands, a pytree whose leaves may be `Pending`.

    Returns:
      The program's pytree, with `Pending` for its arrays.
    """
    if self._paused > 0 or self._is_calling:
      self._paused = max(self._paused - 1, 0)
      return run_at_once(program, operands)
    leaves, tree = list(operands), None
    if not _LEAVES.issuperset(map(type, leaves)):
      leaves, tree = _flatten(operands)
    for position, leaf in enumerate(leaves):
      if type(leaf) is Pending and leaf.recorder is not self:
        leaves[position] = leaf.read()
    with self._lock:
      found = self._refer(leaves) if self._may_record() else None
      if found is None:
        return _call(program, tree, list(map(_read, leaves)))
      references, kinds, inputs = found
      key = (self._segment.state, program, tree, *references, *kinds)
      step = self._tree.get(key)
      if step is None and self._restarts(program, tree, leaves):
        self.end()
        return self.call(program, operands)
      self._new = self._new + 1 if step is None else max(self._new - 1, 0)
      if step is None or self._segment.has_run or not step.is_frequent:
        return self._run(step, key, leaves, references, inputs)
      index = len(self._segment.results)
      results = [
        Pending(self, index + offset, *result)
        for offset, result in enumerate(step.results)
      ]
      return self._advance(step, inputs, results)

  def _may_record(self) -> bool:
    """Return True in the context of JAX that segments run in."""
    context = jax_compat.trace_context()
    if context == self._context:
      return True
    if context not in self._others:
      usual = _in_new_thread(jax_compat.trace_context)
      if context == usual:  # at first, and after a change of `jax.config`
        self.clear()
        self._context, self._devices = usual, jax.device_put(0).devices()
        return True
      self._others.add(context)
    return False

  def _refer(self, leaves: list, is_first=False) -> tuple[list, list, list] | None:
    """Return the references of operands, and the kinds and values of new inputs.

    Return None if an operand cannot be recorded. Nothing changes.

    Args:
      leaves: operands; `Pending` of ended segments are replaced by their arrays.
      is_first: the operation is the first one of a segment.
    """
    known = {} if is_first else self._segment.positions
    count = 0 if is_first else len(self._segment.inputs)
    references: list[int] = []
    kinds: list[Any] = []
    inputs: list[Any] = []
    new: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
      if type(leaf) is Pending:
        if leaf.index is not None:
          references.append(leaf.index)
          continue
        leaf = leaves[place] = leaf.value
      position = known.get(id(leaf), new.get(id(leaf)))
      if position is None or type(leaf) in _NUMBERS:
        kind = self._kind(leaf)
        if kind is None:
          return None
        kinds.append(kind)
        position = new[id(leaf)] = count + len(inputs)
        inputs.append(leaf)
      references.append(~position)
    return references, kinds, inputs

  def _kind(self, leaf) -> Any:
    """Return the properties of an input that its program depends on.

    Return None if it cannot be an input.
    """
    cls = type(leaf)
    if cls in _NUMBERS:
      return cls
    if cls is not _ArrayImpl:
      is_array = hasattr(leaf, "dtype") and not isinstance(leaf, jax.core.Tracer)
      return (cls, leaf.shape, leaf.dtype) if is_array else None
    if jax_compat.is_committed(leaf) and leaf.devices() != self._devices:
      return None
    return leaf.aval

  def _restarts(self, program, tree, leaves: list) -> bool:
    """Return True if an operation on inputs alone starts a known sequence."""
    if len(self._segment.path) < _SHORTEST or Pending in map(type, leaves):
      return False
    found = self._refer(leaves, is_first=True)
    if found is None:
      return False
    references, kinds, _ = found
    return (self._root, program, tree, *references, *kinds) in self._tree

  def _advance(self, step: _Step, inputs: list, results: list[Pending]):
    """Append a step to the segment; return its results."""
    segment = self._segment
    segment.state = step
    segment.path.append(step)
    for leaf in inputs:
      segment.positions[id(leaf)] = len(segment.inputs)
      segment.inputs.append(leaf)  # which keeps its id from being reused
    segment.results += map(weakref.ref, results)
    if len(segment.path) >= _LONGEST:
      self.end()
    return results[0] if step.structure is None else _unflatten(step.structure, results)

  def _run(self, step: _Step | None, key: tuple, leaves, references, inputs):
    """Run an operation at once; if it is new here (`step` is None), extend the tree."""
    _, program, tree, *_ = key
    with setting(self, "_is_calling", True):
      if not self._segment.has_run:
        self._run_recorded()
      out = _call(program, tree, [*map(_known, leaves)])
    is_single = type(out) is _ArrayImpl
    arrays, structure = ([out], None) if is_single else _flatten(out)
    if not is_single and not all(type(array) is _ArrayImpl for array in arrays):
      self.end()
      return out
    if step is None:
      kinds = tuple([(array.shape, array.dtype) for array in arrays])
      step = self._tree[key] = _Step(program, tree, references, kinds, structure)
    index = len(self._segment.results)
    results = [
      Pending(self, index + offset, array.shape, array.dtype, array)
      for offset, array in enumerate(arrays)
    ]
    found = self._advance(step, inputs, results)
    if len(self._tree) >= _MOST_STEPS:
      self.clear()
    return found

  def _run_recorded(self) -> None:
    """Run the operations of the segment one after the other.

    If one fails, the segment is dropped: its results have no values then.
    """
    alive = self._alive()
    try:
      arrays = _run_path(
        self._segment.path, self._segment.inputs, {index for _, index in alive}
      )
    except Exception:
      self._segment = _Segment(self._root)
      for pending, _ in alive:
        pending.index = None
      raise
    for pending, index in self._alive():
      pending.value = arrays[index]
    self._segment.has_run = True

  def _alive(self) -> list[tuple[Pending, int]]:
    """Return the results that are still in use, and their indices."""
    pairs = zip([reference() for reference in self._segment.results], itertools.count())
    return [(pending, index) for pending, index in pairs if pending is not None]

  def end(self) -> None:
    """End the segment: its results have values then."""
    with self._lock:
      if not self._segment.path or self._is_calling:
        return
      with setting(self, "_is_calling", True), jax_compat.outside_of_traces():
        if self._segment.has_run or jax_compat.trace_context() == self._context:
          self._end()
        else:
          _in_new_thread(self._end)

  def _end(self) -> None:
    state, path, alive = self._segment.state, self._segment.path, self._alive()
    how, is_frequent = "ran one by one", self._is_frequent(state)
    try:
      if not self._segment.has_run and is_frequent:
        how = "ran as one program"
        alive = self._run_compiled(state, alive) if alive else []
      elif not self._segment.has_run:
        self._run_recorded()
    except Exception as error:
      if not is_frequent:
        raise
      _logger.warning(
        "%d operations run one by one, because their program fails: %s",
        *(len(path), error),
      )
      for step in path:
        step.is_frequent = False
      state.programs.clear()
      state.ends = -math.inf  # never frequent
      return self._end()
    if self._segment.has_run and is_frequent and not state.is_frequent:
      for step in path:
        step.is_frequent = True
    self._ended += not is_frequent
    state.ends, state.last = state.ends + 1, self._ended
    if logs.is_enabled("eager"):
      file, line = user_code.line() or ("?", 0)
      _logger.info(
        "%d operations %s, with %d results in use at %s:%d",
        *(len(path), how, len(alive), file, line),
      )
    self._segment = _Segment(self._root)
    if self._new >= _PATIENCE:
      self._new, self._paused = 0, self._next_pause
      self._next_pause = min(4 * self._next_pause, _LONGEST_PAUSE)
    for pending, _ in alive:
      pending.index = None

  def _is_frequent(self, state: _Step) -> bool:
    """Return True for a segment that ends often, beside those since its last end.

    A training loop has few different segments: each is frequent the second time, and
    deferred and compiled the third time. Text generation has some for each length, and
    compiling all takes minutes.
    """
    return bool(state.programs) or state.ends * 4 > self._ended - state.last

  def _run_compiled(self, state: _Step, alive: list) -> list:
    if _program_for(state, alive) is None:
      gc.collect()  # results in reference cycles are not in use
      alive = self._alive()
    found = _program_for(state, alive)
    if found is None:
      if len(state.programs) >= _MOST_PROGRAMS:
        state.programs.clear()
      indices = frozenset([index for _, index in alive])
      program = _compile(self._segment.path, sorted(indices))
      found = indices, state.programs.setdefault(indices, program)
    indices, program = found
    arrays = dict(zip(sorted(indices), program(*self._segment.inputs)))
    for pending, index in alive:
      pending.value = arrays[index]
    return alive


def _call(program, tree, leaves: list):
  return program(*leaves) if tree is None else program(*_unflatten(tree, leaves))


def _read(leaf):
  return leaf.read() if type(leaf) is Pending else leaf


def _known(leaf):
  return leaf.value if type(leaf) is Pending else leaf


def _run_path(path: list[_Step], inputs: Sequence, wanted: Iterable[int]) -> dict:
  """Run steps one after the other; return the wanted results by index.

  Other results are dropped after their last use.
  """
  last = {index: len(path) for index in wanted}
  for number, step in enumerate(path):
    last.update({r: number for r in step.references if last.get(r) != len(path)})
  results: dict[int, Any] = {}
  count = 0
  for number, step in enumerate(path):
    leaves = [inputs[~r] if r < 0 else results[r] for r in step.references]
    arrays = _flatten(_call(step.program, step.operands, leaves))[0]
    results.update(zip(itertools.count(count), arrays))
    count += len(arrays)
    for reference in step.references:
      if reference >= 0 and last[reference] == number:
        results.pop(reference, None)
  return results


def _program_for(state: _Step, alive: list) -> tuple[frozenset, Callable] | None:
  """Return a program that returns at least these results, and their indices."""
  wanted = frozenset([index for _, index in alive])
  if wanted in state.programs:
    return wanted, state.programs[wanted]
  pairs = state.programs.items()
  return next(((known, run) for known, run in pairs if wanted <= known), None)


def _compile(path: list[_Step], indices: list[int]) -> Callable:
  """Compile steps as one program, `inputs -> results`."""

  def segment(*inputs):
    results: list[Any] = []
    for step in path:
      leaves = [inputs[~r] if r < 0 else results[r] for r in step.references]
      out = _call(step.program.in_traces, step.operands, leaves)
      results += _flatten(out)[0]
    return [results[index] for index in indices]

  options = {"xla_allow_excess_precision": False}
  return program_limit.jit(segment, is_of_user=True, compiler_options=options)


def _in_new_thread(function: Callable) -> Any:
  """Return `function()`, run outside of the contexts of this thread."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(function).result()


class Use:
  """`is_on`: a thread of this process has left the strict mode."""

  is_on = False


class _Thread(threading.local):
  """Mode of a thread; `recorder` is None unless the mode is fused."""

  def __init__(self):
    self.recorder: Recorder | None = None
    self._kept: Recorder | None = None
    self.switch(os.environ.get(VARIABLE) or "strict")

  def switch(self, mode: str) -> None:
    """Change the mode; end the segment.

    Raises:
      ValueError: there is no such mode.
    """
    if mode not in EAGER_MODES:
      words = ", ".join(map(repr, EAGER_MODES))
      raise ValueError(
        f"eager_mode and {VARIABLE} expect one of {words}, but got {mode!r}."
      )
    if self.recorder is not None:
      self.recorder.end()
    self.mode = mode
    Use.is_on = Use.is_on or mode != "strict"
    self._kept = self._kept or (Recorder() if mode == "fused" else None)
    self.recorder = self._kept if mode == "fused" else None


_thread = _Thread()


class eager_mode:
  """Mode of the eager operations of this thread; also a context manager.

  "strict" (the default) runs each operation when it is called. "fused" runs sequences
  of operations that repeat, such as the steps of a training loop, as one compiled
  program; see Performance. "debug" waits for each operation, so that an error of the
  device is raised at its line. The environment variable `TORCHAX_EAGER` sets the mode
  of all threads.

  Args:
    mode: "strict", "fused" or "debug".

  Raises:
    ValueError: there is no such mode.

  >>> x = torch.ones(2, device="jax")
  >>> with torchax.eager_mode("fused"):
  ...   for _ in range(3):
  ...     x = x * 2 + 1
  >>> x
  tensor([15., 15.], device='jax:0')
  """

  def __init__(self, mode: str):
    self._before = _thread.mode
    _thread.switch(mode)

  def __enter__(self) -> "eager_mode":
    return self

  def __exit__(self, *exc: Any) -> None:
    _thread.switch(self._before)


def end() -> None:
  """Run what this thread has deferred."""
  if Use.is_on and _thread.recorder is not None:
    _thread.recorder.end()


def is_recording() -> bool:
  """Return True if operands may be `Pending`: in the fused mode, outside of traces."""
  is_inside = active.boundary is not None or not jax_compat.is_top_level()
  return _thread.recorder is not None and not is_inside


def run(program, operands: Sequence):
  """Call a program in the mode of this thread; see `Recorder.call`."""
  if not Use.is_on:
    return program(*operands)
  recorder = _thread.recorder
  if recorder is None or active.boundary is not None:
    return run_at_once(program, operands)
  return recorder.call(program, operands)


def run_at_once(program, operands: Sequence):
  """Call a program that may not be recorded."""
  if not _PLAIN.issuperset(map(type, operands)):
    operands = values(operands)
  results = program(*operands)
  return jax.block_until_ready(results) if _thread.mode == "debug" else results


def values(tree):
  """Return a tree with arrays for its `Pending` leaves."""
  if not Use.is_on:
    return tree
  leaves, structure = _flatten(tree)
  return _unflatten(structure, list(map(_read, leaves)))
