"""Barriers and equality checks between processes, without a device.

Processes that run different programs hang in collectives that do not match. The
functions here compare short texts through JAX's coordinator beforehand. After a
timeout they raise, naming the processes that did not arrive.
"""

import hashlib
import itertools
import json
import time
from typing import Any

import jax

from torchax.compat import jax_compat
from torchax.core.tracebacks import hide_library_frames
from torchax.errors import ProcessError

SECONDS = 60
"""Default timeout: how long the first process to arrive waits for the last."""

_SHOWN = 200  # characters of a value in messages


_rounds = itertools.count(1)
"""Numbers of comparisons; equal numbers belong together in all processes."""


@hide_library_frames
def barrier(name: str, timeout: float = SECONDS) -> None:
  """Wait until all processes have reached this barrier.

  Args:
    name: name of the barrier, for messages; the same in all processes.
    timeout: in seconds.

  Raises:
    ProcessError: some processes did not arrive, or reached another barrier. Raised in
      every process that arrived.

  >>> barrier("saved")  # a single process does not wait
  """
  if jax.process_count() > 1:
    _compare(f"the barrier {name}", "", "reached", timeout)


@hide_library_frames
def require_equal(
  what: str, value: Any, timeout: float = SECONDS, *, shown: str | None = None
) -> None:
  """Raise in every process if a value differs between processes.

  All processes must call it, in the same order. It compares through JAX's coordinator
  and runs nothing on devices.

  Args:
    what: name of the value in messages, such as "the seed".
    value: a string, a number, or any other JSON value.
    timeout: in seconds, for the last process to arrive.
    shown: text shown in place of the value in messages; by default its beginning.

  Raises:
    ProcessError: the values differ, or a process did not arrive in time.

  >>> require_equal("the seed", 0)  # a single process agrees with itself
  """
  if jax.process_count() > 1:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    shown = repr(text[:_SHOWN]) if shown is None else shown
    _compare(what, text, shown, timeout)


@hide_library_frames
def require_same_program(
  function: Any, *args: Any, timeout: float = SECONDS, **kwargs: Any
) -> None:
  """Raise in every process if a compiled function differs between processes.

  The function is traced and lowered for the arguments, not compiled or run; no state
  advances. Call this once, before the first step.

  Args:
    function: result of `jax_jit`, `torchax.jit` or `jax.jit`.
    *args, **kwargs: arguments of the first call.
    timeout: in seconds, for the last process to arrive.

  Raises:
    ProcessError: a process has another program, or did not arrive.

  >>> require_same_program(jax.jit(lambda x: 2 * x), 1.0)  # a single process
  """
  if jax.process_count() == 1:
    return
  name = getattr(function, "__name__", type(function).__name__)
  text = function.lower(*args, **kwargs).as_text()
  shown = f"{text.count(' = ')} operations, {len(text)} characters"
  _compare(f"the program of `{name}`", text, shown, timeout)


def _compare(what: str, text: str, shown: str, timeout: float) -> None:
  """Raise if the text differs between processes; messages show `shown` instead."""
  client = jax_compat.coordination_client()
  number, rank = next(_rounds), jax.process_index()
  folder = f"torchax/round/{number}/"
  digest = hashlib.sha256(text.encode()).hexdigest()
  value = json.dumps([what, digest, shown])
  client.key_value_set(f"{folder}{rank}", value)
  deadline = time.monotonic() + timeout
  try:
    client.wait_at_barrier(f"torchax/round/{number}", int(timeout * 1000))
  except jax.errors.JaxRuntimeError as error:
    arrived = _values_by_rank(client, folder)
    missing = [r for r in range(jax.process_count()) if r not in arrived]
    if not missing and time.monotonic() < deadline:
      raise
    absent = (_process_names(missing) or "a process").capitalize()
    present = _process_names(sorted(arrived))
    raise ProcessError(
      f"{absent} did not come to {what} within {timeout:g} s, but {present} did. "
      "Either it runs another program (each process has to take the same steps in the "
      "same order), or it has died, or it is slower: then pass a longer timeout."
    ) from error
  _require_one(_values_by_rank(client, folder))
  if number > 1:
    # All processes have left the previous round, so its values can be deleted.
    client.key_value_delete(f"torchax/round/{number - 1}/{rank}")


def _values_by_rank(client, folder: str) -> dict[int, list[str]]:
  """Return the values of a round by rank."""
  entries = client.key_value_dir_get(folder)
  return {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}


def _process_names(ranks: list[int]) -> str:
  if not ranks:
    return ""
  name = "process" if len(ranks) == 1 else "processes"
  return f"{name} {', '.join(map(str, ranks))}"


def _require_one(values: dict[int, list[str]]) -> None:
  """Raise unless all ranks have the same name and digest."""
  groups: dict[tuple[str, ...], list[int]] = {}
  for rank, value in sorted(values.items()):
    groups.setdefault(tuple(value[:2]), []).append(rank)
  if len(groups) == 1:
    return
  lines = [
    f"  {_process_names(ranks)}: {values[ranks[0]][0]}: {values[ranks[0]][2]}"
    for ranks in groups.values()
  ]
  raise ProcessError(
    "The processes do not agree:\n"
    + "\n".join(lines)
    + "\nEach process has to run the same program with the same seed; only the data "
    "that it reads may be its own."
  )
