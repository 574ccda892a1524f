"""Draws with new shapes: the first elements of flat draws, which shapes share."""

import itertools

import compile_events
import jax
import pytest
import torch
import torch.nn.functional as F
from accelerators import cpu_only

import torchax
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
  for often, form in ((64, draw), (0, draw), (0, jax_jit(draw))):
    monkeypatch.setattr(new_shapes, "OFTEN", often)
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
  for often in (new_shapes.OFTEN, 0):
    monkeypatch.setattr(new_shapes, "OFTEN", often)
    torchax.clear_caches()
    F.dropout(x, 0.3)  # the same shapes, with a key that has flat draws
    with env.rng_scope(other()):
      found.append(F.dropout(x, 0.3).cpu())
  assert torch.equal(*found)
