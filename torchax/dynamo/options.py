"""What `torch.compile(…, backend="jax", options=…)` may say."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

_MODES = (None, "default")
_PRECISIONS = (None, "default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the backend.

  Attributes:
    device: the `jax.Device` that graphs run on; None for JAX's default.
    precision: of matrix products, as `jax.default_matmul_precision` takes it: None for
      JAX's setting, "default", "high" or "highest".
    x64: whether 64-bit dtypes are kept; None for JAX's setting.
    donate: the old memory of jax tensors that a graph changes in place, an optimizer's
      parameters for example, may be used for its results. The memory of plain tensors
      is torch's, and never donated.
    compiler_options: XLA's flags for these graphs, as `jax.jit` takes them.
  """

  device: jax.Device | None = None
  precision: str | None = None
  x64: bool | None = None
  donate: bool = False
  compiler_options: dict[str, Any] | None = None

  @classmethod
  def of(cls, mode: str | None = None, options: dict | None = None) -> "Options":
    """The options that were given to `torch.compile`.

    Raises:
      ValueError: a mode or an option that there is not.
      TypeError: a value of the wrong type.
    """
    if mode not in _MODES:
      raise ValueError(
        f'torch.compile(backend="jax") has the mode "default", but got {mode!r}. XLA '
        "chooses kernels by itself; leave `mode` out."
      )
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(options or ()) - known)
    if unknown:
      raise ValueError(
        f'torch.compile(backend="jax") has no option {", ".join(unknown)}. Its options '
        f"are {', '.join(sorted(known))}."
      )
    return cls(**(options or {}))

  def __post_init__(self):
    if self.precision not in _PRECISIONS:
      raise ValueError(
        f"The option precision is one of {_PRECISIONS}, but got {self.precision!r}."
      )
    self._require("x64", bool | None, "True, False or None")
    self._require("donate", bool, "True or False")
    self._require("device", jax.Device | None, "a jax.Device or None")
    self._require("compiler_options", dict | None, "a dict of XLA's flags or None")

  def _require(self, name: str, kind, expected: str) -> None:
    value = getattr(self, name)
    if not isinstance(value, kind):
      raise TypeError(f"The option {name} is {expected}, but got {value!r}.")

  @property
  def _contexts(self) -> list[Callable]:
    contexts = []
    if self.device is not None:
      contexts.append(lambda: jax.default_device(self.device))
    if self.precision is not None:
      contexts.append(lambda: jax.default_matmul_precision(self.precision))
    if self.x64 is not None:
      contexts.append(lambda: jax.enable_x64(self.x64))
    return contexts

  @contextlib.contextmanager
  def applied(self) -> Iterator[None]:
    """JAX's settings as the options have them."""
    with contextlib.ExitStack() as stack:
      for context in self._contexts:
        stack.enter_context(context())
      yield

  @property
  def change_settings(self) -> bool:
    """Whether `applied` does anything."""
    return bool(self._contexts)
