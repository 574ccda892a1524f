"""Points where a derivative is a convention, made from the inputs that torch suggests.

They are zeros, ties, bounds, infinities, repeated indices, padding, ignored labels,
masks that are all one, and inputs without elements. All except the last keep the shapes
of the suggested input, so one compiled function serves them. NaN is left out: torch's
own loops over a vector and over its last elements differ there.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

# Corners of functions of one number: relu6, hardsigmoid, logit ….
CORNERS = (0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 2.0, 20.0)
# Operators that ignore a label -> the label without `ignore_index`.
IGNORING, IGNORED = ("cross_entropy", "nll_loss"), -100
# Operators of lists of labels -> the end of a list.
LISTING, ENDED = ("multilabel_margin_loss",), -1
# Operators with which CPU torch ends the process.
CRASHES = (("nn.functional.pdist", "empty"),)


def edge_points(name: str, sample: SampleInput) -> Iterator[tuple[str, SampleInput]]:
  """Yield (its name, input) for each edge point of a suggested input.

  The input's dtypes and its arguments other than tensors are kept. Some of these inputs
  are invalid for an operator: CPU torch refuses these.

  Args:
    name: name of the operator.
    sample: the input.
  """
  for point, change in _CHANGES.items():
    changed = _changed(name, sample, change)
    if changed is not None and (name, point) not in CRASHES:
      yield point, changed


def _changed(name: str, sample: SampleInput, change: Callable) -> SampleInput | None:
  """Return the input with changed tensors, or None if no tensor changes."""
  parts = (sample.input, sample.args, sample.kwargs)
  leaves, spec = pytree.tree_flatten(parts)
  made: dict[int, torch.Tensor] = {}
  numbers = [v for v in leaves if type(v) in (int, float) and math.isfinite(v)]
  for leaf in leaves:
    if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
      if leaf.layout is not torch.strided:
        return None
      first = not any(_is_inexact(t) for t in made.values())
      made[id(leaf)] = change(leaf, _Setting(name, sample, leaves, numbers, first))
  given = {id(leaf): leaf for leaf in leaves}
  if all(tensor is given[place] for place, tensor in made.items()):
    return None
  filled = [made.get(id(leaf), leaf) for leaf in leaves]
  input, args, kwargs = pytree.tree_unflatten(filled, spec)
  return SampleInput(
    input,
    args=tuple(args),
    kwargs=kwargs,
    output_process_fn_grad=sample.output_process_fn_grad,
  )


class _Setting:
  """Context of a tensor in an input.

  Attributes:
    name: name of the operator.
    sample: the input.
    leaves: all of its arguments.
    numbers: its finite Python numbers.
    is_first: no tensor of floats is before it.
  """

  def __init__(self, name, sample, leaves, numbers, is_first):
    self.name, self.sample, self.leaves = name, sample, leaves
    self.numbers, self.is_first = numbers, is_first

  def other(self, tensor: torch.Tensor) -> torch.Tensor | None:
    """Second tensor of floats, if it has this one's shape."""
    others = [
      leaf
      for leaf in self.leaves
      if isinstance(leaf, torch.Tensor) and leaf is not tensor and _is_inexact(leaf)
    ]
    return others[0] if others and others[0].shape == tensor.shape else None


def _is_inexact(tensor: torch.Tensor) -> bool:
  return tensor.is_floating_point() or tensor.is_complex()


def _is_index(tensor: torch.Tensor) -> bool:
  return not _is_inexact(tensor) and tensor.dtype is not torch.bool


def _like(tensor: torch.Tensor, values) -> torch.Tensor:
  """Return the values, repeated, in a tensor's shape and dtype."""
  cycle = itertools.islice(itertools.cycle(values), tensor.numel())
  return torch.tensor(list(cycle), dtype=tensor.dtype).reshape(tensor.shape)


def _with_first(tensor: torch.Tensor, value: float) -> torch.Tensor:
  changed = tensor.detach().clone(memory_format=torch.contiguous_format)
  changed.view(-1)[:1] = value
  return changed


def _floats(make: Callable) -> Callable:
  """Return a change of all tensors of floats."""
  return lambda t, s: make(t) if _is_inexact(t) and t.numel() else t


def _first(make: Callable) -> Callable:
  """Return a change of the first tensor of floats."""
  return lambda t, s: make(t, s) if _is_inexact(t) and s.is_first and t.numel() else t


def _others(make: Callable) -> Callable:
  """Return a change of all tensors of floats except the first."""
  return lambda t, s: make(t) if _is_inexact(t) and not s.is_first else t


def _bounds(tensor, setting):
  """Return values at the corners of functions and at the numbers in the call."""
  named = [sign * number for number in setting.numbers for sign in (1, -1)]
  return _like(tensor, [*named, *CORNERS])


def _apart(tensor, setting):
  """Return values at these distances from the second tensor."""
  other = setting.other(tensor)
  return tensor if other is None else other.detach() + _bounds(tensor, setting)


def _same(tensor, setting):
  """Return values equal to the second tensor."""
  other = setting.other(tensor)
  return tensor if other is None else other.detach().to(tensor.dtype)


def _repeated(tensor, setting):
  """Make every index the first one."""
  if not _is_index(tensor) or tensor.numel() < 2:
    return tensor
  return torch.full_like(tensor, tensor.flatten()[0].item())


def _every_other(tensor, value):
  changed = tensor.detach().clone(memory_format=torch.contiguous_format)
  changed.view(-1)[::2] = value
  return changed


def _padding(tensor, setting):
  """Make every other index the padding, if the call has one."""
  padding = setting.sample.kwargs.get("padding_idx")
  if padding is None or not _is_index(tensor) or tensor is not setting.sample.input:
    return tensor
  return _every_other(tensor, padding)


def _ignored(tensor, setting):
  """Make every other label one that is ignored."""
  if not _is_index(tensor) or not setting.name.partition(".chunk")[0].endswith(
    IGNORING
  ):
    return tensor
  return _every_other(tensor, setting.sample.kwargs.get("ignore_index", IGNORED))


def _ended(tensor, setting):
  """End lists of labels before their last position."""
  is_list = _is_index(tensor) and setting.name.endswith(LISTING)
  return _every_other(tensor, ENDED) if is_list else tensor


def _masks(value: bool) -> Callable:
  return lambda t, s: torch.full_like(t, value) if t.dtype is torch.bool else t


def _empty(tensor, setting):
  """Drop all elements along the first dimension of tensors that share its length."""
  lengths = {
    leaf.shape[0] if leaf.dim() else None
    for leaf in setting.leaves
    if isinstance(leaf, torch.Tensor)
  }
  return tensor[:0] if len(lengths) == 1 and None not in lengths else tensor


_CHANGES: dict[str, Callable] = {
  "zeros": _floats(torch.zeros_like),
  "a zero input": _first(lambda t, s: torch.zeros_like(t)),
  "zeros beside the input": _others(torch.zeros_like),
  "ties": _floats(torch.ones_like),
  "rounded": _floats(torch.round),
  "equal operands": _first(_same),
  "bounds": _first(_bounds),
  "bounds apart": _first(_apart),
  "an infinity": _first(lambda t, s: _with_first(t, math.inf)),
  "a negative infinity": _first(lambda t, s: _with_first(t, -math.inf)),
  "negative infinities": _first(lambda t, s: torch.full_like(t, -math.inf)),
  "infinities beside the input": _others(lambda t: torch.full_like(t, math.inf)),
  "repeated indices": _repeated,
  "padding": _padding,
  "ignored labels": _ignored,
  "ended labels": _ended,
  "all masked": _masks(True),
  "nothing masked": _masks(False),
  "empty": _empty,
}
NAMES = tuple(_CHANGES)
