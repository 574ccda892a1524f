"""`torch.Generator(device="jax")`: a CPU generator whose device is jax.

torch creates generators in C++, and a backend in Python cannot add its own. So
`torchax` replaces `torch.Generator` by a subclass. For jax it returns an instance of
itself, a CPU generator; for other devices it returns torch's own generator. Draws on
jax derive their keys from either kind (`rng/generator.py`).
"""

from collections.abc import Callable
from typing import Any

import torch

from torchax.devices import placement

_OfTorch = getattr(torch.Generator, "of_torch", torch.Generator)
_Meta: type = type(_OfTorch)


class _AnyGenerator(_Meta):
  """Metaclass of `Generator`: torch's own generators count as its instances."""

  of_torch: Any

  def __instancecheck__(cls, instance):
    own = cls.__dict__.get("of_torch")
    return (
      super().__instancecheck__(instance) if own is None else isinstance(instance, own)
    )

  def __subclasscheck__(cls, subclass):
    own = cls.__dict__.get("of_torch")
    return (
      super().__subclasscheck__(subclass) if own is None else issubclass(subclass, own)
    )


_MEANS_JAX: list[Callable[[str], bool]] = []


def register(means_jax: Callable[[str], bool]) -> None:
  """Register another device type that `Generator` treats as jax, such as "cuda".

  Args:
    means_jax: returns True if a device type currently means jax.
  """
  _MEANS_JAX.append(means_jax)


class Generator(_OfTorch, metaclass=_AnyGenerator):
  """Generator of any device, in place of `torch.Generator`.

  On jax, a jax generator and a CPU generator with the same seed draw the same numbers.
  A jax generator has the state of a CPU generator; CPU operations accept it too.

  Args:
    device: device of the draws.
  """

  of_torch = _OfTorch

  def __new__(cls, device="cpu"):
    """Raise NoSuchDeviceError for an index of jax that does not exist."""
    named = torch.device("cpu" if device is None else device)
    if named.type == "jax" or any(means(named.type) for means in _MEANS_JAX):
      index = placement.checked_index(named.index)
      generator = super().__new__(cls)
      if index is None:
        index = placement.current_index()
      generator._device = placement.torch_device(index)
      return generator
    return _OfTorch(device) if cls is Generator else super().__new__(cls, device)

  def __init__(self, device="cpu"):
    pass

  @property
  def device(self) -> torch.device:
    """Device that the generator was created for."""
    return self.__dict__.get("_device") or super().device

  def clone_state(self) -> "Generator":
    """Return a copy that continues independently from the same state."""
    clone = type(self)(self.device)
    clone.set_state(self.get_state())
    return clone

  def __reduce__(self):
    _, _, *state = super().__reduce__()
    return (type(self), (self.device,), *state)


# pickle finds the class as `torch.Generator`.
Generator.__module__ = "torch"
