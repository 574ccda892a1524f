"""A key for each row of a batch: `with env.rng_scope(RngState.rows(keys))`.

A row's numbers depend on its key alone: neither on the size of the batch nor on its
place in it nor on the other rows. Rows of `jax_vmap` are in `test_maps.py`.
"""

import jax
import pytest
import torch
import torch.nn.functional as F

from torchax.errors import RngError, SeedError
from torchax.interop import gradient_checkpoint, jax_jit, scan
from torchax.rng import RngState


def _x(n=2) -> torch.Tensor:
  return (torch.arange(3.0 * n).view(n, 3) + 1).to("jax")


def _size(x):
  return x.shape


# Each makes one draw or more for a batch of shape (n, 3).
DRAWS = {
  "rand": lambda x: torch.rand(_size(x), device="jax"),
  "randn": lambda x: torch.randn(_size(x), device="jax"),
  "randint": lambda x: torch.randint(0, 1000, _size(x), device="jax"),
  "bernoulli": lambda x: torch.bernoulli(x / 10),
  "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
  "uniform_": lambda x: torch.empty_like(x).uniform_(1.0, 3.0),
  "uniform_ of a view": lambda x: x.new_zeros(len(x), 2, 3)[:, 1].uniform_(),
  "normal_": lambda x: torch.empty_like(x).normal_(1.0, 3.0),
  "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
  "random_": lambda x: torch.empty_like(x).random_(3, 900),
  "normal of a mean": lambda x: torch.normal(x, 2.0),
  "normal of both": lambda x: torch.normal(x, x),
  "multinomial": lambda x: torch.multinomial(x, 2),
  "multinomial with replacement": lambda x: torch.multinomial(x, 5, True),
  "dropout": lambda x: F.dropout(x, 0.5),
  "feature_dropout": lambda x: F.dropout2d(x[:, :, None, None], 0.5),
  "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
  "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
  "Categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
  "poisson": lambda x: torch.poisson(x * 3),
  "gamma": lambda x: torch._standard_gamma(x),
}


def _program(x) -> dict[str, torch.Tensor]:
  """Every draw, twice."""
  drawn = {name: draw(x) for name, draw in DRAWS.items()}
  drawn |= {f"{name} again": draw(x) for name, draw in DRAWS.items() if name == "rand"}
  return drawn


@pytest.fixture(scope="module")
def compiled():
  return jax_jit(_program)


def _under(env, seeds, program, x):
  with env.rng_scope(RngState.rows(seeds)):
    return program(x)


def test_a_row_draws_what_it_draws_alone(env, compiled):
  x = _x()
  batch = _under(env, [7, 8], compiled, x)
  for place, seed in enumerate((7, 8)):
    alone = _under(env, [seed], compiled, x[place : place + 1])
    for name, drawn in batch.items():
      assert torch.equal(drawn[place : place + 1], alone[name]), name


def test_a_row_depends_neither_on_its_place_nor_on_the_other_rows(env, compiled):
  x = _x()
  batch = _under(env, [7, 8], compiled, x)
  other = _under(env, [9, 7], compiled, torch.stack([x[1] + 5, x[0]]))
  for name, drawn in batch.items():
    assert torch.equal(drawn[0], other[name][1]), name
  changed = [n for n, d in batch.items() if not torch.equal(d[1], other[n][0])]
  assert len(changed) > len(batch) * 3 / 4  # a few rows of bits meet by chance
  assert not torch.equal(batch["rand"], batch["rand again"])


@pytest.mark.parametrize(
  "name", ["rand", "normal of a mean", "multinomial", "dropout", "exponential_"]
)
def test_a_row_draws_what_a_stream_with_its_key_draws_without_a_batch(env, name):
  x = _x()
  batch = _under(env, [7, 8], DRAWS[name], x)
  assert torch.equal(_under(env, [7, 8], jax_jit(DRAWS[name]), x), batch)
  for row, drawn, seed in zip(x, batch, (7, 8)):
    with env.rng_scope(seed):
      assert torch.equal(DRAWS[name](row), drawn)


KEYS = {
  "seeds": lambda: [7, 8],
  "a tuple": lambda: (7, 8),
  "keys": lambda: [jax.random.key(7), jax.random.key(8)],
  "an array of keys": lambda: jax.numpy.stack([jax.random.key(7), jax.random.key(8)]),
  "states": lambda: [RngState.from_seed(7), RngState.from_seed(8)],
  "integers": lambda: torch.tensor([7, 8]),
}


@pytest.mark.parametrize("name", KEYS)
def test_rows_take_whatever_seeds_a_stream(env, name):
  expected = _under(env, [7, 8], torch.rand_like, _x())
  assert torch.equal(_under(env, KEYS[name](), torch.rand_like, _x()), expected)


def test_a_state_that_has_drawn_gives_its_row_fresh_numbers(env):
  state = RngState.from_seed(7)
  first, later = _under(env, [state, state.advance(1)], torch.rand_like, _x())
  with env.rng_scope(state):
    drawn = [torch.rand(3, device="jax") for _ in range(3)]
  assert torch.equal(first, drawn[0])
  assert not any(torch.equal(later, numbers) for numbers in drawn)


def test_rows_go_on_in_loops_and_recomputations(env):
  def body(carry, _):
    dropped = gradient_checkpoint(lambda x: F.dropout(x, 0.5))(carry)
    return carry, (dropped, torch.rand_like(carry))

  def program(x):
    return [*scan(body, x, length=3)[1], torch.rand_like(x)]

  compiled = jax_jit(program)
  for wrapped in (program, compiled):
    batch = _under(env, [7, 8], wrapped, _x())
    assert len({tuple(row) for row in batch[1].reshape(-1, 3).tolist()}) == 6
    for place, seed in enumerate((7, 8)):
      with env.rng_scope(seed) as stream:
        masks, drawn, after = program(_x()[place])
        assert stream.state.count == 7
      assert torch.equal(batch[0][:, place], masks)
      assert torch.equal(batch[1][:, place], drawn)
      assert torch.equal(batch[2][place], after)


def test_the_gradient_of_dropout_has_the_mask_of_each_row(env):
  x = _x().requires_grad_()
  with env.rng_scope(RngState.rows([7, 8])):
    y = F.dropout(x, 0.5)
  (gradient,) = torch.autograd.grad(y.sum(), x)
  assert torch.equal(gradient * x, y)
  assert set(gradient.flatten().tolist()) == {0.0, 2.0}


def test_the_ledger_finds_no_key_used_twice(env):
  with env.rng.record() as ledger:
    _under(env, [7, 8], lambda x: [torch.rand_like(x) for _ in range(3)], _x())
  ledger.require_unique()
  assert len(ledger) == 3


# Errors ------------------------------------------------------------------------------

WITHOUT_ROWS = {
  "a size": lambda: torch.rand(3, device="jax"),
  "no size": lambda: torch.randn((), device="jax"),
  "the batch as the second dimension": lambda: torch.rand(3, 2, device="jax"),
  "a tensor": lambda: F.dropout(torch.ones(3, device="jax"), 0.5),
  "a tensor in place": lambda: torch.ones(3, 2, device="jax").uniform_(),
  "two tensors": lambda: torch.normal(_x(), _x(1)),
  "a permutation": lambda: torch.randperm(2, device="jax"),
  "weights without a batch": lambda: torch.multinomial(_x()[0], 2),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_draw_without_these_rows_is_refused_and_nothing_is_drawn(env, name):
  with env.rng_scope(RngState.rows([7, 8])) as stream:
    for wrap in (lambda f: f, jax_jit):
      with pytest.raises(RngError, match="keys for 2 rows"):
        wrap(WITHOUT_ROWS[name])()
    assert stream.state.count == 0
    assert torch.rand(2, 3, device="jax").shape == (2, 3)


@pytest.mark.parametrize(
  "rows",
  [7, jax.random.key(7), [], [1.5], ["a"], [None], [torch.ones(2)], None, {7, 8}],
  ids=repr,
)
def test_what_gives_no_key_for_each_row_is_refused(rows):
  with pytest.raises(SeedError):
    RngState.rows(rows)


def test_rows_can_be_written_down_and_go_on(env):
  with env.rng_scope(RngState.rows([7, 8])) as stream:
    torch.rand(2, 3, device="jax")
    state = stream.state
    expected = torch.rand(2, 3, device="jax")
  for restored in (
    RngState.from_state_dict(state.state_dict()),
    RngState.from_tensor(state.to_tensor()),
  ):
    with env.rng_scope(restored):
      assert torch.equal(torch.rand(2, 3, device="jax"), expected)
