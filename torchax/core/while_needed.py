"""Patches of torch that stay installed while any thread needs them."""

import threading
from collections.abc import Callable


class WhileNeeded:
  """Context manager that keeps a patch installed while any thread is inside it.

  Args:
    install: function that installs the patch and returns the function to remove it.
  """

  def __init__(self, install: Callable[[], Callable[[], object]]):
    self._install = install
    self._lock = threading.Lock()
    self._users = 0
    self._remove: Callable[[], object] | None = None

  def __enter__(self) -> None:
    with self._lock:
      if not self._users:
        self._remove = self._install()
      self._users += 1

  def __exit__(self, *exception) -> None:
    with self._lock:
      self._users -= 1
      if not self._users and self._remove is not None:
        self._remove()
