"""Environments that are on, and properties that a block can override, such as the mesh.

Context variables hold both, so they apply to a thread or task only. `on` and
`suspended` are tuples, innermost last, with an environment once per time that it was
enabled. `Environment` sets them, and `Environment.override_property` the properties.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from torchax import rng

on: ContextVar[tuple] = ContextVar("on", default=())
"""Environments enabled by a block (`with env:`)."""


class _OnThread(threading.local):
  """Environments enabled for the rest of a thread, in every task.

  A notebook may run each of its cells in a task of its own.
  """

  environments: tuple = ()


on_thread = _OnThread()

suspended: ContextVar[tuple] = ContextVar("suspended", default=())
"""Environments suspended by a block, in which torch runs unchanged."""


def push(switch: ContextVar[tuple], value: Any) -> None:
  """Append a value."""
  switch.set((*switch.get(), value))


def drop(switch: ContextVar[tuple], value: Any) -> bool:
  """Remove the last occurrence of a value; return False if there is none."""
  values = switch.get()
  rest = without(values, value)
  switch.set(rest)
  return len(rest) < len(values)


def without(values: tuple, value: Any) -> tuple:
  """Return the values without the last occurrence of `value` (by identity)."""
  for index in reversed(range(len(values))):
    if values[index] is value:
      return values[:index] + values[index + 1 :]
  return values


class _None:
  """Sentinel for "not given" where None is a value."""


@dataclasses.dataclass
class RuntimeProperty:
  """Properties that `Environment.override_property` overrides inside a block.

  Attributes:
    mesh: device mesh.
    prng: key that continues the current stream (`Environment.prng_key`).
    autocast_dtype: dtype of `torch.autocast("jax")`; None if it is off.

  >>> with torchax.default_env().override_property(autocast_dtype=torch.bfloat16):
  ...   torchax.default_env().param.autocast_dtype
  torch.bfloat16
  """

  mesh: Any
  prng: Any
  autocast_dtype: Any

  @classmethod
  def override(
    cls,
    base: "RuntimeProperty",
    *,
    mesh: Any = _None,
    prng: Any = _None,
    autocast_dtype: Any = _None,
  ) -> "RuntimeProperty":
    """Return a copy of `base` with the given properties replaced.

    Args:
      base: properties to copy.
      mesh, prng, autocast_dtype: new values; properties that are not given stay.

    >>> base = RuntimeProperty(mesh=None, prng=None, autocast_dtype=None)
    >>> RuntimeProperty.override(base, autocast_dtype=torch.bfloat16).autocast_dtype
    torch.bfloat16
    """

    def pick(new, old):
      return old if new is _None else new

    return cls(
      pick(mesh, base.mesh),
      pick(prng, base.prng),
      pick(autocast_dtype, base.autocast_dtype),
    )

  def get_and_rotate_prng_key(self) -> jax.Array:
    """Return the key of the next draw of the current stream.

    >>> with torchax.rng_scope(7):
    ...   key = torchax.default_env().param.get_and_rotate_prng_key()
    >>> key.shape, key.dtype
    ((), key<fry>)
    """
    return rng.current().next_key("get_and_rotate_prng_key")


_overrides: ContextVar[tuple] = ContextVar("overrides", default=())


class _PropertyHolder:
  """Stack of properties, local to each thread and task.

  Args:
    content_factory: function that returns the stack without overrides.
  """

  def __init__(self, content_factory):
    self._initial = content_factory()

  @property
  def content(self) -> list[RuntimeProperty]:
    """Stack of properties, innermost last."""
    overrides = [entry for holder, entry in _overrides.get() if holder is self]
    return [*self._initial, *overrides]

  @contextlib.contextmanager
  def overridden(self, properties: RuntimeProperty) -> Iterator[None]:
    """Push properties inside the block."""
    entry = (self, properties)
    push(_overrides, entry)
    try:
      yield
    finally:
      drop(_overrides, entry)
