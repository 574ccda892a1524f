"""Results of a graph on jax that share memory with an input or with one another.

A compiled function returns new arrays. A result that is a view is therefore created
after the call, from the tensor that it views. In the trace, tensors that share memory
have one storage, and their chains contain the view steps. `on_jax.py` calls `box` at
the end of the trace and `unbox` after each call.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from torchax.core import mappings, view_steps
from torchax.core.static_values import StaticValue
from torchax.core.view_steps import ViewInfo
from torchax.registry.names import aten
from torchax.tensor import Tensor, new_tensor


@dataclasses.dataclass(frozen=True)
class _ViewOf:
  """Result that is created after the call, as a view.

  Attributes:
    base: index of the input or of the result that it views.
    is_input: True if the base is an input.
    steps: view steps from the base; None for the base itself.
    requires_grad: True if the result has a gradient.
  """

  base: int
  is_input: bool
  steps: tuple[ViewInfo, ...] | None
  requires_grad: bool

  def make(self, base: torch.Tensor) -> torch.Tensor:
    """Return the view of a base, with a gradient if the result had one."""
    if self.steps is None:
      return base
    steps, under_no_grad = self.steps, ()
    if self.requires_grad and _STOP in steps:  # the view was created under `no_grad`
      stop = steps.index(_STOP)
      under_no_grad, steps = steps[:stop], steps[stop + 1 :]
    is_cut = base.requires_grad and not self.requires_grad
    with torch.no_grad():
      view = _replay_steps(base.detach() if is_cut else base, under_no_grad)
    with torch.set_grad_enabled(self.requires_grad):
      view = _replay_steps(view, steps)
      return base.view_as(base) if view is base else view


def _replay_steps(view: torch.Tensor, steps: Sequence[ViewInfo]) -> torch.Tensor:
  for step in steps:
    view = _OPERATIONS[type(step)](view, step)
  return view


_STOP = view_steps.StopGradientInfo()
# Operation of torch for each type of view step.
_OPERATIONS: dict[type[ViewInfo], Callable] = {
  view_steps.AsStridedInfo: lambda t, step: t.as_strided(
    step.size, step.stride, t.storage_offset() + step.offset
  ),
  view_steps.ComplexAsRealInfo: lambda t, step: torch.view_as_real(t),
  view_steps.ConjugateInfo: lambda t, step: t.conj(),
  view_steps.DiagonalInfo: lambda t, step: t.diagonal(
    step.offset, step.dim1, step.dim2
  ),
  view_steps.DtypeInfo: lambda t, step: t.view(mappings.j2t_dtype(step.dtype)),
  view_steps.ExpandInfo: lambda t, step: t.expand(step.size),
  view_steps.IndexInfo: lambda t, step: t.select(step.dim, step.index),
  view_steps.NarrowInfo: lambda t, step: t[tuple(slice(*part) for part in step.slices)],
  view_steps.NegateInfo: lambda t, step: aten._neg_view(t),
  view_steps.PermuteInfo: lambda t, step: t.permute(step.dims),
  view_steps.RealAsComplexInfo: lambda t, step: torch.view_as_complex(t),
  view_steps.ReshapeInfo: lambda t, step: t.reshape(step.size),
  view_steps.StopGradientInfo: lambda t, step: t.detach(),
  view_steps.UnfoldInfo: lambda t, step: t.unfold(step.dim, step.size, step.step),
}


def box(args: Sequence, results: Sequence) -> list:
  """Replace results that are views by their steps, at the end of a trace.

  Args:
    args: inputs of the graph, in the trace.
    results: its results, in the trace.

  Returns:
    The results, and bases that are no results themselves.
  """
  inputs = {id(a._storage): n for n, a in enumerate(args) if isinstance(a, Tensor)}
  groups: dict[int, list[int]] = collections.defaultdict(list)
  for number, value in enumerate(results):
    if isinstance(value, Tensor):
      groups[id(value._storage)].append(number)
  boxed = list(results)
  for storage, group in groups.items():
    is_input = storage in inputs
    if is_input:
      base = inputs[storage]
      viewed = args[base]
    elif len(group) > 1:
      viewed = _base_of([results[number] for number in group])
      base = next((n for n in group if results[n] is viewed), len(boxed))
      if base == len(boxed):
        boxed.append(viewed)
    else:
      continue
    for number in group:
      steps = _steps(results[number], viewed, undoes=is_input)
      if steps is not None and (is_input or number != base):
        has_gradient = results[number].requires_grad
        is_same = results[number] is viewed
        view = _ViewOf(base, is_input, None if is_same else steps, has_gradient)
        boxed[number] = StaticValue(view)
  return boxed


def _steps(
  value: Tensor, base: Tensor, undoes: bool = False
) -> tuple[ViewInfo, ...] | None:
  """Return the steps from a base to a view; None if they cannot be repeated.

  Args:
    value: the view.
    base: the base.
    undoes: the base may have changed its shape in place after the view was created.
  """
  prefix, infos = base._chain.infos, value._chain.infos
  pairs = enumerate(zip(prefix, infos))
  fewest = min(len(prefix), len(infos))
  shared = next((n for n, (one, other) in pairs if one != other), fewest)
  undone = _undone(base, shared) if undoes else ()
  if undone is None or not (undoes or shared == len(prefix)):
    return None
  steps = (*undone, *infos[shared:])
  has_gradient = base.requires_grad or not value.requires_grad
  is_known = all(type(step) in _OPERATIONS for step in steps)
  return steps if has_gradient and is_known else None


def _undone(tensor: Tensor, start: int) -> tuple[ViewInfo, ...] | None:
  """Return steps that undo those of a tensor from `start` on; None if some cannot."""
  array, undone = tensor._storage.read(), []
  for number, step in enumerate(tensor._chain.infos):
    before, array = array, jax.eval_shape(step.transform_tensor, array)
    if number < start:
      continue
    if isinstance(step, view_steps.ReshapeInfo):
      undone.append(view_steps.ReshapeInfo(before.shape))
    elif isinstance(step, view_steps.PermuteInfo):
      undone.append(view_steps.PermuteInfo(tuple(map(int, np.argsort(step.dims)))))
    else:
      return None
  return tuple(reversed(undone))


def _base_of(values: list[Tensor]) -> Tensor:
  """Return the tensor that is a base of most values, by steps that can be repeated."""
  first = values[0]
  bases = [base for value in values if isinstance(base := value._base, Tensor)]
  whole = new_tensor(first._storage.read(), first._env)

  def count_views(base: Tensor) -> int:
    return sum(_steps(value, base) is not None for value in values)

  return max([*values, *bases, whole], key=count_views)


def unbox(args: Sequence, results: Sequence, count: int) -> list:
  """Return the results of the graph, after a call.

  Args:
    args: inputs of the call.
    results: returned by the compiled function; see `box`.
    count: number of results of the graph.
  """
  values = []
  for value in results[:count]:
    view = value.value if type(value) is StaticValue else value
    if isinstance(view, _ViewOf):
      value = view.make((args if view.is_input else results)[view.base])
    values.append(value)
  return values
