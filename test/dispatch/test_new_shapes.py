"""Draws and pointwise operations with new shapes, by flat arrays that shapes share."""

import itertools

import compile_events
import jax
import pytest
import torch
import torch.nn.functional as F
from accelerators import cpu_only

import torchax
from torchax.core import numpy_fallback
from torchax.dispatch import new_shapes
from torchax.functions.dropout import keep_mask
from torchax.interop import jax_jit

SIZE = itertools.count(30)


@pytest.fixture(autouse=True)
def _inside_the_environment():
  with torchax.default_env():
    # One-time costs of JAX and its compiler.
    F.dropout(torch.ones(3, device="jax"), 0.3)
    yield


def ones(n: int, dtype=torch.float32):
  return torch.ones(n, 5, device="jax", dtype=dtype)


DRAWS = {
  "dropout": lambda x: F.dropout(x, 0.3),
  "dropout of a view": lambda x: F.dropout(x.t(), 0.3),
  "dropout of one row": lambda x: F.dropout(x[2], 0.3),
  "dropout in half precision": lambda x: F.dropout(x.bfloat16() * 1.7, 0.3),
  "dropout of everything": lambda x: F.dropout(x, 1.0),
  "dropout of a rare half": lambda x: F.dropout(x, 0.5),
  "a mask": lambda x: keep_mask(x, (2, *x.shape), 0.3),
  "rand": lambda x: torch.rand(x.shape, device="jax"),
  "rand in half precision": lambda x: torch.rand(
    x.shape, device="jax", dtype=torch.bfloat16
  ),
  "complex rand": lambda x: torch.rand(x.shape, device="jax", dtype=torch.complex64),
  "randn": lambda x: torch.randn(x.shape, device="jax"),
  "randn of many": lambda x: torch.randn(71, *x.shape, device="jax"),
  "complex randn": lambda x: torch.randn(x.shape, device="jax", dtype=torch.complex64),
  "uniform_": lambda x: x.clone().uniform_(-0.3, 0.7),
  "uniform_ of a view": lambda x: x.clone()[:, 1:].uniform_(-0.3, 0.7),
  "normal_": lambda x: x.clone().normal_(1, 0.3),
  "rand_like": lambda x: torch.rand_like(x.t()),
  "normal": lambda x: torch.normal(1.0, 0.3, x.shape, device="jax"),
  "exponential_": lambda x: x.clone().exponential_(1.3),
  "cauchy_": lambda x: x.clone().cauchy_(1.0, 0.3),
  "log_normal_": lambda x: x.clone().log_normal_(1.0, 0.3),
  "geometric_": lambda x: x.clone().geometric_(0.3),
  "random_": lambda x: x.clone().random_(),
  "bernoulli": lambda x: (x / 3).bernoulli(),
  "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
  "bernoulli_ of tensors": lambda x: x.clone().bernoulli_(x.cumsum(1) / 7),
  "native_dropout": lambda x: torch.stack(torch.native_dropout(x, 0.3, True)),
  "a draw of one number": lambda x: x[0, 0].clone().normal_(1, 0.3),
  "an empty draw": lambda x: torch.rand(0, 3, device="jax"),
  "randint": lambda x: torch.randint(3, 10, x.shape, device="jax"),
  "randint below a power of two": lambda x: torch.randint(
    8, x.shape, device="jax", dtype=torch.uint8
  ),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_flat_draws_equal_those_of_one_program(draw, monkeypatch):
  x = ones(next(SIZE))
  found = []
  for cost, form in ((numpy_fallback.PROGRAM, draw), (0, draw), (0, jax_jit(draw))):
    monkeypatch.setattr(numpy_fallback, "PROGRAM", cost)
    torchax.clear_caches()
    torch.manual_seed(7)
    found.append(form(x).cpu())
  rare, often, compiled = found
  assert torch.equal(rare, often)
  assert torch.equal(rare, compiled)


def test_other_shapes_share_a_program():
  F.dropout(ones(next(SIZE)), 0.3)
  with compile_events.recorded() as first:
    F.dropout(ones(next(SIZE)), 0.3)
  assert not first


@cpu_only("programs for single shapes replace shared ones on CPU devices only")
def test_frequent_shapes_get_one_program(monkeypatch):
  monkeypatch.setattr(new_shapes, "OFTEN", 3)
  torchax.clear_caches()
  x = ones(next(SIZE))
  counts = []
  for _ in range(6):
    with compile_events.recorded() as events:
      F.dropout(x, 0.3)
    counts.append(len(events))
  assert counts[1:] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("given", [{}, {"dtype": torch.float16}])
def test_size_of_a_draw_may_be_a_keyword(given):
  env, rand = torchax.default_env(), torch.ops.aten.rand.default
  torch.manual_seed(7)
  found = env.dispatch(rand, (), (), {"size": [3, 2], **given})
  torch.manual_seed(7)
  assert torch.equal(found.cpu(), torch.rand(3, 2, device="jax", **given).cpu())


def test_each_draw_has_its_own_bits():
  x = ones(next(SIZE))
  torch.manual_seed(3)
  drawn = [F.dropout(x, 0.5).cpu() for _ in range(4)]
  assert not any(torch.equal(*pair) for pair in itertools.combinations(drawn, 2))
  torch.manual_seed(3)
  assert all(torch.equal(F.dropout(x, 0.5).cpu(), each) for each in drawn)


def test_gradient_of_dropout_uses_its_mask():
  x = ones(next(SIZE)).requires_grad_()
  y = F.dropout(x, 0.4)
  y.sum().backward()
  assert torch.equal(x.grad, y.detach())


OTHER_KEYS = {
  "another generator": lambda: jax.random.key(0, impl="rbg"),
}


@pytest.mark.parametrize("other", OTHER_KEYS.values(), ids=OTHER_KEYS)
def test_keys_without_flat_draws_use_one_program(other, monkeypatch):
  x = ones(30)
  env, found = torchax.default_env(), []
  for cost in (numpy_fallback.PROGRAM, 0):
    monkeypatch.setattr(numpy_fallback, "PROGRAM", cost)
    torchax.clear_caches()
    F.dropout(x, 0.3)  # the same shapes, with a key that has flat draws
    with env.rng_scope(other()):
      found.append(F.dropout(x, 0.3).cpu())
  assert torch.equal(*found)


# --- Pointwise operations -------------------------------------------------------------


def numbers(n: int, dtype=torch.float32):
  values = torch.arange(n * 5).reshape(n, 5) * 7919 % 251 - 125
  return (values / 37).to(dtype).to("jax")


POINTWISE = {
  "exp": torch.exp,
  "gelu of a view": lambda x: F.gelu(x.t()[1:]),
  "tanh of numbers with two dimensions": lambda x: x[:, :, None].tanh(),
  "three tensors": lambda x: torch.addcmul(x, x + 1, x / 3),
  "a tensor without dimensions": lambda x: torch.atan2(
    x.half(), torch.tensor(0.7, device="jax")
  ),
  "a quotient of integers": lambda x: x.int() / 2.5 + x.short() / 3,
  "powers of a number": lambda x: 2.5 ** x.short(),
  "a number": lambda x: torch.clamp(x.half(), min=0.1),
  "a power": lambda x: x**3,
  "in place": lambda x: x.clone().sin_(),
  "in place, into another dtype": lambda x: x.half().mul_(x),
  "a comparison": lambda x: x.bfloat16() > (x * x).bfloat16(),
  "a cast": lambda x: x.to(torch.bfloat16),
  "complex": lambda x: torch.complex(x, x).sqrt(),
  "integers": lambda x: x.int().bitwise_xor(x.t().int().t()),
  "gradient": lambda x: torch.ops.aten.hardtanh_backward(x, x, -1, 1),
}


@cpu_only("pointwise operations have flat arrays on CPU devices only")
@pytest.mark.parametrize("function", POINTWISE.values(), ids=POINTWISE)
@pytest.mark.parametrize("with_x64", [False, True])
def test_flat_results_equal_those_of_one_program(function, with_x64, monkeypatch):
  run_flat, flat_results = new_shapes._run_flat, []

  def spy(*args):
    flat_results.append(run_flat(*args))
    return flat_results[-1]

  monkeypatch.setattr(new_shapes, "_run_flat", spy)
  with jax.enable_x64(with_x64):
    x = numbers(next(SIZE))
    monkeypatch.setattr(new_shapes, "FEW", 0)
    flat = function(x)
    assert any(result is not None for result in flat_results)
    monkeypatch.setattr(new_shapes, "FEW", 1_000_000)
    alone = function(x)
    assert flat.dtype == alone.dtype
    assert torch.equal(flat.cpu(), alone.cpu())


def test_results_of_broadcasting_are_those_of_one_program(monkeypatch):
  """XLA multiplies by the reciprocal of a divisor that it broadcasts."""
  x = numbers(next(SIZE))
  monkeypatch.setattr(new_shapes, "FEW", 0)
  first = torch.addcdiv(x, x, x[:1] + 7)
  monkeypatch.setattr(new_shapes, "FEW", 1_000_000)
  assert torch.equal(first.cpu(), torch.addcdiv(x, x, x[:1] + 7).cpu())


@cpu_only("pointwise operations have flat arrays on CPU devices only")
@pytest.mark.parametrize("function", [torch.erf, lambda x: x.erf_()], ids=["", "_"])
def test_pointwise_operations_compile_for_few_shapes(function):
  torchax.clear_caches()
  counts = []
  for _ in range(new_shapes.FEW + 4):
    x = ones(next(SIZE))
    with compile_events.recorded() as events:
      function(x)
    counts.append(len(events))
  assert counts[: new_shapes.FEW] == [1] * new_shapes.FEW
  assert counts[new_shapes.FEW + 1 :] == [0, 0, 0]


def test_frequent_shapes_of_pointwise_operations_get_one(monkeypatch):
  monkeypatch.setattr(new_shapes, "FEW", 0)
  monkeypatch.setattr(new_shapes, "OFTEN", 3)
  torchax.clear_caches()
  x, counts = ones(next(SIZE)), []
  for _ in range(6):
    with compile_events.recorded() as events:
      torch.erfc(x)
    counts.append(len(events))
  assert counts == [1, 0, 0, 1, 0, 0]


def test_arguments_that_torch_refuses_raise_its_errors(monkeypatch):
  monkeypatch.setattr(new_shapes, "FEW", 0)
  with pytest.raises(RuntimeError, match="size of tensor a"):
    torch.atan2(ones(3), torch.ones(3, 4, device="jax"))
  x = ones(next(SIZE))
  torch.where(x > 0, x, x)
  with pytest.raises(RuntimeError, match="to be a boolean tensor"):
    torch.where(x, x, x)  # the same static key
