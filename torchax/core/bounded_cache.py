"""Dict with a bounded number of entries, for compiled functions and interned objects.

It caches programs (`program_limit.py`), view readers and static values.
"""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
  """Dict of at most `limit` entries; evicts entries not used recently.

  It has two generations. An entry found in the old one moves to the young one. When the
  young one is full, it becomes the old one, and the previous old one is dropped. So a
  hit costs as much as in a dict. An entry used at least once per `limit // 2` new
  entries is kept.

  Args:
    limit: largest number of entries, at least 2.
  """

  __slots__ = ("limit", "_young", "_old")

  def __init__(self, limit: int):
    if limit < 2:
      raise ValueError(f"BoundedCache expects limit >= 2, but got {limit}.")
    self.limit = limit
    self._young: dict[K, V] = {}
    self._old: dict[K, V] = {}

  def get(self, key: K) -> V | None:
    """Return the entry of a key, or None."""
    value = self._young.get(key)
    if value is None and self._old:
      value = self._old.pop(key, None)
      if value is not None:
        self[key] = value
    return value

  def __setitem__(self, key: K, value: V) -> None:
    if len(self._young) >= self.limit // 2 and key not in self._young:
      self._old, self._young = self._young, {}
    self._young[key] = value

  def pop(self, key: K) -> V | None:
    """Remove the entry of a key and return it, or None."""
    young, old = self._young.pop(key, None), self._old.pop(key, None)
    return old if young is None else young

  def age(self) -> None:
    """Evict the old generation; the young one becomes the old one."""
    self._old, self._young = self._young, {}

  def __len__(self) -> int:
    return len(self._young) + len(self._old)

  def clear(self) -> None:
    """Remove all entries."""
    self._young, self._old = {}, {}
