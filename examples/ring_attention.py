"""Ring attention: attention over a sequence that is sharded over eight devices.

Queries, keys and values are sharded along the sequence. In each turn a device attends
with its queries to its current block of keys and values and sends the block to its
neighbour. The softmax is accumulated block by block, without the blocks that a causal
mask hides. After eight turns every query has met every key, and no device has held more
than two blocks. The backward pass goes round the ring once more. Without accelerators,
JAX splits the CPU into eight devices.

Prints the difference to attention on one device, the shape of the output on each
device, the collectives and the temporary memory. Then trains a block with dropout on
one and on eight devices and prints the losses of both, which are equal up to rounding.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context" (2023), https://arxiv.org/abs/2310.01889.

usage: python examples/ring_attention.py [--steps=5]
"""

import copy
import functools
from collections import Counter

import jax
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from absl import app, flags
from jax.sharding import AxisType, PartitionSpec
from torch import nn

import torchax
from torchax.interop import call_jax, cond, jax_jit, jax_shard_map, scan
from torchax.mesh_util import Mesh
from torchax.processes import collectives as collectives_of

_STEPS = flags.DEFINE_integer("steps", 5, "Training steps.", 1)

DEVICES, RING = 8, "ring"
BATCH, HEADS, LENGTH, FEATURES = 2, 2, 1024, 16
WIDTH = HEADS * FEATURES


def send_to_next(block: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
  """Send a block to the next device; return the block from the previous one."""
  next_ones = [(i + 1) % DEVICES for i in range(DEVICES)]
  return tuple(collectives.permute_tensor(t, next_ones, RING) for t in block)


def sending_turns() -> torch.Tensor:
  """Return the turns that send blocks on: all except the last."""
  return torch.arange(DEVICES - 1, device="jax")


def unless_hidden(add_block, is_causal: bool, turn, so_far, block):
  """Return `add_block(turn, so_far, block)`; `so_far` if the mask hides the block."""
  if not is_causal:
    return add_block(turn, so_far, block)
  add, skip = functools.partial(add_block, turn), lambda so_far, block: so_far
  return cond(turn <= call_jax(jax.lax.axis_index, RING), add, skip, so_far, block)


def attention_scores(query, key, turn, is_causal: bool) -> torch.Tensor:
  """Return the scores of this device's queries and the keys of a turn."""
  scores = query @ key.mT * query.shape[-1] ** -0.5
  if not is_causal:
    return scores
  here = call_jax(jax.lax.axis_index, RING)
  within = torch.arange(query.shape[-2], device="jax")
  rows = here * len(within) + within
  columns = (here - turn) % DEVICES * len(within) + within
  return scores.masked_fill(columns > rows[:, None], -torch.inf)


class RingAttention(torch.autograd.Function):
  """Attention, softmax(query keyᵀ / √features) value, on one device's shard.

  Each tensor has the shape (batch, heads, length of the shard, features). The backward
  pass keeps the logarithm of each row's sum, and recomputes the weights.
  """

  @staticmethod
  def forward(ctx, query, key, value, is_causal):
    def attend_block(turn, so_far, block):
      (peak, total, output), (key, value) = so_far, block
      scores = attention_scores(query, key, turn, is_causal)
      higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
      weights, before = torch.exp(scores - higher), torch.exp(peak - higher)
      total = total * before + weights.sum(-1, keepdim=True)
      return higher, total, output * before + weights @ value

    take_turn = functools.partial(unless_hidden, attend_block, is_causal)

    def turn(carry, index):
      return (take_turn(index, *carry), send_to_next(carry[1])), None

    # The first block is the device's own: each row sees at least one key in it, so the
    # peak is finite from then on.
    start = torch.full_like(query[..., :1], -torch.inf)
    start = start, torch.zeros_like(start), torch.zeros_like(query)
    carry, _ = scan(turn, (start, (key, value)), sending_turns())
    peak, total, output = take_turn(DEVICES - 1, *carry)
    output = output / total
    ctx.is_causal = is_causal
    ctx.save_for_backward(query, key, value, output, peak + total.log())
    return output

  @staticmethod
  def backward(ctx, grad):
    query, key, value, output, log_total = ctx.saved_tensors
    scale = query.shape[-1] ** -0.5
    mean = (grad * output).sum(-1, keepdim=True)

    def add_gradients(turn, so_far, block):
      (grad_query, (grad_key, grad_value)), (key, value) = so_far, block
      weights = torch.exp(attention_scores(query, key, turn, ctx.is_causal) - log_total)
      grad_scores = weights * (grad @ value.mT - mean) * scale
      grad_block = grad_key + grad_scores.mT @ query, grad_value + weights.mT @ grad
      return grad_query + grad_scores @ key, grad_block

    take_turn = functools.partial(unless_hidden, add_gradients, ctx.is_causal)

    def turn(carry, index):
      grad_query, grad_block = take_turn(index, *carry)
      block = send_to_next(carry[1])
      return ((grad_query, send_to_next(grad_block)), block), None

    # The gradients of a block travel with it; one more turn returns them to the device
    # that owns the block.
    zeros = torch.zeros_like(query), (torch.zeros_like(key), torch.zeros_like(value))
    carry, _ = scan(turn, (zeros, (key, value)), sending_turns())
    grad_query, grad_block = take_turn(DEVICES - 1, *carry)
    return grad_query, *send_to_next(grad_block), None


def ring_attention(mesh: jax.sharding.Mesh, query, key, value, is_causal=False):
  """Return attention of tensors (batch, heads, length, features) sharded on a ring."""
  part = PartitionSpec(None, None, RING)

  @jax_shard_map(mesh=mesh, in_specs=(part, part, part), out_specs=part)
  def on_parts(query, key, value):
    return RingAttention.apply(query, key, value, is_causal)

  return on_parts(query, key, value)


class Block(nn.Module):
  """Causal attention and two linear layers, each with dropout on its output."""

  def __init__(self, attend):
    super().__init__()
    self.attend = attend
    self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
    self.heads, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    self.dropout = nn.Dropout(0.1)

  def forward(self, x):
    heads = self.heads(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
    mixed = self.attend(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
    x = x + self.dropout(self.mix(mixed.transpose(1, 2).flatten(-2)))
    return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


def losses(block: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
  """Train a few steps; return the loss of each."""
  optimizer = torch.optim.AdamW(block.parameters(), 1e-2)

  @jax_jit
  def step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(block(x), y)
    loss.backward()
    optimizer.step()
    return loss

  torch.manual_seed(1)
  return [step(x, y).item() for _ in range(_STEPS.value)]


def gradients(attend, is_causal: bool):
  """Return a compiled function that computes attention and its gradients."""

  @jax_jit
  def run(query, key, value, weights):
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    output = attend(*leaves, is_causal=is_causal)
    return output.detach(), torch.autograd.grad((output * weights).sum(), leaves)

  return run


def compare(attend, ring: Mesh, is_causal: bool) -> None:
  """Print the difference to one device, the collectives and the temporary memory."""
  tensors = [torch.randn(BATCH, HEADS, LENGTH, FEATURES) for _ in range(4)]
  parts = [ring.shard(t, (None, None, RING)) for t in tensors]
  whole = [t.to("jax") for t in tensors]
  dense = gradients(F.scaled_dot_product_attention, is_causal)
  sharded = gradients(attend, is_causal)
  output, gradients_found = sharded(*parts)
  expected, gradients_expected = dense(*whole)
  pairs = [(output, expected), *zip(gradients_found, gradients_expected, strict=True)]
  differences = [(a.cpu() - b.cpu()).abs().max().item() for a, b in pairs]
  sent = collectives_of(sharded, *parts)
  print(f"is_causal={is_causal}, {LENGTH} positions:")
  print("  largest difference to one device:", *[f"{d:.1e}" for d in differences])
  print("  output on each device:", output.jax().addressable_shards[0].data.shape)
  print("  collectives:", dict(Counter(one.kind for one in sent)))
  for name, function, given in (
    ("one device", dense, whole),
    ("each of eight", sharded, parts),
  ):
    memory = function.lower(*given).compile().memory_analysis()
    print(f"  {name} needs {memory.temp_size_in_bytes} bytes of temporary memory")


def main(argv) -> None:
  del argv
  axes = (AxisType.Auto,)
  ring = Mesh(jax.make_mesh((DEVICES,), (RING,), axis_types=axes))
  attend = functools.partial(ring_attention, ring.jax_mesh)
  torch.manual_seed(0)
  for is_causal in (False, True):
    compare(attend, ring, is_causal)

  block = Block(F.scaled_dot_product_attention).to("jax")
  sharded_block = copy.deepcopy(block)
  sharded_block.attend = attend
  ring.shard_model(sharded_block, lambda name, tensor: PartitionSpec())
  x, y = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
  one = losses(block, x.to("jax"), y.to("jax"))
  eight = losses(sharded_block, *(ring.shard(t, (None, RING)) for t in (x, y)))
  print("losses of one device:   ", *[f"{loss:.5f}" for loss in one])
  print("losses of eight devices:", *[f"{loss:.5f}" for loss in eight])
  difference = max(abs(a - b) for a, b in zip(one, eight, strict=True))
  print(f"largest difference of the losses: {difference:.1e}")


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", DEVICES)  # has no effect on accelerators
  torchax.enable_globally()
  app.run(main)
