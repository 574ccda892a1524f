"""Functions and methods compiled through `torch.export`, for `torchax.compile`."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torchax.environment import default_env
from torchax.export import Program, exported_program_to_jax
from torchax.interop import call_jax, jax_jit
from torchax.interop.module import extract_all_buffers
from torchax.tensor import META, Tensor


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
