"""`torch.Generator(device="jax")`: a generator that says that it is on jax.

torch makes generators in C++, and lets no backend written in Python make one. So the
name `torch.Generator` stands for a subclass here: for another device it gives torch's
own generator, for jax an instance of itself, which is a CPU generator underneath. Draws
on jax build their keys from either kind (`rng/generator.py`).
"""

from collections.abc import Callable
from typing import Any

import torch

from torchax.devices import placement

_OfTorch = getattr(torch.Generator, "of_torch", torch.Generator)
_Meta: type = type(_OfTorch)


class _AnyGenerator(_Meta):
  """Type of `Generator`: torch's own generators count as instances of it."""

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
  """Have `Generator` take another kind of device, such as "cuda", for jax.

  Args:
    means_jax: whether a kind means jax now.
  """
  _MEANS_JAX.append(means_jax)


class Generator(_OfTorch, metaclass=_AnyGenerator):
  """`torch.Generator`, of any device; see torch's documentation.

  One of jax draws what a CPU generator of the same seed draws on jax. Its state is that
  of a CPU generator, and operations on the CPU take it as well.

  Args:
    device: of which the draws are to be.
  """

  of_torch = _OfTorch

  def __new__(cls, device="cpu"):
    """Raises NoSuchDeviceError for an index of jax that does not exist."""
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
    """The device that the generator was made for."""
    return self.__dict__.get("_device") or super().device

  def clone_state(self) -> "Generator":
    """A generator of its own that goes on as this one does."""
    clone = type(self)(self.device)
    clone.set_state(self.get_state())
    return clone

  def __reduce__(self):
    _, _, *state = super().__reduce__()
    return (type(self), (self.device,), *state)


# Found by pickle, as what it stands for.
Generator.__module__ = "torch"
