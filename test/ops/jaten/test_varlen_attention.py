"""`varlen_attn`: packed sequences, equal to attention of each sequence."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from ops.harness import WAYS, floats

from torchax.ops.jaten import _blockwise_attention as blockwise

varlen = pytest.importorskip(
  "torch.nn.attention.varlen", reason="this torch has no varlen_attn"
)

pytestmark = pytest.mark.skipif(
  "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters,
  reason="varlen_attn of this torch has no enable_gqa, and fewer arguments",
)

# Lengths of queries and keys; the second sequence has no query, the last tokens none.
QUERIES, KEYS = (0, 5, 5, 12), (0, 3, 7, 14)
QUERY = floats(14, 4, 8)
KEY, VALUE = floats(2, 16, 2, 8, seed=1)


def on_jax(*tensors):
  return [torch.as_tensor(tensor).to("jax") for tensor in tensors]


def starts(*sizes):
  return [torch.tensor(size, dtype=torch.int32, device="jax") for size in sizes]


def reference(query, key, value, window=(-1, -1), used=(3, 4, 7), keys=KEYS):
  """Return attention and logsumexp of one sequence after the other, with padding."""
  outputs, sums = [], []
  for first, (a, b), length in zip(keys, itertools.pairwise(QUERIES), used):
    part = slice(first, first + length)
    q, k, v = (t.transpose(0, 1) for t in (query[a:b], key[part], value[part]))
    distance = torch.arange(length) - torch.arange(b - a)[:, None] - length + (b - a)
    left, right = (size if size >= 0 else 99 for size in window)
    seen = (-left <= distance) & (distance <= right)
    outputs.append(F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True))
    scores = q @ k.repeat_interleave(2, 0).mT * q.shape[-1] ** -0.5
    sums.append(scores.masked_fill(~seen, -torch.inf).logsumexp(-1))
  rest = len(query) - QUERIES[-1]
  output = F.pad(torch.cat(outputs, 1).transpose(0, 1), (0, 0, 0, 0, 0, rest))
  return output, F.pad(torch.cat(sums, 1), (0, rest), value=-torch.inf)


def attend(query, key, value, queries, keys, **options):
  return varlen.varlen_attn(
    *(query, key, value, queries, keys, 7, 7),
    enable_gqa=True,
    return_aux=varlen.AuxRequest(lse=True),
    **options,
  )


def with_block(monkeypatch, block):
  """Set the size of blocks; return tensors of a shape that only this size has.

  Programs of the same shape would be reused.
  """
  monkeypatch.setattr(blockwise, "BLOCK", block)
  features = 8 if block == 512 else 6
  return [t[..., :features] for t in (QUERY, KEY, VALUE)]


@pytest.mark.parametrize(
  "window, way, block",
  [
    *((window, "eager", 512) for window in ((-1, -1), (3, 0), (1, 2), (0, 0))),
    *(((-1, 0), way, 512) for way in WAYS),
    *((window, "eager", 4) for window in ((-1, -1), (1, 2))),
  ],
)
def test_values_and_gradients_equal_each_sequence(monkeypatch, window, way, block):
  tensors = with_block(monkeypatch, block)
  exact = [t.double().requires_grad_() for t in tensors]
  expected = reference(*exact, window)
  leaves = [t.to("jax").requires_grad_() for t in tensors]

  def function(*args):
    return attend(*args, window_size=window)

  found = WAYS[way](function)(*leaves, *starts(QUERIES, KEYS))
  pairs = zip(
    (*found, *torch.autograd.grad(found[0].sin().sum(), leaves)),
    (*expected, *torch.autograd.grad(expected[0].sin().sum(), exact)),
    strict=True,
  )
  for have, want in pairs:
    torch.testing.assert_close(have.cpu().double(), want, atol=2e-6, rtol=1e-5)


def test_hidden_blocks_are_skipped(monkeypatch):
  """A NaN in a value of another sequence would spread over its block."""
  query, key, value = on_jax(*with_block(monkeypatch, 4))
  value[12:] = torch.nan
  found, _ = attend(query, key, value, *starts(QUERIES, KEYS))
  assert found[:4].isfinite().all()
  assert found[5:12].isnan().all()


@pytest.mark.parametrize("is_paged", (False, True))
def test_only_used_keys_are_seen(is_paged):
  table = torch.tensor([[4, 1], [0, 5], [3, 2]], dtype=torch.int32)
  pages = floats(2, 6, 4, 2, 8, seed=4)
  key, value = pages[:, table].reshape(2, -1, 2, 8)
  used = (5, 0, 7)
  options = dict(window_size=(-1, 0), seqused_k=starts(used)[0])
  expected = reference(QUERY, key, value, (-1, 0), used, keys=(0, 8, 16))
  if is_paged:
    arrays, keys = on_jax(QUERY, *pages), None
    options["block_table"] = table.to("jax")
  else:
    arrays, (keys,) = on_jax(QUERY, key, value), starts((0, 8, 16, 24))
  found = attend(*arrays, *starts(QUERIES), keys, **options)
  for have, want in zip(found, expected, strict=True):
    torch.testing.assert_close(have.cpu(), want, atol=2e-6, rtol=1e-5)


def test_out_receives_the_result():
  arguments = *on_jax(QUERY, KEY, KEY), *starts(QUERIES, KEYS)
  out = torch.zeros(QUERY.shape, device="jax")
  aux = varlen.AuxRequest(lse=True)
  found, lse = varlen.varlen_attn_out(
    out, *arguments, 7, 7, enable_gqa=True, return_aux=aux
  )
  expected = attend(*arguments)
  assert found is out
  assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_half_precision_keeps_logsumexp_in_float32():
  arrays = [t.bfloat16() for t in (QUERY, KEY, VALUE)]
  expected = reference(*(t.float() for t in arrays))
  output, lse = attend(*on_jax(*arrays), *starts(QUERIES, KEYS))
  assert output.dtype == torch.bfloat16
  torch.testing.assert_close(output.cpu().float(), expected[0], atol=1e-2, rtol=1e-2)
  torch.testing.assert_close(lse.cpu(), expected[1])


def test_compiled_graphs_of_cpu_tensors_have_it():
  leaves = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
  sizes = [torch.tensor(size, dtype=torch.int32) for size in (QUERIES, KEYS)]
  found = torch.compile(attend, backend="jax", fullgraph=True)(*leaves, *sizes)
  expected = reference(*leaves)
  torch.testing.assert_close(found, expected)
  gradients = (torch.autograd.grad(t[0].sin().sum(), leaves) for t in (found, expected))
  torch.testing.assert_close(*gradients, atol=2e-6, rtol=1e-5)


def test_errors_name_the_argument():
  arrays = on_jax(QUERY, KEY, VALUE)
  sizes = starts(QUERIES, KEYS)
  with pytest.raises(ValueError, match="Try setting enable_gqa=True"):
    varlen.varlen_attn(*arrays, *sizes, 7, 7)
  with pytest.raises(RuntimeError, match="expects cu_seq_k or block_table"):
    attend(*arrays, sizes[0], None)
  arrays[0].requires_grad_()
  with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
    attend(*arrays, *sizes, seqused_k=starts((1, 1, 1))[0])
