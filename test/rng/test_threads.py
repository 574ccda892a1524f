"""Concurrent threads: no deadlock, no key used twice, a fixed sequence for each thread.

Threads that draw one after another are tested in `test_scope.py`. A `Crew` is eight
threads that live as long as a test: the stream of a thread follows from the seed and
the order of the threads' first draws after it.
"""

import queue
import threading
import time
from collections.abc import Callable

import jax
import pytest
import torch
import torch.nn.functional as F

from torchax.interop import (
  fori_loop,
  jax_jit,
  jax_value_and_grad,
  scan,
  while_loop,
)

THREADS = 8
# Long enough for any machine; a deadlock would wait for ever.
TIMEOUT = 240


class Crew:
  """Threads that each run a task at the same time."""

  def __init__(self, size: int):
    self._tasks = [queue.SimpleQueue() for _ in range(size)]
    self._done: queue.SimpleQueue = queue.SimpleQueue()
    self._start = threading.Barrier(size)
    for number in range(size):
      threading.Thread(target=self._work, args=(number,), daemon=True).start()

  def _work(self, number: int) -> None:
    while (task := self._tasks[number].get()) is not None:
      self._start.wait(TIMEOUT)
      try:
        self._done.put((number, task(number), None))
      except BaseException as error:
        self._done.put((number, None, error))
        raise

  def run(self, task: Callable) -> list:
    """Run `task(number)` on all threads at once; return results in thread order."""
    for tasks in self._tasks:
      tasks.put(task)
    results = [None] * len(self._tasks)
    for _ in self._tasks:
      number, result, error = self._done.get(timeout=TIMEOUT)
      if error is not None:
        raise AssertionError(f"thread {number} failed") from error
      results[number] = result
    return results

  def one_by_one(self, task: Callable) -> list:
    """Run `task(number)` on one thread after the other."""
    turn = threading.Condition()
    next_number = 0

    def in_turn(number):
      nonlocal next_number
      with turn:
        assert turn.wait_for(lambda: next_number == number, TIMEOUT)
        try:
          return task(number)
        finally:
          next_number += 1
          turn.notify_all()

    return self.run(in_turn)

  def stop(self) -> None:
    """End the threads."""
    for tasks in self._tasks:
      tasks.put(None)


def _seed(crew: Crew, seed: int) -> None:
  """Seed, and let each thread draw once, which fixes the order of the threads."""
  torch.manual_seed(seed)
  crew.one_by_one(lambda number: torch.rand(1, device="jax"))


@pytest.fixture
def crew():
  crew = Crew(THREADS)
  _seed(crew, 0)
  yield crew
  crew.stop()


def _rand() -> torch.Tensor:
  return torch.rand(4, device="jax")


def _ones() -> torch.Tensor:
  return torch.ones(4, device="jax")


def _program(x) -> list[torch.Tensor]:
  time.sleep(0.002)  # other threads run meanwhile, also during this trace
  drawn = [F.dropout(x, 0.5), torch.randn(4, device="jax")]
  time.sleep(0.002)
  return [*drawn, torch.randint(0, 1000, (4,), device="jax")]


def _work(shared: Callable, own: Callable) -> list[torch.Tensor]:
  """Draw eagerly, with a function of all threads, and with one of this thread."""
  x = _ones()
  drawn = [_rand(), *shared(x), *_program(x), own(x), *shared(x), own(x)]
  drawn.append(jax_value_and_grad(lambda x: F.dropout(x, 0.5).sum())(x)[1])
  return [*drawn, _rand()]


def _own() -> list[Callable]:
  """Return a compiled function of one thread."""
  return [jax_jit(lambda x: F.dropout(x, 0.5)) for _ in range(THREADS)]


def _listed(tensors) -> list:
  return [tensor.tolist() for tensor in tensors]


def test_threads_at_once_never_use_one_key_twice(env, crew):
  shared, own = jax_jit(_program), _own()

  def work(number):
    with env.rng.record() as ledger:
      _work(shared, own[number])
      _work(shared, own[number])
    return ledger

  ledgers = crew.run(work)
  with env.rng.record() as ledger:
    _work(shared, own[0])
  keys = [draw.key for ledger in (*ledgers, ledger) for draw in ledger]
  assert len(keys) == (2 * THREADS + 1) * len(ledger) and len(ledger) == 14
  assert None not in keys and len(set(keys)) == len(keys)


def test_draws_of_a_thread_do_not_depend_on_other_threads(crew):
  own = _own()
  work = lambda number, shared: _listed(_work(shared, own[number]))  # noqa: E731
  _seed(crew, 1)
  expected = crew.one_by_one(lambda number: work(number, _program))
  for _ in range(2):
    _seed(crew, 1)
    shared = jax_jit(_program)
    assert crew.run(lambda number, f=shared: work(number, f)) == expected
  _seed(crew, 2)
  others = crew.run(lambda number: work(number, _program))
  numbers = [drawn[0] for drawn in expected + others]
  assert len(set(map(tuple, numbers))) == 2 * THREADS


def test_function_traced_by_many_threads_draws_from_its_caller(
  crew,
):
  weight = torch.arange(1.0, 5.0).to("jax").requires_grad_()

  def loss(x):
    time.sleep(0.02)
    dropped = F.dropout(x * weight, 0.5)
    time.sleep(0.02)
    return (dropped * torch.randint(0, 9, (4,), device="jax")).sum()

  def work(number, function):
    values = [function(_ones()) for _ in range(2)]
    gradients = torch.autograd.grad(sum(values), weight)
    return _listed([*[value.detach() for value in values], *gradients])

  expected = crew.one_by_one(lambda number: work(number, loss))
  assert len(set(map(str, expected))) > THREADS / 2
  _seed(crew, 0)
  shared = jax_jit(loss)
  assert crew.run(lambda number: work(number, shared)) == expected


def test_concurrent_eager_loops_draw_from_their_own_threads(crew):
  add = lambda v: v + torch.randint(0, 9999, (4,), device="jax")  # noqa: E731
  bodies = (lambda i, v: add(v), lambda v: v.sum() < 20_000, lambda c, _: (add(c), c))

  def work(number):
    indexed, is_open, stepped = bodies
    zero = torch.zeros(4, dtype=torch.int32, device="jax")
    drawn = [fori_loop(0, 3, indexed, zero), while_loop(is_open, add, zero)]
    return _listed([*drawn, scan(stepped, zero, length=2)[0]])

  expected = crew.one_by_one(work)
  _seed(crew, 0)
  assert crew.run(work) == expected
  assert len({tuple(row) for rows in expected for row in rows}) == 3 * THREADS


def test_scopes_and_seeds_inside_them_are_of_their_thread(env, crew):
  def scoped(number):
    with env.rng_scope(number):
      drawn = [_rand()]
      env.manual_seed(100 + number)
      drawn += [_rand()]
      with env.rng_scope(jax.random.key(200 + number)):
        drawn += [*_program(_ones())]
      return _listed([*drawn, _rand()])

  expected = [scoped(number) for number in range(THREADS)]
  before = env.rng.state.state_dict()
  states = crew.run(lambda number: env.rng.state.state_dict())
  assert crew.run(scoped) == expected
  assert crew.run(lambda number: env.rng.state.state_dict()) == states
  assert env.rng.state.state_dict() == before


def test_states_saved_and_restored_are_of_their_thread(crew):
  def work(number):
    state = torch.jax.get_rng_state()
    first = _listed(_program(_ones()))
    torch.jax.set_rng_state(state)
    return first == _listed(_program(_ones()))

  assert crew.run(work) == [True] * THREADS


def test_concurrent_seeds_leave_the_streams_of_the_last_seed(env, crew):
  _seed(crew, 5)
  expected = crew.run(lambda number: _rand().tolist())
  shared = jax_jit(_program)

  def work(number):
    for turn in range(5):
      if number == turn:
        torch.manual_seed(number)
      shared(_ones())
      _rand()

  crew.run(work)
  _seed(crew, 5)
  assert crew.run(lambda number: _rand().tolist()) == expected


def test_a_ledger_shows_the_draws_of_its_own_thread(env, crew):
  def work(number):
    with env.rng.record() as ledger:
      for _ in range(number):
        _rand()
        time.sleep(0.001)
    return len(ledger)

  with env.rng.record() as ledger:
    assert crew.run(work) == list(range(THREADS))
  assert len(ledger) == 0


def test_exception_in_a_thread_leaves_other_streams_unchanged(crew):
  def fails(x):
    F.dropout(x, 0.5)
    raise KeyError

  def work(number):
    if number % 2:
      with pytest.raises(KeyError):
        jax_jit(fails)(_ones())
    return _listed(shared(_ones()))

  shared = jax_jit(_program)
  expected = crew.one_by_one(lambda number: _listed(_program(_ones())))
  _seed(crew, 0)
  assert crew.run(work) == expected
