"""Cache keys of programs as text, and the reasons for recompilations that they show.

`TORCHAX_LOGS=recompiles` logs each reason (`torchax/logs.py`); `torchax.explain` shows
the last one and the key.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax import logs
from torchax.compat.user_code import name_of, positional, signature_of
from torchax.core.static_values import StaticValue, describe_value
from torchax.tensor import Tensor
from torchax.tracing.modules import changed_names
from torchax.tracing.static_arguments import BoxedGenerator

logger = logging.getLogger("torchax.recompiles")

# Number of earlier traces that a new one is compared with.
MOST_TRACES = 8

# Text of each static value and guard of a program, by name.
ProgramKey = dict[str, str]

_ABSENT = "not there"


def key_of_call(
  traced, specialization, args: tuple, kwargs: dict[str, Any]
) -> tuple[ProgramKey, list[str]]:
  """Return the key of a trace as text, and the names of the argument leaves."""
  found = list(arguments(traced.function, args, kwargs))
  key = {name: describe(leaf) for name, leaf in found}
  names = [name for name, leaf in found if not _is_static(leaf)]
  key |= _of_specialization(specialization, names, traced)
  return key | traced.guards.describe(), names


def _of_specialization(specialization, leaves: list[str], traced) -> ProgramKey:
  captured = captured_names(traced)
  key = {"torch.is_grad_enabled()": str(not specialization.no_grad)}
  key["torch.get_default_dtype()"] = str(specialization.default_dtype)
  if specialization.autocast is not None:
    key["autocast"] = str(specialization.autocast)
  if specialization.extra is not None:
    key["compiled for"] = str(specialization.extra)
  for index, earlier in specialization.same:
    key[f"tensor of {leaves[index]}"] = f"that of {leaves[earlier]}"
  for index in specialization.overlapping:
    key[f"memory of {leaves[index]}"] = "shared with another argument"
  if specialization.wants_grad is not None:
    recorded = zip([*leaves, *captured], specialization.wants_grad)
    needed = [name for name, is_needed in recorded if is_needed]
    key["gradients recorded for"] = ", ".join(needed)
  if specialization.has_grad:
    graded = list(traced.captures.graded.values())
    names = {id(t): name for name, t in zip(captured, traced.captures.tensors)}
    present = [names.get(id(graded[n]), "a leaf") for n in specialization.has_grad]
    key["gradients that are there"] = ", ".join(present)
  if specialization.environments:
    numbers = [str(env.streams.number) for env in specialization.environments]
    key["environments"] = ", ".join(numbers)
  if specialization.captures is not None and specialization.captures.edition:
    key["tensors and modules replaced"] = f"{specialization.captures.edition} times"
  return key


def arguments(
  function: Callable, args: tuple, kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
  """Yield the leaves of the arguments, static ones and arrays, with their names."""
  parameters = parameter_names(function)
  found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_static)
  for path, leaf in found:
    name = argument_name(path, parameters)
    yield name + jax.tree_util.keystr(path[2:]), leaf


def argument_name(path: tuple, parameters: list[str]) -> str:
  """Return the name of the argument that has a leaf of the tree (args, kwargs)."""
  which, first = path[:2]
  if which.idx == 1:
    return str(first.key)
  is_named = first.idx < len(parameters)
  return parameters[first.idx] if is_named else f"argument {first.idx}"


def captured_names(traced) -> list[str]:
  """Return the names of the captured tensors, from their modules and optimizers."""
  names: dict[int, str] = {}
  for root, values in traced.guards.modules:
    module = values.module
    tables = (module._parameters, module._buffers, vars(module))
    for name, value in itertools.chain.from_iterable(map(dict.items, tables)):
      if isinstance(value, Tensor):
        names.setdefault(id(value._storage), f"{root}.{name}")
        if value.is_leaf and isinstance(value.grad, Tensor):
          names.setdefault(id(value.grad._storage), f"{root}.{name}.grad")
  for optimizer in traced.guards.optimizers:
    for name, tensor in optimizer.tensors():
      names.setdefault(id(tensor._storage), name)
  return [
    names.get(id(tensor._storage), f"tensor {number} that is closed over")
    for number, tensor in enumerate(traced.captures.tensors)
  ]


def parameter_names(function: Callable) -> list[str]:
  """Return the names of the positional parameters, up to `*args`."""
  owner = getattr(function, "__self__", function)
  if isinstance(owner, torch.nn.Module) and name_of(owner) == name_of(function):
    function = owner.forward
  signature = signature_of(function)
  return [] if signature is None else [each.name for each in positional(signature)]


def _is_static(leaf) -> bool:
  return isinstance(leaf, StaticValue | BoxedGenerator)


def describe(leaf) -> str:
  """Return the dtype and shape of an array leaf, or the value of a static one."""
  if isinstance(leaf, jax.Array):
    kind = f"{leaf.dtype.name}{list(leaf.shape)}"
    return f"{kind} of a Python number" if leaf.weak_type else kind
  if isinstance(leaf, BoxedGenerator):
    return f"torch.Generator {leaf.generator._cdata}"
  if type(leaf) in (int, float, complex):
    return f"{type(leaf).__name__} number"
  return describe_value(leaf.value if type(leaf) is StaticValue else leaf)


class History:
  """Traces of one function.

  Attributes:
    count: number of traces.
    reasons: differences between the last trace and the most similar earlier one.
  """

  def __init__(self, name: str):
    self._name = name
    self.count = 0
    self.reasons: tuple[str, ...] = ()
    self._keys: deque[ProgramKey] = deque(maxlen=MOST_TRACES)

  def record(self, key: ProgramKey) -> None:
    """Add a trace with this key, and log why it was needed."""
    self.count += 1
    self.reasons = self._differences(key)
    self._keys.append(key)
    if self.count > 1 and logs.is_enabled("recompiles"):
      reasons = "\n".join([f"  {reason}" for reason in self.reasons])
      ordinal = _ordinal(self.count)
      logger.info("%s is compiled for the %s time:\n%s", self._name, ordinal, reasons)

  def _differences(self, key: ProgramKey) -> tuple[str, ...]:
    if not self._keys:
      return ()
    # Among equally similar traces, take the latest.
    fewest = min(reversed(self._keys), key=lambda known: len(changed_names(key, known)))
    changes = changed_names(key, fewest)
    if not changes:
      return ("what was compiled for the same was dropped",)
    return tuple(
      [
        f"{name}: {key.get(name, _ABSENT)}, before {fewest.get(name, _ABSENT)}"
        for name in changes
      ]
    )


def _ordinal(number: int) -> str:
  is_teen = number % 100 in (11, 12, 13)
  ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
  return f"{number}th" if is_teen else f"{number}{ending}"
