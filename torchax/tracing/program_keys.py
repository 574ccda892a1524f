"""Cache keys of programs as text, for `History` and `torchax.explain`."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax.core.static_values import StaticValue, describe_value
from torchax.tensor import Tensor
from torchax.tracing.function_names import name_of, signature_of
from torchax.tracing.history import ProgramKey
from torchax.tracing.specialization import is_trained
from torchax.tracing.static_arguments import BoxedGenerator


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
    trained = [n for n, t in zip(captured, traced.captures.tensors) if is_trained(t)]
    present = itertools.compress(trained, specialization.has_grad)
    key["gradients that are there"] = ", ".join(present) or "none"
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
  parameters = _parameters(function)
  found, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_static)
  for (which, first, *path), leaf in found:
    if which.idx == 1:
      name = str(first.key)
    elif first.idx < len(parameters):
      name = parameters[first.idx]
    else:
      name = f"argument {first.idx}"
    yield name + jax.tree_util.keystr(tuple(path)), leaf


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


_POSITIONAL = (
  inspect.Parameter.POSITIONAL_ONLY,
  inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def _parameters(function: Callable) -> list[str]:
  """Return the names of the positional parameters, up to `*args`."""
  owner = getattr(function, "__self__", function)
  if isinstance(owner, torch.nn.Module) and name_of(owner) == name_of(function):
    function = owner.forward
  signature = signature_of(function)
  parameters = () if signature is None else signature.parameters.values()
  return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]


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
