"""Lowerings by name, for programs that call them: `jaten._aten_conv2d(x, w, …)`.

What a theme defines is found by its own name. A sampler is a function of a key here,
and of an environment for programs: its face draws the key.
"""

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torchax.environment import env_on
from torchax.ops.names import Missing, aten, find
from torchax.ops.ops_registry import Kind, Operator

# What a lowering here never gets, and programs may pass.
_OF_TORCH = ("layout", "device", "pin_memory", "memory_format", "requires_grad", "out")


def lookup(
  name: str, themes: Iterable[ModuleType], operators: Iterable[Operator]
) -> Any:
  """A function of a theme by its name; None where no theme defines it.

  Args:
    name: as the theme has it.
    themes: where it is looked for.
    operators: the registered ones, which say what is a sampler.
  """
  for theme in themes:
    found = vars(theme).get(name)
    if getattr(found, "__module__", None) != theme.__name__:
      continue
    kinds = {operator.kind for operator in operators if operator.func is found}
    return _drawing(found) if Kind.SAMPLER in kinds else found
  return None


def of_aten(name: str) -> Callable | None:
  """`_aten_<op>` of arrays, for what runs here without a lowering of that name."""
  packet = find(name, aten, name.removeprefix("_aten_"))
  if not name.startswith("_aten_") or isinstance(packet, Missing):
    return None

  def run(*args, **kwargs):
    env = env_on()
    args, kwargs = env.j2t_iso((args, kwargs))
    return env.t2j_iso(packet(*args, **kwargs))

  run.__name__ = name
  return run


def in_environment(function: Callable) -> Callable:
  """A function of tensors that wants `env=`, with the one that is on by default."""

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
