"""`View`: a tensor that shows a part of another one and writes through to it.

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
  """A tensor that shows a part of another one.

  Args:
    parent: the tensor that is viewed.
    view_info: the step from the parent to this view.
    env: the environment.
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
    """The array of the base."""
    return self._storage.read()

  def replace_source_jax(self, new_value: jax.Array) -> None:
    """Replaces the array of the base."""
    self._storage.write(new_value)

  def get_transformation_chain(self) -> list[ViewInfo]:
    """The steps from the base to this view."""
    return list(self._chain.infos)

  def create_sub_view(self, view_info: ViewInfo) -> View:
    """A view of this view."""
    return View(self, view_info, self._env)

  def update(
    self,
    new_values: jax.Array | torch.Tensor,
    view_infos: list[ViewInfo] | None = None,
  ) -> None:
    """Writes values to the view and thereby to its base.

    Args:
      new_values: of the view's shape.
      view_infos: steps from the base to write through instead of this view's.
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
    """The view as a tensor with memory of its own, on jax."""
    return new_tensor(self.jax(), self._env)


def new_view(source: Tensor, layout: torch.Tensor, chain: Chain) -> View:
  """A view on the storage of `source`.

  Args:
    source: the tensor that is viewed.
    layout: a tensor of any device with the shape, strides, offset and dtype to take.
    chain: the steps from the base of `source` to the view.
  """
  return alias(View, source, layout, source._storage, chain)
