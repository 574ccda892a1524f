"""Decompositions: operations in terms of others, used where there is no lowering.

Most are torch's own; what torch lacks or has only for its devices is here. Random
operations are lowered, never decomposed, so that eager and compiled runs draw alike;
their decompositions below are for graphs that are to have no other random operation
than `rand`. They draw through torch, from the scope of the tensors' device.
"""

import torch

from torchax.compat import torch_compat
from torchax.registry import operators
from torchax.registry.schema import schema_of

DECOMPOSITIONS: dict = {
  op: function
  for op, function in torch_compat.decomposition_table().items()
  if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
}

# The decomposed operations that write to an argument.
MUTABLE_DECOMPOSITION: list = [
  op
  for op in DECOMPOSITIONS
  if isinstance(op, torch_compat.OpOverload) and schema_of(op).written
]

operators.decompositions = DECOMPOSITIONS


def rand_like(self: torch.Tensor, **kwargs) -> torch.Tensor:
  """Uniform numbers in [0, 1) in the shape of a tensor.

  Args:
    self: of any shape; dtype and device are taken from it.
    **kwargs: of `torch.rand`, in place of what is taken, and `generator`.
  """
  kwargs.pop("memory_format", None)
  options = {"dtype": self.dtype, "device": self.device}
  given = {name: value for name, value in kwargs.items() if value is not None}
  return torch.rand(self.shape, **{**options, **given})


def bernoulli(self: torch.Tensor, *, generator=None) -> torch.Tensor:
  """Ones with the probabilities that a tensor holds, else zeros.

  Args:
    self: probabilities in [0, 1], floats of any shape.
    generator: a `torch.Generator` to draw from; the current stream by default.

  Returns:
    A tensor of the same shape and dtype.
  """
  # A half has few numbers in [0, 1), and with them only few probabilities.
  dtype = torch.promote_types(self.dtype, torch.float32)
  return (rand_like(self, dtype=dtype, generator=generator) < self).to(self.dtype)


def bernoulli_float(self: torch.Tensor, p: float = 0.5) -> torch.Tensor:
  """Fills a tensor, in place, with ones with probability `p`, else zeros.

  Raises:
    RuntimeError: `p` is not in [0, 1].
  """
  if not 0 <= p <= 1:
    raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}.")
  return self.copy_(rand_like(self, dtype=torch.float32) < p)


def channel_shuffle(self: torch.Tensor, groups: int) -> torch.Tensor:
  """Interleaves groups of channels: (batch, groups * n, ...), n channels a group.

  Raises:
    RuntimeError: fewer than three dimensions, or no whole number of channels a group.
  """
  if self.dim() < 3:
    raise RuntimeError(
      "channel_shuffle expects input with > 2 dims, but got input with sizes "
      f"{list(self.shape)}."
    )
  channels = self.shape[1]
  if groups < 1 or channels % groups:
    raise RuntimeError(
      "channel_shuffle expects a positive number of groups that divides the number "
      f"of channels, but got {groups} groups and {channels} channels."
    )
  return self.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
