"""Laws of `fully_shard`, which trains as one device. `dtensor_cases.py` runs them."""

import copy

import pytest
import torch
from distributed.dtensor_parts import (
  Block,
  X,
  assert_trains_alike,
  case,
  enter_refusals,
  grid,
  line,
  numbers,
  pair,
)
from torch import nn
from torch.distributed.fsdp import (
  CPUOffloadPolicy,
  FSDPModule,
  FullyShardedDataParallel,
  MixedPrecisionPolicy,
  fully_shard,
  register_fsdp_forward_method,
  share_comm_ctx,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
  ColwiseParallel,
  RowwiseParallel,
  parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from torchax.errors import CollectiveError
from torchax.interop import jax_jit


@case
def fully_sharded_modules_train_as_on_one_device():
  block, reference = pair()
  for part in (block.norm, block.up, block.down, block):
    assert fully_shard(part, mesh=line()) is part
  assert {p.placements for p in block.parameters()} == {(Shard(0),)}
  assert {p.jax().addressable_shards[0].data.size * 8 for p in block.parameters()} == {
    p.numel() for p in reference.parameters()
  }
  assert_trains_alike(block, reference)


@case
def fully_shard_shards_a_dim_that_divides():
  module = nn.Module()
  module.rows = nn.Parameter(numbers(8, 3))
  module.columns = nn.Parameter(numbers(3, 8))
  module.small = nn.Parameter(numbers(3))
  module.frozen = nn.Parameter(numbers(8))
  # By default over all devices.
  fully_shard(module.to("jax"), ignored_params={module.frozen})
  found = {name: p.placements for name, p in module.named_parameters()}
  assert found == {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "small": (Replicate(),),
    "frozen": (),
  }
  chosen = nn.Linear(8, 8, bias=False)
  fully_shard(chosen, mesh=line(), shard_placement_fn=lambda p: Shard(1))
  assert chosen.weight.placements == (Shard(1),)
  wrong = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to("jax")
  with pytest.raises(CollectiveError, match=r"shape \(3, 8\) does not divide into 8"):
    fully_shard(wrong, mesh=line(), shard_placement_fn=lambda p: Shard(0))
  # The module has not changed.
  assert {p.placements for p in wrong.parameters()} == {()}


@case
def fully_shard_on_two_dims_shards_over_the_last():
  block, reference = pair()
  fully_shard(block, mesh=grid())
  assert block.up.weight.placements == (Replicate(), Shard(0))
  assert_trains_alike(block, reference)


@case
def tensor_parallel_modules_can_be_fully_sharded():
  block, reference = pair()
  mesh = grid()
  plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
  parallelize_module(block, mesh["tp"], plan)
  fully_shard(block, mesh=mesh["dp"])
  assert block.up.weight.placements == (Shard(0), Shard(0))
  assert block.down.weight.placements == (Shard(0), Shard(1))
  assert_trains_alike(block, reference)


# Methods ------------------------------------------------------------------------------


def sharded(**options) -> tuple[Block, Block]:
  """Return a block, fully sharded by parts and as a whole, and an equal plain one."""
  block, reference = pair()
  for part in (block.norm, block.up, block.down, block):
    fully_shard(part, mesh=line(), **options)
  return block, reference


@case
def fully_sharded_module_keeps_its_class():
  block, reference = sharded()
  for part in block.modules():
    assert isinstance(part, FSDPModule)
  assert isinstance(block, Block) and isinstance(block.up, nn.Linear)
  assert type(block).__name__ == "FSDPBlock" and type(block.up) is type(block.down)
  layers = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), mesh=line())
  assert type(layers[:1]) is nn.Sequential
  copied = copy.deepcopy(block)
  assert isinstance(copied, FSDPModule) and copied.up is not block.up
  assert copied.up.weight.placements == (Shard(0),)
  copied.to("cpu")
  assert copied.up.weight.device.type == "cpu"
  assert_trains_alike(block, reference)


SCHEDULES = {
  "unshard": lambda block: block.unshard(),
  "unshard and wait": lambda block: block.unshard(async_op=True).wait(),
  "reshard": lambda block: block.reshard(),
  "last backward": lambda block: block.set_is_last_backward(True),
  "gradient sync": lambda block: block.set_requires_gradient_sync(False, recurse=True),
  "all reduce": lambda block: block.set_requires_all_reduce(False),
  "reshard after forward": lambda block: block.set_reshard_after_forward(False),
  "reshard after backward": lambda block: block.set_reshard_after_backward(False),
  "unshard in backward": lambda block: block.set_unshard_in_backward(False),
  "forward prefetch": lambda block: block.set_modules_to_forward_prefetch(
    modules=[block.up]
  ),
  "backward prefetch": lambda block: block.set_modules_to_backward_prefetch(
    modules=[block.up]
  ),
  "mean of means": lambda block: block.set_gradient_divide_factor(8.0),
  "sums": lambda block: block.set_gradient_divide_factor(1.0),
  "streams": lambda block: share_comm_ctx(modules=[block, block.up]),
}


@case
def scheduling_methods_do_not_change_results():
  block, reference = sharded()
  for schedule in SCHEDULES.values():
    assert schedule(block) is None
  assert_trains_alike(block, reference)


@case
def gradients_accumulated_without_sync_sum_all_batches():
  block, reference = sharded()
  for last, rows in enumerate(X.split(2)):
    block.set_requires_gradient_sync(bool(last))
    block.set_is_last_backward(bool(last))
    block(rows.to("jax")).pow(2).sum().backward()
    reference(rows).pow(2).sum().backward()
  for mine, other in zip(block.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@case
def gradient_norms_are_clipped_as_on_one_device():
  for kind in (2.0, 1.0, float("inf")):
    block, reference = sharded()
    for module, x in ((block, X.to("jax")), (reference, X)):
      module(x).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, kind)
    found = nn.utils.clip_grad_norm_(block.parameters(), 0.5, kind)
    assert expected > 0.5
    torch.testing.assert_close(found.full_tensor().cpu(), expected)
    for mine, other in zip(block.parameters(), reference.parameters(), strict=True):
      torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
      assert mine.grad.placements == mine.placements


# Mixed precision ----------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Tolerance for sums of 16 products, rounded to 8 bits and added in any order.
OF_BF16 = {"rtol": 2e-2, "atol": 2e-2}


def in_bf16(reference: nn.Module, x: torch.Tensor):
  """Return the output of a module in bfloat16 and the gradients of its parameters."""
  half = copy.deepcopy(reference).to("jax").bfloat16()
  y = half(x.to("jax").bfloat16())
  y.float().pow(2).mean().backward()
  return y.float(), [p.grad.float() for p in half.parameters()]


def computes_in_bf16(policy: MixedPrecisionPolicy, output: torch.dtype) -> None:
  block, reference = pair()
  fully_shard(block, mesh=line(), mp_policy=policy)
  expected, gradients = in_bf16(reference, X)
  parameters, dtypes = list(block.parameters()), set()
  block.up.register_forward_hook(
    lambda module, inputs, y: dtypes.add((module.weight.dtype, y.dtype))
  )

  def step(x):
    y = block(x)
    y.float().pow(2).mean().backward()
    return y

  for run in (step, jax_jit(step)):
    block.zero_grad()
    dtypes.clear()
    y = run(X.to("jax"))
    assert dtypes == {(torch.bfloat16, torch.bfloat16)} and y.dtype == output
    torch.testing.assert_close(y.float().cpu(), expected.detach().cpu(), **OF_BF16)
    for now, before, g in zip(block.parameters(), parameters, gradients, strict=True):
      assert now is before and now.dtype == now.grad.dtype == torch.float32
      torch.testing.assert_close(now.grad.cpu(), g.cpu(), **OF_BF16)


@case
def parameters_are_cast_in_forward_and_gradients_cast_back():
  computes_in_bf16(BF16, torch.bfloat16)
  to_float = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
  computes_in_bf16(to_float, torch.float32)


@case
def inner_policy_applies_to_its_own_parameters():
  block, _ = pair()
  fully_shard(block.norm, mesh=line(), mp_policy=MixedPrecisionPolicy())
  fully_shard(block.up, mesh=line(), mp_policy=BF16)
  whole = MixedPrecisionPolicy(cast_forward_inputs=False, output_dtype=torch.float16)
  fully_shard(block, mesh=line(), mp_policy=whole)
  seen = {}
  for name, part in block.named_children():
    part.register_forward_hook(
      lambda module, inputs, y, name=name: seen.update({name: y.dtype})
    )
  block.down.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
  assert block(X.to("jax")).dtype == torch.float16
  expected = {"norm": torch.float32, "up": torch.bfloat16, "down": torch.float32}
  assert seen == expected


@case
def recomputed_activations_keep_their_dtype():
  class Checkpointed(nn.Module):
    def __init__(self, inner):
      super().__init__()
      self.inner = inner

    def forward(self, x):
      return checkpoint(self.inner, x, use_reentrant=False)

  block, reference = pair()
  fully_shard(Checkpointed(block), mesh=line(), mp_policy=BF16)(
    X.to("jax")
  ).float().pow(2).mean().backward()
  _, gradients = in_bf16(reference, X)
  for parameter, gradient in zip(block.parameters(), gradients, strict=True):
    assert parameter.grad.dtype == torch.float32
    torch.testing.assert_close(parameter.grad.cpu(), gradient.cpu(), **OF_BF16)


@case
def failed_forward_pass_restores_parameters():
  block, _ = pair()
  fully_shard(block, mesh=line(), mp_policy=BF16)
  before = dict(block.named_parameters())
  with pytest.raises(RuntimeError):
    block(torch.ones(4, 3, device="jax"))
  after = dict(block.named_parameters())
  assert all(after[name] is parameter for name, parameter in before.items())
  assert block(X.to("jax")).dtype == torch.bfloat16


@case
def registered_methods_cast_parameters_as_forward_does():
  class Encoder(Block):
    def encode(self, x):
      return self.up(x)

  for policy, dtype in ((BF16, torch.bfloat16), (None, torch.float32)):
    options = {} if policy is None else {"mp_policy": policy}
    module = fully_shard(Encoder(), mesh=line(), **options)
    register_fsdp_forward_method(module, "encode")
    assert module.encode(X.to("jax")).dtype == dtype
    assert module.up.weight.dtype == torch.float32
  with pytest.raises(ValueError, match="Encoder.* does not have a method decode"):
    register_fsdp_forward_method(module, "decode")


REFUSALS = {
  "a policy of another dtype": (
    lambda: fully_shard(
      Block(), mesh=line(), mp_policy=MixedPrecisionPolicy(torch.int8)
    ),
    CollectiveError,
    "floating-point dtypes.*param_dtype.*int8",
  ),
  "a policy of offloading": (
    lambda: fully_shard(Block(), mesh=line(), offload_policy=CPUOffloadPolicy()),
    CollectiveError,
    "expects no offload_policy",
  ),
  "the first version of FSDP": (
    lambda: FullyShardedDataParallel(Block().to("jax"), device_mesh=line()),
    CollectiveError,
    "fully_shard.module, mesh=",
  ),
  "a module twice": (
    lambda: fully_shard(sharded()[0], mesh=line()),
    AssertionError,
    "only be applied to a module once",
  ),
  "another divide factor": (
    lambda: sharded()[0].set_gradient_divide_factor(4.0),
    CollectiveError,
    "divide factor of 1, or 8 .*, but got 4.0. Divide the loss",
  ),
  "a collective of one's own": (
    lambda: sharded()[0].set_custom_all_gather(None),
    CollectiveError,
    "no `set_custom_all_gather`: XLA communicates",
  ),
  "a hook of the reduction": (
    lambda: sharded()[0].set_all_reduce_hook(print),
    CollectiveError,
    "register_post_accumulate_grad_hook",
  ),
  "arguments that torch does not take": (
    lambda: sharded()[0].set_is_last_backward(),
    TypeError,
    "missing a required argument: 'is_last_backward'",
  ),
  "a prefetch of what is not sharded": (
    lambda: sharded()[0].set_modules_to_forward_prefetch([nn.ReLU()]),
    ValueError,
    "fully_shard was applied to, but got ReLU",
  ),
}
enter_refusals(REFUSALS)
