"""What a process does that was forked from one that had started JAX.

JAX runs on threads, and a child has those of its parent no more: what it asks of JAX
would wait for ever, or end it. As torch's own accelerators do, the child refuses: the
functions by which anything of torchax comes to JAX are replaced by ones that raise.
They are replaced in the child alone, so nobody asks about forks on the way to JAX.
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
  """Whether JAX had started before this process was forked; its functions then raise.

  JAX is asked before the fork: in the child, a thread that is gone may hold its lock.
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
  """True in a process that was forked from one that had started JAX."""
  return _Fork.is_bad


def watch(functions: Sequence[tuple[Any, str]]) -> None:
  """Have functions raise ForkError in processes that are forked after JAX has started.

  Args:
    functions: (owner, name) of each function that leads to JAX.
  """
  in_child = functools.partial(_Fork.in_child, functions)
  os.register_at_fork(before=_Fork.before, after_in_child=in_child)
