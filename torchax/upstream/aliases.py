"""Lookup of lowerings by upstream's names: `jaten._aten_conv2d(x, w, …)`.

A module of lowerings defines them by name. Some take a key, tensors or an environment
instead of arrays. Such a lowering is returned in a wrapper with upstream's arguments:
arrays give arrays, tensors give tensors, and keys are drawn from the environment.
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

# Options that programs may pass and lowerings do not take.
_OF_TORCH = ("layout", "device", "pin_memory", "memory_format", "requires_grad", "out")


def lookup(
  name: str, themes: Iterable[ModuleType], operators: Iterable[Operator]
) -> Any:
  """Return a function of the modules `themes` by its name; None if none defines it.

  Args:
    name: name of the function in its module.
    themes: modules of lowerings to search.
    operators: registered operators, which tell the arguments of a function.
  """
  for theme in themes:
    function = vars(theme).get(name)
    if getattr(function, "__module__", None) != theme.__name__:
      continue
    uses = [operator for operator in operators if operator.func is function]
    return _face(function, uses[0]) if uses else function
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
  """Return `_aten_<op>` on arrays, for operations without a lowering of that name."""
  packet = find(name, aten, name.removeprefix("_aten_"))
  if not name.startswith("_aten_") or isinstance(packet, Missing):
    return None
  run = of_tensors(packet)
  run.__name__ = name
  return run


def of_tensors(function: Callable, *, needs_env: bool = False) -> Callable:
  """Wrap a function of tensors so that it also maps arrays to arrays.

  Args:
    function: takes tensors and may call torch.
    needs_env: `function` takes the environment as `env=`.
  """

  @_called_like(function)
  def run(*args, env=None, **kwargs):
    env = env or env_on()
    extra = {"env": env} if needs_env else {}
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(leaf, jax.Array) for leaf in leaves):
      return function(*args, **kwargs, **extra)
    args, kwargs = env.j2t_iso((args, kwargs))
    with env:
      return env.t2j_iso(function(*args, **(kwargs | extra)))

  return run


def _called_like(function: Callable) -> Callable:
  """Return `functools.wraps`, or the identity for functions of torch's C++."""
  return functools.wraps(function) if inspect.isfunction(function) else lambda run: run


def in_environment(function: Callable) -> Callable:
  """Wrap a function that needs `env=`; by default it gets the current environment."""

  @functools.wraps(function)
  def run(*args, env=None, **kwargs):
    return function(*args, env=env or env_on(), **kwargs)

  return run


def _drawing(sampler: Callable) -> Callable:
  """Wrap a sampler in upstream's arguments: an environment instead of a key."""

  @functools.wraps(sampler)
  def draw(*args, env=None, generator=None, **kwargs):
    key = (env or env_on()).get_and_rotate_prng_key(generator)
    options = {k: v for k, v in kwargs.items() if k not in _OF_TORCH}
    return sampler(key, *args, **options)

  return draw
