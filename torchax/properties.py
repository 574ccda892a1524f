"""Properties of an environment that a `with` block can override, such as the mesh.

An override applies to its thread or task only. `Environment.override_property` is the
entry point.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from torchax import rng
from torchax.core import active_environments


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
    active_environments.push(_overrides, entry)
    try:
      yield
    finally:
      active_environments.drop(_overrides, entry)
