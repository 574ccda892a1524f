"""Refusal of draws from Python's and numpy's generators in a traced function.

Such a draw would happen once, in the trace, and every call would reuse its number.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from torchax.dispatch.host_operations import draw_message
from torchax.errors import TracedDrawError


@contextlib.contextmanager
def refused(name: str, location: tuple[str, int] | None) -> Iterator[None]:
  """Raise if code inside the block draws from `random` or `np.random`.

  Raises:
    TracedDrawError: the block has drawn; the generator's state is restored.
  """
  python, numpy = random.getstate(), np.random.get_state()
  yield
  if random.getstate() != python:
    random.setstate(python)
    raise TracedDrawError(draw_message(f"Python's `random` in {name}", location))
  if not _is_same(np.random.get_state(), numpy):
    np.random.set_state(numpy)
    raise TracedDrawError(draw_message(f"`np.random` in {name}", location))


def _is_same(one, other) -> bool:
  return one[2:] == other[2:] and np.array_equal(one[1], other[1])
