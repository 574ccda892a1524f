"""Compiled programs: their number, a limit on it, and their eviction.

`jit` is `jax.jit` with a counter of programs, one per combination of shapes and static
arguments. It counts while JAX traces, so calls of compiled programs cost nothing extra.
Above the limit, entries not used recently are evicted from every `ProgramCache`. Then
the functions with most programs lose theirs: if shapes keep changing, nearly all of
these programs are stale.

On the CPU, compilation is most of the cost of a new shape. `quick_options` makes it
cheaper for programs of single operations.
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

from torchax.compat.user_code import name_of
from torchax.core.bounded_cache import BoundedCache

K = TypeVar("K")
V = TypeVar("V")


class _Policy:
  """Limit on the number of programs, and a callback before the first trace."""

  limit: Callable[[], int] = staticmethod(lambda: 4096)
  before_first: Callable[[], None] | None = None


def limit(count: Callable[[], int]) -> None:
  """Keep at most `count()` programs."""
  _Policy.limit = staticmethod(count)


def before_first(call: Callable[[], None]) -> None:
  """Run `call()` once, before the first program is traced."""
  _Policy.before_first = staticmethod(call)


class Counted:
  """Counter of the programs of one compiled function, which are dropped with it.

  Args:
    name: name of the function.
    is_of_user: the user compiled it. Among functions with equally many programs,
      operations lose theirs first, because they are cheaper to recompile.
  """

  __slots__ = ("name", "is_of_user", "programs", "_jitted", "_tracing", "__weakref__")

  def __init__(self, name: str, is_of_user: bool = False):
    self.name, self.is_of_user = name, is_of_user
    self.programs, self._tracing = 0, 0
    self._jitted: Callable | None = None

  def of(self, jitted):
    """Set the compiled function whose programs are counted; return it."""
    self._jitted = weakref.ref(jitted)
    weakref.finalize(jitted, self._forget).atexit = False
    return jitted

  def trace(self, function: Callable, *args, **kwargs):
    """Call the function under trace and count one more program."""
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
      with _lock:
        if self.programs:
          self.programs -= 1
          _Total.programs -= 1
      raise
    finally:
      self._tracing -= 1

  def clear(self) -> None:
    """Drop the programs, unless one is being traced."""
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
  """Number of programs of all functions."""

  programs = 0


_lock = threading.RLock()
_all: set[Counted] = set()
_caches: "weakref.WeakSet[Any]" = weakref.WeakSet()


class ProgramCache(BoundedCache[K, V]):
  """Bounded cache of compiled functions; it also ages when the global limit is met."""

  __slots__ = ("__weakref__",)

  def __init__(self, limit: int):
    super().__init__(limit)
    register(self)


def register(cache: Any) -> None:
  """Call `cache.age()` when the limit is met, and `cache.clear()` with all others."""
  _caches.add(cache)


class Program(Protocol):
  """Compiled function of arrays.

  Attributes:
    in_traces: the same function, for calls inside a JAX transformation.
  """

  in_traces: Callable

  def __call__(self, *operands: Any) -> Any: ...


class Effort(enum.Enum):
  """Effort of XLA's CPU compiler for a program."""

  NONE = "none"  # for small arrays of a shape that is rarely repeated
  LEAST = "least"  # sums and tangents may differ in the last bit
  REPEATED = "repeated"  # for many equal kernels; sums may differ in the last bit
  SAME_BITS = "same bits"  # except for the order in which sums are added
  FULL = "full"


def jit(
  function: Callable,
  is_of_user: bool = False,
  effort: Effort = Effort.LEAST,
  **options,
):
  """Compile a function with `jax.jit` and count its programs.

  Args:
    function: a function that `jax.jit` accepts.
    is_of_user: see `Counted`; user functions are compiled with full effort.
    effort: compiler effort for other functions; see `quick_options`.
    **options: options of `jax.jit`.

  Returns:
    The compiled function. Its `in_traces` is the same function without compiler
    options, for calls inside a JAX transformation, which does not allow them.
  """
  counted = Counted(name_of(function), is_of_user)

  @functools.wraps(function)
  def traced(*args, **kwargs):
    return counted.trace(function, *args, **kwargs)

  traced.__name__ = counted.name
  own: dict[str, Any] = {}
  if not is_of_user:
    own["compiler_options"] = quick_options(effort)
  jitted = counted.of(jax.jit(traced, **options, **own))
  jitted.in_traces = jax.jit(traced, **options)
  return jitted


_LEVEL = "xla_backend_optimization_level"
_EMITTERS, _PASSES = "xla_cpu_use_fusion_emitters", "xla_disable_hlo_passes"
# Options of XLA's CPU compiler. For the program of one operation, its newer emitters
# and LLVM levels above 1 compile two to six times as long, and the program runs no
# faster (benchmarks/compiling.py). So few kernels are best compiled together. The
# rewriter splits a reduction that no library computes (fewer than 4096 elements, other
# dtypes than floats) into two, which compile two to five times as long as one.
_QUICK = {
  _LEVEL: 1,
  "xla_cpu_parallel_codegen_split_count": 1,
  _EMITTERS: False,
  _PASSES: "tree_reduction_rewriter",
}
# Options left out. The older emitters compute other tangents, as in Cauchy draws, and
# compile equal kernels again. Both options change the order in which sums are added.
_LEFT_OUT = {Effort.REPEATED: (_EMITTERS,), Effort.SAME_BITS: (_EMITTERS, _PASSES)}


@functools.cache
def quick_options(effort: Effort = Effort.LEAST) -> dict | None:
  """Return compiler options for small programs; initialize JAX.

  Args:
    effort: compiler effort.

  Returns:
    The options of XLA's CPU compiler that this version has; None for the defaults,
    and on other platforms.
  """
  if jax.default_backend() != "cpu" or effort is Effort.FULL:
    return None
  chosen = {k: v for k, v in _QUICK.items() if k not in _LEFT_OUT.get(effort, ())}
  options = {name: value for name, value in chosen.items() if _is_known(name, value)}
  if effort is Effort.NONE and _LEVEL in options:
    options[_LEVEL] = 0
  return options or None


def _is_known(name: str, value) -> bool:
  try:
    jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return False
  return True


def count() -> int:
  """Return the number of programs: traced combinations of shapes."""
  return _Total.programs


def _make_room() -> None:
  """Drop programs if one more would exceed the limit."""
  most = _Policy.limit()
  if count() < most:
    return
  for cache in list(_caches):
    cache.age()
  gc.collect()  # compiled functions are in reference cycles
  with _lock:
    ordered = sorted(_all, key=lambda counted: (-counted.programs, counted.is_of_user))
  # Down to half the limit, so that the search is rare.
  for counted in ordered:
    if count() <= most // 2:
      break
    counted.clear()


def clear() -> None:
  """Drop all programs, also JAX's own, and return their memory to the system."""
  for cache in list(_caches):
    cache.clear()
  gc.collect()
  with _lock:
    members = list(_all)
  for counted in members:
    counted.clear()
  jax.clear_caches()
  gc.collect()
  # Return free memory to the system, with glibc.
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)
