"""Cache of a lowering's compiled programs, one per static key.

A program is built when its key is new. torch checks the arguments once then; the
program checks other shapes whenever JAX retraces it (`torch_checks.py`). Numbers that
are static in the first call become operands of a program shared by all other calls.
While a shape is new, numpy or a program of many shapes may compute the result
(`new_shapes.py`). `plans.py` calls the programs; they compile `lowering.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import jax
import torch

from torchax.compat import torch_compat
from torchax.core import numpy_fallback
from torchax.core.bounded_cache import BoundedCache
from torchax.core.program_limit import Program, ProgramCache
from torchax.core.static_values import NUMBERS
from torchax.dispatch import compiling, explaining, new_shapes, torch_checks
from torchax.dispatch.lowering import Lowering
from torchax.registry.schema import schema_of

# Most programs of one operation; each takes a few hundred kilobytes.
MOST_PROGRAMS = 512

P = TypeVar("P")


def cache_key(static_key, write=None, sharding=None):
  """Return the key of a program in the cache; see `Plan.run` for the parts."""
  found = static_key if write is None else (write, static_key)
  return found if sharding is None else (sharding, found)


class Programs:
  """Programs of a lowering, by static key, written view and sharding."""

  def __init__(self, lowering: Lowering):
    self._lowering = lowering
    self._operator = lowering.operator
    self._by_key: ProgramCache[tuple, Program] = ProgramCache(MOST_PROGRAMS)
    self._flat_programs: ProgramCache[tuple, Program] = ProgramCache(MOST_PROGRAMS)
    self._number_programs: NumberPrograms[Program] = NumberPrograms()
    # Arguments that torch's check has accepted in traces.
    self._accepted: BoundedCache[tuple, bool] = BoundedCache(MOST_PROGRAMS)
    # Cache key -> program, or None.
    self.get = self._by_key.get

  def __len__(self) -> int:
    return len(self._by_key)

  def build(self, args, kwargs, static_key, write=None, sharding=None) -> Program:
    """Build the program of a new key and cache it.

    Args:
      args, kwargs: torch's arguments.
      static_key, write, sharding: see `Plan.run`.
    """
    program = None
    if sharding is None:
      program = self._shared_program(args, kwargs, static_key, write)
    if program is None:
      program = self._compile(args, kwargs, static_key, write, sharding)
    self._by_key[cache_key(static_key, write, sharding)] = program
    return program

  def evict(self, args, kwargs, static_key, write=None) -> None:
    """Drop the program of a key after a failed trace, which would make it slower."""
    self._by_key.pop(cache_key(static_key, write))
    if self._lowering.prepared is not None:
      _, form = self._lowering.prepared.numbers_of(args, kwargs)
      self._number_programs.pop((write, form))

  def check_once(self, args, kwargs, static_key) -> None:
    """Call `check_with_torch`, once for equal types and numbers."""
    if not self._lowering.is_checked:
      return
    # The static key lacks the numbers that are operands.
    leaves = jax.tree.leaves((args, kwargs))
    numbers = [(type(leaf), leaf) for leaf in leaves if type(leaf) in NUMBERS]
    key = static_key, torch_checks.tensor_types(leaves), tuple(numbers)
    if self._accepted.get(key) is None:
      self.check_with_torch(args, kwargs)
      self._accepted[key] = True

  def check_with_torch(self, args, kwargs) -> None:
    """Raise torch's error for arguments that torch refuses on every device."""
    lowering = self._lowering
    given = (lowering.op, args, kwargs)
    if lowering.is_checked and torch_checks.refusal(*given) is not None:
      lowering.require_real(args, kwargs or {})
      if self._operator.checks.check is None:  # a check tests the dtypes itself
        explaining.require_label_dtypes(*given, self._operator)
      torch_checks.raise_as_torch(*given)

  def _compile(self, args, kwargs, static_key, write=None, sharding=None) -> Program:
    lowering = self._lowering
    example = None
    if lowering.is_checked:
      if not torch_checks.is_unchecked(self):
        self.check_with_torch(args, kwargs)
      example = torch_checks.Example(self, lowering.op, args, kwargs)
    function = lowering.program(static_key, write, example)
    repeats = _repeats_shapes(lowering.op, args)
    program = compiling.jit_if_possible(function, self._operator, sharding, repeats)
    if sharding is not None:
      return program
    given = program, lowering, static_key, write
    flat = functools.partial(self._flat_program, example)
    return new_shapes.with_warmup(*given, flat)

  def _flat_program(self, example, static_key) -> Program:
    """Return the program of a flat array, which many shapes share."""
    program = self._flat_programs.get(static_key)
    if program is None:
      function = self._lowering.program(static_key, None, example)
      program = compiling.jit_if_possible(function, self._operator)
      self._flat_programs[static_key] = program
    return program

  def _shared_program(self, args, kwargs, static_key, write) -> Program | None:
    """Return the shared program, with the numbers of this call filled in.

    None for the first numbers of a form, and if the operation has no such numbers.
    """
    prepared = self._lowering.prepared
    if prepared is None:
      return None
    pairs, form = prepared.numbers_of(args, kwargs)
    if not pairs:
      return None
    make = lambda: self._compile(args, kwargs, form, write)  # noqa: E731
    program = self._number_programs.get((write, form), make)
    if program is None:
      return None
    # The operands start with the key and count of a draw, and the base of a write.
    offset = 2 * self._lowering.is_sampler + (write is not None)
    # Inside a trace Python numbers are used: an array would be read back.
    arrays = [(offset + index, array) for index, array, _ in pairs]
    numbers = [(offset + index, number) for index, _, number in pairs]
    require = self._shape_check(static_key, offset)
    with_numbers: Any = _with_numbers(program, arrays, require)
    with_numbers.in_traces = _with_numbers(program.in_traces, numbers, require)
    return with_numbers

  def _shape_check(self, static_key, offset: int) -> Callable | None:
    """Return a check of the operands' shapes against the numbers of a key, or None."""
    shape_check = self._operator.checks.shape_check
    if shape_check is None:
      return None
    known = set()

    def check(*operands):
      args, kwargs = self._lowering.flattener.rebuild(static_key, operands)
      shape_check(*args, **kwargs)

    def require(operands) -> None:
      shapes = tuple(map(numpy_fallback.shape_of, operands))
      if shapes not in known:
        jax.eval_shape(check, *operands[offset:])
        known.add(shapes)

    return require


def _repeats_shapes(op, args) -> bool:
  """Return True for an operation on lists with four tensors of a shape on average."""
  if not isinstance(op, torch_compat.OpOverload) or not schema_of(op).returns_lists:
    return False
  rows = next((arg for arg in args if isinstance(arg, list | tuple)), ())
  shapes = [row.shape for row in rows if isinstance(row, torch.Tensor)]
  return 0 < 4 * len(set(shapes)) <= len(shapes)


class NumberPrograms(Generic[P]):
  """Cache of programs whose numbers are operands, one per form.

  A form is a key without its numbers. The first numbers of a form are compiled in as
  constants, which makes a call cheapest. All others share one program, as operands.
  """

  def __init__(self):
    # False if only the first numbers of a form were seen.
    self._by_form: ProgramCache[tuple, P | Literal[False]] = ProgramCache(MOST_PROGRAMS)

  def get(self, form, make: Callable[[], P]) -> P | None:
    """Return the program of a form, built by `make()`; None for its first numbers."""
    found = self._by_form.get(form)
    if found is None:
      self._by_form[form] = False
      return None
    if found is False:
      found = self._by_form[form] = make()
    return found

  def pop(self, form) -> None:
    self._by_form.pop(form)


def _with_numbers(program: Callable, numbers, require: Callable | None) -> Callable:
  """Return a program with its numbers inserted among the operands.

  Args:
    program: takes all operands.
    numbers: (index among the operands, number), by ascending index.
    require: raises for the other operands; None without a check.
  """

  def filled(*operands):
    if require is not None:
      require(operands)
    given = list(operands)
    for index, number in numbers:
      given.insert(index, number)
    return program(*given)

  return filled
