"""Law 1 at the end of the counts: after 2**30 draws a stream takes a new key.

A compiled call keeps the key with which it begins. If a call counts past the end, it
continues with that key, and its caller's stream takes the new key after the call.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchax.interop import (
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  scan,
  while_loop,
)
from torchax.rng import RngState
from torchax.rng import state as rng_state

LAST = rng_state.REKEY_AT - 1
# No call with one of these starts counts past the end: before it, at it, after it.
COUNTS = (LAST - 20, LAST + 1, 2**31 + 5)
# Every call with one of these starts counts past the end.
CROSSING = (LAST - 1, LAST)


def _draws(x) -> list[torch.Tensor]:
  return [F.dropout(x, 0.5), torch.rand(4, device="jax"), F.dropout(x * 2, 0.5)]


def _scanned(x):
  def turn(carry, _):
    drawn = torch.rand(4, device="jax")
    return carry + drawn, drawn

  return list(scan(turn, x, length=3)[1])


def _unrolled(x):
  return [torch.rand(4, device="jax") for _ in range(3)]


def _by_while(x):
  def turn(state):
    index, drawn = state
    return index + 1, drawn + torch.rand(4, device="jax")

  first = F.dropout(x, 0.5)
  index = torch.zeros((), dtype=torch.int32, device="jax")
  return [first, while_loop(lambda s: s[0] < 2, turn, (index, x))[1], *_draws(x)]


def _by_cond(x):
  first = torch.rand(4, device="jax")
  draw = lambda x: torch.rand(4, device="jax") + x  # noqa: E731
  return [first, cond(x.sum() > 0, draw, lambda x: x, x), *_draws(x)]


PROGRAMS = {
  "jit": (_draws, jax_jit(_draws)),
  "nested": (_draws, jax_jit(lambda x: jax_jit(_draws)(x))),
  "checkpoint": (_draws, jax_jit(gradient_checkpoint(_draws))),
  "scan": (_unrolled, _scanned),
  "scan in jit": (_unrolled, jax_jit(_scanned)),
  "while_loop in jit": (_by_while, jax_jit(_by_while)),
  "cond in jit": (_by_cond, jax_jit(_by_cond)),
  "torch.compile": (_draws, torch.compile(_draws, backend="jax")),
}


def _run(env, program, count):
  x = torch.ones(4, device="jax")
  with env.rng_scope(RngState(jax.random.key(3), count)):
    drawn = program(x)
    return [t.tolist() for t in (*drawn, torch.rand(4, device="jax"))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_calls_near_the_last_count_draw_as_eager_ones(env, name):
  eager, compiled = PROGRAMS[name]
  for count in COUNTS:
    assert _run(env, compiled, count) == _run(env, eager, count), count


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_past_the_last_count_keeps_its_key(env, name):
  """The count continues past `REKEY_AT`, as in a trace; no number repeats."""
  eager, compiled = PROGRAMS[name]
  for count in CROSSING:
    *drawn, after = _run(env, compiled, count)
    assert drawn == _run(env, eager, jnp.uint32(count))[:-1]
    assert len(set(map(str, (*drawn, after)))) == len(drawn) + 1


def test_a_stream_takes_its_new_key_when_the_call_returns(env):
  key = jax.random.key(3)
  compiled = PROGRAMS["jit"][1]
  with env.rng_scope(RngState(key, LAST)) as stream:
    compiled(torch.ones(4, device="jax"))
    assert stream.state == RngState(rng_state.rekey(key), 2)


def test_graphs_of_plain_tensors_draw_as_eager_ones_near_it(env):
  def drawing(x):
    return [F.dropout(x, 0.5), F.dropout(x * 2, 0.5), F.dropout(x * 3, 0.5)]

  def gradients(function, device, count):
    with env.rng_scope(RngState(jax.random.key(3), count)):
      x = torch.ones(4, device=device, requires_grad=True)
      drawn = function(x)
      sum(drawn).sum().backward()
      return [t.tolist() for t in (*drawn, x.grad)]

  compiled = torch.compile(drawing, backend="jax")
  for count in (0, *COUNTS):
    assert gradients(compiled, "cpu", count) == gradients(drawing, "jax", count)
  for count in CROSSING:
    expected = gradients(drawing, "jax", jnp.uint32(count))
    assert gradients(compiled, "cpu", count) == expected


def test_gradients_across_a_rekey_use_the_forward_masks(env):
  def loss(x):
    first = checkpoint(F.dropout, x, 0.5, use_reentrant=False)
    return (F.dropout(first, 0.5) ** 3).sum()

  def gradients(function, count=LAST):
    with env.rng_scope(RngState(jax.random.key(3), count)):
      x = torch.linspace(1, 2, 16).to("jax").requires_grad_()
      (first,) = torch.autograd.grad(function(x), x, create_graph=True)
      (second,) = torch.autograd.grad(first.sum(), x)
    return [first.detach(), second]

  eager = gradients(loss, jnp.uint32(LAST))
  for actual, expected in zip(gradients(jax_jit(loss)), eager):
    torch.testing.assert_close(actual, expected)
  with env.rng_scope(RngState(jax.random.key(3), LAST)):
    x = torch.linspace(1, 2, 16).to("jax")
    torch.testing.assert_close(jax_value_and_grad(loss)(x)[1], eager[0])


def test_count_beyond_rekey_at_equals_state_of_the_next_key(env):
  key = jax.random.key(3)
  state = RngState(key, 2 * rng_state.REKEY_AT + 7)
  same = RngState(rng_state.rekey(rng_state.rekey(key)), 7)
  assert state.draw_key() == same.draw_key()
  assert state.state_dict() == same.state_dict()
  with env.rng_scope(state) as stream:
    assert stream.state == same
  assert RngState.from_tensor(state.to_tensor()) == same


SITE_COUNTS = (LAST - 20, LAST + 1, 2 * rng_state.REKEY_AT)


def _run_at_a_site(env, program, count):
  x = torch.ones(4, device="jax")
  with env.rng_scope(RngState(jax.random.key(3), 5, {"": count})) as stream:
    drawn = program(x)
    found = [t.tolist() for t in (*drawn, torch.rand(4, device="jax"))]
    return found, stream.state.sites


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_site_has_as_many_draws_as_a_stream(env, name):
  """A site rekeys as a stream does, in eager code and after compiled calls."""
  eager, compiled = PROGRAMS[name]
  for count in SITE_COUNTS:
    expected = _run_at_a_site(env, eager, count)
    assert _run_at_a_site(env, compiled, count) == expected
  for run in (eager, compiled):
    drawn, sites = _run_at_a_site(env, run, LAST)
    numbers = [tuple(row) for row in drawn if 1.0 > max(row) > 0.0]
    assert len(set(numbers)) == len(numbers)
    assert sites[""] > LAST


def test_a_site_beyond_its_last_count_is_saved_and_goes_on(env):
  state = RngState(jax.random.key(3), 5, {"": LAST + 1})
  with env.rng_scope(state):
    expected = torch.rand(4, device="jax")
  for again in (
    RngState.from_state_dict(state.state_dict()),
    RngState.from_tensor(state.to_tensor()),
  ):
    with env.rng_scope(again):
      assert torch.equal(torch.rand(4, device="jax"), expected)
