"""Draws of the rows of `jax_vmap`: by a declared policy; without one, none is allowed.

Shards, the other kind of map, are tested in `test_devices.py`, and keys given row by
row in `test_rows.py`.
"""

import jax
import pytest
import torch
from rng.boundaries import all_equal, drop, from_seed, identity
from rng.unrolled import scan_unrolled, vmap_unrolled

from torchax.errors import MutationError, RngError
from torchax.interop import (
  call_jax,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_vmap,
  scan,
)


def _x(*shape) -> torch.Tensor:
  shape = shape or (3, 4)
  return torch.arange(torch.Size(shape).numel()).float().view(shape).to("jax") + 1


def _rand() -> torch.Tensor:
  return torch.rand(4, device="jax")


def _row(x):
  """Return a row whose arithmetic is exact, so that every bit has to agree."""
  return drop(x) + 1, torch.randn(4, device="jax"), drop(drop(x * 0.5))


def _different(function, *args, **kwargs):
  return jax_vmap(function, *args, randomness="different", **kwargs)


# "different": row i equals iteration i of a Python loop ------------------------------


FORMS = {
  "eager": identity,
  "jit": jax_jit,
  "nested jit of checkpoint": lambda f: jax_jit(
    lambda *args: jax_jit(gradient_checkpoint(f))(*args)
  ),
  "jit of value_and_grad": lambda f: jax_jit(
    lambda x: jax_value_and_grad(lambda x: (x.sum(), f(x)), {"has_aux": True})(x)[0][1]
  ),
}
each_form = pytest.mark.parametrize("form", FORMS)


@each_form
def test_rows_draw_the_numbers_of_their_turns_in_a_loop(form):
  expected = from_seed(lambda x: [_rand(), vmap_unrolled(_row)(x)], _x())
  program = FORMS[form](lambda x: [_rand(), _different(_row)(x)])
  for _ in range(2):
    assert all_equal(from_seed(program, _x()), expected)


def test_row_draws_do_not_depend_on_batch_size_or_other_rows():
  rows = _different(_row)
  large = rows(_x(5, 4))
  torch.manual_seed(0)
  small = rows(_x(5, 4)[:3])
  torch.manual_seed(0)
  mates = _x(5, 4)
  mates[1:] = 7.0
  changed = rows(mates)
  for all_rows, few, other in zip(large, small, changed):
    assert torch.equal(all_rows[:3], few)
    assert torch.equal(all_rows[0], other[0])


def test_rows_and_calls_draw_different_numbers():
  rows = _different(lambda x: _rand() + 0 * x)
  compiled = jax_jit(lambda x: torch.cat([rows(x), rows(x)]))
  drawn = torch.cat([rows(_x()), rows(_x()), compiled(_x()), compiled(_x())])
  assert len({tuple(row) for row in drawn.tolist()}) == 18


def test_the_ledger_shows_the_draws_of_each_row(env):
  def rows(program):
    torch.manual_seed(0)
    with env.rng.record() as ledger:
      program(_x())
    ledger.require_unique()
    return [(draw.index, draw.shape, draw.key) for draw in ledger]

  expected = rows(vmap_unrolled(_row))
  assert len(expected) == 12 == env.rng.state.count
  assert rows(_different(_row)) == expected
  assert rows(jax_jit(_different(_row))) == expected


def test_the_number_of_draws_may_depend_on_the_shape_of_a_row(env):
  def row(x):
    return torch.stack([_rand() for _ in range(len(x))]).sum(0)

  mapped = _different(row)
  for shape in ((2, 3), (3, 1), (2, 3)):
    expected = from_seed(vmap_unrolled(row), _x(*shape))
    assert all_equal(from_seed(mapped, _x(*shape)), expected)


# Nests -------------------------------------------------------------------------------


def test_nested_rows_draw_the_numbers_of_nested_loops():
  x = _x(2, 3, 4)

  def outer(vmap):
    def per_matrix(matrix):
      return drop(matrix), vmap(_row)(matrix), _rand()

    return vmap(per_matrix)

  expected = from_seed(outer(vmap_unrolled), x)
  assert all_equal(from_seed(outer(_different), x), expected)
  assert all_equal(from_seed(jax_jit(outer(_different)), x), expected)


def test_nested_policies_apply_to_their_own_rows():
  x = _x(2, 3, 4) * 0

  def nested(outer: str, inner: str) -> torch.Tensor:
    torch.manual_seed(0)
    rows = jax_vmap(lambda x: x + _rand(), randomness=inner)
    return jax_vmap(rows, randomness=outer)(x)

  torch.manual_seed(0)
  turns = torch.stack([_rand() for _ in range(3)])
  assert torch.equal(nested("same", "different"), torch.stack([turns, turns]))
  by_matrix = nested("different", "same")
  for matrix, turn in zip(by_matrix, turns):
    assert torch.equal(matrix, torch.stack([turn] * 3))
  with pytest.raises(RngError):
    nested("error", "different")
  with pytest.raises(RngError):
    nested("different", "error")


def test_rows_in_a_loop_draw_as_loops_in_a_loop():
  def program(scan, vmap):
    def body(carry, x):
      return vmap(lambda c, x: drop(c + x))(carry, x), vmap(_row)(x)

    return lambda x: scan(body, x, torch.stack([x, x + 1]))

  expected = from_seed(program(scan_unrolled, vmap_unrolled), _x())
  looped = program(scan, _different)
  assert all_equal(from_seed(looped, _x()), expected)
  assert all_equal(from_seed(jax_jit(looped), _x()), expected)


@pytest.mark.parametrize("wrap", [jax_jit, gradient_checkpoint])
def test_a_compiled_or_checkpointed_row_draws_the_same(wrap):
  expected = from_seed(vmap_unrolled(_row), _x())
  assert all_equal(from_seed(_different(wrap(_row)), _x()), expected)


# Arguments ---------------------------------------------------------------------------


def _pair(x, y):
  return drop(x + 2 * y)


AXES = {
  "one for all": ({}, (_x(), _x() + 1)),
  "one not mapped": ({"in_axes": (0, None)}, (_x(), _x()[0])),
  "columns": ({"in_axes": (1, 0)}, (_x().T.clone(), _x())),
  "negative": ({"in_axes": (-1, 0)}, (_x().T.clone(), _x())),
  "a list": ({"in_axes": [0, None]}, (_x(), _x()[0])),
  "results in columns": ({"out_axes": 1}, (_x(), _x())),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_count_the_users_arguments(name):
  axes, args = AXES[name]
  expected = from_seed(vmap_unrolled(_pair, **axes), *args)
  assert all_equal(from_seed(_different(_pair, **axes), *args), expected)


def test_axes_may_be_trees():
  def pair(tree):
    return {"z": _pair(tree["x"], tree["y"])}

  axes = {"in_axes": ({"x": 0, "y": None},), "out_axes": {"z": 1}}
  expected = from_seed(vmap_unrolled(_pair, (0, None), 1), _x(), _x()[0])
  found = from_seed(_different(pair, **axes), {"x": _x(), "y": _x()[0]})
  assert all_equal(found, expected)


def test_keyword_arguments_are_mapped_over_their_first_dimension():
  expected = from_seed(vmap_unrolled(_pair), _x(), _x() + 1)
  assert all_equal(from_seed(_different(_pair), _x(), y=_x() + 1), expected)


def test_the_number_of_rows_may_be_given():
  expected = torch.stack([_rand() for _ in range(3)])
  torch.manual_seed(0)
  assert torch.equal(_different(_rand, axis_size=3)(), expected)


def test_rows_can_be_added_up_by_the_name_of_their_axis():
  def row(x):
    return call_jax(lambda x: jax.lax.psum(x, "rows"), drop(x))

  torch.manual_seed(0)
  total = torch.stack([drop(x) for x in _x()]).sum(0)
  torch.manual_seed(0)
  assert torch.equal(_different(row, axis_name="rows")(_x()), torch.stack([total] * 3))


def test_a_key_can_be_an_argument_of_each_row(env):
  def row(x, key):
    with env.rng_scope(key):
      return drop(x)

  keys = jax.random.split(jax.random.key(5), 3)
  mapped = jax_vmap(row)(_x(), keys)
  for x, key, found in zip(_x(), keys, mapped):
    assert torch.equal(found, row(x, key))
  assert env.rng.state.count == 0


# Closed-over tensors and gradients ---------------------------------------------------


def _losses(vmap, weight, x):
  return vmap(lambda x: (drop(torch.tanh(x * weight)) * _rand()).sum())(x)


@pytest.mark.parametrize("wrap", [identity, jax_jit], ids=["eager", "jit"])
def test_gradients_of_rows_equal_the_loop(wrap):
  def run(wrap, vmap):
    weight, x = (t.requires_grad_() for t in (_x(4) / 4, _x() / 12))
    loss = wrap(lambda x: _losses(vmap, weight, x).sum())
    return [g for _ in range(2) for g in torch.autograd.grad(loss(x), [weight, x])]

  expected = from_seed(run, identity, vmap_unrolled)
  found = from_seed(run, wrap, _different)
  assert torch.equal(found[-1], expected[-1])
  for one, other in zip(found, expected):
    torch.testing.assert_close(one.cpu(), other.cpu())


def test_gradients_of_rows_by_jax_equal_the_loop():
  def step(vmap):
    loss = lambda weight, x: _losses(vmap, weight, x).sum()  # noqa: E731
    return jax_value_and_grad(loss, {"argnums": (0, 1)})

  weight, x = _x(4) / 4, _x() / 12
  expected = from_seed(step(vmap_unrolled), weight, x)
  for wrap in (identity, jax_jit):
    found = from_seed(wrap(step(_different)), weight, x)
    assert torch.equal(found[-1], expected[-1])
    for one, other in zip(found, expected):
      torch.testing.assert_close(one.cpu(), other.cpu())


def test_gradients_for_each_row_have_the_mask_of_their_row():
  """Per-example gradients: `jax_vmap` around `jax_value_and_grad`."""
  step = jax_value_and_grad(lambda x: (drop(x) * x).sum())
  expected = from_seed(vmap_unrolled(step), _x())
  assert all_equal(from_seed(_different(step), _x())[1:], expected[1:])


# "same" and "error" ------------------------------------------------------------------


@each_form
def test_by_same_all_rows_draw_as_one_row(env, form):
  x = torch.ones(3, 4, device="jax")
  one, after = [*_row(x[0])], _rand()
  mapped = FORMS[form](jax_vmap(_row, randomness="same"))
  torch.manual_seed(0)
  for found, expected in zip(mapped(x), one):
    assert torch.equal(found, torch.stack([expected] * 3))
  assert torch.equal(_rand(), after)


@each_form
def test_by_default_a_draw_is_refused_and_nothing_is_drawn(env, form):
  generator = torch.Generator().manual_seed(1)
  states = env.rng.state.state_dict(), generator.get_state()
  for draw in (drop, lambda x: torch.rand(4, generator=generator, device="jax") + x):
    for mapped in (jax_vmap(draw), jax_vmap(draw, randomness="error")):
      with pytest.raises(RngError, match='randomness="different".*randomness="same"'):
        FORMS[form](mapped)(_x())
  assert env.rng.state.state_dict() == states[0]
  assert torch.equal(generator.get_state(), states[1])


def test_by_default_a_function_that_draws_nothing_is_mapped():
  assert torch.equal(jax_vmap(lambda x: x * 2)(_x()), _x() * 2)


@pytest.mark.parametrize("word", ["Different", None, 0, {"rows": "same"}], ids=repr)
def test_another_policy_is_refused_before_anything_runs(word):
  with pytest.raises(ValueError, match='"error", "different" or "same"'):
    jax_vmap(drop, randomness=word)


@pytest.mark.parametrize("policy", ["different", "same"])
def test_a_row_that_changes_a_closed_over_tensor_is_refused(env, policy):
  noise = torch.zeros(4, device="jax")
  before = env.rng.state.state_dict()
  for wrap in (identity, jax_jit):
    with pytest.raises(MutationError, match="jax_vmap changes 1 tensor"):
      wrap(jax_vmap(lambda x: noise.uniform_() + x, randomness=policy))(_x())
  assert env.rng.state.state_dict() == before and not noise.any()


def test_rows_of_different_lengths_are_refused(env):
  before = env.rng.state.state_dict()
  with pytest.raises(ValueError, match="size"):
    _different(_pair)(_x(), _x()[:2])
  assert env.rng.state.state_dict() == before


# Generators --------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [identity, jax_jit], ids=["eager", "jit"])
def test_a_generator_draws_in_rows_as_in_a_loop(wrap):
  def run(wrap, vmap):
    generators = [torch.Generator().manual_seed(n) for n in (1, 2)]

    def row(x):
      one, other = (torch.rand(4, generator=g, device="jax") for g in generators)
      return x * 0 + one, other, _rand(), torch.rand_like(x, generator=generators[0])

    program = wrap(vmap(row))
    drawn = [*from_seed(program, _x()), *from_seed(program, _x())]
    return drawn, [generator.get_state() for generator in generators]

  expected, states = run(identity, vmap_unrolled)
  drawn, after = run(wrap, _different)
  assert all_equal(drawn, expected) and all_equal(after, states)


def test_a_generator_by_same_draws_once_for_all_rows():
  generator, twin = (torch.Generator().manual_seed(1) for _ in range(2))
  row = lambda x: x * 0 + torch.rand(4, generator=generator, device="jax")  # noqa: E731
  drawn = jax_vmap(row, randomness="same")(_x())
  one = torch.rand(4, generator=twin, device="jax")
  assert torch.equal(drawn, torch.stack([one] * 3))
  assert torch.equal(generator.get_state(), twin.get_state())


def test_no_rows_draw_nothing(env):
  before = env.rng.state.state_dict()
  assert _different(drop)(_x()[:0]).shape == (0, 4)
  assert env.rng.state.state_dict() == before


def test_no_rows_draw_nothing_from_a_generator():
  generator = torch.Generator().manual_seed(1)
  before = generator.get_state()
  row = lambda x: x + torch.rand(4, generator=generator, device="jax")  # noqa: E731
  assert _different(row)(_x()[:0]).shape == (0, 4)
  assert torch.equal(generator.get_state(), before)
