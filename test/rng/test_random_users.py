"""Random users in torch: initialisation, parametrizations, pruning, projections.

Each obeys the laws of the stream (one seed, one result; eager equals compiled) and
gives a correct result. Programs on the CPU's generators (`DataLoader`, `random_split`)
must be unaffected by torchax.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops.harness import floats
from rng.goodness import SEEDS, Cdf, N, p_value, require_good
from scipy import stats
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import data

from torchax.compat import versions
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

pytestmark = pytest.mark.distributions

INIT_ROWS = 9


def _seeded(draw, seed: int = 0):
  torch.manual_seed(seed)
  return draw()


def _same(left, right) -> bool:
  if isinstance(left, torch.Tensor):
    return torch.equal(left, right)
  return len(left) == len(right) and all(map(_same, left, right))


# Initialisation ---------------------------------------------------------------------

# A matrix of 100 outputs and 100 inputs, and the scale 1 / sqrt(100).
_FAN = 100
_STD = 0.1
_XAVIER_GAIN = 5 / 3
INITS = {
  "uniform_": ((-1.0, 2.0), {}, stats.uniform(-1, 3)),
  "normal_": ((1.0, 2.0), {}, stats.norm(1, 2)),
  "trunc_normal_": ((0.0, 1.0, -1.0, 2.0), {}, stats.truncnorm(-1, 2)),
  "xavier_uniform_": (
    (_XAVIER_GAIN,),
    {},
    stats.uniform(-_XAVIER_GAIN * _STD * 3**0.5, 2 * _XAVIER_GAIN * _STD * 3**0.5),
  ),
  "xavier_normal_": ((_XAVIER_GAIN,), {}, stats.norm(0, _XAVIER_GAIN * _STD)),
  "kaiming_uniform_": (
    (),
    {"a": 5**0.5, "mode": "fan_out"},
    stats.uniform(-_STD, 2 * _STD),
  ),
  "kaiming_normal_": (
    (),
    {"nonlinearity": "relu"},
    stats.norm(0, _STD * 2**0.5),
  ),
}


def _init(name: str, generator=None) -> torch.Tensor:
  args, kwargs, _ = INITS[name]
  weight = torch.empty(_FAN, _FAN, device="jax")
  return getattr(nn.init, name)(weight, *args, **kwargs, generator=generator)


@pytest.mark.statistics
@pytest.mark.parametrize("name", INITS)
def test_an_initialisation_with_a_generator_has_its_distribution(name):
  p_values = []
  for seed in range(SEEDS):
    drawn = _init(name, torch.Generator().manual_seed(seed)).numpy().ravel()
    assert drawn.size == N
    p_values.append(p_value(drawn.astype(np.float64), INITS[name][2]))
  require_good(p_values, rows=INIT_ROWS)


@pytest.mark.parametrize("name", INITS)
def test_an_initialisation_draws_from_its_generator_alone(name, env):
  before = repr(env.rng)
  generator = torch.Generator().manual_seed(1)
  first, second = _init(name, generator), _init(name, generator)
  assert not torch.equal(first, second)
  assert torch.equal(first, _init(name, generator.manual_seed(1)))
  assert repr(env.rng) == before
  assert not torch.equal(first, _init(name))
  assert repr(env.rng) != before


@pytest.mark.parametrize("name", sorted(INITS.keys() - {"trunc_normal_"}))
def test_a_compiled_initialisation_is_the_eager_one(name):
  eager = _seeded(lambda: _init(name))
  assert torch.equal(eager, _seeded(jax_jit(lambda: _init(name))))


@pytest.mark.skipif(
  versions.is_older(torch.__version__, "2.13"),
  reason="torch's `trunc_normal_` took quantiles of uniforms, which can be compiled",
)
def test_trunc_normal_raises_in_a_compiled_function(env):
  """torch's `trunc_normal_` draws again while any number is out of bounds."""
  before = repr(env.rng)
  with pytest.raises(TracedStateError):
    jax_jit(lambda: _init("trunc_normal_"))()
  assert repr(env.rng) == before


@pytest.mark.statistics
def test_orthogonal_matrices_follow_the_haar_measure():
  """Coordinate i of a Haar vector in d dimensions: its square is Beta(1/2, (d-1)/2)."""
  square = stats.beta(0.5, 1.5)
  signed_square = Cdf(lambda x: (1 + np.sign(x) * square.cdf(abs(x))) / 2)
  p_values = []
  for seed in range(SEEDS):
    torch.manual_seed(seed)
    matrices = [nn.init.orthogonal_(torch.empty(4, 4, device="jax")) for _ in range(50)]
    corners = np.array([matrix[0, 0].item() for matrix in matrices])
    p_values.append(p_value(np.sign(corners) * corners**2, signed_square))
  require_good(p_values, rows=INIT_ROWS)


def test_dirac_eye_and_constants_draw_nothing(env):
  before = repr(env.rng)
  kernel = nn.init.dirac_(torch.empty(3, 3, 3, device="jax"))
  assert torch.equal(kernel[:, :, 1].cpu(), torch.eye(3))
  assert nn.init.eye_(torch.empty(2, 2, device="jax")).trace().item() == 2
  assert nn.init.constant_(torch.empty(2, device="jax"), 3.0).sum().item() == 6
  assert repr(env.rng) == before


# Parametrizations and pruning -------------------------------------------------------

INPUT = floats(5, 6)


def _linear(seed: int = 0) -> nn.Linear:
  torch.manual_seed(seed)
  return nn.Linear(6, 4, device="jax")


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
def test_an_orthogonal_parametrization_is_orthogonal_and_trains(orthogonal_map):
  layer = parametrizations.orthogonal(_linear(), orthogonal_map=orthogonal_map)
  original = layer.parametrizations.weight.original
  optimizer = torch.optim.SGD([original], 0.1)
  before = layer.weight.detach().clone()
  layer(INPUT.to("jax")).square().sum().backward()
  optimizer.step()
  weight = layer.weight.detach()
  assert not torch.allclose(before, weight)
  np.testing.assert_allclose((weight @ weight.T).numpy(), np.eye(4), atol=1e-5)


def test_weight_norm_gradients_match_cpu_torch():
  layer = _linear()
  on_cpu = nn.Linear(6, 4)
  on_cpu.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})
  gradients = []
  for module, x in ((layer, INPUT.to("jax")), (on_cpu, INPUT)):
    parametrizations.weight_norm(module)
    module(x).square().sum().backward()
    gradients.append([p.grad.cpu().numpy() for p in module.parameters()])
  for actual, expected in zip(*gradients):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def _spectral(seed: int = 0) -> nn.Module:
  layer = _linear()
  torch.manual_seed(seed)
  return parametrizations.spectral_norm(layer)


def test_spectral_norm_converges_from_a_random_start():
  vector = lambda layer: layer.parametrizations.weight[0]._u  # noqa: E731
  assert torch.equal(vector(_spectral(1)), vector(_spectral(1)))
  # After fifteen steps, power iteration still depends on its start.
  assert not torch.equal(vector(_spectral(1)), vector(_spectral(2)))
  layer = _spectral()
  for _ in range(100):
    layer(INPUT.to("jax"))
  largest = np.linalg.svd(layer.weight.detach().numpy(), compute_uv=False)[0]
  assert largest == pytest.approx(1, abs=1e-5)


PRUNINGS = {
  "random_unstructured": (prune.random_unstructured, {"amount": 10}, 10),
  "random_structured": (prune.random_structured, {"amount": 2, "dim": 0}, 12),
}


@pytest.mark.parametrize("name", PRUNINGS)
def test_pruning_follows_the_seed(name):
  prune_module, options, removed = PRUNINGS[name]

  def mask(seed: int):
    layer = _linear()
    torch.manual_seed(seed)
    prune_module(layer, "weight", **options)
    assert (layer.weight == 0).sum().item() == removed
    return layer.weight_mask

  assert torch.equal(mask(1), mask(1))
  assert len({tuple(mask(seed).ravel().tolist()) for seed in range(6)}) > 3


@pytest.mark.statistics
def test_pruning_treats_all_weights_alike():
  draws = 50 * SEEDS
  torch.manual_seed(0)
  weight = torch.ones(20, device="jax")
  method = prune.RandomUnstructured(5)
  kept = sum(method.compute_mask(weight, torch.ones_like(weight)) for _ in range(draws))
  # 5 of 20 without replacement: the variance of counts is 15/19 of the independent
  # case.
  deviations = (kept.numpy() - 0.75 * draws) ** 2 / (draws * 0.25 * 0.75)
  chi_square = deviations.sum() * 19 / 20
  assert 1e-3 < stats.chi2(19).sf(chi_square) < 1 - 1e-3


# Factorisations by random projection ------------------------------------------------


def _low_rank() -> torch.Tensor:
  return (floats(20, 3, seed=1) @ floats(3, 15, seed=2)).to("jax")


FACTORISATIONS = {
  "svd_lowrank": (lambda a: torch.svd_lowrank(a, q=4), lambda a: a),
  "pca_lowrank": (lambda a: torch.pca_lowrank(a, q=4), lambda a: a - a.mean(0)),
}
each_factorisation = pytest.mark.parametrize("name", FACTORISATIONS)


@each_factorisation
def test_a_random_factorisation_gives_the_matrix_back(name):
  factorise, target = FACTORISATIONS[name]
  matrix = _low_rank()
  u, s, v = factorise(matrix)
  expected = target(matrix).numpy()
  np.testing.assert_allclose(((u * s) @ v.T).numpy(), expected, rtol=0, atol=1e-5)
  values = np.linalg.svd(expected, compute_uv=False)[:4]
  np.testing.assert_allclose(s.numpy(), values, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose((u.T @ u).numpy(), np.eye(4), rtol=0, atol=1e-5)


@each_factorisation
def test_random_factorisation_depends_on_the_seed_only(name, env):
  factorise, _ = FACTORISATIONS[name]
  # Full rank, so that four factors depend on the projection.
  matrix = floats(20, 15, seed=3).to("jax")
  eager = _seeded(lambda: factorise(matrix))
  assert _same(eager, _seeded(lambda: factorise(matrix)))
  assert not _same(eager, factorise(matrix))
  compiled = _seeded(lambda: jax_jit(lambda a: factorise(a)[1])(matrix))
  np.testing.assert_allclose(compiled.numpy(), eager[1].numpy(), rtol=1e-5)
  after = repr(env.rng)
  torch.manual_seed(0)
  factorise(matrix)
  assert repr(env.rng) == after


# Gumbel softmax ---------------------------------------------------------------------

LOGITS = torch.tensor([0.5, -1.0, 1.5])
_CATEGORIES = np.exp(LOGITS.double().numpy()) / np.exp(LOGITS.double().numpy()).sum()


@pytest.mark.statistics
@pytest.mark.parametrize("hard", [False, True])
def test_the_largest_of_gumbel_softmax_is_categorical(hard):
  logits = LOGITS.to("jax").expand(N, 3)
  p_values = []
  for seed in range(SEEDS):
    torch.manual_seed(seed)
    drawn = F.gumbel_softmax(logits, tau=0.5, hard=hard).numpy()
    np.testing.assert_allclose(drawn.sum(-1), 1, atol=1e-5)
    assert hard == (np.sort(drawn, -1) == [0, 0, 1]).all()
    p_values.append(p_value(drawn.argmax(-1), _CATEGORIES))
  require_good(p_values, rows=INIT_ROWS)


def test_hard_gumbel_softmax_has_the_gradient_of_the_soft_one():
  weights = torch.arange(3.0).to("jax")

  def gradient(hard: bool):
    logits = LOGITS.to("jax").requires_grad_()
    torch.manual_seed(0)
    (F.gumbel_softmax(logits, hard=hard) * weights).sum().backward()
    return logits.grad

  assert gradient(True).abs().sum() > 0
  torch.testing.assert_close(gradient(True), gradient(False))


def test_compiled_gumbel_softmax_draws_the_eager_numbers():
  logits = LOGITS.to("jax").expand(5, 3)
  eager = _seeded(lambda: F.gumbel_softmax(logits, hard=True))
  compiled = jax_jit(lambda x: F.gumbel_softmax(x, hard=True))
  assert torch.equal(eager, _seeded(lambda: compiled(logits)))


# Draws on the CPU -------------------------------------------------------------------

NUMBERS = data.TensorDataset(torch.arange(40))


def _batches(generator=None, **options) -> list:
  loader = data.DataLoader(
    NUMBERS, batch_size=8, shuffle=True, generator=generator, **options
  )
  return [batch.tolist() for (batch,) in loader]


def _worker_numbers(generator=None) -> list:
  """Return random numbers that the workers draw; workers do not use JAX."""
  loader = data.DataLoader(
    _Drawing(), batch_size=4, num_workers=2, generator=generator, timeout=60
  )
  return [batch.tolist() for batch in loader]


class _Drawing(data.Dataset):
  def __len__(self):
    return 8

  def __getitem__(self, index):
    return torch.randint(1 << 30, ())


CPU_USERS = {
  "DataLoader": _batches,
  "numbers of workers": _worker_numbers,
  "random_split": lambda generator=None: [
    list(part.indices) for part in data.random_split(NUMBERS, [30, 10], generator)
  ],
  "RandomSampler": lambda generator=None: list(
    data.RandomSampler(NUMBERS, generator=generator)
  ),
  "RandomSampler with replacement": lambda generator=None: list(
    data.RandomSampler(NUMBERS, True, 100, generator=generator)
  ),
  "SubsetRandomSampler": lambda generator=None: list(
    data.SubsetRandomSampler(range(20), generator=generator)
  ),
  "WeightedRandomSampler": lambda generator=None: list(
    data.WeightedRandomSampler([1.0, 2.0, 3.0], 50, generator=generator)
  ),
  "rand": lambda generator=None: torch.rand(8, generator=generator).tolist(),
  "init of a CPU tensor": lambda generator=None: nn.init.normal_(
    torch.empty(3), generator=generator
  ).tolist(),
}
each_cpu_user = pytest.mark.parametrize("name", CPU_USERS)


def _with_seed(draw):
  torch.manual_seed(3)
  return draw()


def _with_generator(draw):
  return draw(torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@each_cpu_user
@pytest.mark.parametrize("seeded", [_with_seed, _with_generator])
def test_draws_on_the_cpu_are_unchanged_by_torchax(name, seeded, env):
  draw = CPU_USERS[name]
  before = repr(env.rng)
  with env.disabled():
    expected = seeded(draw)
  with env:
    # Draws on jax in between change no generator of the CPU.
    torch.manual_seed(3)
    torch.rand(3, device="jax")
    assert seeded(draw) == expected
  assert seeded is _with_generator or repr(env.rng) != before
  assert len(expected) > 1


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@each_cpu_user
def test_draws_on_the_cpu_leave_the_streams_of_jax_alone(name, env):
  with env:
    torch.manual_seed(3)
    before = repr(env.rng)
    CPU_USERS[name]()
    assert repr(env.rng) == before


def test_a_generator_serves_a_loader_and_jax_in_turn(env):
  def run():
    generator = torch.Generator().manual_seed(0)
    order = []
    for _ in range(2):
      order += [_batches(generator)]
      order += [torch.rand(3, generator=generator, device="jax").tolist()]
    return order

  with env:
    first = run()
    assert first == run()
  assert first[0] != first[2] and first[1] != first[3]
