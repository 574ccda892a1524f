"""float4_e2m1fn_x2 on jax: bytes move as on the CPU; arithmetic raises as there."""

import copy

import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.compat import versions

float4 = torch.float4_e2m1fn_x2
BYTES = torch.arange(256, dtype=torch.uint8).reshape(16, 16)


def first(t):
  return torch.tensor([1, 2], device=t.device)


def written(t):
  target = torch.zeros_like(t)
  target[2:4] = t[:2]
  return target


MOVES = {
  "itself": lambda t: t,
  "transposed copy": lambda t: t.T.contiguous(),
  "slice": lambda t: t[2:, ::2],
  "reshape": lambda t: t.reshape(4, 64),
  "cat": lambda t: torch.cat([t, t]),
  "stack": lambda t: torch.stack([t, t]),
  "flip": lambda t: t.flip(0),
  "roll": lambda t: t.roll(1, 0),
  "repeat": lambda t: t.repeat(2, 1),
  "expand": lambda t: t[None].expand(2, 16, 16),
  "index_select": lambda t: t.index_select(0, first(t)),
  "embedding": lambda t: F.embedding(first(t), t),
  "where": lambda t: torch.where(t.view(torch.uint8) > 9, t, t.flip(0)),
  "copy_": lambda t: torch.empty_like(t).copy_(t),
  "write of rows": written,
  "zeros": lambda t: torch.zeros(3, dtype=float4, device=t.device),
  "same dtype": lambda t: t.to(float4),
  "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False).data,
  "deep copy": copy.deepcopy,
}


BEFORE_2_13 = pytest.mark.skipif(
  versions.is_older(torch.__version__, "2.13"),
  reason="CPU torch before 2.13 has no `where` of this dtype",
)
NAMES = [
  pytest.param(name, marks=BEFORE_2_13 if name == "where" else ()) for name in MOVES
]


@pytest.mark.parametrize("name", NAMES)
def test_moved_bytes_equal_those_of_the_cpu(name):
  move = MOVES[name]
  expected = move(BYTES.view(float4)).view(torch.uint8)
  with torchax.default_env():
    of_bytes = move(BYTES.to("jax").view(float4))
    of_tensor = move(BYTES.view(float4).to("jax"))
  for found in (of_bytes, of_tensor):
    assert found.dtype == float4 and found.device.type == "jax"
    assert torch.equal(found.cpu().view(torch.uint8), expected)


COMPUTED = {
  "add": lambda t: t + t,
  "add_": lambda t: t.clone().add_(1),
  "product": lambda t: t @ t,
  "sum": lambda t: t.sum(),
  "sort": lambda t: t.sort(),
  "softmax": lambda t: t.softmax(0),
  "linear": F.linear,
  "attention": lambda t: F.scaled_dot_product_attention(*[t[None]] * 3),
  "float": lambda t: t.float(),
  "from float": lambda t: torch.zeros(3, device=t.device).to(float4),
  "copy to float": lambda t: torch.zeros(16, 16, device=t.device).copy_(t),
  "fill_": lambda t: t.clone().fill_(1.0),
  "ones": lambda t: torch.ones(3, dtype=float4, device=t.device),
  "item": lambda t: t[0, 0].item(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_arithmetic_raises_as_on_the_cpu(name):
  compute = COMPUTED[name]
  arguments = (BYTES.view(float4),) * (2 if name == "linear" else 1)
  with pytest.raises(NotImplementedError, match="Float4_e2m1fn_x2"):
    compute(*arguments)
  with torchax.default_env():
    moved = [t.to("jax") for t in arguments]
    with pytest.raises(NotImplementedError, match="Float4_e2m1fn_x2"):
      compute(*moved)


def test_tolist_refuses_packed_numbers():
  with pytest.raises(NotImplementedError, match="tolist"):
    BYTES.view(float4).to("jax").tolist()
