"""Private methods of optimizers in `torch.optim`."""

import inspect

import torch


def init_optimizer_group(optimizer: torch.optim.Optimizer, group: dict) -> None:
  """Create the state of a group's parameters, as the first step would.

  Do nothing if the class has no such method; its first step then creates the state.
  """
  init = getattr(optimizer, "_init_group", None)
  if init is None:
    return
  parameters = list(inspect.signature(init).parameters.values())[1:]
  if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
    init(group, *[[] for _ in parameters])
