"""Classes that stand for one of torch's own that C++ lets no backend extend."""

from typing import Any

import torch

# Of which a class that derives from it has to be; `type` to the others.
_OfGenerator: type = type(getattr(torch.Generator, "of_torch", torch.Generator))


class StandIn(_OfGenerator):
  """The type of a class that a name of torch is given to.

  Torch's own instances, which C++ and other devices make, count among those of the
  class itself; not among those of its subclasses.

  Attributes:
    of_torch: what the class stands for.
  """

  of_torch: Any

  def __instancecheck__(cls, instance):
    of_torch = cls.__dict__.get("of_torch")
    return (
      super().__instancecheck__(instance)
      if of_torch is None
      else isinstance(instance, of_torch)
    )

  def __subclasscheck__(cls, subclass):
    of_torch = cls.__dict__.get("of_torch")
    return (
      super().__subclasscheck__(subclass)
      if of_torch is None
      else issubclass(subclass, of_torch)
    )
