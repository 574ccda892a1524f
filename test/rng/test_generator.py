"""`torch.Generator` passed to an operation: a stream of its own, eager and compiled."""

import copy
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.data import DataLoader, random_split

import torchax
from torchax.errors import NoSuchDeviceError, RngError, TracedDrawError
from torchax.interop import (
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
)


@pytest.fixture(params=["cpu", "jax"])
def generator(request):
  return torch.Generator(device=request.param).manual_seed(0)


def _rand(generator, n=4) -> torch.Tensor:
  return torch.rand(n, device="jax", generator=generator)


def _same(first, second) -> bool:
  return all(map(torch.equal, first, second))


def test_one_generator_never_repeats_a_draw(generator):
  draws = [tuple(_rand(generator).tolist()) for _ in range(20)]
  assert len(set(draws)) == 20


def test_one_generator_never_repeats_a_draw_compiled(generator):
  compiled = jax_jit(lambda: (_rand(generator), _rand(generator)))
  draws = [tuple(draw.tolist()) for _ in range(10) for draw in compiled()]
  assert len(set(draws)) == 20


def test_a_generators_draw_leaves_the_environments_stream_alone(env, generator):
  before = env.rng.state.state_dict()
  _rand(generator)
  jax_jit(lambda: _rand(generator))()
  assert env.rng.state.state_dict() == before


def test_the_environments_draw_leaves_a_generator_alone(generator):
  words = generator.get_state()
  _rand(None)
  jax_jit(lambda: _rand(None))()
  assert torch.equal(generator.get_state(), words)


def test_seeding_torch_leaves_a_generator_alone(generator):
  torch.manual_seed(1)
  first = _rand(generator)
  torch.manual_seed(2)
  assert torch.equal(_rand(generator.manual_seed(0)), first)


def test_a_generator_obeys_manual_seed(generator):
  first = [_rand(generator), _rand(generator)]
  assert not torch.equal(_rand(generator.manual_seed(1)), first[0])
  generator.manual_seed(0)
  assert _same([_rand(generator), _rand(generator)], first)


def test_a_generator_obeys_get_state_and_set_state(generator):
  _rand(generator)
  words = generator.get_state()
  first = [_rand(generator), _rand(generator)]
  generator.set_state(words)
  assert _same([_rand(generator), _rand(generator)], first)


def test_a_compiled_function_obeys_manual_seed_and_set_state(generator):
  compiled = jax_jit(lambda: _rand(generator))
  first, second = compiled(), compiled()
  words = generator.get_state()
  third = compiled()
  generator.manual_seed(0)
  assert _same([compiled(), compiled()], [first, second])
  generator.set_state(words)
  assert torch.equal(compiled(), third)


def test_two_generators_of_one_seed_draw_the_same(generator):
  twin = torch.Generator().manual_seed(0)
  assert torch.equal(_rand(generator), _rand(twin))
  compiled = jax_jit(lambda: (_rand(generator), _rand(twin)))
  assert torch.equal(*compiled())
  assert torch.equal(generator.get_state(), twin.get_state())


DRAWS = {
  "rand": lambda g: torch.rand(3, device="jax", generator=g),
  "randn": lambda g: torch.randn(3, device="jax", generator=g),
  "randint": lambda g: torch.randint(0, 100, (3,), device="jax", generator=g),
  "randperm": lambda g: torch.randperm(6, device="jax", generator=g),
  "uniform_": lambda g: torch.zeros(3, device="jax").uniform_(generator=g),
  "normal_": lambda g: torch.zeros(3, device="jax").normal_(generator=g),
  "bernoulli_": lambda g: torch.zeros(9, device="jax").bernoulli_(0.5, generator=g),
  "bernoulli": lambda g: torch.bernoulli(
    torch.full((9,), 0.5, device="jax"), generator=g
  ),
  "exponential_": lambda g: torch.zeros(3, device="jax").exponential_(generator=g),
  "random_": lambda g: torch.zeros(3, device="jax").random_(0, 99, generator=g),
  "cauchy_": lambda g: torch.zeros(3, device="jax").cauchy_(generator=g),
  "log_normal_": lambda g: torch.zeros(3, device="jax").log_normal_(generator=g),
  "geometric_": lambda g: torch.zeros(9, device="jax").geometric_(0.1, generator=g),
  "multinomial": lambda g: torch.multinomial(
    torch.ones(64, device="jax"), 3, generator=g
  ),
  "normal": lambda g: torch.normal(
    torch.zeros(3, device="jax"), torch.ones(3, device="jax"), generator=g
  ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_random_operation_draws_from_the_generator(env, generator, name):
  before = env.rng.state.state_dict()
  words = generator.get_state()
  first, second = DRAWS[name](generator), DRAWS[name](generator)
  assert not torch.equal(first, second)
  assert not torch.equal(generator.get_state(), words)
  generator.manual_seed(0)
  assert torch.equal(DRAWS[name](generator), first)
  assert env.rng.state.state_dict() == before


def test_a_generator_draws_the_same_eager_and_compiled(generator):
  """Numbers and generator state are equal for every operation, twice in a row."""

  def program():
    return [draw(generator) for draw in DRAWS.values()]

  eager = program() + program()
  words = generator.get_state()
  generator.manual_seed(0)
  compiled = jax_jit(program)
  assert _same(compiled() + compiled(), eager)
  assert torch.equal(generator.get_state(), words)


_SEEDED = {None: None, "a": torch.Generator(), "b": torch.Generator()}


@hypothesis.given(st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=6))
@hypothesis.settings(max_examples=6)
def test_interleaved_generators_draw_the_same_eager_and_compiled(names):
  def program():
    return [_rand(_SEEDED[name]) for name in names]

  def seed():
    torch.manual_seed(0)
    _SEEDED["a"].manual_seed(1)
    _SEEDED["b"].manual_seed(2)

  seed()
  eager = program()
  states = [_SEEDED[name].get_state() for name in "ab"]
  seed()
  assert _same(jax_jit(program)(), eager)
  assert _same([_SEEDED[name].get_state() for name in "ab"], states)


def test_generator_in_nested_compiled_functions_draws_as_eager(generator):
  def twice(draw):
    return lambda: (draw(), _rand(None), draw())

  eager = twice(lambda: _rand(generator))
  expected = [*eager(), *eager()]
  words = generator.get_state()
  generator.manual_seed(0)
  torch.manual_seed(0)
  nested = jax_jit(twice(jax_jit(lambda: _rand(generator))))
  assert _same([*nested(), *nested()], expected)
  assert torch.equal(generator.get_state(), words)


def test_generator_already_an_operand_of_an_inner_function(generator):
  inner = jax_jit(lambda: _rand(generator))
  expected = [_rand(generator) for _ in range(3)]
  generator.manual_seed(0)
  assert torch.equal(inner(), expected[0])
  outer = jax_jit(lambda: (inner(), _rand(generator)))
  assert _same(outer(), expected[1:])


def test_recomputed_forward_pass_repeats_generator_draws(generator):
  ones = torch.ones(32, device="jax")

  def masked_sum(x):
    mask = torch.zeros(32, device="jax").bernoulli_(0.5, generator=generator)
    return (mask * x).sum()

  mask = torch.zeros(32, device="jax").bernoulli_(0.5, generator=generator)
  words = generator.get_state()
  step = jax_value_and_grad(gradient_checkpoint(masked_sum))
  for function in (step, jax_jit(step)):
    generator.manual_seed(0)
    value, grad = function(ones)
    assert torch.equal(grad, mask)
    assert value.item() == mask.sum().item()
    assert torch.equal(generator.get_state(), words)


def test_a_generator_may_be_a_static_argument(generator):
  compiled = jax_jit(_rand, {"static_argnums": 0})
  drawn = [compiled(generator), compiled(generator)]
  generator.manual_seed(0)
  assert _same(drawn, [_rand(generator), _rand(generator)])


@pytest.mark.parametrize(
  "change",
  [
    lambda g: g.manual_seed(3),
    lambda g: torch.rand(2, generator=g),
    lambda g: g.set_state(torch.Generator().manual_seed(9).get_state()),
  ],
  ids=["manual_seed", "draw on the CPU", "set_state"],
)
def test_generator_changed_while_tracing_raises_and_is_restored(generator, change):
  """Only the first call would change it, so calls would differ."""
  words = generator.get_state()

  def f():
    first = _rand(generator)
    change(generator)
    return first, _rand(generator)

  compiled = jax_jit(f)
  for _ in range(2):
    with pytest.raises(RngError, match="before the call"):
      compiled()
    assert torch.equal(generator.get_state(), words)


def test_generator_seeded_while_tracing_raises(generator):
  compiled = jax_jit(lambda: _rand(generator.manual_seed(3)))
  for _ in range(2):
    with pytest.raises(RngError, match="before the call"):
      compiled()


def test_generator_created_while_tracing_raises():
  compiled = jax_jit(lambda: _rand(torch.Generator().manual_seed(0)))
  for _ in range(2):
    with pytest.raises(RngError, match="outside of the function"):
      compiled()


def test_generator_per_static_argument_is_accepted(generator):
  compiled = jax_jit(_rand, {"static_argnums": 0})
  generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
  drawn = [compiled(g) for g in generators * 2]
  for g, seed in zip(generators, range(3)):
    g.manual_seed(seed)
  assert _same(drawn, [_rand(g) for g in generators * 2])


def test_generator_advances_in_a_scope_of_a_compiled_function(generator):
  def f():
    with torchax.rng_scope(5):
      return _rand(generator), _rand(None)

  eager = [*f(), *f()]
  words = generator.get_state()
  generator.manual_seed(0)
  compiled = jax_jit(f)
  assert _same([*compiled(), *compiled()], eager)
  assert torch.equal(generator.get_state(), words)


def test_generator_raises_in_raw_jit_even_with_a_key(generator):
  words = generator.get_state()
  compiled = jax.jit(jax_view(lambda: _rand(generator)))
  with pytest.raises(TracedDrawError, match="rand"):
    compiled(rng=jax.random.key(0))
  assert torch.equal(generator.get_state(), words)


def test_generator_in_a_raw_transformation_raises_unchanged(generator):
  words = generator.get_state()
  with pytest.raises(TracedDrawError, match="rand"):
    jax.jit(jax_view(lambda: _rand(generator)))()
  with pytest.raises(TracedDrawError, match="rand"):
    jax.vmap(jax_view(lambda x: x + _rand(generator, 1)))(jnp.ones((2, 1)))
  assert torch.equal(generator.get_state(), words)


def test_a_generator_under_grad_draws_once(generator):
  expected = _rand(generator)
  generator.manual_seed(0)
  grad = jax.grad(jax_view(lambda x: (x * _rand(generator)).sum()))(jnp.ones(4))
  assert jnp.array_equal(grad, expected.jax())


def test_a_rejected_parameter_draws_nothing_from_a_generator(generator):
  words = generator.get_state()
  with pytest.raises(RuntimeError, match="p"):
    torch.zeros(3, device="jax").bernoulli_(2.0, generator=generator)
  with pytest.raises(RuntimeError, match="from"):
    torch.zeros(3, device="jax").uniform_(2.0, 1.0, generator=generator)
  assert torch.equal(generator.get_state(), words)


def test_an_operation_that_fails_draws_nothing_from_a_generator(generator):
  words = generator.get_state()
  with pytest.raises(NotImplementedError, match="int32"):
    torch.zeros(2, dtype=torch.int32, device="jax").uniform_(generator=generator)
  assert torch.equal(generator.get_state(), words)


def test_values_other_than_generators_are_refused(env):
  before = env.rng.state.state_dict()
  with pytest.raises(TypeError, match="[Gg]enerator"):
    torch.rand(3, device="jax", generator=0)
  with pytest.raises(TypeError, match=r"torch\.Generator.*int"):
    env.get_and_rotate_prng_key(0)
  assert env.rng.state.state_dict() == before


def test_a_key_taken_from_a_generator_is_that_of_its_next_draw(env, generator):
  key = env.get_and_rotate_prng_key(generator)
  expected = _rand(generator.manual_seed(0))
  assert jnp.array_equal(jax.random.uniform(key, (4,)), expected.jax())


def test_initialisers_take_a_generator(generator):
  weight = torch.empty(3, 4, device="jax")
  torch.nn.init.uniform_(weight, generator=generator)
  first = weight.clone()
  torch.nn.init.uniform_(weight, generator=generator)
  assert not torch.equal(weight, first)
  torch.nn.init.uniform_(weight, generator=generator.manual_seed(0))
  assert torch.equal(weight, first)


def _add_noise(x, g):
  return x + torch.rand(3, generator=g, device="jax")


BY_ARGUMENT = {
  "jit": jax_jit(_add_noise),
  "jit by name": lambda x, g: jax_jit(lambda x, *, g: _add_noise(x, g))(x, g=g),
  "in a tree": lambda x, g: jax_jit(lambda tree: _add_noise(*tree["a"]))({"a": (x, g)}),
  "value_and_grad": lambda x, g: jax_value_and_grad(
    lambda x, g: (x.sum(), _add_noise(x, g)), {"has_aux": True}
  )(x, g)[0][1],
  "jit of checkpoint": lambda x, g: jax_jit(gradient_checkpoint(_add_noise))(x, g),
  "cond": lambda x, g: cond(x.sum() < 1, _add_noise, _add_noise, x, g),
}


@pytest.mark.parametrize("name", BY_ARGUMENT)
def test_a_generator_may_be_an_argument(generator, name):
  x = torch.zeros(3, device="jax")
  eager = [_add_noise(x, generator) for _ in range(3)]
  state = generator.get_state()
  generator.manual_seed(0)
  assert all(torch.equal(BY_ARGUMENT[name](x, generator), want) for want in eager)
  assert torch.equal(generator.get_state(), state)


def test_two_generators_as_arguments_are_two_streams(generator):
  other = torch.Generator().manual_seed(1)
  compiled, x = jax_jit(_add_noise), torch.zeros(3, device="jax")
  outs = [compiled(x, g) for g in (generator, other, generator, other)]
  generator.manual_seed(0)
  other.manual_seed(1)
  assert all(
    torch.equal(out, _add_noise(x, g))
    for out, g in zip(outs, (generator, other, generator, other))
  )


# Generators of jax --------------------------------------------------------------------


@pytest.fixture
def of_jax():
  return torch.Generator(device="jax").manual_seed(3)


def test_a_generator_of_jax_says_so():
  x = torch.ones(2, device="jax")
  for device in ("jax", "jax:0", torch.device("jax"), x.device):
    generator = torch.Generator(device)
    assert generator.device == x.device and isinstance(generator, torch.Generator)
    assert torch.Generator(device=device).device.type == "jax"


def test_a_generator_of_jax_draws_as_one_of_the_cpu_on_jax(of_jax):
  of_cpu = torch.Generator().manual_seed(3)
  for draw in DRAWS.values():
    assert torch.equal(draw(of_jax), draw(of_cpu))
  assert torch.equal(of_jax.get_state(), of_cpu.get_state())


def test_a_generator_of_jax_has_torch_s_methods(of_jax):
  assert of_jax.manual_seed(5) is of_jax and of_jax.initial_seed() == 5
  state = of_jax.get_state()
  assert state.device.type == "cpu" and state.dtype == torch.uint8
  expected = _rand(of_jax)
  assert torch.equal(_rand(of_jax.set_state(state) or of_jax), expected)
  assert of_jax.seed() == of_jax.initial_seed()


@pytest.mark.parametrize(
  "copied",
  [
    lambda g: g.clone_state(),
    copy.deepcopy,
    lambda g: pickle.loads(pickle.dumps(g)),
  ],
  ids=["clone_state", "deepcopy", "pickle"],
)
def test_a_copy_of_a_generator_of_jax_goes_on_by_itself(of_jax, copied):
  _rand(of_jax)
  other = copied(of_jax)
  assert other.device == of_jax.device
  expected = [_rand(of_jax), _rand(of_jax)]
  assert _same([_rand(other), _rand(other)], expected)


def test_samplers_of_torch_take_a_generator_of_jax(of_jax):
  data = torch.arange(8)
  loader = DataLoader(data, batch_size=8, shuffle=True, generator=of_jax)
  (first,), (second,) = list(loader), list(loader)
  assert not torch.equal(first, second) and torch.equal(first.sort().values, data)
  parts = random_split(data, [4, 4], generator=of_jax)
  assert sorted([*parts[0].indices, *parts[1].indices]) == list(range(8))
  assert torch.randperm(5, generator=of_jax).sort().values.tolist() == list(range(5))


def test_initialisers_take_a_generator_of_jax(of_jax):
  weights = [torch.empty(3, 3, device="jax") for _ in range(2)]
  for weight in weights:
    torch.nn.init.kaiming_uniform_(weight, generator=of_jax.manual_seed(1))
  assert torch.equal(*weights)


def test_cuda_is_jax_for_a_generator_where_it_is_configured(env, monkeypatch):
  monkeypatch.setattr(env.config, "treat_cuda_as_jax_device", True)
  with env:
    generator = torch.Generator(device="cuda").manual_seed(0)
    drawn = torch.rand(3, device="cuda", generator=generator)
  assert generator.device.type == "jax"
  assert torch.equal(drawn, _rand(generator.manual_seed(0), 3))


def test_torch_compile_takes_a_generator_of_jax(of_jax):
  compiled = torch.compile(lambda x: x + _rand(of_jax, 2), backend="jax")
  x = torch.zeros(2, device="jax")
  drawn = [compiled(x), compiled(x)]
  of_jax.manual_seed(3)
  assert _same(drawn, [_rand(of_jax, 2), _rand(of_jax, 2)])


@pytest.mark.parametrize("device", ["jax:7", torch.device("jax:1"), 3])
def test_a_generator_of_a_device_that_does_not_exist_is_refused(device):
  with pytest.raises(NoSuchDeviceError, match="only jax:0"):
    torch.Generator(device)
