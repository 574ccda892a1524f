"""What a process does that was forked from one that had started JAX.

JAX runs on threads, and a child has those of its parent no more: what it asks of JAX
would wait for ever, or end it. As torch's own accelerators do, the child refuses: the
functions by which anything of torchax comes to JAX are replaced by ones that raise.
They are replaced in the child alone, so nobody asks about forks on the way to JAX.
"""

import os
from typing import Any, ClassVar

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


class Fork:
  """Whether this process was forked from one that had started JAX.

  Attributes:
    is_bad: it was.
    ways: (owner, name) of the functions that lead to JAX; the composition root says.
  """

  is_bad = False
  ways: ClassVar[tuple[tuple[Any, str], ...]] = ()
  _has_started = False

  @classmethod
  def _before(cls) -> None:
    # Asked here: in the child, JAX's lock may be held by a thread that is not there.
    cls._has_started = jax_compat.has_started()

  @classmethod
  def _in_child(cls) -> None:
    if not cls._has_started:
      return
    cls.is_bad = True
    for owner, name in cls.ways:
      setattr(owner, name, _refuse)

  @classmethod
  def watch(cls) -> None:
    """Watches the forks of this process, once."""
    os.register_at_fork(before=cls._before, after_in_child=cls._in_child)


Fork.watch()
