"""Draws of Python's and numpy's own generators in a traced function, which are refused.

They would happen while the function is compiled and never again.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from torchax.dispatch.host_operations import draw_message
from torchax.errors import TracedDrawError


@contextlib.contextmanager
def refused(name: str, location: tuple[str, int] | None) -> Iterator[None]:
  """Raises where code inside draws from `random` or `np.random`.

  Args:
    name: of the function, for messages.
    location: file and line of the function.

  Raises:
    TracedDrawError: the generators stand where they stood before.
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
