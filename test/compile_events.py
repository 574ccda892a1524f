"""What JAX compiles, its own small programs included."""

import contextlib
from collections.abc import Iterator

import jax

_open: list[list[str]] = []


def _note(event: str, _seconds: float, **_details) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    for events in _open:
      events.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
  """A list with an entry for each program that is compiled inside the block."""
  events: list[str] = []
  _open.append(events)
  try:
    yield events
  finally:
    _open.remove(events)
