"""A dict with a bound, for what is compiled and interned."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
  """A dict of at most `limit` entries, from which those go that nobody has used lately.

  It has two generations. What is found in the old one moves to the young one; when the
  young one is full it becomes the old one, and the old one goes. So a hit costs what it
  costs in a dict, and what is used at least once in `limit // 2` new entries stays.

  Args:
    limit: at least 2.
  """

  __slots__ = ("limit", "_young", "_old")

  def __init__(self, limit: int):
    if limit < 2:
      raise ValueError(f"A cache has room for 2 entries at least, but got {limit}.")
    self.limit = limit
    self._young: dict[K, V] = {}
    self._old: dict[K, V] = {}

  def get(self, key: K) -> V | None:
    """The entry of a key, or None."""
    found = self._young.get(key)
    if found is None and self._old:
      found = self._old.pop(key, None)
      if found is not None:
        self[key] = found
    return found

  def __setitem__(self, key: K, value: V) -> None:
    if len(self._young) >= self.limit // 2 and key not in self._young:
      self._old, self._young = self._young, {}
    self._young[key] = value

  def pop(self, key: K) -> V | None:
    """Drops the entry of a key, and gives it; None where there is none."""
    young, old = self._young.pop(key, None), self._old.pop(key, None)
    return old if young is None else young

  def age(self) -> None:
    """Drops what has not been found since the cache last aged, or was half full."""
    self._old, self._young = self._young, {}

  def __len__(self) -> int:
    return len(self._young) + len(self._old)

  def clear(self) -> None:
    """Drops all entries."""
    self._young, self._old = {}, {}
