"""Words that are drawn before their draw, while shapes are new: bits and counts."""

import itertools

import compile_events
import jax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.dispatch import new_shapes
from torchax.functions.dropout import keep_mask
from torchax.interop import jax_jit
from torchax.rng import threefry

SIZE = itertools.count(30)


@pytest.fixture(autouse=True)
def _inside_the_environment():
  with torchax.default_env():
    F.dropout(torch.ones(3, device="jax"), 0.3)  # what JAX and its compiler do once
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
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_words_first_and_both_at_once_give_the_same_bits(draw, monkeypatch):
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


def test_other_shapes_draw_no_words_of_their_own():
  F.dropout(ones(next(SIZE)), 0.3)
  with compile_events.noted() as first:
    F.dropout(ones(next(SIZE)), 0.3)
  # That of dropout itself; words of up to 1024 elements are there.
  assert len(first) == 1


def test_shapes_that_come_often_get_one_program(monkeypatch):
  monkeypatch.setattr(new_shapes, "OFTEN", 3)
  x = ones(next(SIZE))
  counts = []
  for _ in range(6):
    with compile_events.noted() as events:
      F.dropout(x, 0.3)
    counts.append(len(events))
  assert counts[1:] == [0, 0, 1, 0, 0]


def test_each_draw_has_words_of_its_own():
  x = ones(next(SIZE))
  torch.manual_seed(3)
  drawn = [F.dropout(x, 0.5).cpu() for _ in range(4)]
  assert not any(torch.equal(*pair) for pair in itertools.combinations(drawn, 2))
  torch.manual_seed(3)
  assert all(torch.equal(F.dropout(x, 0.5).cpu(), each) for each in drawn)


def test_the_gradient_drops_what_was_dropped():
  x = ones(next(SIZE)).requires_grad_()
  y = F.dropout(x, 0.4)
  y.sum().backward()
  assert torch.equal(x.grad, y.detach())


def test_other_generators_and_large_draws_are_left_to_one_program():
  assert threefry.number_of_shared(jax.random.key(0), threefry.MOST_SHARED + 1) is None
  assert threefry.number_of_shared(jax.random.key(0, impl="rbg"), 10) is None
  assert threefry.number_of_shared(jax.random.key(0), 0) == threefry.LEAST_SHARED


OTHER_KEYS = {
  "another generator": lambda: jax.random.key(0, impl="rbg"),
}


@pytest.mark.parametrize("other", OTHER_KEYS.values(), ids=OTHER_KEYS)
def test_keys_without_words_draw_as_before(other, monkeypatch):
  x = ones(30)
  env, found = torchax.default_env(), []
  for often in (new_shapes.OFTEN, 0):
    monkeypatch.setattr(new_shapes, "OFTEN", often)
    torchax.clear_caches()
    F.dropout(x, 0.3)  # with a key that has words, of the same shapes
    with env.rng_scope(other()):
      found.append(F.dropout(x, 0.3).cpu())
  assert torch.equal(*found)


@pytest.mark.parametrize(
  "elements", [1, 7, threefry.LEAST_SHARED, threefry.LEAST_SHARED + 1]
)
def test_a_draw_has_the_first_words_of_a_larger_one(elements):
  key, count = jax.random.key(3), 5
  number = threefry.number_of_shared(key, elements)
  given = threefry.random_words(key, count, number)
  draw = jax.random.fold_in(key, count)
  for shape in [(elements,), (1, elements)]:
    expected = threefry.two_words(draw, shape)
    for ours, theirs in zip(threefry.two_words(given, shape), expected):
      assert (ours == theirs).all()
