"""Lowerings by name, for programs that call them: `jaten._aten_conv2d(x, w, …)`.

What a theme defines is found by its own name. Not every lowering is a function of
arrays here: a sampler is one of a key, others are of tensors and of an environment. The
face of such a lowering takes what a program has. Arrays give arrays and tensors give
tensors; keys are drawn from the environment.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import jax
from torch.utils import _pytree as pytree

from torchax.environment import env_on
from torchax.registry.names import Missing, aten, find
from torchax.registry.operators import Kind, Operator

# What a lowering here never gets, and programs may pass.
_OF_TORCH = ("layout", "device", "pin_memory", "memory_format", "requires_grad", "out")


def lookup(
  name: str, themes: Iterable[ModuleType], operators: Iterable[Operator]
) -> Any:
  """A function of a theme by its name; None where no theme defines it.

  Args:
    name: as the theme has it.
    themes: where it is looked for.
    operators: the registered ones, which say what a function takes.
  """
  for theme in themes:
    found = vars(theme).get(name)
    if getattr(found, "__module__", None) != theme.__name__:
      continue
    uses = [operator for operator in operators if operator.func is found]
    return _face(found, uses[0]) if uses else found
  return None


def _face(lowering: Callable, operator: Operator) -> Callable:
  if operator.kind is Kind.SAMPLER:
    return _drawing(lowering)
  if operator.kind is Kind.TENSORS:
    return of_tensors(lowering, needs_env=operator.needs_env)
  if operator.kind is Kind.ENV_ARRAYS:
    return in_environment(lowering)
  return lowering


def of_aten(name: str) -> Callable | None:
  """`_aten_<op>` of arrays, for what runs here without a lowering of that name."""
  packet = find(name, aten, name.removeprefix("_aten_"))
  if not name.startswith("_aten_") or isinstance(packet, Missing):
    return None
  run = of_tensors(packet)
  run.__name__ = name
  return run


def of_tensors(function: Callable, *, needs_env: bool = False) -> Callable:
  """A function of tensors as one of arrays too: arrays in, arrays out.

  Args:
    function: takes tensors and may call torch.
    needs_env: it takes the environment as `env=`.
  """

  @_called_like(function)
  def run(*args, env=None, **kwargs):
    env = env or env_on()
    given = {"env": env} if needs_env else {}
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(leaf, jax.Array) for leaf in leaves):
      return function(*args, **kwargs, **given)
    args, kwargs = env.j2t_iso((args, kwargs))
    with env:
      return env.t2j_iso(function(*args, **(kwargs | given)))

  return run


def _called_like(function: Callable) -> Callable:
  """`functools.wraps`; what torch has written in C++ shows no signature."""
  return functools.wraps(function) if inspect.isfunction(function) else lambda run: run


def in_environment(function: Callable) -> Callable:
  """A function that wants `env=`, with the one that is on by default."""

  @functools.wraps(function)
  def run(*args, env=None, **kwargs):
    return function(*args, env=env or env_on(), **kwargs)

  return run


def _drawing(sampler: Callable) -> Callable:
  """A sampler with upstream's arguments: without a key, with an environment."""

  @functools.wraps(sampler)
  def draw(*args, env=None, generator=None, **kwargs):
    key = (env or env_on()).get_and_rotate_prng_key(generator)
    given = {k: v for k, v in kwargs.items() if k not in _OF_TORCH}
    return sampler(key, *args, **given)

  return draw
