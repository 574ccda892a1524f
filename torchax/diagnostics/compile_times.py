"""Time spent compiling, with one warning if it dominates a program's run time.

A listener receives JAX's durations of lowering and compiling each program. It is
registered when torchax first traces a program; calls of compiled programs cost nothing.
`TORCHAX_LOGS=compiles` shows long compilations while they run.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import jax

from torchax import logs

logger = logging.getLogger("torchax.compiles")

# Minimum seconds and programs compiled before the warning.
LEAST_SECONDS = 10.0
LEAST_PROGRAMS = 50
# Seconds after which a compilation is logged.
LONG = 3.0

_TOP = 5
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"

ADVICE = (
  "JAX compiles an operation for each new shape, and a function also for each new "
  "value of an argument that is not a tensor. Compile a whole step with "
  "`torchax.interop.jax_jit` or `torchax.compile`, pad sizes that vary to a few sizes, "
  "and set JAX_COMPILATION_CACHE_DIR and "
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 to keep programs for the next run. "
  "(docs: Performance)"
)


@dataclasses.dataclass
class _Cost:
  """Number of programs with one name, and the seconds spent on them."""

  programs: int = 0
  seconds: float = 0.0


class CompileTimes:
  """Seconds spent compiling since construction; warns once if they are too many.

  Args:
    clock: () -> seconds.

  Attributes:
    seconds: total time of lowering and compiling.
    programs: number of compiled programs.
    has_spoken: True once the warning has been given.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._start = clock()
    self._by_name: dict[str, _Cost] = {}
    self._lock = threading.Lock()
    self.seconds = 0.0
    self.programs = 0
    self.has_spoken = False

  def add(self, name: str, seconds: float, is_program: bool) -> None:
    """Add the time of lowering or compiling a program.

    Args:
      name: name of the compiled function.
      seconds: duration of this step.
      is_program: True for compiling, the last step of a program.
    """
    with self._lock:
      cost = self._by_name.setdefault(name, _Cost())
      cost.seconds += seconds
      cost.programs += is_program
      self.seconds += seconds
      self.programs += is_program
      warns = is_program and not self.has_spoken and self._is_much()
      self.has_spoken |= warns
    if warns:
      logger.warning("%s", self.message())

  def _is_much(self) -> bool:
    return (
      self.seconds >= LEAST_SECONDS
      and self.programs >= LEAST_PROGRAMS
      and self.seconds > (self._clock() - self._start) / 2
    )

  def message(self) -> str:
    """Return the warning: the most expensive functions, and advice."""
    most = sorted(self._by_name.items(), key=lambda item: -item[1].seconds)[:_TOP]
    named = [f"{name} ({s.programs}, {s.seconds:.1f} s)" for name, s in most]
    elapsed = self._clock() - self._start
    return (
      f"torchax has compiled {self.programs} programs in {self.seconds:.0f} of "
      f"{elapsed:.0f} s, most of it for {', '.join(named)}. {ADVICE}"
    )


class _Watch(threading.Thread):
  """Thread that logs a compilation that takes long, while it runs.

  Args:
    name: name of the function.
  """

  def __init__(self, name: str):
    super().__init__(name=f"torchax compiles {name}", daemon=True)
    self._function = name
    self._start = time.perf_counter()
    self._end = threading.Event()

  def run(self) -> None:
    """Log once after `LONG` seconds; a program that is only lowered never ends."""
    if not self._end.wait(LONG):
      logger.info("%s: lowered %.0f s ago, not compiled yet", self._function, LONG)

  def end(self) -> None:
    """Mark the compilation as finished; log its duration if it was long."""
    self._end.set()
    taken = time.perf_counter() - self._start
    if taken >= LONG:
      logger.info("%s: compiled in %.1f s", self._function, taken)


class _Listener:
  """Listener to JAX's duration events of compilations."""

  def __init__(self):
    self.times = CompileTimes()
    self._watches: dict[int, _Watch] = {}

  def __call__(self, event: str, seconds: float, **details) -> None:
    if event not in (_LOWERED, _COMPILED):
      return
    name = str(details.get("fun_name", "a function"))
    name = name.removeprefix("jit(").removesuffix(")")
    thread = threading.get_ident()
    watch = self._watches.pop(thread, None)
    if watch is not None:
      watch.end()
    if event == _LOWERED and logs.is_enabled("compiles"):
      self._watches[thread] = watch = _Watch(name)
      watch.start()
    self.times.add(name, seconds, event == _COMPILED)


_listeners: list[_Listener] = []
_lock = threading.Lock()


def listen() -> None:
  """Register the listener with JAX; a second call does nothing."""
  with _lock:
    if _listeners:
      return
    _listeners.append(_Listener())
  jax.monitoring.register_event_duration_secs_listener(_listeners[0])
