"""`torch.jit`: generators in scripts; operations above and below the key of `trace`."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from torchax.compat import private

_TORCHSCRIPT = "torch.jit.trace"
is_tracing_for_torchscript = private.find(
  "torch._C._is_tracing", _TORCHSCRIPT, instead=torch.jit.is_tracing
)
_trace_state = private.find("torch._C._get_tracing_state", _TORCHSCRIPT)
_set_trace_state = private.find("torch._C._set_tracing_state", _TORCHSCRIPT)
_parse_key = private.find("torch._C._dispatch_key_parse", _TORCHSCRIPT)
_exclude_key = private.find("torch._C._SetExcludeDispatchKeyGuard", _TORCHSCRIPT)

_register_builtin = private.find(
  "torch.jit._builtins._register_builtin",
  "torch.Generator in torch.jit.script",
  instead=None,
)


def compile_as_generator(cls: type) -> None:
  """Make `torch.jit.script` compile calls of `cls` as calls of torch's generator."""
  if _register_builtin is not None:
    _register_builtin(cls, "aten::Generator")


def _with_key() -> contextlib.AbstractContextManager:
  return _exclude_key(_parse_key("Tracer"), False)


def _set_trace(state: Any) -> None:
  with _with_key():  # torch refuses the change below the key
    _set_trace_state(state)


class _Paused(threading.local):
  """State of this thread's trace while operations run below its key; None without."""

  trace: Any = None


_paused = _Paused()


@contextlib.contextmanager
def pause_torchscript() -> Iterator[None]:
  """Pause `torch.jit.trace` while an operation runs below its key.

  In a trace sizes are tensors. torch keeps those that are passed on for its key, which
  would take them for sizes of the next operation.
  """
  _paused.trace = _trace_state()
  _set_trace(None)
  try:
    yield
  finally:
    _set_trace(_paused.trace)
    _paused.trace = None


def is_torchscript_paused() -> bool:
  """Return True inside `pause_torchscript`."""
  return _paused.trace is not None


@contextlib.contextmanager
def record_for_torchscript() -> Iterator[None]:
  """Resume the paused `torch.jit.trace`, and record operations below its key."""
  trace, _paused.trace = _paused.trace, None
  _set_trace(trace)
  try:
    with _with_key():
      yield
  finally:
    _set_trace(None)
    _paused.trace = trace
