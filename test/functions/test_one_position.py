"""Attention of one position over a growing number of keys: few programs, no others."""

import compile_events
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.functions import one_position

LENGTHS = (5, *range(6, 20), 31, 32, 33, 40)


@pytest.fixture(autouse=True)
def _inside_the_environment(monkeypatch):
  monkeypatch.setattr(one_position, "_first", type(one_position._first)(1024))
  with torchax.default_env():
    yield


def inputs(length: int, dtype=torch.float32, heads: int = 2, width: int = 8):
  generator = torch.Generator("cpu").manual_seed(length)
  shapes = (2, 4, 1, 8), (2, heads, length, 8), (2, heads, length, width)
  with torch.device("cpu"):
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def bools(length: int):
  return (torch.arange(2 * length, device="cpu") % 3 > 0).reshape(2, 1, 1, length)


# Functions of a number of keys: attention's tensors and its other arguments.
CALLS = {
  "plain": lambda n: (inputs(n, heads=4), {}),
  "values of another width": lambda n: (inputs(n, heads=4, width=6), {}),
  "a scale": lambda n: (inputs(n, heads=4), {"scale": 0.3}),
  "groups of heads": lambda n: (inputs(n), {"enable_gqa": True}),
  "half precision": lambda n: (inputs(n, torch.bfloat16, heads=4), {}),
  "a mask of bools": lambda n: (inputs(n, heads=4), {"attn_mask": bools(n)}),
  "a mask of two dimensions": lambda n: (
    inputs(n, heads=4),
    {"attn_mask": bools(n)[0, 0]},
  ),
  "a mask of floats": lambda n: (
    inputs(n, heads=4),
    {"attn_mask": bools(n).float() * 2 - 1},
  ),
  "a mask for each head": lambda n: (
    inputs(n, heads=4),
    {"attn_mask": bools(n).expand(2, 4, 1, n)},
  ),
  "values that are no numbers": lambda n: (
    [
      *inputs(n, heads=4)[:2],
      inputs(n, heads=4)[2].masked_fill(bools(n)[0, 0, 0, :, None], torch.nan),
    ],
    {},
  ),
}


def on_jax(tensors, options):
  moved = {
    name: option.to("jax") if isinstance(option, torch.Tensor) else option
    for name, option in options.items()
  }
  return F.scaled_dot_product_attention(*[t.to("jax") for t in tensors], **moved)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_number_of_keys_matches_torch(call):
  tolerance = {}
  for length in LENGTHS:
    tensors, options = call(length)
    if tensors[0].dtype == torch.bfloat16:
      tolerance = {"rtol": 1.6e-2, "atol": 1e-2}
    expected = F.scaled_dot_product_attention(*tensors, **options)
    found = on_jax(tensors, options)
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numbers_of_keys_share_programs(call):
  torchax.clear_caches()
  with compile_events.recorded() as events:
    on_jax(*call(5))
    before = len(events)
    for length in range(6, 33):
      on_jax(*call(length))
  # One for up to 32 keys, and one for numbers if there are any.
  assert len(events) - before <= 2


@pytest.mark.usefixtures("strict_mode")  # compares bits
def test_frequent_number_of_keys_keeps_its_bits(monkeypatch):
  on_jax(inputs(5, heads=4), {})
  rare = [on_jax(inputs(n, heads=4), {}).cpu() for n in LENGTHS]
  monkeypatch.setattr(one_position, "OFTEN", 1)
  often = [on_jax(inputs(n, heads=4), {}).cpu() for n in LENGTHS]
  assert all(map(torch.equal, rare, often))


def test_constant_number_of_keys_is_not_padded():
  tensors = [t.to("jax") for t in inputs(9, heads=4)]
  for _ in range(2):
    assert one_position.pad_keys(*tensors, None, False)[0] is tensors[1]


def test_a_call_with_gradients_is_not_padded():
  for length in (5, 6):
    query, key, value = [t.to("jax") for t in inputs(length, heads=4)]
    key.requires_grad_()
    assert one_position.pad_keys(query, key, value, None, False)[0] is key
    with torch.no_grad():
      is_padded = one_position.pad_keys(query, key, value, None, False)[0] is not key
    assert is_padded == (length == 6)


def test_a_traced_call_is_not_padded():
  call = torchax.interop.jax_jit(F.scaled_dot_product_attention)
  for length in (5, 6):
    tensors = [t.to("jax") for t in inputs(length, heads=4)]
    with torch.no_grad():
      found, expected = call(*tensors), F.scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(found.cpu(), expected.cpu())


@pytest.mark.parametrize(
  "length, number",
  [(1, 32), (32, 32), (33, 64), (100, 128), (129, 160), (256, 256), (257, 320)]
  + [(1000, 1024), (1025, 1280)],
)
def test_padded_numbers_of_keys(length, number):
  assert one_position.padded_length(length) == number


def test_padded_numbers_are_few_and_close():
  numbers = [one_position.padded_length(length) for length in range(1, 4097)]
  assert len(set(numbers)) == 4 + 4 * 5
  for length, number in enumerate(numbers, 1):
    assert length <= number <= max(1.25 * length, length + 31)


REFUSED = {
  "keys of another width": ((2, 4, 6, 7), (2, 4, 6, 8), None),
  "values of another number": ((2, 4, 6, 8), (2, 4, 7, 8), None),
  "a mask of another number": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 1, 1, 7)),
  "a mask for other heads": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 3, 1, 6)),
  "heads that are not grouped": ((2, 2, 6, 8), (2, 2, 6, 8), None),
}


@pytest.mark.parametrize("shapes", REFUSED.values(), ids=REFUSED)
def test_errors_name_the_shapes_of_the_call(shapes):
  on_jax(inputs(5, heads=4), {})
  key, value, mask = shapes
  options = {} if mask is None else {"attn_mask": torch.ones(mask, device="jax") > 0}
  query = torch.ones(2, 4, 1, 8, device="jax")
  given = [torch.ones(shape, device="jax") for shape in (key, value)]
  with pytest.raises(RuntimeError) as raised:
    F.scaled_dot_product_attention(query, *given, **options)
  assert str(list(key)) in str(raised.value), str(raised.value)
