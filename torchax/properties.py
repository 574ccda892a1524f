"""Properties of an environment that are replaced for a while, such as the mesh.

Each thread and each task has the ones that it has replaced itself.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from torchax import rng
from torchax.core import switches


class _None:
  """Stands for "not given" where None is a value."""


@dataclasses.dataclass
class RuntimeProperty:
  """The properties that `Environment.override_property` replaces for a while.

  Attributes:
    mesh: the device mesh.
    prng: the key that the current stream goes on from (read by `prng_key`).
    autocast_dtype: the dtype of `torch.autocast("jax")`; None where it is off.
  """

  mesh: Any
  prng: Any
  autocast_dtype: Any

  @classmethod
  def override(
    cls, base: "RuntimeProperty", *, mesh=_None, prng=_None, autocast_dtype=_None
  ) -> "RuntimeProperty":
    """`base` with some properties replaced."""

    def pick(new, old):
      return old if new is _None else new

    return cls(
      pick(mesh, base.mesh),
      pick(prng, base.prng),
      pick(autocast_dtype, base.autocast_dtype),
    )

  def get_and_rotate_prng_key(self) -> jax.Array:
    """The key of the next draw of the current stream."""
    return rng.current().next_key("get_and_rotate_prng_key")


_overridden: ContextVar[tuple] = ContextVar("overridden", default=())


class _PropertyHolder:
  """A stack of properties, which each thread and each task has for itself.

  Args:
    content_factory: makes the stack that each begins with.
  """

  def __init__(self, content_factory):
    self._first = content_factory()

  @property
  def content(self) -> list[RuntimeProperty]:
    """The stack, innermost last."""
    overridden = [found for holder, found in _overridden.get() if holder is self]
    return [*self._first, *overridden]

  @contextlib.contextmanager
  def overridden(self, properties: RuntimeProperty) -> Iterator[None]:
    """These properties inside the block."""
    entry = (self, properties)
    switches.push(_overridden, entry)
    try:
      yield
    finally:
      switches.drop(_overridden, entry)
