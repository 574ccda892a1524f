"""The base of modules that run another module compiled: what they share with it."""

from collections.abc import Callable

import torch

from torchax.compat.torch_compat.active_functions import TRANSPARENT
from torchax.core.tracebacks import hide
from torchax.interop.module_hooks import has_hooks


class ModuleWrapper(torch.nn.Module):
  """A module around another one, whose attributes are the other one's.

  What is got, set and deleted is the inner module's. Hooks and the mode of the wrapper
  are its own; the inner module's hooks run as well.

  Args:
    module: the inner module.
  """

  # Attributes that hold compiled functions: no copy and no pickle has them.
  _derived: tuple[str, ...] = ()

  def __init__(self, module: torch.nn.Module):
    super().__init__()
    self._modules["_model"] = module

  def __call__(self, *args, **kwargs):
    """Runs `forward`, with the hooks of the wrapper if it has any."""
    try:
      if has_hooks(self):
        return super().__call__(*args, **kwargs)
      return self.forward(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise

  def _method(self, name: str) -> Callable | None:
    """The compiled method of that name, None for what is not compiled."""
    raise NotImplementedError

  def _forget(self) -> None:
    """Drops what was compiled, since the module has changed."""
    raise NotImplementedError

  def _restore(self) -> None:
    """Makes the derived attributes anew."""
    raise NotImplementedError

  @property
  def __class__(self):
    """The inner module's, so that `isinstance(wrapper, MyModel)` is as without it."""
    inner = self.__dict__.get("_modules", {}).get("_model")
    return type(self) if inner is None else inner.__class__

  @__class__.setter
  def __class__(self, cls) -> None:
    raise TypeError(
      f"The class of a {type(self).__name__} cannot be changed. Wrap a module of that "
      "class instead."
    )

  def __getattr__(self, name: str):
    """Compiled methods by name; the rest is the module's."""
    try:
      return super().__getattr__(name)
    except AttributeError:
      if "_model" not in self.__dict__.get("_modules", {}):
        raise
      method = self._method(name)
      return getattr(self._model, name) if method is None else method

  def __setattr__(self, name: str, value) -> None:
    if self._is_own(name):
      super().__setattr__(name, value)
    else:
      setattr(self._model, name, value)
      self._forget()  # what was traced may have decided by the old value

  def __delattr__(self, name: str) -> None:
    if self._is_own(name):
      super().__delattr__(name)
    else:
      delattr(self._model, name)
      self._forget()

  def _is_own(self, name: str) -> bool:
    own = self.__dict__
    is_set_up = "_model" in own.get("_modules", {})
    return not is_set_up or name == "_model" or name in own or hasattr(type(self), name)

  def __reduce_ex__(self, protocol):
    # By the wrapper's own class, which `__class__` does not tell.
    return _made, (type(self),), self.__getstate__()

  def __getstate__(self) -> dict:
    return {k: v for k, v in self.__dict__.items() if k not in self._derived}

  def __setstate__(self, state: dict) -> None:
    super().__setstate__(state)
    self._restore()


def _made(cls):
  return cls.__new__(cls)


# The draws of a module have the same sites, compiled or not.
setattr(ModuleWrapper, TRANSPARENT, "_model")
