"""Decompositions: operations in terms of others, used where there is no lowering.

Most are torch's own; this file adds those that torch lacks or has only for its devices.
Random operations are lowered, not decomposed, so that eager and compiled runs draw the
same numbers. The random decompositions below serve graphs whose only random operation
may be `rand`. They draw through torch, from the stream of the tensors' device.
"""

from typing import Any

import torch

from torchax.compat import torch_compat
from torchax.registry import operators
from torchax.registry.schema import schema_of

DECOMPOSITIONS: dict = {
  op: function
  for op, function in torch_compat.decomposition_table.items()
  if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
}

# Decomposed operations that write to an argument.
MUTABLE_DECOMPOSITION: list = [
  op
  for op in DECOMPOSITIONS
  if isinstance(op, torch_compat.OpOverload) and schema_of(op).written
]

operators.decompositions = DECOMPOSITIONS


def rand_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
  """Draw uniform numbers in [0, 1) in the shape of a tensor.

  Args:
    self: tensor of any shape, with a floating-point dtype.
    **kwargs: options of `torch.rand`, `generator` included. dtype and device
      default to `self`'s.

  Returns:
    A tensor of the same shape.

  >>> rand_like(torch.ones(2, 3, device="jax")).shape
  torch.Size([2, 3])
  """
  kwargs.pop("memory_format", None)
  options = {"dtype": self.dtype, "device": self.device}
  overrides = {name: value for name, value in kwargs.items() if value is not None}
  return torch.rand(self.shape, **{**options, **overrides})


def bernoulli(
  self: torch.Tensor, *, generator: torch.Generator | None = None
) -> torch.Tensor:
  """Draw ones with the probabilities in a tensor, else zeros.

  Args:
    self: probabilities in [0, 1], floats of any shape.
    generator: `torch.Generator` to draw from; by default the current stream.

  Returns:
    A tensor of the same shape and dtype.

  >>> bernoulli(torch.tensor([0.0, 1.0], device="jax"))
  tensor([0., 1.], device='jax:0')
  """
  # A 16-bit float has too few values in [0, 1) to resolve small probabilities.
  dtype = torch.promote_types(self.dtype, torch.float32)
  return (rand_like(self, dtype=dtype, generator=generator) < self).to(self.dtype)


def bernoulli_float(self: torch.Tensor, p: float = 0.5) -> torch.Tensor:
  """Fill a tensor in place with ones with probability `p`, else zeros.

  Args:
    self: tensor of any shape and dtype.
    p: probability of a one, in [0, 1].

  Returns:
    `self`.

  Raises:
    RuntimeError: `p` is not in [0, 1].

  >>> bernoulli_float(torch.zeros(2, device="jax"), 1.0)
  tensor([1., 1.], device='jax:0')
  """
  if not 0 <= p <= 1:
    raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}.")
  return self.copy_(rand_like(self, dtype=torch.float32) < p)


def channel_shuffle(self: torch.Tensor, groups: int) -> torch.Tensor:
  """Interleave the channels of groups.

  Args:
    self: tensor of shape (batch, channels, ...), any dtype.
    groups: number of groups; it divides `channels`.

  Returns:
    A tensor of the same shape and dtype.

  Raises:
    RuntimeError: `self` has fewer than three dims, or `groups` does not divide the
      number of channels.

  >>> channel_shuffle(torch.arange(4, device="jax").reshape(1, 4, 1), 2).flatten()
  tensor([0, 2, 1, 3], dtype=torch.int32, device='jax:0')
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
