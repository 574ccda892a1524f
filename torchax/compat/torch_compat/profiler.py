"""torch's profiler beside JAX's: labels of `record_function`, and names of operations.

A label is an annotation in JAX's traces, and a named scope of the function being
traced. The steps of optimizers and the batches of a `DataLoader` have such labels.
"""

import contextlib
import functools

import jax
import torch
from torch.profiler import record_function

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat import named_scopes

_LABELS = "labels of torch.profiler.record_function in JAX's traces and programs"

is_profiling = private.find(
  "torch._C._autograd._profiler_enabled",
  "operations on jax in torch.profiler",
  instead=lambda: False,
)


def label_jax_traces() -> None:
  """Make `record_function` label JAX's traces, and the function that is traced."""
  enter, leave = record_function.__enter__, record_function.__exit__

  @functools.wraps(enter)
  def __enter__(self):
    labels = contextlib.ExitStack()
    labels.enter_context(jax.profiler.TraceAnnotation(self.name))
    if named_scopes.is_recording():
      labels.enter_context(named_scopes.entered(self.name))
    # A decorated function that calls itself enters one object several times.
    vars(self).setdefault("_labels_of_jax", []).append(labels)
    return enter(self)

  @functools.wraps(leave)
  def __exit__(self, *exception):
    try:
      return leave(self, *exception)
    finally:
      self._labels_of_jax.pop().close()

  patch(record_function, "__enter__", __enter__, _LABELS)
  patch(record_function, "__exit__", __exit__, _LABELS)


@functools.lru_cache(maxsize=1024)
def _label(name: str) -> str:
  return f"aten::{name}" if hasattr(torch.ops.aten, name) else name


def recorded(name: str) -> contextlib.AbstractContextManager:
  """Return a block that torch's profiler shows, with "aten::" before names of ATen."""
  return record_function(_label(name))
