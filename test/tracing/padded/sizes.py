"""Arguments of all sizes of one bucket, and comparison of results."""

import torch

SIZES = (5, 8, 7, 6)
C = 4


def x_of(n):
  generator = torch.Generator().manual_seed(n)
  return torch.randn(3, n, C, generator=generator)


def close(ours, theirs):
  """Compare with results on jax, or of CPU torch, whose 64-bit dtypes JAX narrows."""
  for one, other in zip(ours, theirs, strict=True):
    assert one.shape == other.shape
    torch.testing.assert_close(one.cpu(), other.to("jax").cpu(), rtol=2e-5, atol=2e-5)
