"""Plain torch tensors in and out of a compiled graph. Used by `program.py`.

On the CPU nothing is copied: the graph reads the memory of its inputs. A call waits for
its results, as CPU torch does. A change of an input after the call is therefore seen by
the next call, never by this one.

Most results are arrays that become tensors. A returned input is the caller's own
tensor. Results that share memory in eager mode share it here. Numbers bypass JAX, which
may narrow them, even if torch expects them in a tensor.
"""

import collections
import operator
from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from torchax.compat import jax_compat
from torchax.core import mappings, narrowing
from torchax.errors import MixedDeviceError
from torchax.graphs import strided
from torchax.registry.names import aten

_SCALAR_TENSOR = aten.scalar_tensor.default
_NARROWED = frozenset({torch.int64, torch.float64, torch.complex128})


def as_numpy(tensor: torch.Tensor) -> np.ndarray | jax.Array:
  """Return a CPU tensor as an array, sharing its memory if JAX has its dtype.

  Raises:
    MixedDeviceError: the tensor is not on the CPU.
    UnsupportedDtypeError: the tensor is sparse, nested or quantized.
    OverflowError: an int64 value needs x64 mode.
  """
  if tensor.device.type != "cpu":
    raise MixedDeviceError(
      'torch.compile(backend="jax") expects tensors on the CPU, or all on "jax", but '
      f'got one on {tensor.device}. Call `.cpu()` or `.to("jax")` first.'
    )
  mappings.check_layout(tensor)
  tensor = tensor.detach().resolve_conj().resolve_neg()
  if tensor.dtype is torch.float64 and not tensor.dim() and narrowing.is_on():
    # Dynamo passes a Python float this way; the user did not ask for 64 bits.
    return mappings.host_array(tensor.float())
  if tensor.dtype in _NARROWED and narrowing.is_on():
    return narrowing.narrow(tensor, mappings.t2j_dtype(tensor.dtype))
  return jax_compat.with_64_bits(mappings.host_array(tensor))


class Result:
  """Conversion of one output of a graph to a torch tensor.

  Args:
    like: a tensor with the dtype and strides that torch expects.
  """

  __slots__ = ("dtype", "order", "inverse")

  def __init__(self, like: torch.Tensor):
    self.dtype = like.dtype
    self.order = strided.memory_order(like)
    self.inverse = None
    if self.order is not None:
      self.inverse = tuple(int(axis) for axis in np.argsort(self.order))

  def in_memory_order(self, array: jax.Array) -> jax.Array:
    """Return the array inside the trace, with its dimensions in memory order."""
    return array if self.order is None else jax.numpy.transpose(array, self.order)

  def tensor(self, array: jax.Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory, after the call."""
    if not _is_on_cpu(array):
      tensor = mappings.j2t(array)
    else:
      tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__())
    if tensor.dtype is not self.dtype:
      tensor = tensor.to(self.dtype)
    return tensor if self.inverse is None else tensor.permute(self.inverse)


class NumberResult:
  """Conversion of one output of a graph, a number computed from tensors."""

  def in_memory_order(self, value) -> jax.Array:
    """Return the number as an array inside the trace."""
    return jax.numpy.asarray(value)

  def tensor(self, array: jax.Array) -> int | float | bool:
    """Return the Python number, after the call."""
    return array.item()


def _is_on_cpu(array: jax.Array) -> bool:
  return next(iter(array.devices())).platform == "cpu"


class Outputs:
  """Results of a graph, in order.

  Args:
    returned: nodes, and values that are the same in every call.
    inputs: the graph's placeholders.
    visible: number of results for the caller; see `_sharing`.

  Attributes:
    arrays: nodes whose arrays the compiled function returns.
    numbers: nodes and numbers that it returns as static values.
    passed: positions of the inputs that are returned or viewed.
  """

  def __init__(self, returned: Sequence, inputs: Sequence[fx.Node], visible: int):
    self.arrays: list[fx.Node] = []
    self.numbers: list = []
    self.passed: set[int] = set()
    self._results: list[Result | NumberResult] = []
    self._array_index: dict[fx.Node, int] = {}
    index = {node: number for number, node in enumerate(inputs)}
    shared = _sharing(returned, index, visible)
    self._assemblers = [self._assembler(value, index, shared) for value in returned]

  def in_memory_order(self, values: list) -> list[jax.Array]:
    """Return the arrays that leave the trace, with their dimensions in memory order."""
    return [
      result.in_memory_order(value) for result, value in zip(self._results, values)
    ]

  def assemble(self, args: dict, arrays: list, numbers: Sequence) -> list:
    """Return the results of the graph.

    Args:
      args: the inputs in `passed`, by position.
      arrays, numbers: results of the compiled function.
    """
    tensors = [result.tensor(array) for result, array in zip(self._results, arrays)]
    return [assembler(args, tensors, numbers) for assembler in self._assemblers]

  def _assembler(self, value, index, shared) -> Callable:
    if isinstance(value, fx.Node) and value in index:
      number = index[value]
      self.passed.add(number)
      return lambda args, tensors, numbers: args[number]
    meta = value.meta.get("val") if isinstance(value, fx.Node) else value
    if is_computed_number(meta):
      number = self._array(value, is_own=True)
      return lambda args, tensors, numbers: tensors[number]
    if not isinstance(meta, torch.Tensor):
      number = self._number(value)
      return lambda args, tensors, numbers: numbers[number]
    if is_number(value):
      number, dtype = self._number(value.args[0]), meta.dtype
      return lambda args, tensors, numbers: torch.scalar_tensor(
        numbers[number], dtype=dtype
      )
    base, steps = _base(value) if value in shared else (value, ())
    if base in index:
      number = index[base]
      self.passed.add(number)
      return lambda args, tensors, numbers: _apply_views(args[number], steps)
    number = self._array(base, is_own=value not in shared)
    return lambda args, tensors, numbers: _apply_views(tensors[number], steps)

  def _number(self, value) -> int:
    self.numbers.append(value)
    return len(self.numbers) - 1

  def _array(self, node: fx.Node, is_own: bool) -> int:
    if is_own or node not in self._array_index:
      self._array_index[node] = len(self.arrays)
      self.arrays.append(node)
      value = node.meta["val"]
      is_tensor = isinstance(value, torch.Tensor)
      self._results.append(Result(value) if is_tensor else NumberResult())
    return self._array_index[node]


def is_computed_number(value) -> bool:
  """Return True for a number that depends on the values of a tensor."""
  is_symbol = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
  return is_symbol and has_free_unbacked_symbols(value)


def is_number(node: fx.Node) -> bool:
  """Return True for a number that is only returned, as a tensor."""
  if node.target is not _SCALAR_TENSOR or any(u.op != "output" for u in node.users):
    return False
  (number,) = node.args
  return not (isinstance(number, fx.Node) and is_computed_number(number.meta["val"]))


def _sharing(returned: Sequence, inputs: dict, visible: int) -> set[fx.Node]:
  """Return the results that share memory with another result or with an input.

  AOTAutograd makes the views of inputs, except those of operations with several
  results, such as `split`.

  Args:
    returned: results of the graph.
    inputs: its placeholders.
    visible: number of results for the caller, who may change them. The others are
      gradients, or are saved for the backward pass.
  """
  groups: dict[fx.Node, list[fx.Node]] = collections.defaultdict(list)
  seen: set[fx.Node] = set()
  sharing: set[fx.Node] = set()
  for number, node in enumerate(returned):
    is_new = isinstance(node, fx.Node) and node not in inputs and not is_number(node)
    if is_new and isinstance(node.meta.get("val"), torch.Tensor):
      base, steps = _base(node)
      is_part = any(target is operator.getitem for target, *_ in steps)
      is_repeated = node in seen and base not in inputs  # torch returns one tensor
      if is_repeated or (is_part and base in inputs):
        sharing.add(node)
      if number < visible and base not in inputs:
        groups[base].append(node)
      seen.add(node)
  for group in groups.values():
    if len(group) > 1:
      sharing.update(group)
  return sharing


def _base(node: fx.Node) -> tuple[fx.Node, tuple]:
  """Return the base of a node, and the view operations from the base to the node."""
  steps: list = []
  while (source := _viewed_node(node)) is not None:
    steps.append((node.target, node.args[1:], node.kwargs))
    node = source
  return node, tuple(reversed(steps))


def _viewed_node(node: fx.Node) -> fx.Node | None:
  """Return the node that `node` views with constant arguments, if any."""
  source = strided.base_node(node)
  return source if node.all_input_nodes == [source] else None


def _apply_views(tensor, steps):
  for target, args, kwargs in steps:
    tensor = target(tensor, *args, **kwargs)
  return tensor
