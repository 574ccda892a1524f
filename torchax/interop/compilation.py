"""`torchax.compile`: compiles a function or a module by `jax.jit` or by Dynamo.

The mode "jax" is `jit.py` and `module.py`; the mode "dynamo" is `torch.compile` with
the backend "jax".
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from torchax.compat import torch_compat
from torchax.core.tracebacks import hide_library_frames
from torchax.interop import JittableModule, jax_jit
from torchax.interop.wrapper import Hooks, ModuleWrapper, with_hooks
from torchax.types import P, R

M = TypeVar("M", bound=torch.nn.Module)

MODES = ("jax", "dynamo")


@dataclasses.dataclass
class CompileOptions:
  """Options of `torchax.compile`.

  Attributes:
    methods_to_compile: names of the module's methods to compile; `forward` is always
      compiled.
    jax_jit_kwargs: keyword arguments of `jax.jit`, for all methods. An argument name
      applies to the methods that have this argument. The mode "jax" takes them all, the
      mode "dynamo" only `compiler_options`.
    mode: "jax" traces the function with `jax.jit`; "dynamo" captures graphs with
      `torch.compile`, with graph breaks where Python branches on tensor values.

  >>> options = CompileOptions(jax_jit_kwargs={"static_argnums": 1})
  >>> power = compile(lambda x, n: x**n, options)
  >>> power(torch.ones(2, device="jax") + 1, 3)
  tensor([8., 8.], device='jax:0')
  """

  methods_to_compile: list[str] = dataclasses.field(default_factory=lambda: ["forward"])
  jax_jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  mode: str = "jax"


@overload
def compile(fn: M, options: CompileOptions | None = None) -> M: ...


@overload
def compile(
  fn: Callable[P, R], options: CompileOptions | None = None
) -> Callable[P, R]: ...


@hide_library_frames
def compile(fn, options=None):
  """Compile a function or a module of jax tensors.

  All modes return the same results, draw the same numbers and support gradients. They
  change parameters, buffers and arguments in place as the function itself does.

  Args:
    fn: function of tensors, or module on jax.
    options: see `CompileOptions`; the mode "jax" by default.

  Returns:
    A function; for a module, a module whose named methods run compiled and whose other
    attributes are the original module's.

  Raises:
    ValueError: the mode is unknown, or the mode does not support an option.
    TypeError: `fn` is not callable.
    AttributeError: the module has no method of a given name.

  >>> import torch, torchax
  >>> double = torchax.compile(lambda x: 2 * x)
  >>> double(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  options = options or CompileOptions()
  _check(fn, options)
  if options.mode == "jax":
    return _with_jax(fn, options)
  if isinstance(fn, torch.nn.Module):
    return CompiledModule(fn, options)
  return _with_dynamo(fn, options)


def _check(fn, options: CompileOptions) -> None:
  if options.mode == "export":
    raise ValueError(
      f'The mode "export" is gone: expected one of {MODES}. For one graph, give '
      "`torch.export.export(…)` to `torchax.export.exported_program_to_jax`."
    )
  if options.mode not in MODES:
    raise ValueError(
      f"CompileOptions expects a mode of {MODES}, but got {options.mode!r}."
    )
  if not callable(fn):
    raise TypeError(f"compile expects a function or a module, but got {fn!r}.")
  named = set(options.methods_to_compile) - {"forward"}
  if named and not isinstance(fn, torch.nn.Module):
    raise ValueError(
      f"methods_to_compile expects a module, but got {fn!r}. Compile each "
      "function by itself."
    )
  for name in named:
    if not callable(getattr(fn, name, None)):
      raise AttributeError(f"{type(fn).__name__} has no method {name!r} to compile.")
  unused = sorted(set(options.jax_jit_kwargs) - {"compiler_options"})
  if options.mode != "jax" and unused:
    raise ValueError(
      f'The mode "{options.mode}" compiles graphs, whose arguments are not those of '
      f'the function: {", ".join(unused)} cannot be used. Use the mode "jax".'
    )


def _with_jax(fn, options: CompileOptions):
  if not isinstance(fn, torch.nn.Module):
    return jax_jit(fn, options.jax_jit_kwargs)
  module = JittableModule(fn, options.jax_jit_kwargs)
  # `make_jitted` needs all names: each method ignores options for the others.
  module._names.update(options.methods_to_compile)
  for name in options.methods_to_compile:
    module.make_jitted(name)
  return module


class CompiledModule(ModuleWrapper):
  """Module whose `forward` and selected methods run compiled by Dynamo.

  Attributes are read from and set on the inner module. A copy and an unpickled wrapper
  recompile on their first call.

  Args:
    module: inner module; the wrapper has the same parameters and buffers.
    options: compile options, with the names of the methods to compile.
  """

  def __init__(self, module: torch.nn.Module, options: CompileOptions):
    super().__init__(module)
    own = vars(self)
    own["_options"] = options
    own["_names"] = frozenset(("forward", *options.methods_to_compile))
    self._restore()

  def forward(self, *args, **kwargs):
    """Run the module's `forward`, compiled."""
    return self._compiled_method("forward")(*args, **kwargs)

  def _compiled_method(self, name: str) -> Callable:
    if self._hooks.have_changed():
      self._methods.clear()
      vars(self)["_needs_new_backend"] = True
    method = self._methods.get(name)
    if method is None:
      function = with_hooks(self._model, name)
      method = _with_dynamo(function, self._options, self._needs_new_backend)
      self._methods[name] = method
    return method

  def _method(self, name: str) -> Callable | None:
    return self._compiled_method(name) if name in self._names else None

  def _forget(self) -> None:
    self._methods.clear()

  def _restore(self) -> None:
    vars(self).update(_methods={}, _hooks=Hooks(self._model), _needs_new_backend=False)

  _derived = ("_methods", "_hooks", "_needs_new_backend")


def _with_dynamo(function, options: CompileOptions, needs_new_backend: bool = False):
  # Importing Dynamo takes as long as importing torch. With the backend's name torch
  # imports both on first use.
  backend: Any = "jax"
  if needs_new_backend:
    # Dynamo ignores hooks registered after compilation. A new backend object has no
    # cache entries, so it recompiles.
    backend = functools.partial(torch_compat.lookup_backend(backend))
  return torch.compile(function, backend=backend, options=dict(options.jax_jit_kwargs))
