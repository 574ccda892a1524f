"""Options of `torch.compile(…, backend="jax", options=…)`, read by `backend.py`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from torchax.tracing.buckets import EXPECTED, Sizes, are_sizes

_MODES = (None, "default")
_PRECISIONS = (None, "default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the backend.

  Attributes:
    device: the `jax.Device` that graphs run on; None for JAX's default.
    precision: precision of matrix products, as in `jax.default_matmul_precision`:
      "default", "high" or "highest"; None for JAX's setting.
    x64: True to keep 64-bit dtypes; None for JAX's setting.
    donate: True to donate the memory of jax tensors that a graph changes in place,
      such as an optimizer's parameters. torch owns the memory of plain tensors, which
      is never donated.
    compiler_options: XLA's flags for these graphs, as in `jax.jit`.
    buckets: sizes that share a program, for graphs on jax whose sizes are dynamic:
      "pow2", a list of padded sizes, or a function that returns the padded size of a
      size.

  >>> double = torch.compile(lambda x: 2 * x, backend="jax", options={"x64": True})
  >>> double(torch.ones(2, dtype=torch.float64))
  tensor([2., 2.], dtype=torch.float64)
  """

  device: jax.Device | None = None
  precision: str | None = None
  x64: bool | None = None
  donate: bool = False
  compiler_options: dict[str, Any] | None = None
  buckets: Sizes | None = None

  @classmethod
  def of(cls, mode: str | None = None, options: dict | None = None) -> "Options":
    """Return the options for `mode` and `options` of `torch.compile`.

    Args:
      mode: "default" or None.
      options: fields of this class by name.

    Raises:
      ValueError: unknown mode or unknown option.
      TypeError: a value of the wrong type.

    >>> Options.of(options={"precision": "highest"}).precision
    'highest'
    """
    if mode not in _MODES:
      raise ValueError(
        f'torch.compile(backend="jax") expects the mode "default", but got {mode!r}. '
        "XLA chooses kernels by itself; leave `mode` out."
      )
    names = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(options or ()) - names)
    if unknown:
      raise ValueError(
        f'torch.compile(backend="jax") has no option {", ".join(unknown)}. Its options '
        f"are {', '.join(sorted(names))}."
      )
    return cls(**(options or {}))

  def __post_init__(self):
    if self.precision not in _PRECISIONS:
      raise ValueError(
        f"precision expects one of {_PRECISIONS}, but got {self.precision!r}."
      )
    self._require("x64", bool | None, "True, False or None")
    self._require("donate", bool, "True or False")
    self._require("device", jax.Device | None, "a jax.Device or None")
    self._require("compiler_options", dict | None, "a dict of XLA's flags or None")
    if self.buckets is not None and not are_sizes(self.buckets):
      raise TypeError(f"The option buckets is {EXPECTED}, but got {self.buckets!r}.")

  def _require(self, name: str, kind, expected: str) -> None:
    value = getattr(self, name)
    if not isinstance(value, kind):
      raise TypeError(f"The option {name} is {expected}, but got {value!r}.")

  @contextlib.contextmanager
  def apply(self) -> Iterator[None]:
    """Apply the options to JAX's settings inside the block.

    >>> with Options(x64=True).apply():
    ...   jax.numpy.float64(1).dtype
    dtype('float64')
    """
    with contextlib.ExitStack() as stack:
      if self.device is not None:
        stack.enter_context(jax.default_device(self.device))
      if self.precision is not None:
        stack.enter_context(jax.default_matmul_precision(self.precision))
      if self.x64 is not None:
        stack.enter_context(jax.enable_x64(self.x64))
      yield

  @property
  def change_settings(self) -> bool:
    """True if `apply` changes a setting of JAX."""
    return (self.device, self.precision, self.x64) != (None, None, None)
