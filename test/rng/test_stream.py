"""`RngStream`: one counter, and keys that are derived and never consumed."""

import jax
import numpy as np
import pytest
import torch

from torchax.errors import ClosedScopeError
from torchax.rng import RngState, RngStream
from torchax.rng import state as rng_state


def _words(key) -> tuple[int, ...]:
  return tuple(np.asarray(jax.random.key_data(key)).tolist())


def _stream(seed=0, count=0) -> RngStream:
  return RngStream(RngState.from_seed(seed).advance(count))


def test_draw_i_has_the_key_folded_with_i():
  stream = _stream(seed=5)
  key = rng_state.key_from_seed(5)
  for count in range(4):
    assert _words(stream.next_key()) == _words(jax.random.fold_in(key, count))


def test_a_draw_does_not_depend_on_the_draws_before(env):
  with env.rng_scope(0):
    draws = [torch.rand(3, device="jax") for _ in range(4)]
  for count in (3, 1, 2, 0):
    with env.rng_scope(RngState.from_seed(0).advance(count)):
      assert torch.equal(torch.rand(3, device="jax"), draws[count])


def test_a_draw_does_not_depend_on_how_much_was_drawn_before(env):
  with env.rng_scope(0):
    torch.rand(2, device="jax")
    after_few = torch.rand(3, device="jax")
  with env.rng_scope(0):
    torch.randn(100, device="jax")
    after_many = torch.rand(3, device="jax")
  assert torch.equal(after_few, after_many)


def test_one_operation_is_one_draw(env):
  x = torch.ones(6, device="jax")
  for draw in (
    lambda: torch.rand(2, 3, device="jax"),
    lambda: torch.randn(2, 3, device="jax"),
    lambda: torch.randint(0, 9, (2,), device="jax"),
    lambda: torch.randperm(5, device="jax"),
    lambda: x.clone().uniform_(),
    lambda: x.clone().bernoulli_(0.5),
    lambda: torch.bernoulli(x * 0.5),
    lambda: torch.multinomial(x, 2),
    lambda: torch.normal(x, x),
    lambda: torch.nn.functional.dropout(x, 0.5),
  ):
    before = env.rng.state.count
    draw()
    assert env.rng.state.count == before + 1


def test_a_peek_does_not_advance():
  stream = _stream()
  key, count = stream.peek()
  assert stream.state.count == count == 0
  assert _words(jax.random.fold_in(key, count)) == _words(stream.next_key())


def test_an_operation_that_fails_has_not_drawn(env):
  before = env.rng.state.state_dict()
  with pytest.raises(NotImplementedError, match="int32"):
    torch.zeros(2, dtype=torch.int32, device="jax").uniform_()
  assert env.rng.state.state_dict() == before


def test_looking_at_a_stream_changes_nothing(env):
  torch.rand(1, device="jax")
  before = env.rng.state.state_dict()
  assert repr(env.rng) == "RngStream(RngState(threefry2x32, key=0:0, count=1))"
  str(env.rng), env.rng.state, env.rng.draws
  assert env.rng.state.state_dict() == before


# Re-basing --------------------------------------------------------------------------


def test_reading_the_key_before_any_draw_gives_the_key_itself():
  stream = _stream(seed=4)
  assert _words(stream.rebase()) == _words(rng_state.key_from_seed(4))
  assert _words(stream.rebase()) == _words(rng_state.key_from_seed(4))
  assert not stream.reseeded


def test_rebase_after_draws_returns_a_fresh_key_and_continues():
  stream = _stream()
  used = {_words(stream.next_key()) for _ in range(3)}
  key = stream.rebase()
  assert _words(key) not in {*used, _words(rng_state.key_from_seed(0))}
  assert _words(stream.next_key()) == _words(jax.random.fold_in(key, 0))


def test_keys_read_after_different_numbers_of_draws_differ():
  read = set()
  for draws in range(1, 5):
    stream = _stream()
    stream.advance(draws)
    read.add(_words(stream.rebase()))
  assert len(read) == 4


# Re-keying --------------------------------------------------------------------------


def test_a_stream_takes_a_new_key_long_before_its_count_can_wrap():
  stream = _stream(count=rng_state.REKEY_AT - 2)
  old = rng_state.key_from_seed(0)
  assert _words(stream.next_key()) == _words(
    jax.random.fold_in(old, rng_state.REKEY_AT - 2)
  )
  stream.next_key()
  assert stream.state.count == 0
  assert _words(stream.state.key) == _words(rng_state.rekey(old))


def test_a_stream_that_took_a_new_key_repeats_no_draw():
  stream = _stream(count=rng_state.REKEY_AT - 5)
  keys = [_words(stream.next_key()) for _ in range(10)]
  first = _stream()
  keys += [_words(first.next_key()) for _ in range(10)]
  assert len(set(keys)) == 20


def test_a_compiled_call_may_step_over_the_last_count():
  stream = _stream(count=rng_state.REKEY_AT - 1)
  stream.advance(1000)
  assert stream.state.count == 999
  assert RngState.from_tensor(stream.state.to_tensor()).count == 999


def test_state_before_a_rekey_round_trips():
  state = _stream(count=rng_state.REKEY_AT - 1).state
  restored = RngStream(RngState.from_tensor(state.to_tensor()))
  for _ in range(3):
    restored.next_key()
  assert restored.state.count == 2


# Forks ------------------------------------------------------------------------------


def test_a_fork_leaves_its_stream_where_it_was():
  stream = _stream()
  stream.fork("data").next_key()
  assert stream.state.state_dict() == RngState.from_seed(0).state_dict()


def test_forks_of_one_name_are_one_stream_and_of_two_names_two():
  stream = _stream()
  data = _words(stream.fork("data").next_key())
  stream.advance(3)
  assert _words(stream.fork("data").next_key()) == data
  assert _words(stream.fork("model").next_key()) != data
  assert _words(_stream(seed=1).fork("data").next_key()) != data


def test_a_fork_and_its_stream_never_draw_the_same():
  stream = _stream()
  fork = stream.fork("data")
  assert len({_words(s.next_key()) for s in (stream, fork) for _ in range(20)}) == 40


# Re-seeding and closing -------------------------------------------------------------


def test_a_reseeded_stream_starts_over_and_says_so():
  stream = _stream()
  stream.advance(3)
  stream.reseed(RngState.from_seed(8).advance(1))
  assert stream.reseeded
  assert stream.state.state_dict() == RngState.from_seed(8).advance(1).state_dict()


@pytest.mark.parametrize(
  "use",
  [
    lambda stream: stream.next_key(),
    lambda stream: stream.peek(),
    lambda stream: stream.rebase(),
    lambda stream: stream.fork("data"),
    lambda stream: stream.reseed(RngState.from_seed(1)),
  ],
  ids=["next_key", "peek", "rebase", "fork", "reseed"],
)
def test_a_closed_stream_refuses_every_use_and_stays_as_it_was(use):
  stream = _stream(count=2)
  stream.close()
  with pytest.raises(ClosedScopeError, match=r"rng_scope.*env\.rng"):
    use(stream)
  assert stream.state.state_dict() == RngState.from_seed(0).advance(2).state_dict()
  assert "closed" in repr(stream)
