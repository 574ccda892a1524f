"""Compiled programs: how many there are, a bound on them, and giving them back.

`jit` is `jax.jit` with a count of what it traces, one for each combination of shapes
and static arguments. Counting happens while JAX traces, so a call of what is compiled
costs nothing. Over the bound those go whose cache nobody has looked into lately, then
those of the functions that have most: of shapes that keep changing, nearly all are of
the past.

Programs of single operations are compiled quickly on the CPU, which is most of what a
new shape costs. `quick_options` says how.
"""

import contextlib
import ctypes
import enum
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax

from torchax.core.bounded_cache import BoundedCache

K = TypeVar("K")
V = TypeVar("V")


class _Policy:
  """Limit on the number of programs, and a call before the first one is traced."""

  limit: Callable[[], int] = staticmethod(lambda: 4096)
  before_first: Callable[[], None] | None = None


def limit(count: Callable[[], int]) -> None:
  """Keep at most `count()` programs."""
  _Policy.limit = staticmethod(count)


def before_first(call: Callable[[], None]) -> None:
  """Run `call()` once, before the first program is traced."""
  _Policy.before_first = staticmethod(call)


class Counted:
  """The programs of one compiled function; they are dropped with it.

  Args:
    name: of the function.
    is_of_user: the user has compiled it. Of functions that have equally many programs,
      operations lose theirs first: these are cheaper to compile again.
  """

  __slots__ = ("name", "is_of_user", "programs", "_jitted", "_tracing", "__weakref__")

  def __init__(self, name: str, is_of_user: bool = False):
    self.name, self.is_of_user = name, is_of_user
    self.programs, self._tracing = 0, 0
    self._jitted: Callable | None = None

  def of(self, jitted):
    """Says which function's programs these are, and gives it back."""
    self._jitted = weakref.ref(jitted)
    weakref.finalize(jitted, self._forget).atexit = False
    return jitted

  def traced(self, function: Callable, *args, **kwargs):
    """Calls the function that JAX traces, and counts one program more."""
    if _Policy.before_first is not None:
      first, _Policy.before_first = _Policy.before_first, None
      first()
    _make_room()
    with _lock:
      self.programs += 1
      _Total.programs += 1
      _all.add(self)
    self._tracing += 1
    try:
      return function(*args, **kwargs)
    except BaseException:
      self._drop_one()
      raise
    finally:
      self._tracing -= 1

  def _drop_one(self) -> None:
    """One that was counted and is none: what JAX traced has raised."""
    with _lock:
      if self.programs:
        self.programs -= 1
        _Total.programs -= 1

  def clear(self) -> None:
    """Drops the programs; one that is being traced is not touched."""
    jitted = None if self._jitted is None else self._jitted()
    clear_cache = getattr(jitted, "clear_cache", None)
    if clear_cache is not None and not self._tracing:
      clear_cache()
      in_traces = getattr(jitted, "in_traces", None)
      if in_traces is not None:
        in_traces.clear_cache()
      self._forget()

  def _forget(self) -> None:
    with _lock:
      _Total.programs -= self.programs
      self.programs = 0
      _all.discard(self)


class _Total:
  """The programs of all functions, so that nobody has to add them up."""

  programs = 0


_lock = threading.RLock()
_all: set[Counted] = set()
_caches: "weakref.WeakSet[ProgramCache]" = weakref.WeakSet()


class ProgramCache(BoundedCache[K, V]):
  """A bounded cache of compiled functions; over the bound of all it drops some too."""

  __slots__ = ("__weakref__",)

  def __init__(self, limit: int):
    super().__init__(limit)
    _caches.add(self)


class Program(Protocol):
  """Compiled function of arrays.

  Attributes:
    in_traces: the same function for calls while JAX transforms a function.
  """

  in_traces: Callable

  def __call__(self, *operands: Any) -> Any: ...


def name_of(function: Callable) -> str:
  """The name of a function, also of a partial one."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, "__name__", type(function).__name__)


class Effort(enum.Enum):
  """What XLA's CPU compiler does for a program."""

  NONE = "none"  # for small arrays of a shape that hardly comes again
  LEAST = "least"  # sums and tangents may differ in the last bit
  SAME_BITS = "same bits"  # but for the order in which sums are added
  FULL = "full"


def jit(
  function: Callable,
  is_of_user: bool = False,
  effort: Effort = Effort.LEAST,
  **options,
):
  """`jax.jit` of a function whose programs are counted.

  Args:
    function: as `jax.jit` takes it.
    is_of_user: see `Counted`; the user's are compiled with full effort.
    effort: for others, by `quick_options`.
    **options: of `jax.jit`.

  Returns:
    The compiled function. Its `in_traces` is the same for calls while JAX transforms
    a function, where a program has no options of its own.
  """
  counted = Counted(name_of(function), is_of_user)

  @functools.wraps(function)
  def traced(*args, **kwargs):
    return counted.traced(function, *args, **kwargs)

  traced.__name__ = counted.name
  own: dict[str, Any] = {}
  if not is_of_user:
    own["compiler_options"] = quick_options(effort)
  jitted = counted.of(jax.jit(traced, **options, **own))
  jitted.in_traces = jax.jit(traced, **options)
  return jitted


# Of XLA's CPU compiler. Its newer emitters and LLVM's levels above 1 take two to six
# times as long for the program of one operation, which runs no faster for it
# (benchmarks/compiling.py) and gives the same bits, but for tangents and the order in
# which a sum is added; so few kernels are best compiled together.
_QUICK = {
  "xla_cpu_use_fusion_emitters": False,
  "xla_backend_optimization_level": 1,
  "xla_cpu_parallel_codegen_split_count": 1,
}


_LEVEL = "xla_backend_optimization_level"
# The older ones have another tangent, so that Cauchy numbers would not be those of a
# compiled function.
_NOT_THE_SAME_BITS = "xla_cpu_use_fusion_emitters"


@functools.cache
def quick_options(effort: Effort = Effort.LEAST) -> dict | None:
  """Compiler options for programs that are small; starts JAX.

  Args:
    effort: what the programs are for.

  Returns:
    Those of XLA's CPU options that this version knows; None on other platforms.
  """
  if jax.default_backend() != "cpu" or effort is Effort.FULL:
    return None
  known = {name: value for name, value in _QUICK.items() if _is_known(name, value)}
  if effort is Effort.SAME_BITS:
    known.pop(_NOT_THE_SAME_BITS, None)
  if effort is Effort.NONE and _LEVEL in known:
    known[_LEVEL] = 0
  return known or None


def _is_known(name: str, value) -> bool:
  try:
    jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return False
  return True


def count() -> int:
  """How many programs there are: combinations of shapes that were traced."""
  return _Total.programs


def _make_room() -> None:
  """Drops programs where one more would be over the bound."""
  most = _Policy.limit()
  if count() < most:
    return
  for cache in list(_caches):
    cache.age()
  gc.collect()  # compiled functions and what they compile know each other
  with _lock:
    found = sorted(_all, key=lambda counted: (-counted.programs, counted.is_of_user))
  # Half of them, so that the search is rare.
  for counted in found:
    if count() <= most // 2:
      break
    counted.clear()


def clear() -> None:
  """Drops all programs, JAX's own among them, and gives their memory back."""
  for cache in list(_caches):
    cache.clear()
  gc.collect()
  with _lock:
    found = list(_all)
  for counted in found:
    counted.clear()
  jax.clear_caches()
  gc.collect()
  _trim()


def _trim() -> None:
  """Has glibc return what is free; elsewhere the allocator does as it likes."""
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)
