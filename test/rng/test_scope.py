"""Scopes and threads: the current stream, and the return to the outer one."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax import rng
from torchax.errors import ClosedScopeError, RngError, SeedError, TracedDrawError
from torchax.interop import jax_jit, jax_view
from torchax.rng import RngState


def _rand(n=4) -> torch.Tensor:
  return torch.rand(n, device="jax")


def _state(env) -> dict:
  return env.rng.state.state_dict()


def _in_thread(function):
  """Run `function` on a new thread; return its result or raise its exception."""
  out = []

  def run():
    try:
      out.append((function(), None))
    except BaseException as error:
      out.append((None, error))
      raise

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  value, error = out[0]
  if error is not None:
    raise error
  return value


# Scopes -----------------------------------------------------------------------------


def test_scope_draws_from_its_value_then_outer_stream_resumes(env):
  first, second = _rand(), _rand()
  torch.manual_seed(0)
  assert torch.equal(_rand(), first)
  with env.rng_scope(9):
    inside = _rand()
  assert torch.equal(_rand(), second)
  torch.manual_seed(9)
  assert torch.equal(_rand(), inside)


def test_scopes_nest(env):
  with env.rng_scope(1) as outer:
    a = _rand()
    with env.rng_scope(2) as inner:
      _rand()
      assert env.rng is inner
    assert env.rng is outer
    b = _rand()
  with env.rng_scope(1):
    assert torch.equal(_rand(), a)
    assert torch.equal(_rand(), b)


@pytest.mark.parametrize(
  "value",
  [
    7,
    np.int32(7),
    torch.tensor(7),
    jax.random.key(7),
    np.array([0, 7], np.uint32),
    RngState.from_seed(7),
  ],
  ids=lambda value: type(value).__name__,
)
def test_a_scope_takes_anything_that_seeds(env, value):
  torch.manual_seed(7)
  expected = _rand()
  with env.rng_scope(value):
    assert torch.equal(_rand(), expected)


def test_a_scope_takes_a_0d_jax_tensor(env):
  with env.rng_scope(torch.tensor(7).to("jax")) as stream:
    assert stream.state.state_dict() == RngState.from_seed(7).state_dict()


def test_a_scope_on_a_fork_goes_on_where_the_fork_was(env):
  fork = env.rng.fork("data")
  with env.rng_scope(fork):
    first = _rand()
  with env.rng_scope(fork):
    second = _rand()
  assert not torch.equal(first, second)
  assert fork.state.count == 2
  fresh = env.rng.fork("data")
  with env.rng_scope(fresh):
    assert torch.equal(_rand(), first)
    assert torch.equal(_rand(), second)
  assert env.rng.state.count == 0


def test_a_scope_restores_after_an_exception(env):
  before = _state(env)
  with pytest.raises(KeyError), env.rng_scope(3), env.rng_scope(4):
    _rand()
    raise KeyError
  assert _state(env) == before


def test_open_inner_scope_raises_and_outer_stream_resumes(env):
  root = env.rng
  with pytest.raises(RngError, match="still open"), env.rng_scope(3):
    left_open = env.rng_scope(4)
    left_open.__enter__()
  assert env.rng is root
  with env.rng_scope(5) as stream:
    left_open.__exit__(None, None, None)  # late, as the garbage collector may be
    assert env.rng is stream
  assert env.rng is root


@pytest.mark.parametrize("value", [1.5, "7", None, True, torch.ones(()), np.zeros(3)])
def test_a_scope_of_a_wrong_type_never_opens(env, value):
  root, before = env.rng, _state(env)
  with pytest.raises(SeedError, match="jax.random.key"), env.rng_scope(value):
    pytest.fail("the block ran")
  assert env.rng is root and _state(env) == before


def test_a_scopes_stream_raises_once_the_scope_has_closed(env):
  with env.rng_scope(3) as stream:
    _rand()
  with pytest.raises(ClosedScopeError, match="after its scope had closed"):
    stream.next_key()


def test_a_closed_scope_cannot_be_drawn_from_again(env):
  with env.rng_scope(3) as stream:
    pass
  before = _state(env)
  with pytest.raises(ClosedScopeError, match="rand"), env.rng_scope(stream):
    _rand()
  assert _state(env) == before


def test_the_stream_of_a_compiled_function_raises_outside_of_it(env):
  streams = []

  def f(x):
    streams.append(env.rng)
    return F.dropout(x, 0.5)

  jax_jit(f)(torch.ones(4, device="jax"))
  before = _state(env)
  with pytest.raises(ClosedScopeError):
    streams[0].next_key()
  assert _state(env) == before


def test_scope_in_a_compiled_function_keeps_the_outer_stream(env):
  def f():
    with env.rng_scope(5):
      inside = _rand()
    return inside, _rand()

  expected = f()
  torch.manual_seed(0)
  compiled = jax_jit(f)
  assert all(map(torch.equal, compiled(), expected))
  assert env.rng.state.count == 1
  again = compiled()
  assert torch.equal(again[0], expected[0])
  assert not torch.equal(again[1], expected[1])


def test_a_scope_on_a_traced_key_makes_it_an_operand(env):
  def f(key):
    with env.rng_scope(key):
      return jax_view(_rand())

  compiled = jax.jit(f)
  for seed in (0, 1):
    with env.rng_scope(seed):
      expected = _rand()
    assert jnp.array_equal(compiled(jax.random.key(seed)), expected.jax())
  assert compiled._cache_size() == 1


def test_package_and_environment_rng_scope_are_equal(env):
  with torchax.rng_scope(3):
    first = _rand()
  with env.rng_scope(3):
    assert torch.equal(_rand(), first)


# Seeding ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_one_seed_gives_one_sequence(env, seed):
  env.manual_seed(seed)
  first = [_rand(), _rand()]
  env.manual_seed(seed)
  assert all(map(torch.equal, first, [_rand(), _rand()]))
  env.manual_seed(seed + 2)
  assert not torch.equal(first[0], _rand())


@pytest.mark.parametrize("seed", [3, np.int64(3), torch.tensor(3), np.uint8(3)])
def test_every_integer_re_seeds_the_process(env, seed):
  env.manual_seed(seed)
  assert rng.initial_seed() == 3
  expected = RngState.from_seed(3)
  assert _state(env) == expected.state_dict()


def test_a_0d_jax_tensor_re_seeds_the_process(env):
  env.manual_seed(torch.tensor(3).to("jax"))
  assert rng.initial_seed() == 3 and _state(env) == RngState.from_seed(3).state_dict()


def test_a_key_re_seeds_the_current_stream(env):
  env.manual_seed(jax.random.key(6))
  assert _state(env) == RngState.from_seed(6).state_dict()
  assert rng.initial_seed() == 0


def test_seeding_inside_a_scope_is_of_that_scope(env):
  _rand()
  before = _state(env)
  with env.rng_scope(1):
    torch.manual_seed(5)
    assert _state(env) == RngState.from_seed(5).state_dict()
  assert _state(env) == before


@pytest.mark.parametrize(
  "seed",
  [1.5, True, "3", None, torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor(True)],
  ids=repr,
)
def test_a_seed_of_a_wrong_type_changes_nothing(env, seed):
  _rand()
  before = _state(env)
  with pytest.raises(SeedError, match="integer|seed"):
    env.manual_seed(seed)
  assert _state(env) == before and rng.initial_seed() == 0


def test_a_seed_out_of_range_changes_nothing(env):
  before = _state(env)
  with pytest.raises(ValueError, match=r"2\*\*64"):
    env.manual_seed(2**64)
  assert _state(env) == before and rng.initial_seed() == 0


def test_the_seed_may_choose_another_implementation(env):
  try:
    rng.manual_seed(2, "rbg")
    assert env.rng.state.impl == rng.default_impl() == "rbg"
    first = _rand()
    torch.manual_seed(2)  # the configuration stays
    assert env.rng.state.impl == "rbg"
    assert torch.equal(_rand(), first)
  finally:
    rng.manual_seed(0, "threefry2x32")
  assert env.rng.state.impl == "threefry2x32"


# The first draw after a seed happens inside a raw transformation ---------------------


RAW = {
  "jit": lambda f: jax.jit(f)(jnp.ones(4)),
  "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 4))),
  "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(4)),
}


@pytest.mark.parametrize("transform", RAW)
def test_raw_transformation_after_a_seed_does_not_own_the_root(env, transform):
  f = jax_view(lambda x: F.dropout(x, 0.5))
  torch.manual_seed(5)
  with pytest.raises(TracedDrawError):
    RAW[transform](f)
  assert _state(env) == RngState.from_seed(5).state_dict()
  _rand()
  with pytest.raises(TracedDrawError):
    RAW[transform](f)


@pytest.mark.parametrize("transform", RAW)
def test_thread_draws_after_its_first_traced_draw_raised(env, transform):
  f = jax_view(lambda x: F.dropout(x, 0.5))

  def on_thread():
    with pytest.raises(TracedDrawError):
      RAW[transform](f)
    return _state(env), _rand(8).tolist(), _rand(8).tolist()

  state, first, second = _in_thread(on_thread)
  assert state["count"] == 0 and first != second


# Threads ----------------------------------------------------------------------------


def test_two_threads_never_draw_the_same(env):
  draws = [_rand().tolist()]
  draws += [_in_thread(lambda: _rand().tolist()) for _ in range(3)]
  assert len({tuple(draw) for draw in draws}) == 4


def test_threads_that_run_at_once_have_streams_of_their_own():
  barrier = threading.Barrier(4)
  draws = []

  def work():
    barrier.wait()
    draws.append([tuple(_rand().tolist()) for _ in range(10)])

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len({draw for thread_draws in draws for draw in thread_draws}) == 40


def test_a_thread_draws_from_the_seed_and_its_ordinal():
  """A thread repeats its draws when the seed is set again."""
  ready, go = threading.Semaphore(0), threading.Semaphore(0)
  draws = []

  def work():
    for _ in range(3):
      go.acquire()
      draws.append(_rand().tolist())
      ready.release()

  thread = threading.Thread(target=work)
  thread.start()
  for seed in (1, 2, 1):
    torch.manual_seed(seed)
    go.release()
    ready.acquire()
  thread.join()
  assert draws[0] == draws[2] != draws[1]


def test_a_seed_in_any_thread_re_seeds_all(env):
  _rand()
  _in_thread(lambda: torch.manual_seed(8))
  # The thread that seeds is the first one; this is the second that draws.
  state = RngState(rng.state.thread_key(RngState.from_seed(8).key, 1))
  assert _state(env) == state.state_dict()


def test_draws_of_a_thread_leave_this_one_alone(env):
  before = _state(env)
  _in_thread(lambda: [_rand() for _ in range(3)])
  assert _state(env) == before


def test_a_scope_is_of_its_thread(env):
  with env.rng_scope(3):
    inside = _in_thread(lambda: _rand().tolist())
  with env.rng_scope(3):
    assert _rand().tolist() != inside


def test_a_key_set_in_a_thread_leaves_this_one_alone(env):
  before = _state(env)

  def set_key():
    env.prng_key = jax.random.key(5)
    return _state(env)

  assert _in_thread(set_key) == RngState.from_seed(5).state_dict()
  assert _state(env) == before


def test_a_compiled_function_draws_from_the_thread_that_calls_it():
  compiled = jax_jit(lambda: _rand())
  here = compiled().tolist()

  def on_thread():
    state = torch.jax.get_rng_state()
    drawn = compiled().tolist()
    torch.jax.set_rng_state(state)
    return drawn, _rand().tolist()

  there, eager = _in_thread(on_thread)
  assert there == eager != here


@pytest.mark.parametrize("drawn", [False, True], ids=["unopened", "drawn from"])
def test_state_of_another_prng_implementation_raises(env, drawn):
  env.manual_seed(0)
  other = RngState.from_seed(0, "rbg").advance(2 * drawn).to_tensor()
  before = env.rng.state.state_dict()
  with pytest.raises(ValueError, match="a stream of rbg.*uses threefry2x32"):
    torch.jax.set_rng_state(other)
  assert env.rng.state.state_dict() == before
  with env.rng_scope(RngState.from_tensor(other)):
    assert env.rng.state.impl == "rbg"


def test_stream_of_another_prng_implementation_can_be_restored(env):
  env.prng_key = jax.random.key(0, impl="rbg")
  with torch.random.fork_rng(device_type="jax"):
    first = torch.rand(4, device="jax")
  assert torch.equal(torch.rand(4, device="jax"), first)
  torch.manual_seed(0)
