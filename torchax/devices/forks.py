"""Errors for the use of JAX in a process forked after JAX has started.

JAX runs on threads, which a forked child does not have: calls of JAX would hang or
crash. Like torch's own accelerators, the child raises an error. `watch` replaces the
functions that lead to JAX, in the child alone, so the parent pays for no check.
Called by `torchax/__init__.py`.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from torchax.compat import jax_compat
from torchax.errors import ForkError

MESSAGE = (
  "Cannot re-initialize JAX in forked subprocess: this process was forked from one "
  "that had used JAX, whose threads are not here. To use jax tensors in a child, start "
  "it by the 'spawn' method (`torch.multiprocessing.get_context(\"spawn\")`, or "
  'DataLoader\'s `multiprocessing_context="spawn"`). Workers of a DataLoader need no '
  "JAX: let the dataset and `collate_fn` make CPU tensors, and move a batch in the "
  'parent: `batch.to("jax")`.'
)


def _refuse(*args, **kwargs):
  raise ForkError(MESSAGE)


class _Fork:
  """State of JAX at the last fork, and the replacement of functions in the child.

  The state is read before the fork: in the child a lost thread may hold JAX's lock.
  """

  is_bad = False
  _has_started = False

  @classmethod
  def before(cls) -> None:
    cls._has_started = jax_compat.has_started()

  @classmethod
  def in_child(cls, functions: Sequence[tuple[Any, str]]) -> None:
    if cls._has_started:
      cls.is_bad = True
      for owner, name in functions:
        setattr(owner, name, _refuse)


def is_bad() -> bool:
  """Return True in a process that was forked from one that had started JAX."""
  return _Fork.is_bad


def watch(functions: Sequence[tuple[Any, str]]) -> None:
  """Make functions raise ForkError in processes forked after JAX has started.

  Args:
    functions: (owner, name) of each function that leads to JAX.
  """
  in_child = functools.partial(_Fork.in_child, functions)
  os.register_at_fork(before=_Fork.before, after_in_child=in_child)
