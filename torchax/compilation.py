"""`torchax.compile`: one call for the three ways to compile a function or a module."""

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torchax.environment import default_env
from torchax.export import Program, exported_program_to_jax
from torchax.interop import JittableModule, call_jax, jax_jit
from torchax.interop.module import extract_all_buffers
from torchax.rng.sites import TRANSPARENT
from torchax.tensor import META, Tensor

MODES = ("jax", "dynamo", "export")


@dataclasses.dataclass
class CompileOptions:
  """How `torchax.compile` compiles.

  Attributes:
    methods_to_compile: names of the module's methods to compile; `forward` is among
      them in any case.
    jax_jit_kwargs: keyword arguments of `jax.jit`. Argument numbers and shardings are
      for the mode "jax"; the other modes take `compiler_options`.
    mode: "jax" traces the function itself, with `jax.jit`; "dynamo" lets
      `torch.compile` make graphs of it, with breaks where Python decides by numbers;
      "export" makes one graph with `torch.export`, for each structure and shape of the
      arguments.
  """

  methods_to_compile: list[str] = dataclasses.field(default_factory=list)
  jax_jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  mode: str = "jax"


def compile(fn, options: CompileOptions | None = None):
  """Compiles a function or a module of jax tensors.

  All modes give the same results, draw the same numbers, have gradients, and change
  parameters, buffers and arguments in place as the function itself does.

  Args:
    fn: a function of tensors, or a module on jax.
    options: see `CompileOptions`; the mode "jax" by default.

  Returns:
    A function; for a module a module, whose compiled methods run compiled and whose
    other attributes are the module's.

  Raises:
    ValueError: a mode that there is not, or arguments that the mode cannot use.
    TypeError: `fn` is not callable.
    AttributeError: a method that the module does not have.

  >>> import torch, torchax
  >>> double = torchax.compile(lambda x: 2 * x)
  >>> double(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  options = options or CompileOptions()
  _check(fn, options)
  if options.mode == "jax":
    return _with_jax(fn, options)
  way = _with_dynamo if options.mode == "dynamo" else _with_export
  return _with_methods(fn, options, way)


def _check(fn, options: CompileOptions) -> None:
  if options.mode not in MODES:
    raise ValueError(f"The mode is one of {MODES}, but got {options.mode!r}.")
  if not callable(fn):
    raise TypeError(f"A function or a module is expected, but got {fn!r}.")
  if options.methods_to_compile and not isinstance(fn, torch.nn.Module):
    raise ValueError(
      f"methods_to_compile names methods of a module, but got {fn!r}. Compile each "
      "function by itself."
    )
  for name in options.methods_to_compile:
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
  for name in options.methods_to_compile:
    module.make_jitted(name)
  return module


def _with_methods(fn, options: CompileOptions, way: Callable):
  if not isinstance(fn, torch.nn.Module):
    return way(fn, fn, options)
  names = dict.fromkeys(("forward", *options.methods_to_compile))
  return CompiledModule(
    fn, {name: way(getattr(fn, name), fn, options) for name in names}
  )


class CompiledModule(torch.nn.Module):
  """A module of which some methods run compiled.

  Args:
    module: the module; its parameters and buffers are this one's.
    methods: compiled functions by name; `forward` is one of them.
  """

  def __init__(self, module: torch.nn.Module, methods: dict[str, Callable]):
    super().__init__()
    self._model = module
    self._methods = methods

  def forward(self, *args, **kwargs):
    """Runs the module's `forward`, compiled."""
    return self._methods["forward"](*args, **kwargs)

  def __getattr__(self, name: str):
    try:
      return super().__getattr__(name)
    except AttributeError:
      methods = self.__dict__.get("_methods", {})
      if name in methods:
        return methods[name]
      if name == "_model":
        raise
      return getattr(self._model, name)


# The draws of a module have the same sites, compiled or not.
setattr(CompiledModule, TRANSPARENT, True)


def _with_dynamo(function, owner, options: CompileOptions):
  # Loading the compiler takes as long as loading torch: only who wants it pays.
  dynamo = importlib.import_module("torchax.dynamo")
  return torch.compile(
    function, backend=dynamo.backend, options=dict(options.jax_jit_kwargs)
  )


# Export -------------------------------------------------------------------------------


def _with_export(function, owner, options: CompileOptions):
  return ExportedFunction(function, owner, options.jax_jit_kwargs)


class _Called(torch.nn.Module):
  """What is exported: a function, with the module that it belongs to."""

  def __init__(self, owner, name: str | None, function):
    super().__init__()
    self.owner = owner if name else None
    self._name, self._function = name, function

  def forward(self, *args, **kwargs):
    called = getattr(self.owner, self._name) if self._name else self._function
    return called(*args, **kwargs)


class ExportedFunction:
  """A function or method, exported on its first call for each form of the arguments.

  Args:
    function: of jax tensors and constants, in trees.
    owner: the module that it is a method of, or the function.
    jit_kwargs: of `jax.jit`.
  """

  def __init__(self, function: Callable, owner, jit_kwargs: dict[str, Any]):
    self._function, self._kwargs = function, jit_kwargs
    self._owner = owner if isinstance(owner, torch.nn.Module) else None
    self._by_form: dict[tuple, Callable] = {}
    functools.update_wrapper(self, function, updated=())

  def __call__(self, *args, **kwargs):
    leaves, spec = torch_pytree.tree_flatten((args, kwargs))
    form = (spec, tuple(map(_form, leaves)), *self._situation())
    compiled = self._by_form.get(form)
    if compiled is None:
      compiled = self._by_form[form] = self._compiled(args, kwargs)
    return compiled(*[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

  def _situation(self) -> tuple:
    modules = () if self._owner is None else self._owner.modules()
    return (
      tuple(module.training for module in modules),
      torch.is_grad_enabled(),
      torch.get_default_dtype(),
    )

  def _compiled(self, args, kwargs) -> Callable:
    name = None if self._owner is None else self._function.__name__
    called = _Called(self._owner, name, self._function)
    exported = torch.export.export(*_on_meta((called, args, kwargs)), strict=False)
    names, states, program = exported_program_to_jax(exported, export_raw=True)
    tensors = _tensors_by_name(called)
    # Constants, which are no tensors of the module, are copied once.
    env = default_env()
    held = [
      tensors[name] if name in tensors else env.to_xla(state)
      for name, state in zip(names, states)
    ]
    return jax_jit(functools.partial(_run, program, names, held), self._kwargs)


def _run(program: Program, names, held, *inputs):
  """The program on the tensors that the module has now, which it changes in place."""

  def pure(states, inputs):
    return program.with_updates(states, inputs)

  outputs, updates = call_jax(pure, list(held), tuple(inputs))
  with torch.no_grad():
    for name, tensor in zip(names, held):
      if name in updates:
        tensor.copy_(updates.pop(name))
    for name, tensor in zip(program.input_names, inputs):
      if name in updates:
        tensor.copy_(updates[name])
  return program.unflatten(outputs)


def _tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
  params, buffers = extract_all_buffers(module)
  return {**params, **buffers}


def _form(leaf):
  if isinstance(leaf, torch.Tensor):
    return (torch.Tensor, tuple(leaf.shape), leaf.dtype)
  return (type(leaf), leaf)


def _on_meta(tree):
  """A copy with tensors that have a shape and no numbers in place of jax tensors."""
  memo: dict[int, Any] = {}
  for tensor in _jax_tensors(tree):
    twin = torch.empty_strided(
      tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META
    )
    if isinstance(tensor, torch.nn.Parameter):
      twin = torch.nn.Parameter(twin, tensor.requires_grad)
    memo[id(tensor)] = twin
  return copy.deepcopy(tree, memo)


def _jax_tensors(tree):
  called, *arguments = tree
  found = [*torch_pytree.tree_leaves(arguments), *_tensors_by_name(called).values()]
  return [value for value in found if isinstance(value, Tensor)]
