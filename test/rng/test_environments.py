"""Two environments in one compiled function draw as each would alone."""

import functools

import jax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.interop import (
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_vmap,
  scan,
  while_loop,
)
from torchax.rng import RngState


@pytest.fixture
def other():
  return torchax.Environment(seed=7)


@pytest.fixture(autouse=True)
def on(env):
  with env:
    yield


def _zeros() -> torch.Tensor:
  return torch.zeros(4, device="jax")


def _rand(env=None) -> torch.Tensor:
  if env is None:
    return torch.rand(4, device="jax")
  with env:
    return torch.rand(4, device="jax")


def _mixed(other):
  """Draw from both environments in turns."""

  def mixed(x):
    return x + _rand(), _rand(other), F.dropout(x + 1, 0.5), _rand(other)

  return mixed


def _run(env, other, function, *args, calls: int = 2):
  """Return the results of some calls and the states after them."""
  env.manual_seed(0)
  other.manual_seed(7)
  results = [function(*args) for _ in range(calls)]
  states = (env.rng.state.state_dict(), other.rng.state.state_dict())
  return torch.utils._pytree.tree_leaves(results), states


def _require_equal(found, expected) -> None:
  assert all(map(torch.equal, found[0], expected[0]))
  assert found[1] == expected[1]


def _by_scan(other):
  def turn(carry, x):
    drawn = _rand(other)
    return carry + _rand(), drawn + x

  return lambda x: scan(turn, x, torch.zeros(3, 4, device="jax"))[1]


def _unrolled(other):
  def unrolled(x):
    drawn = []
    for _ in range(3):
      drawn.append(_rand(other))
      x = x + _rand()
    return torch.stack(drawn)

  return unrolled


def _rows(other):
  def row(x):
    return x + _rand(other) - _rand()

  return row


def _branch(other):
  draw = lambda x: x + _rand() - _rand(other)  # noqa: E731
  return lambda x: cond(x.sum() == 0, draw, lambda x: x, x) + _rand(other)


def _branch_taken(other):
  return lambda x: x + _rand() - _rand(other) + _rand(other)


FORMS = {
  "jit": (_mixed, lambda other: jax_jit(_mixed(other))),
  "jit in jit": (_mixed, lambda other: jax_jit(lambda x: jax_jit(_mixed(other))(x))),
  "checkpoint": (_mixed, lambda other: gradient_checkpoint(_mixed(other))),
  "checkpoint in jit": (
    _mixed,
    lambda other: jax_jit(gradient_checkpoint(_mixed(other))),
  ),
  "scan": (_unrolled, _by_scan),
  "scan in jit": (_unrolled, lambda other: jax_jit(_by_scan(other))),
  "cond": (_branch_taken, _branch),
  "cond in jit": (_branch_taken, lambda other: jax_jit(_branch(other))),
  "rows": (
    lambda other: lambda x: torch.stack([_rows(other)(row) for row in (x, x, x)]),
    lambda other: (
      lambda x: jax_vmap(_rows(other), randomness="different")(torch.stack([x, x, x]))
    ),
  ),
}


@pytest.mark.parametrize("name", FORMS)
def test_draws_of_both_equal_the_eager_program(env, other, name):
  eager, compiled = (make(other) for make in FORMS[name])
  expected = _run(env, other, eager, _zeros())
  found = _run(env, other, compiled, _zeros())
  _require_equal(found, expected)


def test_each_environment_draws_as_if_alone(env, other):
  _, first, _, second = jax_jit(_mixed(other))(_zeros())
  env.manual_seed(7)
  assert torch.equal(first, _rand()) and torch.equal(second, _rand())
  assert other.rng.state.count == 2


def test_function_is_recompiled_for_another_active_environment(env, other):
  """A factory draws from the active environment, which is part of the cache key."""
  compiled = jax_jit(_mixed(other))
  for turned_on in (env, other, env):
    with turned_on:
      expected = _run(env, other, _mixed(other), _zeros())
      _require_equal(_run(env, other, compiled, _zeros()), expected)


@pytest.mark.parametrize("wrap", [jax_jit, gradient_checkpoint])
def test_an_argument_of_another_environment_draws_from_it(env, other, wrap):
  with other:
    theirs = torch.ones(64, device="jax")
  ours = torch.ones(64, device="jax")

  def drop(x, y):
    return F.dropout(x, 0.5), F.dropout(y, 0.5), F.dropout(x, 0.5)

  expected = _run(env, other, drop, ours, theirs)
  found = _run(env, other, wrap(drop), ours, theirs)
  _require_equal(found, expected)
  assert [t._env is other for t in found[0][:3]] == [False, True, False]
  assert expected[1][0]["count"] == 4 and expected[1][1]["count"] == 2
  # The same function for tensors of a single environment.
  _require_equal(
    _run(env, other, wrap(drop), ours, ours), _run(env, other, drop, ours, ours)
  )


def test_closed_over_tensor_draws_from_its_own_environment(env, other):
  with other:
    theirs = torch.ones(64, device="jax")
  drop = lambda x: F.dropout(theirs, 0.5) + F.dropout(x, 0.5)  # noqa: E731
  x = torch.ones(64, device="jax")
  _require_equal(_run(env, other, jax_jit(drop), x), _run(env, other, drop, x))


def test_gradients_have_the_masks_of_both(env, other):
  def loss(x):
    with other:
      mask = F.dropout(torch.ones(4, device="jax"), 0.5)
    return (F.dropout(x**3, 0.5) * mask).sum()

  def gradients(function, x):
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.detach(), second

  x = torch.full((4,), 2.0, device="jax", requires_grad=True)
  expected = _run(env, other, lambda: gradients(loss, x))
  for wrapped in (jax_jit(loss), gradient_checkpoint(loss)):
    found = _run(env, other, functools.partial(gradients, wrapped, x))
    _require_equal(found, expected)
  by_jax = _run(env, other, lambda: jax_value_and_grad(loss)(x.detach())[1])
  assert torch.equal(by_jax[0][0], expected[0][0])


def test_a_loop_of_unknown_length_takes_a_draw_of_each(env, other):
  def turn(state):
    index, x = state
    return index + 1, x + _rand() + _rand(other)

  def loop():
    start = (torch.zeros((), dtype=torch.int32, device="jax"), _zeros())
    return while_loop(lambda state: state[0] < 3, turn, start)[1]

  eager = _run(env, other, loop)
  assert eager[1][0]["count"] == eager[1][1]["count"] == 2
  _require_equal(_run(env, other, jax_jit(loop)), eager)
  assert not torch.equal(*eager[0])


def test_shards_draw_from_both(env, other):
  mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
  spec = jax.sharding.PartitionSpec("x")
  sharded = jax_shard_map(
    _rows(other), mesh=mesh, in_specs=(spec,), out_specs=spec, randomness="same"
  )
  expected = _run(env, other, _rows(other), _zeros())
  _require_equal(_run(env, other, sharded, _zeros()), expected)


def test_seeds_in_a_compiled_function_reach_all_environments(env, other):
  def seeded(x):
    torch.manual_seed(3)
    return _mixed(other)(x)

  def itself(x):
    other.manual_seed(3)
    return _mixed(other)(x)

  for function in (seeded, itself):
    expected = _run(env, other, function, _zeros())
    _require_equal(_run(env, other, jax_jit(function), _zeros()), expected)
  assert expected[1][1] == RngState.from_seed(3).advance(2).state_dict()


def test_a_fork_inside_a_compiled_function_brings_both_back(env, other):
  def forked(x):
    _rand(other)
    with torch.random.fork_rng(device_type="jax"):
      inside = _mixed(other)(x)
    return *inside, *_mixed(other)(x)

  expected = _run(env, other, forked, _zeros(), calls=1)
  _require_equal(_run(env, other, jax_jit(forked), _zeros(), calls=1), expected)


def test_a_failing_call_moves_neither(env, other):
  def fails(x):
    _rand()
    _rand(other)
    raise KeyError("mine")

  for _ in range(2):
    before = (env.rng.state.state_dict(), other.rng.state.state_dict())
    with pytest.raises(KeyError):
      jax_jit(fails)(_zeros())
    assert before == (env.rng.state.state_dict(), other.rng.state.state_dict())


def test_a_ledger_notes_the_keys_of_both(env, other):
  ledgers = []
  for function in (_mixed(other), jax_jit(_mixed(other))):
    with env.rng.record() as ledger:
      _run(env, other, function, _zeros())
    ledgers.append([(draw.op.split(".")[1], draw.key) for draw in ledger])
  assert ledgers[0] == ledgers[1]
  assert len({key[1:-1] for _, key in ledgers[0]}) == 2


def test_sites_of_both_are_counted_apart(env, other):
  class Noise(torch.nn.Module):
    def forward(self, x):
      return x + _rand() - _rand(other)

  model = torch.nn.Sequential(Noise(), Noise())
  torchax.rng.address_by("site")
  try:
    expected = _run(env, other, model, _zeros())
    for compiled in (jax_jit(model), jax_jit(gradient_checkpoint(model))):
      _require_equal(_run(env, other, compiled, _zeros()), expected)
  finally:
    torchax.rng.address_by("order")
  assert expected[1][0]["sites"] == expected[1][1]["sites"] == {"0": 2, "1": 2}
