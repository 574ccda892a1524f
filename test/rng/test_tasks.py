"""Tasks, generators and copied contexts: each has the scopes that it has opened."""

import asyncio
import concurrent.futures
import contextvars
import threading

import jax
import pytest
import torch

import torchax
from torchax.errors import ClosedScopeError, RngError, SeedError
from torchax.interop import jax_jit

_compiled = jax_jit(lambda: torch.rand(2, device="jax"))
DRAWS = {
  "eager": lambda: torch.rand(2, device="jax").tolist(),
  "compiled": lambda: _compiled().tolist(),
}


async def _request(env, seed: int, draw, pause: float = 0.0) -> list:
  """Draw three times in a scope of its own, and let other tasks run in between."""
  drawn = []
  with env.rng_scope(seed):
    for _ in range(3):
      drawn.append(draw())
      await asyncio.sleep(pause)
  return drawn


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_interleaved_tasks_draw_as_if_alone(env, draw):
  # Other pauses end the scopes in another order than they began in.
  requests = [(1, 0.003), (2, 0.001), (3, 0.002)]

  async def at_once():
    return await asyncio.gather(*[_request(env, s, draw, p) for s, p in requests])

  together = asyncio.run(at_once())
  alone = [asyncio.run(_request(env, seed, draw)) for seed, _ in requests]
  assert together == alone
  assert env.rng.state.count == 0


def test_two_hundred_requests_at_once_answer_as_each_does_alone(env):
  async def at_once():
    return await asyncio.gather(
      *[_request(env, n, DRAWS["eager"], n % 7 / 5000) for n in range(200)]
    )

  together = asyncio.run(at_once())
  for seed in (0, 1, 99, 199):
    assert together[seed] == asyncio.run(_request(env, seed, DRAWS["eager"]))
  assert len({tuple(map(tuple, drawn)) for drawn in together}) == 200


def test_a_task_begun_in_a_scope_draws_from_it_until_it_ends(env):
  async def late(event):
    first = torch.rand(2, device="jax").tolist()
    await event.wait()
    with pytest.raises(ClosedScopeError, match="scope had closed"):
      torch.rand(2, device="jax")
    return first

  async def main():
    event = asyncio.Event()
    with env.rng_scope(5):
      task = asyncio.create_task(late(event))
      await asyncio.sleep(0)
    event.set()
    return await task

  with env.rng_scope(5):
    expected = torch.rand(2, device="jax").tolist()
  assert asyncio.run(main()) == expected


def test_a_thread_with_a_copied_context_draws_from_the_scope(env):
  def draw():
    return torch.rand(2, device="jax").tolist()

  async def by_asyncio():
    return await asyncio.to_thread(draw)

  def by_executor():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      return pool.submit(contextvars.copy_context().run, draw).result()

  with env.rng_scope(5):
    expected = [draw(), draw()]
  with env.rng_scope(5):
    assert [asyncio.run(by_asyncio()), by_executor()] == expected


@pytest.mark.parametrize("compile", [lambda f: f, jax_jit], ids=["eager", "jitted"])
def test_threads_at_once_in_one_scope_draw_different_numbers(env, compile):
  """The order of their draws is not fixed, but no number is drawn twice."""
  draws, threads = 50, 8
  draw = compile(lambda: torch.rand(1, device="jax") + 0)
  barrier = threading.Barrier(threads)

  def task():
    barrier.wait()
    return [draw().item() for _ in range(draws)]

  with env.rng_scope(5):
    expected = {draw().item() for _ in range(draws * threads)}
  with env.rng_scope(5) as stream:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      tasks = [
        pool.submit(contextvars.copy_context().run, task) for _ in range(threads)
      ]
    found = [number for done in tasks for number in done.result()]
    assert stream.state.count == draws * threads
  assert set(found) == expected and len(set(found)) == len(found)


def test_a_task_has_the_environment_on_for_itself(env):
  other = torchax.Environment()
  seen = []

  async def with_it(entered, left):
    with other:
      entered.set()
      await left.wait()
      assert other.enabled
      assert torch.rand(2, device="jax")._env is other

  async def without_it(entered, left):
    await entered.wait()
    seen.append(other.enabled)
    seen.append(torch.zeros(2, device="meta").device.type)
    left.set()

  async def main():
    entered, left = asyncio.Event(), asyncio.Event()
    await asyncio.gather(with_it(entered, left), without_it(entered, left))

  with env.disabled():
    asyncio.run(main())
  assert seen == [False, "meta"] and not other.enabled


def test_enabled_globally_means_in_every_task_of_the_thread():
  """For example in the cells of a notebook, which may be tasks of their own."""
  other = torchax.Environment(seed=5)

  async def cell(function):
    return function()

  def draw():
    assert other.enabled
    return torch.rand(2, device="jax").tolist()

  async def notebook():
    await asyncio.create_task(cell(other.enable_torch_modes))
    first = await asyncio.create_task(cell(draw))
    second = await asyncio.create_task(cell(draw))
    await asyncio.create_task(cell(other.disable_torch_modes))
    return first, second

  first, second = asyncio.run(notebook())
  assert other.rng.state.count == 2 and first != second and not other.enabled


def test_properties_are_overridden_in_one_task_alone(env):
  async def override(mesh, pause):
    with env.override_property(mesh=mesh):
      await asyncio.sleep(pause)
      return env.param.mesh

  async def main():
    return await asyncio.gather(override("a", 0.002), override("b", 0.001))

  assert asyncio.run(main()) == ["a", "b"]
  assert env.param.mesh is None


def test_generators_that_take_turns_inside_scopes_are_refused(env):
  def drawing(seed, n):
    with env.rng_scope(seed):
      for _ in range(n):
        yield torch.rand(2, device="jax")

  root = env.rng
  with pytest.raises(RngError, match="generators that hold scopes take turns"):
    list(zip(drawing(1, 2), drawing(2, 3)))
  assert env.rng is root


def test_generators_in_own_contexts_draw_from_their_own_scopes(env):
  def drawing(seed):
    with env.rng_scope(seed):
      for _ in range(2):
        yield torch.rand(2, device="jax").tolist()

  def in_its_own_context(generator):
    context = contextvars.copy_context()
    for _ in range(2):
      yield context.run(next, generator)

  turns = list(zip(*map(in_its_own_context, (drawing(1), drawing(2)))))
  assert [list(drawn) for drawn in zip(*turns)] == [
    list(drawing(1)),
    list(drawing(2)),
  ]


# Threads ------------------------------------------------------------------------------


def _in_new_threads(count: int) -> list:
  """Return the draws of threads that begin one after another."""
  found = []
  for _ in range(count):
    thread = threading.Thread(
      target=lambda: found.append(torch.rand(2, device="jax").tolist())
    )
    thread.start()
    thread.join()
  return found


def test_a_seed_determines_draws_of_later_threads():
  def run(seed):
    torch.manual_seed(seed)
    return _in_new_threads(3)

  first = run(42)
  assert run(42) == first != run(43)
  assert len(set(map(tuple, first))) == 3


def test_seeding_resets_thread_numbers_and_seeder_is_first(env):
  torch.manual_seed(42)
  here = torch.rand(2, device="jax").tolist()
  (there,) = _in_new_threads(1)

  def seed_and_draw():
    torch.manual_seed(42)
    drawn.append(torch.rand(2, device="jax").tolist())

  drawn: list = []
  thread = threading.Thread(target=seed_and_draw)
  thread.start()
  thread.join()
  drawn.append(torch.rand(2, device="jax").tolist())
  assert drawn == [here, there]


# Environments -------------------------------------------------------------------------


def test_each_environment_holds_a_state_of_its_own(env):
  other = torchax.Environment(seed=5)
  assert other.rng is not env.rng
  torch.rand(2, device="jax")
  assert env.rng.state.count == 1 and other.rng.state.count == 0
  other.manual_seed(7)
  assert env.rng.state.key == jax.random.key(0) != other.rng.state.key
  with other:
    drawn = torch.rand(2, device="jax")
  with env.rng_scope(7):
    assert torch.equal(torch.rand(2, device="jax"), drawn)


def test_interleaved_environments_draw_independently(env):
  def alone(seed):
    with env.rng_scope(seed):
      return [torch.rand(2, device="jax").tolist() for _ in range(3)]

  first, second = torchax.Environment(seed=1), torchax.Environment(seed=2)
  drawn: dict = {first: [], second: []}
  for environment in (first, second, second, first, second, first):
    with environment:
      drawn[environment].append(torch.rand(2, device="jax").tolist())
  assert [drawn[first], drawn[second]] == [alone(1), alone(2)]


def test_operation_draws_from_its_tensors_environment(env):
  other = torchax.Environment(seed=5)
  with other:
    x = torch.ones(4, device="jax")
  before = env.rng.state.count
  drawn = [torch.rand_like(x), torch.bernoulli(x * 0.5), x.clone().uniform_()]
  drawn.append(torch.nn.functional.dropout(x, 0.5))
  assert env.rng.state.count == before and other.rng.state.count == 4
  assert all(tensor._env is other for tensor in drawn)


def test_torch_seeds_and_forks_every_environment(env):
  other = torchax.Environment(seed=5)

  def draw():
    with other:
      theirs = torch.rand(2, device="jax").tolist()
    return torch.rand(2, device="jax").tolist(), theirs

  torch.manual_seed(3)
  ours, theirs = draw()
  assert ours == theirs
  following = []
  with torch.random.fork_rng(device_type="jax"):
    torch.manual_seed(9)
    following.append(draw())
  after = draw()
  torch.manual_seed(3)
  draw()
  assert draw() == after
  torch.manual_seed(9)
  assert [draw()] == following


def test_state_of_several_environments_restores_or_raises(env):
  other = torchax.Environment(seed=5)
  state = torch.jax.get_rng_state()
  with other:
    drawn = torch.rand(2, device="jax")
  torch.jax.set_rng_state(state)
  with other:
    assert torch.equal(torch.rand(2, device="jax"), drawn)
  torch.rand(1, device="jax")
  assert torchax.RngState.from_tensor(torch.jax.get_rng_state()) == env.rng.state
  before = other.rng.state.state_dict()
  for damaged in (state[:-1], state[:40]):
    with pytest.raises(ValueError, match="truncated"):
      torch.jax.set_rng_state(damaged)
  assert other.rng.state.state_dict() == before


def test_new_environment_configuration_affects_no_other(env):
  other = torchax.Environment(
    torchax.Configuration(prng_impl="rbg", rng_addressing="site"), seed=1
  )
  assert other.rng.state.impl == "rbg" and other.rng.by_site
  assert env.rng.state.impl == "threefry2x32" and not env.rng.by_site


def test_the_repr_of_an_environment_describes_it(env):
  other = torchax.Environment(torchax.Configuration(prng_impl="rbg"), seed=7)
  expected = (
    "Environment(device='jax', seed=7, count={}, "
    "config=Configuration(prng_impl='rbg'), mesh=None)"
  )
  assert repr(other) == expected.format(0)
  with other:
    torch.rand(2, device="jax")
  assert repr(other) == expected.format(1)


@pytest.mark.parametrize("seed", [1.5, "7", True, 2**64])
def test_an_environment_refuses_values_other_than_seeds(seed):
  kind = ValueError if seed == 2**64 else SeedError
  with pytest.raises(kind, match=r"Expected an integer seed in \[-2\*\*63"):
    torchax.Environment(seed=seed)


def test_a_ledger_notes_the_draws_of_its_task_alone(env):
  async def drawing(n, pause):
    with env.rng.record() as ledger:
      for _ in range(n):
        torch.rand(2, device="jax")
        await asyncio.sleep(pause)
    return len(ledger)

  async def main():
    return await asyncio.gather(drawing(3, 0.001), drawing(2, 0.002))

  assert asyncio.run(main()) == [3, 2]
