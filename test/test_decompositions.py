"""Decompositions: torch's table, and our additions to it."""

import pytest
import torch
from compare import assert_same

import torchax
from torchax import decompositions
from torchax.interop import jax_jit
from torchax.registry import operators
from torchax.registry.schema import schema_of

aten = torch.ops.aten
HALVES = torch.full((40, 50), 0.5)


@pytest.fixture(autouse=True)
def env():
  torch.manual_seed(0)
  with torchax.default_env() as environment:
    yield environment


def test_random_operations_are_not_decomposed():
  assert decompositions.DECOMPOSITIONS is operators.decompositions
  assert aten.native_dropout.default not in decompositions.DECOMPOSITIONS
  assert aten.addcmul.default in decompositions.DECOMPOSITIONS


def test_mutable_decompositions_write_to_an_argument():
  mutable = decompositions.MUTABLE_DECOMPOSITION
  assert aten.addcmul_.default in mutable or aten.addcmul.out in mutable
  assert all(schema_of(op).written for op in mutable)
  assert not {aten.addcmul.default} & set(mutable)


@torch.library.custom_op("torchax_test::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
  return x + 2 * x


@torch.library.custom_op("torchax_test::append", mutates_args={"x"})
def append(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
  x.add_(y)
  return x * y


thrice.register_autograd(lambda ctx, grad: 3 * grad)


@pytest.mark.parametrize("way", [lambda f: f, jax_jit])
def test_custom_operators_run_their_function_on_jax_tensors(way):
  x = torch.ones(2, device="jax", requires_grad=True)
  way(lambda x: thrice(x) ** 2)(x).sum().backward()
  assert x.grad.tolist() == [18, 18]
  x = torch.ones(2, device="jax")
  assert way(append)(x, 2 * x).tolist() == [6, 6]
  assert x.tolist() == [3, 3]


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_bernoulli_has_the_given_probabilities(device):
  probabilities = torch.tensor([0.0, 0.25, 1.0]).expand(4000, 3).to(device)
  drawn = decompositions.bernoulli(probabilities)
  assert drawn.dtype == torch.float32 and drawn.device == probabilities.device
  never, seldom, always = drawn.mean(0).tolist()
  # Four standard deviations of a mean of 4000 draws.
  assert never == 0 and always == 1 and abs(seldom - 0.25) < 4 * (0.1875 / 4000) ** 0.5


def test_bernoulli_of_bfloat16_resolves_small_probabilities():
  rare = torch.full((100, 1000), 2.0**-12, dtype=torch.bfloat16, device="jax")
  count = decompositions.bernoulli(rare).float().sum().item()
  # 24 expected; in bfloat16 one draw of 256 would be exactly zero, so about 390.
  assert 4 < count < 50


def test_draws_come_from_the_current_stream_and_from_generators():
  halves = HALVES.to("jax")
  torch.manual_seed(1)
  first, second = decompositions.bernoulli(halves), decompositions.bernoulli(halves)
  assert not torch.equal(first, second)
  torch.manual_seed(1)
  assert torch.equal(first, decompositions.bernoulli(halves))
  with torchax.rng_scope(3):
    scoped = decompositions.rand_like(halves)
  with torchax.rng_scope(3):
    assert torch.equal(scoped, decompositions.rand_like(halves))
  generators = [torch.Generator().manual_seed(5) for _ in range(2)]
  one, other = (decompositions.bernoulli(halves, generator=g) for g in generators)
  assert torch.equal(one, other) and not torch.equal(one, first)


def test_rand_like_options_default_to_the_tensors_options():
  source = torch.zeros(2, 3, dtype=torch.bfloat16, device="jax")
  drawn = decompositions.rand_like(source)
  assert drawn.shape == (2, 3) and drawn.dtype == torch.bfloat16
  assert drawn.device == source.device
  other = decompositions.rand_like(source, dtype=torch.float32, device="cpu")
  assert other.dtype == torch.float32 and other.device.type == "cpu"


def test_compiled_and_eager_decomposition_draw_the_same():
  halves = HALVES.to("jax")
  compiled = jax_jit(decompositions.bernoulli)
  torch.manual_seed(2)
  eager = [decompositions.bernoulli(halves) for _ in range(2)]
  torch.manual_seed(2)
  assert all(torch.equal(compiled(halves), draw) for draw in eager)


def test_bernoulli_float_fills_in_place():
  tensor = torch.zeros(40, 50, dtype=torch.int32, device="jax")
  row = tensor[0]
  assert decompositions.bernoulli_float(tensor, 1.0) is tensor
  assert row.tolist() == [1] * 50
  decompositions.bernoulli_float(tensor)
  assert 0.4 < tensor.float().mean().item() < 0.6
  with pytest.raises(RuntimeError, match="p to be in"):
    decompositions.bernoulli_float(tensor, 1.5)


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 4, 2, 5)])
def test_channel_shuffle_equals_torch(shape):
  x = torch.arange(torch.Size(shape).numel()).view(shape)
  assert_same(
    decompositions.channel_shuffle(x.to("jax"), 2), torch.channel_shuffle(x, 2)
  )


@pytest.mark.parametrize(
  ("shape", "groups"), [((4, 4), 2), ((1, 4, 2), 3), ((1, 4, 2), 0)]
)
def test_channel_shuffle_raises_like_torch(shape, groups):
  x = torch.zeros(shape)
  with pytest.raises(RuntimeError):
    torch.channel_shuffle(x, groups)
  with pytest.raises(RuntimeError, match="channel_shuffle expects"):
    decompositions.channel_shuffle(x, groups)
