"""Loops draw the numbers of the unrolled Python program.

`scan`, `fori_loop` and `while_loop` of `torchax.interop`. Branches are in
`test_branches.py`, errors in `test_loop_errors.py`, random nests in `test_nests.py`.
"""

import functools
import gc
import weakref

import pytest
import torch
from rng.boundaries import (
  FORMS,
  all_equal,
  drop,
  each_wrap,
  from_seed,
  identity,
  leaves,
  ramp,
)
from rng.unrolled import fori_unrolled, scan_unrolled

from torchax.interop import (
  cond,
  fori_loop,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_vmap,
  scan,
  switch,
  while_loop,
)


def _rand() -> torch.Tensor:
  return torch.rand(3, device="jax")


# Numbers: the loop == the unrolled loop, bit for bit ----------------------------------


def _body(carry, x):
  """Its arithmetic is exact in float32, so that every bit has to agree."""
  carry = drop(carry + x)
  return carry, (torch.randn(3, device="jax"), carry)


@functools.cache  # one function for all calls, so that it is compiled once
def _outer_of(scan):
  def outer(carry, row):
    carry, first = scan(_body, drop(carry), torch.stack([row, carry]))
    return row, (first, torch.randint(0, 100, (3,), device="jax"))

  return outer


def _indexed(i, value):
  return drop(value) + torch.randperm(3, device="jax") + i


def _program(scan, fori_loop, x) -> dict:
  """Draws, loops of every kind, and draws between them."""
  xs = torch.stack([x, x + 1, x + 2])
  return {
    "before": _rand(),
    "forward": scan(_body, x, xs),
    "reversed": scan(_body, x, xs, reverse=True, unroll=2),
    "between": drop(x),
    "without xs": scan(lambda c, _: (drop(c), _rand()), x, length=3),
    "nested": scan(_outer_of(scan), x, xs[:2]),
    "fori": fori_loop(2, 5, _indexed, x),
  }


def _looped(x) -> dict:
  return _program(scan, fori_loop, x)


def _unrolled(x) -> dict:
  return _program(scan_unrolled, fori_unrolled, x)


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_draws_the_numbers_of_the_unrolled_one(form):
  torch.manual_seed(0)
  expected, after = _unrolled(ramp(3)), _rand()
  program = FORMS[form](_looped)
  for _ in range(2):  # the second call is compiled already
    torch.manual_seed(0)
    drawn = program(ramp(3))
    for name, numbers in expected.items():
      assert all_equal(leaves(drawn[name]), leaves(numbers)), name
    assert torch.equal(_rand(), after)


def test_loops_under_jax_vmap_draw_as_loops_in_a_python_loop():
  rows = torch.stack([ramp(3), ramp(3) + 5])
  expected = from_seed(lambda: [leaves(_unrolled(row)) for row in rows])
  n = (len(expected) - 1) // 2
  expected = [*map(torch.stack, zip(expected[:n], expected[n:-1])), expected[-1]]
  mapped = jax_jit(jax_vmap(lambda x: leaves(_looped(x)), randomness="different"))
  assert all_equal(from_seed(mapped, rows), expected)


BODIES = {
  "jit": jax_jit,
  "checkpoint": gradient_checkpoint,
  "jit of checkpoint": lambda f: jax_jit(gradient_checkpoint(f)),
}


@pytest.mark.parametrize("wrap", BODIES)
def test_a_compiled_or_checkpointed_body_draws_the_same(wrap):
  x, xs = ramp(3), torch.stack([ramp(3), ramp(3) + 1, ramp(3) + 2])
  expected = from_seed(scan_unrolled, _body, x, xs)
  body = BODIES[wrap](_body)
  assert all_equal(from_seed(scan, body, x, xs), expected)
  assert all_equal(from_seed(jax_jit(lambda x, xs: scan(body, x, xs)), x, xs), expected)


def test_iterations_and_calls_draw_different_numbers():
  loop = lambda: scan(lambda c, _: (c, _rand()), ramp(3), length=4)[1]  # noqa: E731
  compiled = jax_jit(lambda: (loop(), loop()))
  drawn = torch.cat([loop(), loop(), *compiled(), *compiled()])
  assert len({tuple(row) for row in drawn.tolist()}) == 24


def test_an_eager_loop_compiles_once_for_a_body_and_obeys_seeds():
  traces = []

  def body(carry, x):
    traces.append(None)
    return drop(carry), _rand()

  drawn = []
  for seed in (0, 1, 0):
    torch.manual_seed(seed)
    drawn += [scan(body, ramp(3), length=3)[1]]
    met = len(traces)
    scan(body, ramp(3) * 2, length=3)
    assert len(traces) == met
  assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_loops_with_bodies_made_for_one_call_are_dropped():
  """Otherwise a loop in a training loop would keep the tensors of every step."""

  def once():
    weight = torch.ones(3, device="jax")
    scan(lambda c, _: (c * weight, _rand()), ramp(3), length=2)
    return weakref.ref(weight)

  held = [once() for _ in range(4)]
  for _ in range(2):  # objects that the first pass frees refer to more
    gc.collect()
  assert not any(weight() is not None for weight in held)


def test_the_ledger_shows_the_draws_of_each_iteration(env):
  def rows(program):
    torch.manual_seed(0)
    with env.rng.record() as ledger:
      program(ramp(3))
    ledger.require_unique()
    assert len(ledger) == env.rng.state.count
    return [(draw.index, draw.shape, draw.key) for draw in ledger]

  expected = rows(_unrolled)
  compiled = jax_jit(_looped)
  for program in (_looped, compiled, compiled):
    assert rows(program) == expected


# Gradients ----------------------------------------------------------------------------


def _loss(scan, fori_loop, weight, x, xs):
  def body(carry, x):
    carry = drop(torch.tanh(carry * weight) + x)
    return carry, carry * weight

  carry, ys = scan(body, x, xs)
  carry, _ = scan(body, carry, xs, reverse=True, unroll=2)
  carry = fori_loop(0, 2, lambda i, v: drop(torch.sin(v) * (weight + i)), carry)
  return (carry * carry).sum() + ys.sum()


def _operands() -> list[torch.Tensor]:
  weight, x = torch.tensor([0.5, -1.0, 1.5]).to("jax"), ramp(3) / 3
  return [weight, x, torch.stack([x, x - 1, x + 1])]


def _by_torch(wrap, scan, fori_loop) -> list[torch.Tensor]:
  """Value and gradients of two calls; the weight is closed over, x are arguments."""
  weight, *rest = [tensor.requires_grad_() for tensor in _operands()]
  loss = wrap(lambda x, xs: _loss(scan, fori_loop, weight, x, xs))
  results = []
  for _ in range(2):
    value = loss(*rest)
    results += [value.detach(), *torch.autograd.grad(value, [weight, *rest])]
  return results


def _by_jax(wrap, scan, fori_loop, inner=identity) -> list[torch.Tensor]:
  loss = inner(lambda *args: _loss(scan, fori_loop, *args))
  step = wrap(jax_value_and_grad(loss, {"argnums": (0, 1, 2)}))
  results = []
  for _ in range(2):
    value, gradients = step(*_operands())
    results += [value, *gradients]
  return results


GRADIENTS = {
  "eager": (_by_torch, identity),
  "nested jit": (_by_torch, lambda f: jax_jit(lambda *args: jax_jit(f)(*args))),
  "value_and_grad": (_by_jax, identity),
  "jit of value_and_grad of checkpoint": (
    functools.partial(_by_jax, inner=gradient_checkpoint),
    jax_jit,
  ),
}


@pytest.mark.parametrize("form", GRADIENTS)
def test_gradients_of_loops_are_those_of_the_unrolled_ones(form):
  differentiate, wrap = GRADIENTS[form]
  expected = from_seed(_by_torch, identity, scan_unrolled, fori_unrolled)
  found = from_seed(differentiate, wrap, scan, fori_loop)
  assert torch.equal(found[-1], expected[-1])
  for one, other in zip(found, expected):
    torch.testing.assert_close(one.cpu(), other.cpu())


def _penalty(scan, wrap, keeps: bool) -> tuple[torch.Tensor, ...]:
  """A gradient, and the gradients of its square."""
  weight, x, xs = (tensor.requires_grad_() for tensor in _operands())
  kept = []

  def f(x):
    body = lambda c, x: (drop(c * weight * c) + x, None)  # noqa: E731
    kept.append(body if keeps else None)
    return scan(body, x, xs)[0]

  value = wrap(f)(x).sum()
  gc.collect()
  (gradient,) = torch.autograd.grad(value, x, create_graph=True)
  return gradient, *torch.autograd.grad((gradient**2).sum(), [weight, x])


@pytest.mark.parametrize(
  "wrap, keeps",
  [
    pytest.param(identity, True, id="eager"),
    pytest.param(jax_jit, False, id="jit"),
    pytest.param(identity, False, id="eager, with a body made for one call"),
  ],
)
def test_second_derivatives_of_a_loop_have_its_masks(wrap, keeps):
  expected = from_seed(_penalty, scan_unrolled, identity, True)
  found = from_seed(_penalty, scan, wrap, keeps)
  assert torch.equal(found[-1], expected[-1])
  for one, other in zip(found, expected):
    torch.testing.assert_close(one.cpu(), other.cpu())


def test_a_body_may_differentiate_what_it_closes_over():
  """An inner loop of gradient steps, as in meta-learning."""
  weight = torch.ones(3, device="jax", requires_grad=True)

  def body(carry, _):
    (gradient,) = torch.autograd.grad((drop(weight) * weight * carry).sum(), weight)
    return carry + gradient, None

  expected = from_seed(lambda: scan_unrolled(body, ramp(3), length=2)[0])
  assert all_equal(from_seed(lambda: scan(body, ramp(3), length=2)[0]), expected)


# Loops whose length is not known ------------------------------------------------------


def _filled(loop, n: int, rows: int = 4) -> torch.Tensor:
  """Return the draws of the first n iterations of a loop, of shape (rows, 3)."""

  def body(i, value):
    is_here = (torch.arange(rows, device="jax") == i)[:, None]
    return torch.where(is_here, _rand(), value)

  return loop(n, body, torch.zeros(rows, 3, device="jax"))


def _by_while(n, body, value):
  state = (torch.tensor(0).to("jax"), value)
  return while_loop(
    lambda state: state[0] < n, lambda state: (state[0] + 1, body(*state)), state
  )[1]


def _by_fori(n, body, value):
  upper = n if isinstance(n, torch.Tensor) else torch.tensor(n).to("jax")
  return fori_loop(0, upper, body, value)


UNKNOWN = {"while_loop": _by_while, "fori_loop": _by_fori}
each_unknown = pytest.mark.parametrize("name", UNKNOWN)


@each_unknown
def test_iterations_of_a_dynamic_loop_draw_fresh_numbers(env, name):
  def program(n):
    return [_filled(UNKNOWN[name], n), _rand(), _filled(UNKNOWN[name], n)]

  n = torch.tensor(4).to("jax")
  first, between, second = program(n)
  rows = [*first.tolist(), *second.tolist(), between.tolist(), _rand().tolist()]
  assert len(set(map(tuple, rows))) == 10
  assert env.rng.state.count == 4  # each loop moved the stream by one draw
  expected = [first, between, second]
  for wrap in FORMS:
    if "grad" not in wrap:
      torch.manual_seed(0)
      assert all_equal(FORMS[wrap](program)(n), expected), wrap
      assert env.rng.state.count == 3


@each_unknown
def test_loop_length_does_not_change_draws_in_or_after_the_loop(env, name):
  compiled = jax_jit(lambda n: _filled(UNKNOWN[name], n))
  torch.manual_seed(0)
  drawn, after = compiled(torch.tensor(4).to("jax")), _rand()
  for n in (0, 1, 3):
    torch.manual_seed(0)
    fewer = compiled(torch.tensor(n).to("jax"))
    assert torch.equal(fewer[:n], drawn[:n]) and not fewer[n:].any()
    assert torch.equal(_rand(), after)


def test_a_loop_in_a_loop_of_unknown_length_draws_fresh_numbers():
  def inner(value):
    return scan(lambda c, _: (c, _rand()), value, length=2)[1].sum(0)

  def outer(loop):
    rows = torch.zeros(2, 3, device="jax")
    body = lambda i, rows: torch.cat([rows[1:], loop(rows[0])[None]])  # noqa: E731
    return _by_while(2, body, rows)

  def in_turn(value):
    return _filled(_by_while, 2, rows=2).sum(0)

  for loop in (inner, in_turn):
    first, second = outer(loop).tolist()
    assert first != second


def test_draws_of_a_dynamic_loop_are_not_draws_of_the_stream():
  drawn = _filled(_by_while, 4)
  torch.manual_seed(0)
  stream = torch.stack([_rand() for _ in range(8)])
  assert not set(map(tuple, drawn.tolist())) & set(map(tuple, stream.tolist()))


# Loops that draw nothing --------------------------------------------------------------

QUIET = {
  "scan": lambda x: scan(lambda c, _: (c * 2, c), x, length=3),
  "fori_loop": lambda x: fori_loop(0, 3, lambda i, v: v + i, x),
  "fori_loop of tensors": lambda x: fori_loop(
    0, torch.tensor(3).to("jax"), lambda i, v: v + i, x
  ),
  "while_loop": lambda x: while_loop(lambda v: v.sum() < 9, lambda v: v * 2, x),
  "cond": lambda x: cond(x.sum() > 0, lambda x: x * 2, lambda x: x, x),
  "switch": lambda x: switch(torch.tensor(1).to("jax"), [torch.sin, torch.cos], x),
  "jax_vmap": lambda x: jax_vmap(torch.sin, randomness="different")(x),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_loop_that_draws_nothing_leaves_the_stream_alone(env, name):
  before = env.rng.state.state_dict()
  QUIET[name](ramp(3))
  compiled = jax_jit(QUIET[name])
  compiled(ramp(3))
  assert env.rng.state.state_dict() == before
  signature = next(
    line for line in compiled.lower(ramp(3)).as_text().splitlines() if "@main" in line
  )
  arguments = signature.split("->")[0]
  assert "ui32" not in arguments and arguments.count("%arg") <= 2


# Generators ---------------------------------------------------------------------------


def _draw_of(generator) -> torch.Tensor:
  return torch.rand(3, generator=generator, device="jax")


def _generator_program(generator, other, scan, fori_loop):
  def body(carry, x):
    noise = torch.randn(3, generator=generator, device="jax")
    return carry + _draw_of(other), (noise, _rand(), _draw_of(generator))

  carry, ys = scan(body, ramp(3) * 0, torch.stack([ramp(3), ramp(3)]))
  carry, zs = scan(body, carry, torch.stack([ramp(3)] * 3), reverse=True)
  return carry, ys, zs, fori_loop(0, 2, lambda i, v: v + _draw_of(generator), carry)


@each_wrap
def test_a_generator_in_a_loop_draws_as_in_a_python_loop(wrap):
  def run(wrap, *loops):
    generators = [torch.Generator().manual_seed(n) for n in (1, 2)]
    program = wrap(lambda: _generator_program(*generators, *loops))
    results = [from_seed(program), from_seed(program)]
    return results, [generator.get_state() for generator in generators]

  expected, states = run(identity, scan_unrolled, fori_unrolled)
  drawn, after = run(FORMS[wrap], scan, fori_loop)
  for one, other in zip(drawn, expected):
    for first, second in zip(one, other):
      torch.testing.assert_close(first.cpu(), second.cpu(), rtol=1e-6, atol=1e-6)
    assert torch.equal(one[1], other[1])
  assert not torch.equal(drawn[0][1], drawn[1][1])
  assert all(map(torch.equal, after, states))


def test_generator_with_in_place_changes_draws_as_a_python_loop():
  def run(scan):
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(3, device="jax")

    def body(carry, _):
      return carry, total.add_(_draw_of(generator)) * 1

    drawn = from_seed(lambda: [scan(body, ramp(3), length=2) for _ in range(2)])
    return [*drawn, generator.get_state()]

  assert all_equal(run(scan), run(scan_unrolled))


# Closed-over tensors that change ------------------------------------------------------


@each_wrap
def test_statistics_that_a_body_updates_come_back(wrap):
  def run(wrap, scan):
    norm = torch.nn.BatchNorm1d(3).to("jax")
    noise = torch.zeros(3, device="jax")

    def body(carry, x):
      noise.uniform_()
      return norm(carry * noise + x), None

    xs = torch.arange(24.0).view(2, 4, 3).to("jax")
    program = wrap(lambda x: scan(body, x, xs)[0])
    drawn = from_seed(lambda: [program(xs[0]), program(xs[1])])
    return [*drawn, noise.clone(), *norm.buffers()]

  expected = run(identity, scan_unrolled)
  found = run(FORMS[wrap], scan)
  assert expected[-1].item() == 4  # batches tracked
  assert torch.equal(found[3], expected[3]) and torch.equal(found[-1], expected[-1])
  for one, other in zip(found, expected):
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)


@each_unknown
def test_in_place_changes_in_a_dynamic_loop_are_returned(name):
  total = torch.zeros(3, device="jax")

  def body(i, value):
    noise = _rand()
    total.add_(noise)
    return value + noise

  for wrap in (identity, jax_jit):
    total.zero_()
    n = torch.tensor(3).to("jax")
    out = wrap(lambda n: UNKNOWN[name](n, body, torch.zeros(3, device="jax")))(n)
    assert torch.equal(total, out) and bool((total > 0).all())


# No iterations ------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [identity, jax_jit])
def test_a_scan_over_nothing_gives_its_carry_and_draws_nothing(env, wrap):
  generator = torch.Generator().manual_seed(0)

  def body(carry, x):
    noise = torch.rand(3, device="jax", generator=generator)
    return drop(carry) + x + noise, carry.sum()

  before, of_generator = env.rng.state, generator.get_state()
  x = ramp(3).requires_grad_()
  last, ys = wrap(lambda x: scan(body, x, torch.ones(0, 3, device="jax")))(x)
  (gradient,) = torch.autograd.grad(last.sum(), x)
  assert torch.equal(last, x) and ys.shape == (0,)
  assert gradient.tolist() == [1, 1, 1]
  assert env.rng.state == before and torch.equal(generator.get_state(), of_generator)
