"""Record of JAX's compilations, including its own small programs."""

import contextlib
from collections.abc import Iterator

import jax

_open: list[list[str]] = []


def _record(event: str, _seconds: float, **_details) -> None:
  if event == "/jax/core/compile/backend_compile_duration":
    for events in _open:
      events.append(event)


jax.monitoring.register_event_duration_secs_listener(_record)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
  """Return a list that gets an entry for each program compiled inside the block."""
  events: list[str] = []
  _open.append(events)
  try:
    yield events
  finally:
    _open.remove(events)
