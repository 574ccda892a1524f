"""Padded and jagged forms of sequences, and jagged nested tensors on jax."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same
from ops.harness import Case, check, floats

from torchax.errors import UnsupportedDtypeError
from torchax.interop import jax_jit

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 2, 2, 5])
VALUES, PADDED = floats(5, 4), floats(3, 3, 4)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")


def pad(values, offsets, length, filler=0.0):
  return aten._jagged_to_padded_dense_forward(values, [offsets], [length], filler)


def unpad(dense, offsets):
  return aten._padded_dense_to_jagged_forward(dense, [offsets], 5)


CASES = [
  Case(pad, VALUES, OFFSETS, 3),
  Case(pad, VALUES, OFFSETS, 4, -1.5, name="filler"),
  Case(pad, VALUES, OFFSETS, 2, name="cut"),
  Case(pad, VALUES[:0], torch.zeros(3, dtype=torch.int64), 2, name="empty"),
  Case(unpad, PADDED, OFFSETS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jagged_operators(case):
  check(case)


def nested(device="jax", requires_grad=False):
  parts = [part.to(device) for part in VALUES.split([2, 3])]
  return torch.nested.nested_tensor(
    parts, layout=torch.jagged, requires_grad=requires_grad
  )


# name: function of a jagged tensor whose result is dense or jagged
OPERATIONS = {
  "unbind": lambda x: x.unbind(),
  "elementwise": lambda x: (x * 2 + x).relu(),
  "linear": lambda x: F.linear(x, torch.ones(3, 4, device=x.device)),
  "layer norm": lambda x: F.layer_norm(x, (4,)),
  "rms norm": lambda x: F.rms_norm(x, (4,)),
  "softmax": lambda x: x.softmax(-1),
  "softmax of sequences": lambda x: x.softmax(1),
  "padded": lambda x: x.to_padded_tensor(-1.0),
  "dtype": lambda x: x.to(torch.bfloat16).float(),
  "from values": lambda x: torch.nested.nested_tensor_from_jagged(
    x.values() * 2, x.offsets()
  ),
}


def dense(result):
  """Return tuples and dense tensors unchanged, and a jagged tensor as a list."""
  is_jagged = isinstance(result, torch.Tensor) and result.is_nested
  return list(result.unbind()) if is_jagged else result


@pytest.mark.parametrize("name", OPERATIONS)
def test_jagged_tensors_have_torchs_values_and_gradients(name):
  results = {}
  for device in ("cpu", "jax"):
    leaf = nested(device, requires_grad=True)
    values = dense(OPERATIONS[name](leaf))
    parts = values if isinstance(values, list | tuple) else [values]
    sum((part * part).sum() for part in parts).backward()
    assert leaf.device.type == leaf.grad.device.type == device
    results[device] = [part.detach() for part in parts], leaf.grad.values()
  assert_same(results["jax"], results["cpu"])


def test_gradient_crosses_a_move_of_a_jagged_tensor():
  leaf = nested("cpu", requires_grad=True)
  (leaf.to("jax") * 3).values().sum().backward()
  assert torch.equal(leaf.grad.values(), torch.full((5, 4), 3.0))


def test_lookup_of_jagged_indices():
  indices = torch.nested.nested_tensor(
    [torch.tensor([1]), torch.tensor([1, 2])], layout=torch.jagged
  )
  found = F.embedding(indices.to("jax"), PADDED[0].to("jax"))
  assert_same(found.values(), PADDED[0][[1, 1, 2]])


def test_a_trace_builds_a_jagged_tensor_from_its_parts():
  def program(values, offsets):
    jagged = torch.nested.nested_tensor_from_jagged(
      values, offsets, min_seqlen=2, max_seqlen=3
    )
    return jagged.relu().to_padded_tensor(0.0)

  x = nested()
  expected = nested("cpu").relu().to_padded_tensor(0.0)
  assert_same(jax_jit(program)(x.values(), x.offsets()), expected)


def attend_by_sequence(parts, is_causal):
  """Return attention of each sequence of jagged queries, keys and values."""
  heads = [part.unflatten(-1, (2, 2)).transpose(0, 1) for part in parts]
  output = F.scaled_dot_product_attention(*heads, is_causal=is_causal)
  return output.transpose(0, 1).flatten(-2)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_jagged_tensors_is_that_of_each_sequence(is_causal, jitted):
  def attend(query, key, value, offsets):
    heads = [
      torch.nested.nested_tensor_from_jagged(x, offsets, max_seqlen=3)
      .unflatten(-1, (2, 2))
      .transpose(1, 2)
      for x in (query, key, value)
    ]
    output = F.scaled_dot_product_attention(*heads, is_causal=is_causal)
    return output.transpose(1, 2).flatten(-2).values()

  parts = [floats(5, 4, seed=seed).requires_grad_() for seed in range(3)]
  expected = torch.cat(
    [
      attend_by_sequence([x[start:end] for x in parts], is_causal)
      for start, end in ((0, 2), (2, 5))
    ]
  )
  expected.square().sum().backward()
  leaves = [x.detach().to("jax").requires_grad_() for x in parts]
  actual = (jax_jit(attend) if jitted else attend)(*leaves, OFFSETS.to("jax"))
  assert_same(actual.detach(), expected.detach())
  actual.square().sum().backward()
  assert_same([x.grad for x in leaves], [x.grad for x in parts])


def test_attention_ignores_other_sequences_and_holes():
  values = torch.full((5, 4), torch.nan).index_copy(0, torch.arange(2), floats(2, 4))
  key = torch.nested.nested_tensor_from_jagged(
    values.to("jax"), OFFSETS[[0, 3]].to("jax"), torch.tensor([2]).to("jax")
  )
  query = torch.nested.nested_tensor_from_jagged(VALUES.to("jax"), key.offsets())
  actual = F.scaled_dot_product_attention(query, key, key).values()
  expected = F.scaled_dot_product_attention(VALUES[None], *[values[None, :2]] * 2)[0]
  assert_same(actual, expected)


def test_dropout_of_jagged_attention_has_its_mean_and_deviation():
  x = torch.nested.nested_tensor_from_jagged(
    torch.ones(2000, 4, device="jax"), torch.tensor([0, 500, 2000]).to("jax")
  )
  heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
  output = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
  # A row is the mean of n weights that are 0 or 2: its deviation is 1 / sqrt(n).
  for rows, length in zip(output.transpose(1, 2).unbind(), (500, 1500)):
    rows = rows[..., 0].cpu().flatten()
    deviation = length**-0.5
    assert abs(rows.mean().item() - 1) < 5 * deviation / len(rows) ** 0.5
    # The deviation of m rows has a relative error of 1 / sqrt(2 m).
    assert abs(rows.std().item() / deviation - 1) < 5 / (2 * len(rows)) ** 0.5


# name: (unsupported use of a jagged tensor, alternative in the error)
REFUSED = {
  "argument": (lambda x: jax_jit(torch.relu)(x), "compiled function"),
  "compile": (lambda x: torch.compile(torch.relu, backend="jax")(x), "compiled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_use_names_the_alternative(name):
  use, alternative = REFUSED[name]
  with pytest.raises((UnsupportedDtypeError, RuntimeError), match=alternative):
    use(nested())
