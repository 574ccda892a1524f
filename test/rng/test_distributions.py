"""`torch.distributions` on jax tensors: numbers, gradients, densities, checks, laws.

The oracle is CPU torch. A sample is a function of the noise that torch's primitives
draw. With the noise of jax recorded and replayed, CPU torch must compute the same
sample and the same gradient. The statistical rows test the noise itself, and each class
with it. The classes are rows in `distribution_rows.py`.
"""

import numpy as np
import pytest
import torch
import torch.distributions as D
from compare import assert_close, assert_same, to_jax
from rng.distribution_rows import KL_PAIRS, ROWS, Row
from rng.goodness import SEEDS, N, p_value, require_good
from torch.overrides import TorchFunctionMode

from torchax.errors import TracedStateError
from torchax.interop import jax_jit, jax_value_and_grad

each_row = pytest.mark.parametrize("name", ROWS)
# torch reports valid Wishart matrices as singular and draws them again.
pytestmark = [
  pytest.mark.distributions,
  pytest.mark.filterwarnings("ignore:Singular sample detected"),
]

SHAPE = (3,)
ABSTRACT = {"Distribution", "ExponentialFamily"}


@pytest.fixture(autouse=True)
def environment_on(env):
  with env:
    yield


@pytest.fixture(autouse=True)
def values_are_checked(monkeypatch):
  """Validate arguments: Dynamo turns torch's checks off in the whole process."""
  monkeypatch.setattr(D.Distribution, "_validate_args", True)


def _parameters(row: Row, grad: bool = False) -> dict:
  """Return new CPU tensors of the parameters."""
  return {
    name: value.clone().requires_grad_(grad) if torch.is_tensor(value) else value
    for name, value in row.parameters.items()
  }


def _build(row: Row, **options) -> D.Distribution:
  return row.build(**to_jax(row.parameters), **options)


def _draw(distribution, shape=SHAPE) -> torch.Tensor:
  return (distribution.rsample if distribution.has_rsample else distribution.sample)(
    shape
  )


def test_every_class_of_torch_distributions_has_a_row():
  exported = (getattr(D, name) for name in D.__all__ if name not in ABSTRACT)
  classes = {
    value.__name__
    for value in exported
    if isinstance(value, type) and issubclass(value, D.Distribution)
  }
  assert len(classes) > 35
  assert classes == {row.distribution.__name__ for row in ROWS.values()}


# The sample as a function of the noise ----------------------------------------------


class _StandardGamma(torch.autograd.Function):
  """Autograd function: a recorded gamma variable with the gradient of a drawn one."""

  @staticmethod
  def forward(ctx, concentration, drawn):
    ctx.save_for_backward(concentration, drawn)
    return drawn.clone()

  @staticmethod
  def backward(ctx, grad):
    return grad * torch._standard_gamma_grad(*ctx.saved_tensors), None


IN_PLACE_DRAWS = {"cauchy_", "exponential_", "normal_", "uniform_"}
DRAWS = IN_PLACE_DRAWS | {
  *("_sample_dirichlet", "_standard_gamma", "bernoulli", "binomial", "multinomial"),
  *("normal", "poisson", "rand", "randn"),
}


class Recorder(TorchFunctionMode):
  """Mode that records the draws of torch's random functions on jax."""

  def __init__(self):
    super().__init__()
    self.drawn = []

  def __torch_function__(self, func, types, args=(), kwargs=None):
    result = func(*args, **kwargs or {})
    if func.__name__ in DRAWS:
      self.drawn.append((func.__name__, result.detach().cpu()))
    return result


class Replayer(TorchFunctionMode):
  """Mode in which torch's random functions return the recorded draws, in order."""

  def __init__(self, drawn):
    super().__init__()
    self.drawn = list(drawn)

  def __torch_function__(self, func, types, args=(), kwargs=None):
    name = func.__name__
    if name not in DRAWS:
      return func(*args, **kwargs or {})
    recorded, drawn = self.drawn.pop(0)
    assert name == recorded
    if name == "_standard_gamma":
      return _StandardGamma.apply(args[0], drawn)
    if name in IN_PLACE_DRAWS:
      return args[0].copy_(drawn)
    return drawn.long() if name == "multinomial" else drawn


def _gradients(sample: torch.Tensor, parameters: dict) -> dict:
  leaves = {name: p for name, p in parameters.items() if torch.is_tensor(p)}
  weights = torch.linspace(-1.0, 2.0, sample.numel()).reshape(sample.shape)
  (sample * weights.to(sample.device)).sum().backward()
  return {name: leaf.grad for name, leaf in leaves.items()}


@each_row
def test_sample_and_gradient_match_cpu_torch_for_equal_noise(name, env):
  row = ROWS[name]
  has_gradient = _build(row).has_rsample and not row.no_gradient
  on_cpu = _parameters(row, grad=has_gradient)
  on_jax = to_jax(on_cpu)
  recorder = Recorder()
  with recorder:
    actual = _draw(row.build(**on_jax))
  assert recorder.drawn
  with env.disabled(), Replayer(recorder.drawn) as replayer:
    expected = _draw(row.build(**on_cpu))
  assert not replayer.drawn
  assert_same(actual, expected.to(actual.dtype))
  if has_gradient:
    expected_gradients = _gradients(expected, on_cpu)
    assert any(grad is not None for grad in expected_gradients.values())
    _assert_gradients(_gradients(actual, on_jax), expected_gradients, row)


def _assert_gradients(actual: dict, expected: dict, row: Row) -> None:
  if row.gradient_rtol is None:
    assert_same(actual, expected)
    return
  for name, gradient in expected.items():
    error = (actual[name].cpu() - gradient).abs().max()
    assert error <= row.gradient_rtol * gradient.abs().max()


# Densities, moments, divergences ----------------------------------------------------


def _outcome(compute):
  """Return the result of `compute`, or the type of its error as torch's answer."""
  try:
    return compute()
  except (NotImplementedError, ValueError) as error:
    return type(error)


QUESTIONS = {
  "mean": lambda d, x, q: d.mean,
  "mode": lambda d, x, q: d.mode,
  "variance": lambda d, x, q: d.variance,
  "stddev": lambda d, x, q: d.stddev,
  "entropy": lambda d, x, q: d.entropy(),
  "log_prob": lambda d, x, q: d.log_prob(x),
  "cdf": lambda d, x, q: d.cdf(x),
  "icdf": lambda d, x, q: d.icdf(q),
  "enumerate_support": lambda d, x, q: d.enumerate_support(),
}


@each_row
def test_densities_and_moments_equal_cpu_torch(name, env):
  row = ROWS[name]
  with env.disabled():
    oracle = row.build(**_parameters(row))
    torch.manual_seed(0)
    at, quantile = oracle.sample(SHAPE), torch.tensor([0.3, 0.6])
  distribution = _build(row)
  for question, ask in QUESTIONS.items():
    with env.disabled():
      expected = _outcome(lambda ask=ask: ask(oracle, at, quantile))
    actual = _outcome(
      lambda ask=ask: ask(distribution, at.to("jax"), quantile.to("jax"))
    )
    assert_same(actual, expected, question)


@each_row
def test_the_gradient_of_a_density_is_that_of_cpu_torch(name, env):
  row = ROWS[name]
  on_cpu = _parameters(row, grad=True)
  on_jax = to_jax(on_cpu)
  with env.disabled():
    oracle = row.build(**on_cpu)
    torch.manual_seed(0)
    at = oracle.sample(SHAPE)
    expected = _gradients(oracle.log_prob(at), on_cpu)
  actual = _gradients(row.build(**on_jax).log_prob(at.to("jax")), on_jax)
  assert_same(actual, expected)


def _flipped(row: Row) -> dict:
  """Exchange the elements of the batch: parameters of another distribution."""

  def flip(name, value):
    # torch compares binomials only if their counts are equal.
    is_batch = torch.is_tensor(value) and value.dim() == 1 and name != "total_count"
    return value.flip(-1) if is_batch else value

  return {name: flip(name, value) for name, value in row.parameters.items()}


@pytest.mark.parametrize("first, second", KL_PAIRS)
def test_divergences_equal_cpu_torch(first, second, env):
  p, q = ROWS[first], ROWS[second]
  actual = D.kl_divergence(_build(p), q.build(**to_jax(_flipped(q))))
  with env.disabled():
    expected = D.kl_divergence(p.build(**_parameters(p)), q.build(**_flipped(q)))
  assert_same(actual, expected)


# Checks -----------------------------------------------------------------------------


@each_row
def test_invalid_parameter_raises_as_on_cpu_and_draws_nothing(name, env):
  row = ROWS[name]
  parameter, value = row.bad
  on_cpu = {**row.parameters, parameter: value}
  with env.disabled(), pytest.raises(ValueError):
    row.build(**on_cpu, validate_args=True)
  before = repr(env.rng)
  with pytest.raises(ValueError):
    row.build(**to_jax(on_cpu), validate_args=True)
  assert repr(env.rng) == before


@each_row
def test_a_value_outside_of_the_support_has_no_density(name, env):
  row = ROWS[name]
  with env.disabled():
    nowhere = torch.full_like(row.build(**_parameters(row)).sample().float(), torch.nan)
    with pytest.raises(ValueError):
      row.build(**_parameters(row)).log_prob(nowhere)
  with pytest.raises(ValueError):
    _build(row).log_prob(nowhere.to("jax"))


# Compiled ---------------------------------------------------------------------------


def _compiled(row: Row, **options):
  fixed = {k: v for k, v in row.parameters.items() if not torch.is_tensor(v)}

  @jax_jit
  def draw(tensors):
    return _draw(row.build(**tensors, **fixed, **options))

  tensors = {k: v for k, v in row.parameters.items() if torch.is_tensor(v)}
  return lambda: draw(to_jax(tensors))


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if not row.undrawable])
def test_a_compiled_function_draws_as_the_eager_one(name, env):
  row = ROWS[name]
  options = {"validate_args": False} if row.unchecked else {}
  compiled = _compiled(row, **options)
  for seed in (0, 1):
    torch.manual_seed(seed)
    eager, after = _draw(_build(row, **options)), repr(env.rng)
    torch.manual_seed(seed)
    assert_close(compiled().detach().cpu(), eager.detach().cpu())
    assert repr(env.rng) == after


@pytest.mark.parametrize("name", ["Normal", "Gamma", "Dirichlet", "Uniform"])
def test_a_compiled_gradient_of_a_sample_is_the_eager_one(name):
  row = ROWS[name]
  value_and_grad = jax_value_and_grad(
    lambda tensors: row.build(**tensors).rsample(SHAPE).square().sum()
  )
  torch.manual_seed(0)
  value, gradients = jax_jit(value_and_grad)(to_jax(row.parameters))
  parameters = to_jax(_parameters(row, grad=True))
  torch.manual_seed(0)
  loss = row.build(**parameters).rsample(SHAPE).square().sum()
  loss.backward()
  torch.testing.assert_close(value, loss.detach())
  for parameter, leaf in parameters.items():
    torch.testing.assert_close(gradients[parameter], leaf.grad)


@pytest.mark.parametrize("name", ["Normal", "Laplace"])
def test_sample_has_no_gradient_in_jax(name):
  row = ROWS[name]
  value_and_grad = jax_value_and_grad(
    lambda tensors: row.build(**tensors).sample(SHAPE).sum()
  )
  gradients = value_and_grad(to_jax(row.parameters))[1]
  assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
  "name", [n for n, row in ROWS.items() if row.undrawable or row.unchecked]
)
def test_dependence_on_values_raises_in_a_compiled_function(name, env):
  before = repr(env.rng)
  with pytest.raises(TracedStateError):
    _compiled(ROWS[name])()
  assert repr(env.rng) == before


def test_compiled_function_gives_nan_for_invalid_parameters():
  bad = torch.tensor([-1.0, 1.0]).to("jax")
  density = jax_jit(lambda scale: D.Normal(0.0, scale).log_prob(scale))(bad)
  assert density.isnan().tolist() == [True, False]


# Outside of the environment ---------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_the_numbers_are_the_same_outside_of_the_environment(name, env):
  row = ROWS[name]
  torch.manual_seed(0)
  with env.disabled():
    outside = _draw(_build(row))
  torch.manual_seed(0)
  assert torch.equal(outside, _draw(_build(row)))


# Distributions ----------------------------------------------------------------------


def _law_of_column(law, place: int):
  """Return the law of one column of a law with arrays of parameters."""
  pick = lambda value: np.broadcast_to(value, _width(law))[place]  # noqa: E731
  parameters = {name: pick(value) for name, value in law.kwds.items()}
  return law.dist(*map(pick, law.args), **parameters)


def _width(law) -> int:
  return np.broadcast_shapes(*map(np.shape, (*law.args, *law.kwds.values())))[0]


def _columns(drawn: np.ndarray, law):
  """Yield pairs of numbers of shape (N,) and their law."""
  if drawn.ndim == 1:
    return [(drawn, law)]
  return [(column, _law_of_column(law, i)) for i, column in enumerate(drawn.T)]


@pytest.mark.statistics
@each_row
def test_samples_have_their_distribution(name):
  row = ROWS[name]
  distribution = _build(row)
  p_values = []
  for seed in range(SEEDS):
    torch.manual_seed(seed)
    drawn = row.view(distribution.sample((N,)).numpy().astype(np.float64))
    p_values.append([p_value(*pair) for pair in _columns(drawn, row.law)])
  for column in np.transpose(p_values):
    require_good(column, rows=3 * len(ROWS))
