"""`ModuleWrapper`: base class of `JittableModule` and `CompiledModule`, and its hooks.

It makes a compiled module look like the module that it wraps. torch runs hooks in
`Module.__call__`. So a compiled `forward` includes the hooks of submodules; to include
those of the module itself, its whole call is compiled. Registering or removing a hook
triggers recompilation.
"""

import types
from collections.abc import Callable

import torch

from torchax.compat import torch_compat
from torchax.compat.torch_compat.active_functions import TRANSPARENT
from torchax.core.tracebacks import hide
from torchax.tracing.modules import HOOKS, is_same


class ModuleWrapper(torch.nn.Module):
  """Module that runs an inner module compiled, and shares its attributes.

  Attributes are read from, set on and deleted from the inner module. The wrapper has
  its own hooks and training flag; the inner module's hooks run too.
  """

  # Attributes with compiled functions; copies and pickles leave them out.
  _derived: tuple[str, ...] = ()

  def __init__(self, module: torch.nn.Module):
    super().__init__()
    self._modules["_model"] = module

  def __call__(self, *args, **kwargs):
    """Run `forward`, with the hooks of the wrapper if it has any."""
    try:
      if has_hooks(self):
        return super().__call__(*args, **kwargs)
      return self.forward(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise

  def _method(self, name: str) -> Callable | None:
    """Return the compiled method of this name, or None if it is not compiled."""
    raise NotImplementedError

  def _forget(self) -> None:
    """Drop all compiled methods, since the module has changed."""
    raise NotImplementedError

  def _restore(self) -> None:
    """Reset the attributes in `_derived`."""
    raise NotImplementedError

  @property
  def __class__(self):
    """Class of the inner module, so that `isinstance(wrapper, MyModel)` is True."""
    inner = self.__dict__.get("_modules", {}).get("_model")
    return type(self) if inner is None else inner.__class__

  @__class__.setter
  def __class__(self, cls) -> None:
    raise TypeError(
      f"The class of a {type(self).__name__} cannot be changed. Wrap a module of that "
      "class instead."
    )

  def __getattr__(self, name: str):
    """Return a compiled method, or another attribute of the inner module."""
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
      self._forget()  # a trace may depend on the old value

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
    # `type(self)` is the wrapper's own class; `__class__` is the inner module's.
    return _made, (type(self),), self.__getstate__()

  def __getstate__(self) -> dict:
    return {k: v for k, v in self.__dict__.items() if k not in self._derived}

  def __setstate__(self, state: dict) -> None:
    super().__setstate__(state)
    self._restore()


def _made(cls):
  return cls.__new__(cls)


# Draw sites omit the wrapper, so they are the same with and without compilation.
setattr(ModuleWrapper, TRANSPARENT, "_model")


def has_hooks(module: torch.nn.Module) -> bool:
  """Return True if the module itself has hooks."""
  own = module.__dict__  # fast: every call of a compiled module runs this
  return bool(
    own["_forward_pre_hooks"]
    or own["_forward_hooks"]
    or own["_backward_pre_hooks"]
    or own["_backward_hooks"]
  )


def with_hooks(module: torch.nn.Module, name: str) -> Callable:
  """Return the method of this name; `forward` with the module's hooks around it."""
  if name == "forward" and has_hooks(module):
    return types.MethodType(forward, module)
  return getattr(module, name)


def forward(module: torch.nn.Module, *args, **kwargs):
  """Run the module with its hooks; its name is `forward`, for programs and messages."""
  return module(*args, **kwargs)


class Hooks:
  """Hooks of a module and its submodules, recorded now and by each `have_changed`."""

  def __init__(self, module: torch.nn.Module):
    self._module = module
    self._look()

  def _look(self) -> None:
    self._registrations = torch_compat.count_of_hooks()
    tables = (
      vars(module).get(name) for module in self._module.modules() for name in HOOKS
    )
    self._tables = tuple([(table, tuple(table.values())) for table in tables if table])

  def have_changed(self) -> bool:
    """Return True if hooks were added or removed since the last call."""
    is_known = self._registrations == torch_compat.count_of_hooks()
    if is_known and all(is_same((t.values(), hooks)) for t, hooks in self._tables):
      return False
    before = [(id(table), hooks) for table, hooks in self._tables]
    self._look()
    return before != [(id(table), hooks) for table, hooks in self._tables]
