"""Checks of indices, labels, lengths and offsets against an operation's rules.

Before an operation runs, values are checked if that costs no wait: they are on the CPU
and already computed. With `Configuration.check_indices` the check waits for the device,
and compiled functions check while they run. `registry/index_rules.py` has the rules.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat, user_code
from torchax.config import Configuration
from torchax.core import host_memory
from torchax.core.boundary import guard_on_field
from torchax.core.chains import WHOLE
from torchax.registry.index_rules import Rule
from torchax.tensor import Tensor


def require(rules: Iterable[Rule], name: str, config: Configuration) -> None:
  """Raise torch's error for an argument that is known to break a rule.

  Args:
    rules: rules of the operation for its arguments, tensors or arrays.
    name: name of the operation.
    config: with `check_indices`, wait for values on the device; inside a trace, make
      the compiled program raise when it runs.
  """
  waits = config.check_indices
  guard_on_field(config, "check_indices")
  for rule in rules:
    numbers = _known_values(rule.numbers, waits)
    if numbers is None:
      if waits:
        _require_in_program(rule, name)
      continue
    error = rule.error_for(numbers)
    if error is not None:
      raise error


def _known_values(given, waits: bool) -> np.ndarray | None:
  """Return the values of an argument without a copy; None if they are not known."""
  if isinstance(given, Tensor):
    array, chain = given._storage.read(given), given._chain
  elif isinstance(given, torch.Tensor):
    return host_memory.array_of(given.detach()) if given.device.type == "cpu" else None
  elif isinstance(given, list | tuple):
    return np.asarray(given)
  else:
    array, chain = given, WHOLE
  if type(array) is not jax_compat.ArrayImpl or not (waits or _is_ready_on_cpu(array)):
    return None
  if chain is WHOLE:
    return np.asarray(array)
  return None if chain.is_traced else chain.view_numpy(np.asarray(array))


def _is_ready_on_cpu(array) -> bool:
  return (
    type(array.sharding) is jax.sharding.SingleDeviceSharding
    and jax_compat.is_in_host_memory(array)
    and array.is_ready()
  )


def _require_in_program(rule: Rule, name: str) -> None:
  """Add a callback to the current trace that raises if an argument breaks the rule."""
  given = rule.numbers
  numbers = given.jax() if isinstance(given, Tensor) else given
  if not isinstance(numbers, jax.core.Tracer) or not numbers.size:
    return
  if not rule.applies_to(numbers.dtype):
    return
  broken = jnp.ravel(rule.is_broken(numbers))
  index = jnp.argmax(broken)
  number = numbers.ravel()[index] if broken.size == numbers.size else 0
  rule.numbers = None  # the program keeps the rule, which must not hold a tracer
  line = user_code.line()
  site = name if line is None else f"{name}, at {line[0]}:{line[1]}"
  report = functools.partial(_report, rule, site)
  jax.debug.callback(report, broken.any(), number, index)


def _report(rule: Rule, site: str, is_broken, number, index) -> None:
  if is_broken:
    raise rule.error(f"{rule.text(number, index)} ({site})")
