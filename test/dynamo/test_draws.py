"""Random numbers in `torch.compile`: drawn once, as in eager mode and in backward."""

import functools

import pytest
import torch
import torch.nn.functional as F
from dynamo.counting import CountingBackend
from torch.utils.checkpoint import checkpoint

import torchax
import torchax.dynamo
from torchax import rng

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
HEADS = torch.linspace(-1.0, 1.0, 64).reshape(2, 2, 4, 4)


def compiled(function, **options):
  return torch.compile(function, backend="jax", fullgraph=True, **options)


def on_jax(function, *tensors):
  """Return the draws and results of eager mode."""
  with torchax.default_env():
    return function(*[tensor.to("jax") for tensor in tensors]).cpu()


DRAWS = {
  "dropout": lambda x: F.dropout(x, 0.3),
  "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.3),
  "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
  "rrelu": lambda x: F.rrelu(x, training=True),
  "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
  "rand_like and randn_like": lambda x: torch.rand_like(x) + torch.randn_like(x),
  "randn": lambda x: x + torch.randn(4, 8, device=x.device),
  "randint": lambda x: x + torch.randint(0, 10, (4, 8), device=x.device),
  "randperm": lambda x: x[torch.randperm(4, device=x.device)],
  "normal_": lambda x: x.clone().normal_(1, 2),
  "uniform_": lambda x: x.clone().uniform_(2, 3),
  "exponential_": lambda x: x.clone().exponential_(),
  "cauchy_": lambda x: x.clone().cauchy_(),
  "geometric_": lambda x: x.clone().geometric_(0.3),
  "log_normal_": lambda x: x.clone().log_normal_(),
  "multinomial": lambda x: torch.multinomial(torch.sigmoid(x), 3),
  "poisson": lambda x: torch.poisson(x.exp()),
  "binomial": lambda x: torch.binomial(torch.full_like(x, 10.0), torch.sigmoid(x)),
  "normal": lambda x: torch.normal(x, x.exp()),
  "_standard_gamma": lambda x: torch._standard_gamma(x.exp()),
  "_sample_dirichlet": lambda x: torch._sample_dirichlet(x.exp()),
  "gumbel_softmax": lambda x: F.gumbel_softmax(x),
  "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
    x[:, None].repeat(8, 4, 4, 1).reshape(8, 4, 16, 8), 2, output_size=(5, 3)
  ),
}


@pytest.fixture(scope="module")
def drawn():
  """Return results by name, twice from one graph and twice from eager mode."""

  def run_all(x):
    return [function(x) for function in DRAWS.values()]

  run = compiled(run_all)
  torch.manual_seed(5)
  actual = [run(X) for _ in range(2)]
  with torchax.default_env():
    torch.manual_seed(5)
    expected = [[t.cpu() for t in run_all(X.to("jax"))] for _ in range(2)]
  return dict(zip(DRAWS, zip(*actual, *expected)))


@pytest.mark.parametrize("name", DRAWS)
def test_compiled_draws_equal_eager_draws(name, drawn):
  first, second, *expected = drawn[name]
  assert not torch.equal(first, second)
  for have, want in zip((first, second), expected):
    torch.testing.assert_close(have, want.to(have.dtype))


def test_attention_dropout_equals_eager_dropout():
  def attend(q):
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)

  run = compiled(attend)
  torch.manual_seed(5)
  expected = on_jax(attend, HEADS)
  torch.manual_seed(5)
  torch.testing.assert_close(run(HEADS), expected)


def test_stream_continues_across_graph_breaks_and_eager_code():
  def broken(x):
    y = F.dropout(x, 0.5)
    torch._dynamo.graph_break()
    return F.dropout(y + 1, 0.5)

  run = torch.compile(broken, backend="jax")

  def program(function, x):
    first = function(x)
    between = torch.rand(3, device="jax").cpu()
    return torch.cat([first.flatten().cpu(), between, function(x).flatten().cpu()])

  torch.manual_seed(1)
  actual = program(run, X)
  with torchax.default_env():
    torch.manual_seed(1)
    expected = program(broken, X.to("jax"))
  torch.testing.assert_close(actual, expected)


def test_new_seed_changes_draws_without_recompilation():
  counting = CountingBackend()
  run = torch.compile(lambda x: F.dropout(x, 0.5), backend=counting)
  seen = set()
  for seed in range(8):
    torch.manual_seed(seed)
    seen.add(tuple(run(torch.ones(64)).tolist()))
  assert len(counting.graphs) == 1
  assert len(seen) == 8


def test_stream_advances_by_the_number_of_draws():
  run = compiled(lambda x: F.dropout(F.dropout(x, 0.5) + torch.rand_like(x), 0.5))
  torch.manual_seed(0)
  run(X)
  assert rng.current().state.count == 3
  run(X)
  assert rng.current().state.count == 6


def test_function_without_draws_keeps_the_stream():
  torch.manual_seed(0)
  compiled(lambda x: x * 2)(X)
  assert rng.current().state.count == 0


def test_error_keeps_the_stream():
  run = compiled(lambda x: F.dropout(x, 0.5) @ torch.ones(8, 2))
  run(X)
  torch.manual_seed(0)
  with pytest.raises(RuntimeError):
    run(torch.ones(4, 7))
  assert rng.current().state.count == 0


# Forward and backward ----------------------------------------------------------------

SETTINGS = {
  "defaults": {},
  "half the memory": {"activation_memory_budget": 0.5},
  "no memory": {"activation_memory_budget": 0.0},
  "aggressive": {"aggressive_recomputation": True},
}


def network(x, first, second):
  hidden = F.dropout(F.gelu(x @ first), 0.4)
  hidden = hidden * torch.rand_like(hidden)
  return F.dropout(torch.tanh(hidden @ second), 0.3).square().sum()


def checkpointed(x, first, second):
  return checkpoint(network, x, first, second, use_reentrant=False)


@pytest.mark.parametrize("function", [network, checkpointed])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_equal_finite_differences(setting, function):
  generator = torch.Generator().manual_seed(3)

  def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)

  inputs = [normal(5, 6), normal(6, 7), normal(7, 3)]
  directions = [torch.randn_like(tensor) for tensor in inputs]
  leaves = [tensor.clone().requires_grad_() for tensor in inputs]
  run = compiled(function, options={"x64": True})

  def at(step):
    torch.manual_seed(11)
    moved = [t + step * d for t, d in zip(inputs, directions)]
    return run(*[tensor.requires_grad_() for tensor in moved])

  with torch._functorch.config.patch(SETTINGS[setting]):
    torch.manual_seed(11)
    gradients = torch.autograd.grad(run(*leaves), leaves)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions))
    step = 1e-5
    expected = (at(step) - at(-step)) / (2 * step)
  torch.testing.assert_close(slope, expected.detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
  ("setting", "is_drawn_again"), [("defaults", False), ("no memory", True)]
)
def test_backward_pass_may_recompute_draws(setting, is_drawn_again, caplog):
  leaves = [torch.ones(5, 6), torch.ones(6, 7), torch.ones(7, 3)]
  leaves = [leaf.requires_grad_() for leaf in leaves]
  torchax.dynamo.set_logs(draws=True)
  try:
    function = checkpointed if is_drawn_again else network
    with torch._functorch.config.patch(SETTINGS[setting]), caplog.at_level("INFO"):
      compiled(function)(*leaves).backward()
  finally:
    torchax.dynamo.set_logs(draws=False)
  backward = [r.message for r in caplog.records if "of backward" in r.message]
  assert len(backward) == 1
  assert ("native_dropout" in backward[0]) is is_drawn_again


def test_training_step_draws_as_in_eager_mode():
  def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(
      torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )

  def train(model, run, x):
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
      optimizer.zero_grad()
      run(x).square().mean().backward()
      optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]

  plain, moved = make(), make()
  actual = train(plain, compiled(plain), X)
  with torchax.default_env():
    moved.to("jax")
    expected = train(moved, moved, X.to("jax"))
  for have, want in zip(actual, expected):
    torch.testing.assert_close(have, want)


# Ledgers and refusals ----------------------------------------------------------------


class Noisy(torch.nn.Module):
  def forward(self, x):
    return x + torch.rand_like(x)


def test_the_ledger_names_the_module_and_the_line():
  model = torch.nn.Sequential(torch.nn.Linear(8, 8), Noisy())
  run = compiled(model)
  torch.manual_seed(0)
  with torchax.default_env().rng.record() as ledger:
    run(X)
    run(X)
  assert [draw.index for draw in ledger] == [0, 1]
  assert {draw.site for draw in ledger} == {"1"}
  assert ledger[0].shape == (4, 8)
  assert "test_draws.py" in ledger[0].line and "rand_like" in ledger[0].line
  ledger.require_unique()


def test_compiled_function_draws_from_the_rng_scope():
  run = compiled(lambda x: F.dropout(x, 0.5))
  env = torchax.default_env()
  with env.rng_scope(3):
    first = run(X)
  with env.rng_scope(3):
    second = run(X)
  with env.rng_scope(3):
    expected = on_jax(lambda x: F.dropout(x, 0.5), X)
  assert torch.equal(first, second)
  torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("depth", [1, 2])
def test_checkpoint_without_gradient_draws_as_in_eager_mode(device, depth):
  def function(x):
    return F.dropout(x, 0.5) * 2

  for _ in range(depth):
    function = functools.partial(checkpoint, function, use_reentrant=False)
  x = torch.ones(8)
  torch.manual_seed(3)
  expected = [function(x.to("jax")).tolist() for _ in range(2)]
  compiled = torch.compile(function, backend="jax", fullgraph=True)
  torch.manual_seed(3)
  assert [compiled(x.to(device)).tolist() for _ in range(2)] == expected
