"""Bad inputs of every operator, made of good ones: shapes, dimensions, dtypes, indices.

Each mutation takes (args, kwargs) of a sample and gives another pair, or None where it
does not apply. What CPU torch makes of it decides whether it is bad.
"""

from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree

BEYOND = 97

# CPU torch ends the process, by a signal.
CRASHES = ("_segment_reduce.offsets",)


def _tensors(leaves) -> list[int]:
  return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _replacing(which: Callable, change: Callable) -> Callable:
  """A mutation of the leaf at the place that `which(leaves)` names."""

  def mutate(given):
    leaves, spec = pytree.tree_flatten(given)
    place = which(leaves)
    if place is None:
      return None
    changed = change(leaves[place])
    if changed is None:
      return None
    leaves[place] = changed
    return pytree.tree_unflatten(leaves, spec)

  return mutate


def _nth_tensor(n: int) -> Callable:
  def which(leaves):
    places = _tensors(leaves)
    return places[n] if len(places) > n else None

  return which


def _nth_integer(n: int) -> Callable:
  def which(leaves):
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is int]
    return places[n] if len(places) > n else None

  return which


def _index_tensor(leaves):
  places = [i for i in _tensors(leaves) if leaves[i].dtype is torch.int64]
  return next((i for i in places if i > 0), None)


def _longer(tensor):
  """Three more elements along the last dimension."""
  if not tensor.dim():
    return tensor.new_ones(3)
  tail = tensor.new_ones((*tensor.shape[:-1], 3))
  return torch.cat([tensor, tail], -1)


def _of_dtype(dtype) -> Callable:
  return lambda tensor: None if tensor.dtype is dtype else tensor.to(dtype)


def _with_number(number) -> Callable:
  def change(tensor):
    if not tensor.numel():
      return None
    changed = tensor.clone()
    changed.reshape(-1)[-1:] = number
    return changed

  return change


MUTATIONS: dict[str, Callable] = {
  "first tensor longer": _replacing(_nth_tensor(0), _longer),
  "second tensor longer": _replacing(_nth_tensor(1), _longer),
  "third tensor longer": _replacing(_nth_tensor(2), _longer),
  "first tensor without dimensions": _replacing(
    _nth_tensor(0), lambda t: t.new_ones(()) if t.dim() else None
  ),
  "first tensor empty": _replacing(_nth_tensor(0), lambda t: t.new_ones(0)),
  "one dimension more": _replacing(_nth_tensor(0), lambda t: t[None]),
  "first number beyond": _replacing(_nth_integer(0), lambda _: BEYOND),
  "first number below": _replacing(_nth_integer(0), lambda _: -BEYOND),
  "second number beyond": _replacing(_nth_integer(1), lambda _: BEYOND),
  "second number below": _replacing(_nth_integer(1), lambda _: -BEYOND),
  "index beyond": _replacing(_index_tensor, _with_number(BEYOND)),
  "index below": _replacing(_index_tensor, _with_number(-BEYOND)),
  "complex": _replacing(_nth_tensor(0), _of_dtype(torch.complex64)),
  "integers": _replacing(_nth_tensor(0), _of_dtype(torch.int64)),
  "bools": _replacing(_nth_tensor(0), _of_dtype(torch.bool)),
  "second of integers": _replacing(_nth_tensor(1), _of_dtype(torch.int64)),
}


def of(sample) -> Iterator[tuple[str, tuple]]:
  """(name, (args, kwargs)) of each mutation that applies to a sample of `op_db`."""
  given = ((sample.input, *sample.args), sample.kwargs)
  for name, mutate in MUTATIONS.items():
    mutated = mutate(given)
    if mutated is not None:
      yield name, mutated
