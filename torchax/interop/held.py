"""What a module holds by name: noticing that another tensor has taken a place."""

import itertools
import operator

import torch


class Held:
  """The parameters, buffers and submodules of a module and of its submodules.

  Args:
    module: any; tensors that are plain attributes are not looked at.
  """

  def __init__(self, module: torch.nn.Module):
    self._module = module
    self.note()

  def note(self) -> None:
    """Takes what the module holds now for what it should hold."""
    self._tables = [
      table
      for module in self._module.modules()
      for table in (module._parameters, module._buffers, module._modules)
      if table
    ]
    self._known = list(self._values())

  def has_changed(self) -> bool:
    """True where something was replaced, added or removed since `note`."""
    return sum(map(len, self._tables)) != len(self._known) or not all(
      map(operator.is_, self._values(), self._known)
    )

  def _values(self):
    return itertools.chain.from_iterable(map(dict.values, self._tables))
