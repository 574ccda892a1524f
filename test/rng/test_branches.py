"""The selected branch of `cond` and `switch` draws the next numbers of the stream.

Loops are in `test_loops.py`, errors of both in `test_loop_errors.py`.
"""

import pytest
import torch
from rng.boundaries import FORMS, all_equal, drop, each_wrap, from_seed, ramp, rand

from torchax.interop import cond, jax_jit, scan, switch


def _branches():
  return [
    lambda x: x,
    lambda x: rand(),
    lambda x: drop(x) + rand() + rand(),
  ]


@each_wrap
def test_a_branch_draws_what_it_would_draw_first(env, wrap):
  program = FORMS[wrap](lambda index, x: switch(index, _branches(), x))
  for taken, branch in enumerate(_branches()):
    torch.manual_seed(0)
    expected = branch(ramp())
    torch.manual_seed(0)
    assert torch.equal(program(torch.tensor(taken).to("jax"), ramp()), expected)
    assert env.rng.state.count == 3  # as far as the branch that draws most


def test_an_index_out_of_range_takes_the_nearest_branch():
  branches = _branches()
  drawn = {n: from_seed(switch, n, branches, ramp()) for n in (-1, 0, 2, 7)}
  assert all_equal(drawn[-1], drawn[0]) and all_equal(drawn[7], drawn[2])
  assert not all_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("pred", [True, False, torch.tensor(True)], ids=repr)
def test_a_condition_known_to_python_draws_as_one_that_is_not(pred):
  one, two = _branches()[1:]
  traced = torch.tensor(bool(pred)).to("jax")
  expected = from_seed(cond, traced, one, two, ramp())
  assert all_equal(from_seed(cond, pred, one, two, ramp()), expected)


def test_draws_after_cond_do_not_depend_on_the_branch():
  compiled = jax_jit(lambda pred: cond(pred, rand, lambda: rand() + rand()))
  after = []
  for pred in (True, False):
    torch.manual_seed(0)
    compiled(torch.tensor(pred).to("jax"))
    after.append(rand())
  assert torch.equal(*after)


def test_cond_in_scan_draws_from_the_position_of_its_iteration():
  def body(carry, turn):
    return carry, cond(turn % 2 == 0, rand, lambda: rand() * rand())

  def unrolled():
    ys = []
    for turn in range(4):
      first, second = rand(), rand()
      ys.append(first * second if turn % 2 else first)
    return ramp(), torch.stack(ys)

  turns = torch.arange(4, device="jax")
  assert all_equal(from_seed(scan, body, ramp(), turns), from_seed(unrolled))


def test_a_generator_in_a_branch_draws_what_it_would_draw_first():
  generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
  compiled = jax_jit(
    lambda pred: cond(
      pred,
      lambda: rand(generator=generator),
      lambda: rand(generator=generator) + rand(generator=other),
    )
  )
  first = compiled(torch.tensor(True).to("jax"))
  second = compiled(torch.tensor(False).to("jax"))
  twin = torch.Generator().manual_seed(3)
  drawn = [rand(generator=twin) for _ in range(2)]
  assert torch.equal(first, drawn[0])
  # Both generators have moved with each call, whichever branch was taken.
  assert torch.equal(second, drawn[1] + drawn[1])
  assert torch.equal(generator.get_state(), twin.get_state())
  assert torch.equal(other.get_state(), twin.get_state())


def test_what_a_branch_changes_in_place_comes_back():
  counter = torch.zeros(6, device="jax")
  compiled = jax_jit(lambda pred: cond(pred, lambda: counter.add_(rand()), rand))
  _ = compiled(torch.tensor(False).to("jax"))
  assert not counter.any()
  expected = from_seed(rand)[0]
  torch.manual_seed(0)
  compiled(torch.tensor(True).to("jax"))
  assert torch.equal(counter, expected)


def test_the_gradient_of_a_branch_is_that_of_the_branch_taken():
  branches = (lambda x: drop(x) * x, lambda x: drop(drop(x)) * 3)
  loss = lambda pred, x: cond(pred, *branches, x).sum()  # noqa: E731
  compiled = jax_jit(loss)
  for pred, branch in zip((True, False), branches):
    x = ramp(64).requires_grad_()
    torch.manual_seed(0)
    expected = torch.autograd.grad(branch(x).sum(), x)
    for program in (loss, compiled):
      torch.manual_seed(0)
      value = program(torch.tensor(pred).to("jax"), x)
      assert all_equal(torch.autograd.grad(value, x), expected)
