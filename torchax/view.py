"""`View`: tensor that aliases a part of another tensor.

A view shares its base's storage and adds a `Chain` of steps. Reading it applies the
steps inside the operation that uses it; writing to it replaces the base's array.
The steps are in `core/view_steps.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from torchax.compat import torch_compat
from torchax.core.chains import Chain
from torchax.core.view_steps import (
  AsStridedInfo,
  DiagonalInfo,
  NarrowInfo,
  SelectInfo,
  ViewInfo,
  ViewInfoType,
)
from torchax.tensor import Tensor, alias, new_tensor

__all__ = [
  "AsStridedInfo",
  "DiagonalInfo",
  "NarrowInfo",
  "SelectInfo",
  "View",
  "ViewInfo",
  "ViewInfoType",
  "new_view",
]


class View(Tensor):
  """Tensor that aliases a part of another tensor.

  Args:
    parent: tensor of any shape to view.
    view_info: step from the parent to this view.
    env: environment of the view.

  >>> import torch, torchax
  >>> x = torch.zeros(3, device="jax")
  >>> row = x[1:]
  >>> row[0] = 5
  >>> type(row).__name__, x.tolist()
  ('View', [0.0, 5.0, 0.0])
  """

  @staticmethod
  def __new__(cls, parent: Tensor, view_info: ViewInfo, env: Any):
    shape = view_info.calculate_output_shape(parent.jax())
    return torch_compat.make_wrapper(
      cls,
      shape,
      dtype=parent.dtype,
    )

  def __init__(self, parent: Tensor, view_info: ViewInfo, env: Any):
    self._storage = parent._storage
    self._chain = parent._chain.append(view_info)
    self._env = env

  def source_jax(self) -> jax.Array:
    """Return the array of the base.

    >>> torch.zeros(2, 3, device="jax")[0].source_jax().shape
    (2, 3)
    """
    return self._storage.read()

  def replace_source_jax(self, new_value: jax.Array) -> None:
    """Replace the array of the base.

    Args:
      new_value: array of the shape and dtype of the base.

    >>> x = torch.zeros(2, device="jax")
    >>> x[1:].replace_source_jax(jax.numpy.ones(2))
    >>> x
    tensor([1., 1.], device='jax:0')
    """
    self._storage.write(new_value)

  def get_transformation_chain(self) -> list[ViewInfo]:
    """Return the steps from the base to this view.

    >>> x = torch.zeros(2, 3, device="jax")
    >>> [type(step).__name__ for step in x[0, 1:].get_transformation_chain()]
    ['IndexInfo', 'NarrowInfo']
    """
    return list(self._chain.infos)

  def create_sub_view(self, view_info: ViewInfo) -> View:
    """Return a view of this view.

    Args:
      view_info: step from this view to the new one.
    """
    return View(self, view_info, self._env)

  def update(
    self,
    new_values: jax.Array | torch.Tensor,
    view_infos: list[ViewInfo] | None = None,
  ) -> None:
    """Write values to the view and thereby to its base.

    Args:
      new_values: array or tensor of the view's shape.
      view_infos: steps from the base to write through; by default this view's.

    >>> x = torch.zeros(2, 2, device="jax")
    >>> x[0].update(jax.numpy.ones(2))
    >>> x.tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    array: Any = new_values
    if isinstance(array, Tensor):
      array = array.jax()
    if view_infos is None:
      self.replace_jax(array)
      return
    base = self._storage.read()
    self._storage.write(Chain(tuple(view_infos)).write(base, array))

  def torch(self) -> Tensor:
    """Return a copy of the view on jax, with its own memory.

    >>> x = torch.zeros(2, 2, device="jax")
    >>> copied = x[0].torch()
    >>> x[0] += 1
    >>> copied
    tensor([0., 0.], device='jax:0')
    """
    return new_tensor(self.jax(), self._env)


def new_view(source: Tensor, layout: torch.Tensor, chain: Chain) -> View:
  """Create a view on the storage of `source`.

  Args:
    source: tensor to view.
    layout: tensor on any device, with the shape, strides, offset and dtype of the view.
    chain: steps from the base of `source` to the view.
  """
  return alias(View, source, layout, source._storage, chain)
