"""Indices, labels, lengths and offsets, held against the rules of an operation.

Before it runs, where nobody has to wait for the numbers: they are on the CPU and
computed. With `Configuration.check_indices` they are waited for, and a compiled
function looks at them as it runs. The rules are declared by `registry/index_rules.py`.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat, user_code
from torchax.config import Configuration
from torchax.core import host_memory, mappings
from torchax.core.chains import WHOLE
from torchax.dispatch import switches
from torchax.registry.index_rules import Rule
from torchax.tensor import Tensor

_ArrayImpl = jax_compat.ArrayImpl
_OneDevice = jax.sharding.SingleDeviceSharding


def require(rules: Iterable[Rule], name: str, config: Configuration) -> None:
  """Raises torch's error for an argument that is known to break a rule.

  Args:
    rules: those of the operation with its arguments, tensors or arrays.
    name: of the operation.
    config: with `check_indices` this waits for the device, and a program that is being
      traced raises as it runs.
  """
  waits = config.check_indices
  switches.note(config, "check_indices")
  for rule in rules:
    numbers = _known(rule.numbers, waits)
    if numbers is None:
      if waits:
        _require_in_program(rule, name)
      continue
    error = rule.breach(numbers)
    if error is not None:
      raise error


def require_dtypes(rules: Iterable[Rule], name: str) -> None:
  """Raises RuntimeError for indices or labels that are no integers."""
  for rule in rules:
    dtype = getattr(rule.numbers, "dtype", None)
    if isinstance(dtype, torch.dtype) and not rule.is_for(mappings.t2j_dtype(dtype)):
      raise RuntimeError(
        f"{name} expects integers, torch.int64, for indices and labels, but got "
        f"{dtype}. Convert them with `.long()`."
      )


def _known(given, waits: bool) -> np.ndarray | None:
  """The numbers of a tensor, which are not copied; None where they are not known."""
  if isinstance(given, Tensor):
    array, chain = given._storage.read(given), given._chain
  elif isinstance(given, torch.Tensor):
    return host_memory.array_of(given.detach()) if given.device.type == "cpu" else None
  elif isinstance(given, list | tuple):
    return np.asarray(given)
  else:
    array, chain = given, WHOLE
  if type(array) is not _ArrayImpl or not (waits or _is_at_hand(array)):
    return None
  if chain is WHOLE:
    return np.asarray(array)
  return None if chain.is_traced else chain.picked(np.asarray(array))


def _is_at_hand(array) -> bool:
  """True for an array of one CPU device that is computed."""
  return (
    type(array.sharding) is _OneDevice
    and jax_compat.is_of_host(array)
    and array.is_ready()
  )


def _require_in_program(rule: Rule, name: str) -> None:
  """Has the program that is being traced raise where an argument breaks a rule."""
  given = rule.numbers
  numbers = given.jax() if isinstance(given, Tensor) else given
  if not isinstance(numbers, jax.core.Tracer) or not numbers.size:
    return
  if not rule.is_for(numbers.dtype):
    return
  broken = jnp.ravel(rule.is_broken(numbers))
  place = jnp.argmax(broken)
  number = numbers.ravel()[place] if broken.size == numbers.size else 0
  rule.numbers = None  # the program keeps the rule, which is to hold no tracer
  report = functools.partial(_report, rule, _site(name))
  jax.debug.callback(report, broken.any(), number, place)


def _site(name: str) -> str:
  place = user_code.line()
  return name if place is None else f"{name}, at {place[0]}:{place[1]}"


def _report(rule: Rule, site: str, is_broken, number, place) -> None:
  if is_broken:
    raise rule.error(f"{rule.text(number, place)} ({site})")
