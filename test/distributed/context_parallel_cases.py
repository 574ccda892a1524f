"""Laws of `context_parallel`: attention gives the numbers of one device.

`dtensor_cases.py` runs them.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from distributed.dtensor_parts import case, grid, line
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from torchax.distributed import placements_of
from torchax.errors import CollectiveError
from torchax.interop import jax_jit

SHAPE, LENGTH_DIM = (2, 2, 16, 4), 2
INPUTS = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
IS_HIDDEN = torch.arange(16) > 9
# Options of attention; those of the last row only jax has under context_parallel.
OPTIONS = ({}, {"is_causal": True}, {"attn_mask": ~IS_HIDDEN.expand(16, 16)})


def _attend(tensors, options) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
  leaves = [tensor.detach().requires_grad_() for tensor in tensors]
  options = {
    name: value.to(leaves[0].device) if isinstance(value, torch.Tensor) else value
    for name, value in options.items()
  }
  output = F.scaled_dot_product_attention(*leaves, **options)
  return output.detach(), torch.autograd.grad(output.pow(2).sum(), leaves)


def _buffers() -> list[torch.Tensor]:
  return [part.to("jax") for part in INPUTS]


def _in_parallel(run: Callable, mesh, options):
  buffers = _buffers()
  with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[LENGTH_DIM] * 3):
    output, gradients = run(buffers, options)
  return output, gradients


@case
def attention_in_context_parallel_has_the_numbers_of_one_device():
  compiled = lambda tensors, options: jax_jit(lambda *t: _attend(t, options))(*tensors)  # noqa: E731
  for mesh in (line(), grid()["tp"]):
    for options in OPTIONS:
      expected, expected_gradients = _attend(INPUTS, options)
      for run in (_attend, compiled):
        output, gradients = _in_parallel(run, mesh, options)
        assert placements_of(output.jax(), mesh) == (Shard(LENGTH_DIM),)
        whole = context_parallel_unshard(mesh, [output], [LENGTH_DIM])[0]
        assert placements_of(whole.jax(), mesh) == (Replicate(),)
        torch.testing.assert_close(whole.cpu(), expected)
        for found, gradient in zip(gradients, expected_gradients, strict=True):
          torch.testing.assert_close(found.cpu(), gradient, rtol=1e-4, atol=1e-5)


@case
def dropout_in_context_parallel_has_the_mask_of_one_device():
  def drawn(run):
    torch.manual_seed(3)
    return run()[0].cpu()

  options = {"dropout_p": 0.5}
  expected = drawn(lambda: _attend(_buffers(), options))
  found = drawn(lambda: _in_parallel(_attend, line(), options))
  torch.testing.assert_close(found, expected)


@case
def buffers_are_sharded_in_the_block_and_restored_after_it():
  whole, kept, _ = buffers = _buffers()
  dims, mesh = [2, -2, 2], line()
  alias = whole[:1]
  with (
    pytest.raises(KeyError),
    context_parallel(
      mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={kept}
    ),
  ):
    assert all(each.placements == (Shard(2),) for each in [*buffers, alias])
    whole.zero_()
    raise KeyError
  assert torch.equal(whole.cpu(), INPUTS[0])
  assert [each.placements for each in buffers] == [(), (Shard(2),), ()]


REFUSED = (
  ({"buffers": _buffers, "buffer_seq_dims": [2]}, ValueError, "each of 3.*got 1"),
  ({"buffers": lambda: [INPUTS], "buffer_seq_dims": [2]}, CollectiveError, "on cpu"),
  ({"buffers": _buffers, "buffer_seq_dims": [2, 2, 1]}, CollectiveError, "divide"),
  ({"no_restore_buffers": _buffers}, ValueError, "must be a subset"),
)


@case
def context_parallel_refuses_buffers_that_it_cannot_shard():
  for arguments, error, message in REFUSED:
    given = {
      name: value() if callable(value) else value for name, value in arguments.items()
    }
    with pytest.raises(error, match=message), context_parallel(line(), **given):
      pass
    assert all(not each.placements for each in given.get("buffers", ()) if each.is_jax)
  with pytest.raises(CollectiveError, match="load_balancer=None, but got str"):
    context_parallel_unshard(line(), _buffers(), [2] * 3, "balancer")
