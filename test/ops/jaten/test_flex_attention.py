"""`flex_attention` on jax: values, gradients, and skipped blocks."""

import functools

import compile_events
import pytest
import torch
from ops.harness import WAYS, floats, ints
from torch.nn.attention.flex_attention import (
  AuxRequest,
  BlockMask,
  and_masks,
  create_block_mask,
  create_mask,
  flex_attention,
  or_masks,
)

from torchax.compat import versions
from torchax.interop import jax_jit
from torchax.ops.jaten import _blockwise_attention as blockwise

pytestmark = [
  pytest.mark.skipif(
    versions.is_older(torch.__version__, "2.13"),
    reason="Dynamo before torch 2.13 takes fakes of its own class only in operators",
  ),
  # torch advises to compile its own, unfused function.
  pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

LENGTH = 16
TENSORS = floats(2, 4, LENGTH, 8), floats(2, 2, LENGTH, 8, seed=1), floats(2, 2, 16, 6)
TABLE = floats(4, LENGTH, seed=3)
DOCUMENTS = ints(2, LENGTH, high=3).sort(-1)[0]


def causal(b, h, i, j):
  return i >= j


def same_document(documents):
  return lambda b, h, i, j: documents[b, i] == documents[b, j]


def strictly_causal(documents):
  return and_masks(same_document(documents), lambda b, h, i, j: i > j)


def prefix(documents):
  return or_masks(causal, lambda b, h, i, j: j < 3)


def by_position(table):
  return lambda score, b, h, i, j: 2 * score + table[h, j] * (i - j) / LENGTH


def by_chained_index(table):
  return lambda score, b, h, i, j: 3 * torch.tanh(score / 3) + table[h][i].exp()


def hiding(table):
  return lambda score, b, h, i, j: torch.where(
    j - i < b, score * table[0, 0], -torch.inf
  )


CASES = {
  "plain": (None, None),
  "scores": (by_position, None),
  "hiding scores": (hiding, None),
  "causal": (None, lambda documents: causal),
  "prefix": (by_position, prefix),
  "documents": (by_chained_index, strictly_causal),  # the first rows see no key
}


def attend(score, mask, table, documents, query, key, value):
  """Return attention and its logsumexp; both functions read captured tensors."""
  block_mask = mask and create_block_mask(
    mask(documents), 2, None, LENGTH, LENGTH, device=query.device, BLOCK_SIZE=4
  )
  output, aux = flex_attention(
    *(query, key, value, score and score(table), block_mask),
    enable_gqa=True,
    return_aux=AuxRequest(lse=True),
  )
  return output, aux.lse


def reference(score, mask, table, documents, query, key, value):
  """Compute what `attend` computes from the whole matrix of scores."""
  key, value = (t.repeat_interleave(2, 1) for t in (key, value))
  scores = query @ key.mT * query.shape[-1] ** -0.5
  if score is not None:
    one_by_one = zip(scores.flatten(), *torch.ones_like(scores).nonzero().unbind(-1))
    scores = torch.stack([score(table)(*each) for each in one_by_one]).view_as(scores)
  if mask is not None:
    seen = create_mask(mask(documents), 2, 4, LENGTH, LENGTH, device="cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
  logsumexp = scores.logsumexp(-1)
  weights = (scores - logsumexp.nan_to_num(neginf=0)[..., None]).exp()
  return weights @ value, logsumexp


def gradients(results, leaves):
  output, logsumexp = results
  total = output.sin().sum() + logsumexp.nan_to_num(neginf=0).cos().sum()
  return torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize(
  "case, way",
  [
    *((case, "eager") for case in CASES),
    *((case, way) for case in ("prefix", "documents") for way in ("jit", "compile")),
  ],
)
def test_values_and_gradients_equal_a_float64_reference(case, way):
  score, mask = CASES[case]
  exact = [t.double().requires_grad_() for t in (TABLE, *TENSORS)]
  expected = reference(score, mask, exact[0], DOCUMENTS, *exact[1:])
  leaves = [t.to("jax").requires_grad_() for t in (TABLE, *TENSORS)]
  function = functools.partial(attend, score, mask, leaves[0], DOCUMENTS.to("jax"))
  found = WAYS[way](function)(*leaves[1:])
  pairs = zip(
    (*found, *gradients(found, leaves)),
    (*expected, *gradients(expected, exact)),
    strict=True,
  )
  for have, want in pairs:
    if want is None:
      assert have is None or not have.any()
    else:
      torch.testing.assert_close(have.cpu().double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ("scores", "documents"))
def test_values_equal_cpu_torch(case):
  arguments = (TABLE, DOCUMENTS, *TENSORS)
  expected = attend(*CASES[case], *arguments)
  found = attend(*CASES[case], *(t.to("jax") for t in arguments))
  for have, want in zip(found, expected, strict=True):
    torch.testing.assert_close(have.cpu(), want, atol=2e-6, rtol=1e-5)


def on_jax(*tensors):
  return [tensor.to("jax") for tensor in tensors]


def test_auxiliary_results_are_those_asked_for():
  query, key, value = on_jax(*TENSORS)
  attend = functools.partial(flex_attention, query, key, value, enable_gqa=True)
  output, aux = attend(return_aux=AuxRequest(max_scores=True))
  scores = TENSORS[0] @ TENSORS[1].repeat_interleave(2, 1).mT * 8**-0.5
  assert aux.lse is None
  torch.testing.assert_close(aux.max_scores.cpu(), scores.amax(-1))
  assert not aux.max_scores.requires_grad
  with pytest.warns(FutureWarning, match="return_lse is deprecated"):
    again, lse = attend(return_lse=True)
  assert torch.equal(again, output)
  torch.testing.assert_close(lse.cpu(), scores.logsumexp(-1))


def test_hidden_blocks_are_skipped(monkeypatch):
  """A NaN in a hidden value would spread over its block."""
  monkeypatch.setattr(blockwise, "BLOCK", 4)
  # Programs of the shapes of other tests would be reused.
  arguments = (TABLE, DOCUMENTS, *(t[..., :6] for t in TENSORS))
  case = (by_position, lambda documents: causal)
  expected = reference(*case, *arguments)
  table, documents, query, key, value = on_jax(*arguments)
  value[:, :, 12:] = torch.nan
  query = query.requires_grad_()
  found = attend(*case, table, documents, query, key, value)
  for have, want in zip(found, expected, strict=True):
    torch.testing.assert_close(have[:, :, :12].cpu(), want[:, :, :12])
  (gradient,) = torch.autograd.grad(found[0][:, :, :12].sum(), query)
  assert gradient[:, :, :12].isfinite().all()


@pytest.mark.parametrize("length, sizes", ((13, (3, 5)), (16, (8, 2)), (5, (2, 9))))
def test_blocks_may_be_uneven(monkeypatch, length, sizes):
  monkeypatch.setattr(blockwise, "BLOCK", 6)
  query, key, value = (t[:, :2, :length] for t in TENSORS)
  seen = create_mask(causal, None, None, length, length, device="cpu")
  expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
  mask = create_block_mask(
    causal, None, None, length, length, device="jax", BLOCK_SIZE=sizes
  )
  found = flex_attention(*on_jax(query, key, value), block_mask=mask)
  torch.testing.assert_close(found.cpu(), expected)


def test_blocks_that_are_given_hide_the_others():
  """Full blocks ignore the function of the mask; partial ones apply it."""
  counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
  partial, full = ([[[[0, 1], [0, 1]]]], [[[[1, 0], [1, 0]]]])
  partial, full = (torch.tensor(t, dtype=torch.int32) for t in (partial, full))
  mask = BlockMask.from_kv_blocks(
    *on_jax(counts, partial, counts * torch.tensor([0, 1], dtype=torch.int32), full),
    BLOCK_SIZE=8,
    mask_mod=causal,
  )
  seen = torch.zeros(16, 16, dtype=torch.bool)
  seen[:, :8] = torch.ones(16, 8).tril()
  seen[8:, 8:] = True
  expected = torch.nn.functional.scaled_dot_product_attention(
    *TENSORS, seen, enable_gqa=True
  )
  found = flex_attention(*on_jax(*TENSORS), block_mask=mask, enable_gqa=True)
  torch.testing.assert_close(found.cpu(), expected)


def test_keys_of_batch_one_serve_all_queries():
  query, key, value = TENSORS[0], *(t[:1] for t in TENSORS[1:])
  mask = create_block_mask(causal, 2, None, LENGTH, LENGTH, device="jax")
  found = flex_attention(*on_jax(query, key, value), block_mask=mask, enable_gqa=True)
  expected = torch.nn.functional.scaled_dot_product_attention(
    query, key, value, is_causal=True, enable_gqa=True
  )
  torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("casts", (False, True))
def test_half_precision_is_as_torch_computes_it(casts):
  """Autocast casts query, key and value; the scores stay in float32."""
  halves = [t.bfloat16() for t in TENSORS]
  expected = reference(by_position, None, TABLE, None, *(t.float() for t in halves))[0]
  tensors = on_jax(*(TENSORS if casts else halves))
  with torch.autocast("jax", torch.bfloat16, enabled=casts):
    found = flex_attention(*tensors, by_position(TABLE.to("jax")), enable_gqa=True)
  assert found.dtype == torch.bfloat16
  torch.testing.assert_close(found.float().cpu(), expected, atol=1e-2, rtol=1e-2)


def test_compiled_graphs_of_cpu_tensors_have_it():
  function = functools.partial(attend, by_position, None, TABLE, DOCUMENTS)
  found = torch.compile(function, backend="jax", fullgraph=True)(*TENSORS)
  expected = reference(by_position, None, TABLE, DOCUMENTS, *TENSORS)
  torch.testing.assert_close(found, expected)


def test_training_steps_differentiate_captured_parameters():
  table = torch.nn.Parameter(TABLE.to("jax"))
  optimizer = torch.optim.SGD([table], lr=0.1)
  tensors = on_jax(*TENSORS)

  @jax_jit
  def step(query):
    loss = flex_attention(query, *tensors[1:], by_position(table), enable_gqa=True)
    loss.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

  step(tensors[0])
  exact = TABLE.double().requires_grad_()
  reference(by_position, None, exact, None, *(t.double() for t in TENSORS))[
    0
  ].square().sum().backward()
  expected = (exact - 0.1 * exact.grad).float()
  torch.testing.assert_close(table.detach().cpu(), expected)


def test_functions_of_equal_code_share_a_program():
  tensors = on_jax(*TENSORS)

  def attend(table):
    function = lambda score, b, h, i, j: score + table[h, i]  # noqa: E731
    return flex_attention(*tensors, function, enable_gqa=True)

  attend(TABLE.to("jax"))
  with compile_events.recorded() as compiled:
    attend(TABLE.to("jax"))
  assert not compiled


def test_captured_numbers_may_change():
  tensors = on_jax(*TENSORS)
  for number in (1, 2, 3, 0.25, 0.5):

    def score(score, b, h, i, j):
      return score + number * j  # noqa: B023

    found = flex_attention(*tensors, score, enable_gqa=True)
    expected = flex_attention(*TENSORS, score, enable_gqa=True)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-6, rtol=1e-5)


def test_memory_is_linear_in_the_length():
  def needed(length):
    mask = create_block_mask(causal, None, None, length, length, device="jax")

    def step(x):
      loss = flex_attention(x, x, x, block_mask=mask).sum()
      return torch.autograd.grad(loss, x)

    x = torch.zeros(1, 2, length, 16, device="jax", requires_grad=True)
    return jax_jit(step).lower(x).compile().memory_analysis().temp_size_in_bytes

  assert needed(4096) < 2.2 * needed(2048)


def test_errors_are_those_of_torch():
  query, key, value = on_jax(*TENSORS)
  with pytest.raises(ValueError, match="Try setting enable_gqa=True"):
    flex_attention(query, key, value)
  mask = create_block_mask(causal, None, None, 8, 8, device="jax", BLOCK_SIZE=4)
  with pytest.raises(ValueError, match="block_mask was created for"):
    flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
  mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
  with pytest.raises(RuntimeError, match="block_mask to be on the same device"):
    flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def test_functions_that_are_debugged_run_operation_by_operation(monkeypatch):
  module = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
  table, *tensors = on_jax(TABLE, *TENSORS)
  table.requires_grad_()

  def attend(seen):
    def score(score, b, h, i, j):
      if seen is not None:
        seen.append(score)
      return score + table[h, j]

    output = flex_attention(*tensors, score, enable_gqa=True)
    return output, *torch.autograd.grad(output.sin().sum(), table)

  expected = attend(None)
  monkeypatch.setattr(module, True)
  seen = []
  for have, want in zip(attend(seen), expected, strict=True):
    torch.testing.assert_close(have, want, atol=2e-6, rtol=1e-5)
  assert seen
