"""What optimizers of `torch.optim` do by private methods."""

import inspect

import torch


def init_optimizer_group(optimizer: torch.optim.Optimizer, group: dict) -> None:
  """Makes the state of the parameters of a group, as the first step would.

  Where a class has another way to make it, nothing happens: its step makes it.
  """
  init = getattr(optimizer, "_init_group", None)
  if init is None:
    return
  parameters = list(inspect.signature(init).parameters.values())[1:]
  if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
    init(group, *[[] for _ in parameters])
