"""Facts derived from torch's schemas: writes, aliases, functional variants.

Derives the functional variant of in-place and `out=` operations, and the arguments they
write; only exceptions are listed. `dispatch` reads both.
"""

import dataclasses
import functools

import torch

from torchax.compat.torch_compat import OpOverload
from torchax.registry.names import aten, present, resolve

# Functional variants that the naming rule does not find; None if there is none.
_FUNCTIONAL_FORMS = present(
  {
    aten.normal_.default: aten.normal_functional.default,
    aten.normal.out: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.zero_.default: aten.zeros_like.default,
    aten.resize_as_.default: None,
  }
)

# Pointwise operations that torch does not mark as such.
_UNMARKED = present(
  [
    aten._to_copy.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.softplus_backward.default,
  ]
)

_SCALAR_TYPES = ("number", "float", "Scalar")
_DYNAMIC_TYPES = ("Tensor", *_SCALAR_TYPES)


@dataclasses.dataclass(frozen=True)
class Schema:
  """Parts of an overload's schema that dispatch needs.

  Attributes:
    names: argument names, positional ones first.
    dynamic: names of arguments whose numbers may change without recompiling.
    scalars: dynamic names that take no tensor: torch needs Python numbers.
    written: names of arguments that are written to.
    outputs: written names that only receive results, such as `out`.
    is_view: a result aliases an argument and nothing is written. `_unsafe_view` counts
      although its schema has no alias: composite operations write through it.
    is_random: the operation draws from a generator.
    is_pointwise: torch says that each element of the only result depends on elements at
      the same place.
    returns_lists: a result is a list of tensors.
  """

  names: tuple[str, ...]
  dynamic: frozenset[str]
  scalars: frozenset[str]
  written: tuple[str, ...]
  outputs: tuple[str, ...]
  is_view: bool
  is_random: bool
  is_pointwise: bool
  returns_lists: bool


def _kind(argument) -> str:
  """Return the type of an argument, or of its elements, without "Optional"."""
  kind = str(argument.type).removeprefix("Optional[").removeprefix("List[")
  return kind.rstrip("]")


@functools.cache
def schema_of(op: OpOverload) -> Schema:
  """Return the schema of an overload."""
  arguments = op._schema.arguments
  written = tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
  aliased = any(r.alias_info is not None for r in op._schema.returns)
  return Schema(
    names=tuple(a.name for a in arguments),
    dynamic=frozenset(a.name for a in arguments if _kind(a) in _DYNAMIC_TYPES),
    scalars=frozenset(a.name for a in arguments if _kind(a) in _SCALAR_TYPES),
    written=written,
    outputs=tuple(a.name for a in arguments if a.is_out),
    is_view=(aliased and not written) or op is aten._unsafe_view.default,
    is_random=torch.Tag.nondeterministic_seeded in op.tags,
    is_pointwise=op in _UNMARKED
    or (torch.Tag.pointwise in op.tags and len(op._schema.returns) == 1),
    returns_lists=any(str(r.type) == "List[Tensor]" for r in op._schema.returns),
  )


# Arguments of factories that their `out=` variants lack; ignored in signatures.
_TENSOR_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _signature(op: OpOverload, without=()) -> tuple:
  return tuple(
    (a.name, str(a.type))
    for a in op._schema.arguments
    if a.name not in without and not (a.kwarg_only and a.name in _TENSOR_OPTIONS)
  )


@functools.cache
def functional_form(op: OpOverload) -> OpOverload | None:
  """Return the overload without the write, or None if torch has none.

  For example, `aten.add.Tensor` for `add_.Tensor` and `add.out`.
  """
  if op in _FUNCTIONAL_FORMS:
    return _FUNCTIONAL_FORMS[op]
  name = op._schema.name.split("::")[1]
  in_place = is_in_place(op)
  packet = resolve(getattr(aten, name.removesuffix("_") if in_place else name))
  if packet is None:
    return None
  schema = schema_of(op)
  if not in_place and not schema.outputs:
    return None  # it writes to an argument as a side effect, as running statistics
  wanted = _signature(op, () if in_place else schema.outputs)
  # The functional variant has the other writes too, as to running statistics.
  written = set() if in_place else set(schema.written) - set(schema.outputs)
  for overload_name in packet.overloads():
    overload = getattr(packet, overload_name)
    if set(schema_of(overload).written) == written and _signature(overload) == wanted:
      return overload
  return None


def is_in_place(op: OpOverload) -> bool:
  """Return True for `add_`; False for `add.out`."""
  written = schema_of(op).written
  return bool(written) and op._schema.arguments[0].name == written[0]


def returns_tensors(op) -> bool:
  """Return False for an operation that returns a number, as `aten.is_same_size`."""
  returns = op._schema.returns if isinstance(op, OpOverload) else ()
  return all("Tensor" in str(value.type) for value in returns)
