"""Recorder of operations for the fused mode of `deferred.py`.

`Recorder.call` stands between an operation and its compiled program. It walks a tree of
the sequences seen so far. An operation in a sequence that repeats often is recorded:
its results are `Pending`, with a shape and a dtype. Any other operation runs at once,
and extends the tree if it is new. A segment of operations ends when a value of it is
read, or when an operation starts a known sequence again. Then the recorded operations
run as one compiled program. If the sequence has changed, they run one after the other.
So nothing is compiled that has not repeated.
"""

import concurrent.futures
import gc
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from torchax import logs
from torchax.compat import jax_compat, user_code
from torchax.core import program_limit

# Most operations of a segment, and of the tree of a thread.
_LONGEST, _MOST_STEPS = 8192, 65536
# Operations that may be compiled: so many at first, and one for each `_PRICE` that ran
# one by one. XLA takes as long for an operation as some hundred calls of it, and for a
# program as long as for `_PROGRAM` operations more.
_ALLOWANCE, _PRICE, _PROGRAM = 2048, 256, 64
# Most programs of segments with the same operations and other results.
_MOST_PROGRAMS = 8
# A segment is this long before an operation that starts a known sequence ends it.
_SHORTEST = 16
# After so many more new operations than known ones the recorder pauses, so that a
# program that never repeats is not slowed down; first for twice as many.
_PATIENCE, _LONGEST_PAUSE = 2048, 65536

# Errors of tracing, compiling and running a program.
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError)

_ArrayImpl = jax_compat.ArrayImpl
_NUMBERS = frozenset({int, float, bool, complex})
PLAIN = frozenset({_ArrayImpl, *_NUMBERS})
"""Types of operands that are no `Pending` and contain none."""
_flatten, _unflatten = jax.tree.flatten, jax.tree.unflatten
_logger = logging.getLogger("torchax.eager")


class Pending:
  """Result of an operation, which may not have run.

  Attributes:
    segment: its segment.
    index: position among the results of the segment.
    value: the array; None while the operation has not run.
    shape, dtype: those of the array.
  """

  __slots__ = ("segment", "index", "value", "shape", "dtype")

  def __init__(self, segment: "_Segment", index: int, shape, dtype, value: Any = None):
    self.segment, self.index, self.value = segment, index, value
    self.shape, self.dtype = shape, dtype

  def read(self) -> jax.Array:
    """Return the array; end the segment.

    Raises:
      RuntimeError: an operation of the segment has failed.
    """
    if self.segment.is_open:
      self.segment.recorder.end()
    if self.value is None and self.segment.is_open:
      # A destructor reads it while the recorder is at work.
      return self.segment.run([self.index])[self.index]
    if self.value is None:
      raise RuntimeError(
        f"A tensor of shape {list(self.shape)} has no values, because an operation "
        "that was deferred with its own has failed. Compute it again."
      )
    return self.value


ARRAYS = frozenset({_ArrayImpl, Pending})
"""Types that an operation returns for an array."""

_LEAVES = PLAIN | ARRAYS

# Reference count of an item that only its list refers to.
_items = [object()]
_UNUSED = sys.getrefcount(_items[0])


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
    recorder: its recorder.
    state: step of the last operation.
    path: steps of all operations.
    inputs: arrays and numbers that are no results of the segment.
    positions: index of an input by its id.
    results: the results whose operations have not run; None for the others.
    has_run: its operations have run, because its sequence is new or not frequent.
    is_open: it has not ended.
  """

  def __init__(self, recorder: "Recorder", root: _Step):
    self.recorder = recorder
    self.state = root
    self.path: list[_Step] = []
    self.inputs: list[Any] = []
    self.positions: dict[int, int] = {}
    self.results: list[Pending | None] = []
    self.has_run = False
    self.is_open = True

  @property
  def cost(self) -> int:
    """Cost of compiling it, in operations."""
    return _PROGRAM + len(self.path)

  def in_use(self) -> list[Pending]:
    """Return the results that something else refers to, and that have no values."""
    results = self.results
    indices = range(len(results))
    used = [n for n in indices if sys.getrefcount(results[n]) > _UNUSED]
    return [result for n in used if (result := results[n]) is not None]

  def run(self, wanted: Iterable[int]) -> dict[int, jax.Array]:
    """Run the operations one after the other; return the wanted results by index.

    Other results are dropped after their last use.
    """
    left = set(wanted)
    last = dict.fromkeys(left, math.inf)
    for number, step in enumerate(self.path):
      last.update({r: number for r in step.references if r not in left})
    results: dict[int, Any] = {}
    count = 0
    for number, step in enumerate(self.path):
      if not left:
        break
      leaves = [self.inputs[~r] if r < 0 else results[r] for r in step.references]
      arrays = _flatten(_call(step.program, step.operands, leaves))[0]
      results.update(zip(itertools.count(count), arrays))
      count += len(arrays)
      left.difference_update(range(count))
      for reference in step.references:
        if reference >= 0 and last[reference] == number:
          results.pop(reference, None)
    return results

  def close(self) -> None:
    """End the segment, and drop its references to arrays."""
    self.is_open = False
    self.path, self.inputs, self.positions, self.results = [], [], {}, []


class Recorder:
  """Recorder of the operations of one thread."""

  def __init__(self):
    self._lock = threading.RLock()
    # Threads at work here: operations of destructors and lowerings are not recorded.
    self._inside: set[int] = set()
    # Recorded operations are traced and run in this context of JAX, on these devices.
    self._context: tuple = ()
    self._devices: set = set()
    self._others: set = set()  # contexts of blocks, such as a default device
    # New operations over known ones, operations left of a pause, and of the next one.
    self._new, self._paused, self._next_pause = 0, 0, 2 * _PATIENCE
    self._forget()
    program_limit.register(self)

  def clear(self) -> None:
    """End the segment and forget all sequences, unless the recorder is at work."""
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
    self._budget: float = _ALLOWANCE  # operations that may be compiled now
    self._segment = _Segment(self, self._root)

  def call(self, program, operands: Sequence):
    """Record a call of a program; run it if the sequence is new.

    Args:
      program: compiled function, a `program_limit.Program`.
      operands: its operands, a pytree whose leaves may be `Pending`.

    Returns:
      The program's pytree, with `Pending` for its arrays.
    """
    thread = threading.get_ident()
    if self._paused > 0 or thread in self._inside:
      self._paused = max(self._paused - 1, 0)
      return program(*read_values(operands))
    leaves, tree = list(operands), None
    if not _LEAVES.issuperset(map(type, leaves)):
      leaves, tree = _flatten(operands)
    for position, leaf in enumerate(leaves):
      if type(leaf) is Pending and leaf.segment.recorder is not self:
        leaves[position] = leaf.read()
    with self._lock:
      self._inside.add(thread)
      try:
        return self._record(program, tree, leaves)
      finally:
        self._inside.discard(thread)

  def _record(self, program, tree, leaves: list):
    found = self._refer(leaves) if self._may_record() else None
    if found is None:
      if Pending in map(type, leaves):
        self._end()
      return _call(program, tree, list(map(_read, leaves)))
    references, kinds, inputs = found
    key = (self._segment.state, program, tree, *references, *kinds)
    step = self._tree.get(key)
    if step is None and self._restarts(program, tree, leaves):
      self._end()
      return self._record(program, tree, leaves)
    self._new = self._new + 1 if step is None else max(self._new - 1, 0)
    segment = self._segment
    if step is None or segment.has_run or not step.is_frequent:
      return self._run(step, key, leaves, references, inputs)
    index = len(segment.results)
    results = [
      Pending(segment, index + offset, *result)
      for offset, result in enumerate(step.results)
    ]
    segment.results += results
    return self._advance(step, inputs, results)

  def _may_record(self) -> bool:
    """Return True in the context of JAX that segments run in."""
    context = jax_compat.trace_context()
    if context == self._context:
      return True
    if context not in self._others:
      usual = self._in_new_thread(jax_compat.trace_context)
      if context == usual:  # at first, and after a change of `jax.config`
        self._end()
        self._forget()
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
        if leaf.segment.is_open:
          references.append(leaf.index)
          continue
        leaf = leaves[place] = leaf.read()
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
    if len(segment.path) >= _LONGEST:
      self._end()
    return results[0] if step.structure is None else _unflatten(step.structure, results)

  def _run(self, step: _Step | None, key: tuple, leaves, references, inputs):
    """Run an operation at once; if it is new here (`step` is None), extend the tree."""
    _, program, tree, *_ = key
    segment = self._segment
    if not segment.has_run:
      self._run_recorded()
    out = _call(program, tree, [*map(_known, leaves)])
    is_single = type(out) is _ArrayImpl
    arrays, structure = ([out], None) if is_single else _flatten(out)
    if not is_single and not all(type(array) is _ArrayImpl for array in arrays):
      self._end()
      return out
    if step is None:
      kinds = tuple([(array.shape, array.dtype) for array in arrays])
      step = self._tree[key] = _Step(program, tree, references, kinds, structure)
    index = len(segment.results)
    results = [
      Pending(segment, index + offset, array.shape, array.dtype, array)
      for offset, array in enumerate(arrays)
    ]
    segment.results += [None] * len(results)
    found = self._advance(step, inputs, results)
    if len(self._tree) >= _MOST_STEPS:
      self._end()
      self._forget()
    return found

  def _run_recorded(self) -> None:
    """Run the operations of the segment one after the other.

    If one fails, the segment is dropped: its results have no values then.
    """
    segment = self._segment
    used = segment.in_use()
    try:
      arrays = segment.run([result.index for result in used])
    except Exception:
      self._new_segment()
      raise
    for result in used:
      result.value = arrays[result.index]
    segment.results = [None] * len(segment.results)
    segment.has_run = True

  def _new_segment(self) -> None:
    before, self._segment = self._segment, _Segment(self, self._root)
    before.close()

  def end(self) -> None:
    """End the segment: its results have values then."""
    thread = threading.get_ident()
    if thread in self._inside:
      return
    with self._lock:
      self._inside.add(thread)
      try:
        self._end()
      finally:
        self._inside.discard(thread)

  def _end(self) -> None:
    if not self._segment.path:
      return
    with jax_compat.outside_of_traces():
      if self._segment.has_run or jax_compat.trace_context() == self._context:
        self._end_here()
      else:
        self._in_new_thread(self._end_here)

  def _end_here(self) -> None:
    segment = self._segment
    state, path = segment.state, segment.path
    is_frequent, count = self._is_frequent(segment), None
    if is_frequent and not segment.has_run:
      try:
        count = self._run_compiled()
      except _FAILURES as error:
        _logger.warning(
          "%d operations run one by one, because their program fails: %s",
          *(len(path), error),
        )
        for step in path:
          step.is_frequent = False
        state.programs.clear()
        state.ends, is_frequent = -math.inf, False  # never frequent
    if count is None and not segment.has_run:
      self._run_recorded()
    if segment.has_run and is_frequent and not state.is_frequent:
      for step in path:
        step.is_frequent = True
    self._ended += not is_frequent
    self._budget += len(path) / _PRICE if segment.has_run else 0
    state.ends, state.last = state.ends + 1, self._ended
    if logs.is_enabled("eager"):
      how = f"as one program, with {count} results in use"
      how = "one by one" if count is None else how
      file, line = user_code.line() or ("?", 0)
      _logger.info("%d operations ran %s, read at %s:%d", len(path), how, file, line)
    self._new_segment()
    if self._new >= _PATIENCE:
      self._new, self._paused = 0, self._next_pause
      self._next_pause = min(4 * self._next_pause, _LONGEST_PAUSE)

  def _is_frequent(self, segment: _Segment) -> bool:
    """Return True for a segment that is worth a program.

    It ends often, beside those since its last end, and is not too long to compile now.

    A training loop has few different segments: each is frequent the second time, and
    deferred and compiled the third time. Text generation has some for each length, and
    compiling all takes minutes.
    """
    state = segment.state
    is_often = state.ends * 4 > self._ended - state.last
    return bool(state.programs) or (is_often and segment.cost <= self._budget)

  def _run_compiled(self) -> int | None:
    """Run the segment as one program; return the number of its results in use.

    Return None if there is no program and the budget is too small for one.
    """
    segment = self._segment
    programs = segment.state.programs
    if _program_for(programs, segment.in_use()) is None:
      gc.collect()  # results in reference cycles are not in use
    used = segment.in_use()
    if not used:
      return 0
    found = _program_for(programs, used)
    if found is None:
      if segment.cost > self._budget:
        return None
      if len(programs) >= _MOST_PROGRAMS:
        programs.clear()
      indices = frozenset([result.index for result in used])
      program = _compile(segment.path, sorted(indices))
      self._budget -= segment.cost
      found = indices, programs.setdefault(indices, program)
    indices, program = found
    arrays = dict(zip(sorted(indices), program(*segment.inputs)))
    for result in used:
      result.value = arrays[result.index]
    return len(used)

  def _in_new_thread(self, function: Callable) -> Any:
    """Return `function()`, run outside of the contexts of this thread."""

    def run():
      thread = threading.get_ident()
      self._inside.add(thread)
      try:
        return function()
      finally:
        self._inside.discard(thread)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      return pool.submit(run).result()


def _call(program, tree, leaves: list):
  return program(*leaves) if tree is None else program(*_unflatten(tree, leaves))


def _read(leaf):
  return leaf.read() if type(leaf) is Pending else leaf


def read_values(tree):
  """Return a tree with arrays for its `Pending` leaves."""
  leaves, structure = _flatten(tree)
  return _unflatten(structure, list(map(_read, leaves)))


def _known(leaf):
  return leaf.value if type(leaf) is Pending else leaf


def _program_for(programs: dict, used: list) -> tuple[frozenset, Callable] | None:
  """Return a program that returns at least these results, and their indices."""
  wanted = frozenset([result.index for result in used])
  if wanted in programs:
    return wanted, programs[wanted]
  return next((item for item in programs.items() if wanted <= item[0]), None)


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
