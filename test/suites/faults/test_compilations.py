"""Compiled programs: their bound and memory, and numbers that need no new program."""

import gc

import jax
import pytest
import torch
import torch.nn.functional as F
from faults.programs import run

import torchax
from torchax.core import numpy_fallback, program_limit
from torchax.interop import jax_jit
from torchax.ops.jaten._numbers import range_operands
from torchax.rng import samplers, uniform


@pytest.fixture
def bounded():
  """Bound the programs of the default environment to 10."""
  config = torchax.default_env().config
  before = config.compilation_cache_size
  torchax.clear_caches()
  config.compilation_cache_size = 10
  yield 10
  config.compilation_cache_size = before


GROWING = {
  "an operation, by shape": lambda n: torch.ones(n, device="jax").cos(),
  "an operation, by a static number": lambda n: torch.ones(9, 9, device="jax").diag(n),
  "a torch function, by shape": lambda n: torch.nn.functional.layer_norm(
    torch.ones(2, n + 1, device="jax"), (n + 1,)
  ),
}


@pytest.mark.parametrize("called", GROWING.values(), ids=GROWING)
def test_programs_are_bounded(bounded, called):
  with torchax.default_env():
    for n in range(24):
      called(n)
      assert program_limit.count() <= bounded


@pytest.mark.parametrize("called", GROWING.values(), ids=GROWING)
def test_nothing_within_the_bound_is_compiled_twice(bounded, called):
  with torchax.default_env():
    for n in range(4):
      called(n)
    known = program_limit.count()
    for n in range(4):
      called(n)
    assert program_limit.count() == known


def test_recently_used_program_is_not_evicted(bounded):
  """A function used among many others is not compiled again."""
  traces = []

  @jax_jit
  def kept(x):
    traces.append(x.shape)
    return x + 1

  with torchax.default_env():
    x = torch.ones(3, device="jax")
    for n in range(24):
      kept(x)
      torch.ones(n, device="jax").cos()
  assert len(traces) == 1


def test_compiled_functions_are_bounded(bounded):
  double = jax_jit(lambda x: 2 * x)
  with torchax.default_env():
    for n in range(24):
      assert double(torch.ones(n, device="jax")).sum() == 2 * n
      assert program_limit.count() <= bounded


def test_programs_go_with_their_function():
  before = program_limit.count()
  triple = jax_jit(lambda x: 3 * x)
  triple(torch.ones(3, device="jax"))
  assert program_limit.count() > before
  del triple
  torchax.clear_caches()
  assert program_limit.count() == 0


def test_a_backward_pass_survives_a_cleared_cache():
  with torchax.default_env():
    x = torch.arange(4.0, device="jax", requires_grad=True)
    eager = torch.nn.functional.layer_norm(x, (4,)).cos().sum()
    jitted = jax_jit(lambda x: (x * x).sum())(x)
    torchax.clear_caches()
    (eager + jitted).backward()
    reference = torch.arange(4.0, requires_grad=True)
    loss = torch.nn.functional.layer_norm(reference, (4,)).cos().sum()
    (loss + (reference * reference).sum()).backward()
  torch.testing.assert_close(x.grad.cpu(), reference.grad)


def test_random_streams_do_not_notice():
  torch.manual_seed(0)
  expected = [torch.randn(3, device="jax").tolist() for _ in range(2)]
  torch.manual_seed(0)
  found = [torch.randn(3, device="jax").tolist()]
  torchax.clear_caches()
  found.append(torch.randn(3, device="jax").tolist())
  assert found == expected


MEMORY = """
import gc, os, torch, torchax

def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

with torchax.default_env():
  torch.ones(1000, device="jax").softmax(0)
  start = resident()
  for n in range(80):
    torch.ones(n + 2, device="jax").softmax(0)
  full = resident()
  torchax.clear_caches()
  print(start, full, resident())
"""


@pytest.mark.programs
def test_memory_comes_back():
  start, full, cleared = map(float, run(MEMORY).split())
  assert full - start > 40, "80 programs take memory"
  assert cleared - start < (full - start) / 2


@pytest.mark.parametrize("size", [0, -1, 2.5, None, True])
def test_a_size_that_is_none_is_refused(size):
  config = torchax.default_env().config
  before = config.compilation_cache_size
  with pytest.raises(ValueError, match="1 or more"):
    config.compilation_cache_size = size
  assert config.compilation_cache_size == before


def test_a_new_length_of_a_layer():
  """Forward and backward pass; attention needs few programs."""
  layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to("jax")

  def step(length):
    gc.collect()  # programs of other tests do not interfere
    before = program_limit.count()
    layer(torch.ones(1, length, 8, device="jax")).sum().backward()
    return program_limit.count() - before

  with torchax.default_env():
    for _ in range(5):  # counts and gradients that are summed
      step(3)
    assert step(3) == 0
    assert step(5) <= 20


# Numbers are operands -----------------------------------------------------------------

FRACTIONS = (0.11, 0.23, 0.37)
ORDERS = (1.5, 2.5, 3.5)
WHOLE_ORDERS = (3, 4, 5)
PLACES = (0, 1, 3)
SCALES = (1.26, 1.3, 1.32)
INTEGERS = (5, 9, 13)


def _empty(*size):
  return torch.empty(*size, device="jax")


def _gradient(function):
  def run(x, n):
    leaf = x.clone().requires_grad_()
    function(leaf, n).sum().backward()
    return leaf.grad

  return run


def _attention(x, **numbers):
  return F.scaled_dot_product_attention(x[None], x[None], x[None], **numbers)


def _labels():
  return torch.arange(4, device="jax")


def _image(mode, **options):
  return lambda x, n: F.interpolate(x[None, None], scale_factor=n, mode=mode, **options)


def _ctc_loss(x, n):
  steps, label = x.log_softmax(1)[:, None], torch.ones(1, 1, device="jax").int()
  return F.ctc_loss(steps, label, torch.tensor([4]), torch.tensor([1]), blank=n)


# Functions of a matrix (4, 6) and a number.
NUMBERS = {
  "randint, high": (lambda x, n: torch.randint(n, (4,), device="jax"), INTEGERS),
  "randint": (lambda x, n: torch.randint(-n, 2 * n, (4,), device="jax"), INTEGERS),
  "randint_like": (lambda x, n: torch.randint_like(x, n), INTEGERS),
  "randint_like, low": (lambda x, n: torch.randint_like(x, n, 3 * n), INTEGERS),
  "random_": (lambda x, n: _empty(4).random_(n), INTEGERS),
  "random_, from": (lambda x, n: _empty(4).random_(n, 4 * n + 2), INTEGERS),
  "uniform_": (lambda x, n: _empty(4).uniform_(n, n + 1), FRACTIONS),
  "normal_": (lambda x, n: _empty(4).normal_(n, n + 1), FRACTIONS),
  "exponential_": (lambda x, n: _empty(4).exponential_(n), FRACTIONS),
  "geometric_": (lambda x, n: _empty(4).geometric_(n), FRACTIONS),
  "cauchy_": (lambda x, n: _empty(4).cauchy_(n, n), FRACTIONS),
  "bernoulli_": (lambda x, n: _empty(4).bernoulli_(n), FRACTIONS),
  "bernoulli": (lambda x, n: torch.bernoulli(x, n), FRACTIONS),
  "dropout": (lambda x, n: F.dropout(x, n), FRACTIONS),
  "dropout, gradient": (_gradient(F.dropout), FRACTIONS),
  "native_dropout": (lambda x, n: torch.native_dropout(x, n, True)[0], FRACTIONS),
  "dropout2d": (lambda x, n: F.dropout2d(x[None, None], n), FRACTIONS),
  "alpha_dropout": (lambda x, n: F.alpha_dropout(x, n, True), FRACTIONS),
  "pow": (lambda x, n: x**n, (1.3, 2.7, 5.0)),
  "pow of integers": (lambda x, n: x.int() ** n, (4, 5, 6)),
  "pow, gradient": (_gradient(lambda x, n: x**n), (1.3, 2.7, 5.1)),
  "arange": (lambda x, n: torch.arange(n, n + 4, device="jax"), INTEGERS),
  "arange, step": (lambda x, n: torch.arange(0, 4 * n, n, device="jax"), INTEGERS),
  "arange of floats": (
    lambda x, n: torch.arange(n, n + 4, device="jax"),
    (1.5, 2.5, 3.5),
  ),
  "full": (lambda x, n: torch.full((4,), n, device="jax"), FRACTIONS),
  "linspace": (lambda x, n: torch.linspace(n, 2, 5, device="jax"), FRACTIONS),
  "roll": (lambda x, n: x.roll(n, 1), (1, 2, 30)),
  "roll of all": (lambda x, n: x.roll(n), (1, 2, 30)),
  "tril": (lambda x, n: x.tril(n), (-1, 1, 2)),
  "triu": (lambda x, n: x.triu(n), (-1, 1, 2)),
  "kthvalue": (lambda x, n: x.kthvalue(n)[0], (1, 2, 3)),
  "norm": (lambda x, n: x.norm(n), ORDERS),
  "dist": (lambda x, n: torch.dist(x, x + 1, n), ORDERS),
  "cdist": (lambda x, n: torch.cdist(x, x + 1, n), ORDERS),
  "cdist, gradient": (_gradient(lambda x, n: torch.cdist(x, 1 - x, n)), ORDERS),
  "pdist": (lambda x, n: F.pdist(x, n), ORDERS),
  "normalize": (lambda x, n: F.normalize(x, n), ORDERS),
  "norm, whole": (lambda x, n: x.norm(n), WHOLE_ORDERS),
  "cdist, whole": (lambda x, n: torch.cdist(x, x + 1, n), WHOLE_ORDERS),
  "_foreach_norm": (lambda x, n: torch._foreach_norm([x], n)[0], WHOLE_ORDERS),
  "renorm": (lambda x, n: torch.renorm(x, n, 0, n / 4), ORDERS),
  "renorm, whole": (lambda x, n: torch.renorm(x, n, 1, n / 9), WHOLE_ORDERS),
  "ignore_index": (lambda x, n: F.nll_loss(x, _labels(), ignore_index=n), PLACES),
  "ignore_index, gradient": (
    _gradient(lambda x, n: F.cross_entropy(x, _labels(), ignore_index=n)),
    PLACES,
  ),
  "padding_idx": (_gradient(lambda x, n: F.embedding(_labels(), x, n)), PLACES),
  "padding_idx of bags": (
    _gradient(lambda x, n: F.embedding_bag(_labels()[None], x, padding_idx=n)),
    PLACES,
  ),
  "ctc_loss, blank": (_ctc_loss, (2, 3, 5)),
  "ctc_loss, gradient": (_gradient(_ctc_loss), (2, 3, 5)),
  "select_scatter": (lambda x, n: x.select_scatter(x[0], 0, n), (0, -1, 2)),
  "slice_scatter": (lambda x, n: x.slice_scatter(-x[:, :2], 1, n, n + 2), (0, 1, 4)),
  "slice_scatter, from the end": (
    lambda x, n: x.slice_scatter(-x[:, :2], 1, n, n + 3, 2),
    (-6, -5, -4),
  ),
  "diagonal_scatter": (
    lambda x, n: x.repeat(1, 2).diagonal_scatter(x.sum(1), n),
    (1, 2, 5),
  ),
  "diagonal_backward": (
    lambda x, n: torch.ops.aten.diagonal_backward(x.sum(1), (4, 6), n, 0, 1),
    (0, 1, 2),
  ),
  "narrow_copy": (lambda x, n: x.narrow_copy(1, n, 3), (0, 1, -3)),
  "select_copy": (lambda x, n: torch.select_copy(x, 1, n), (0, 1, -3)),
  "polygamma": (lambda x, n: torch.polygamma(n, x), (2, 3, 5)),
  "polygamma, gradient": (_gradient(lambda x, n: torch.polygamma(n, x)), (3, 4, 6)),
  "nearest": (_image("nearest"), SCALES),
  "nearest-exact": (_image("nearest-exact"), SCALES),
  "bilinear": (_image("bilinear"), SCALES),
  "bilinear, gradient": (_gradient(_image("bilinear")), SCALES),
  "bicubic": (_image("bicubic"), SCALES),
  "antialias": (_image("bilinear", antialias=True), SCALES),
  "divisor_override": (
    lambda x, n: F.avg_pool2d(x[None], 2, divisor_override=n),
    INTEGERS,
  ),
  "round": (lambda x, n: x.round(decimals=n), (1, 2, 3)),
  "rrelu, gradient": (
    _gradient(lambda x, n: F.rrelu(x - 0.5, n, n + 0.5, training=True)),
    FRACTIONS,
  ),
  "logit, gradient": (_gradient(lambda x, n: (x / 2).logit(n)), FRACTIONS),
  "smooth_l1": (lambda x, n: F.smooth_l1_loss(x, 1 - x, beta=n), FRACTIONS),
  "smooth_l1, gradient": (
    _gradient(lambda x, n: F.smooth_l1_loss(x, 1 - x, beta=n)),
    FRACTIONS,
  ),
  "huber": (lambda x, n: F.huber_loss(x, 1 - x, delta=n), FRACTIONS),
  "celu": (lambda x, n: F.celu(x, n), FRACTIONS),
  "elu, gradient": (_gradient(F.elu), FRACTIONS),
  "leaky_relu, gradient": (_gradient(F.leaky_relu), FRACTIONS),
  "softshrink": (lambda x, n: F.softshrink(x, n), FRACTIONS),
  "histc": (lambda x, n: torch.histc(x, 5, 0, n), FRACTIONS),
  "label_smoothing": (
    lambda x, n: F.cross_entropy(x, torch.arange(4, device="jax"), label_smoothing=n),
    FRACTIONS,
  ),
}
FUNCTIONS = {
  "layer_norm": (lambda x, n: F.layer_norm(x, (6,), eps=n), FRACTIONS),
  "layer_norm, gradient": (
    _gradient(lambda x, n: F.layer_norm(x, (6,), eps=n)),
    FRACTIONS,
  ),
  "rms_norm": (lambda x, n: F.rms_norm(x, (6,), eps=n), FRACTIONS),
  "attention, scale": (lambda x, n: _attention(x, scale=n), FRACTIONS),
  "attention, dropout": (lambda x, n: _attention(x, dropout_p=n), FRACTIONS),
  "attention, gradient": (_gradient(lambda x, n: _attention(x, scale=n)), FRACTIONS),
}
ROWS = {**NUMBERS, **FUNCTIONS}


@pytest.mark.parametrize(("function", "numbers"), ROWS.values(), ids=ROWS)
def test_numbers_share_a_program(function, numbers, monkeypatch):
  """The first number may have a program; results equal those of the compiled function.

  In the compiled function, each number is a constant.
  """
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 0)  # compile on the first call
  gc.collect()  # programs of other tests do not interfere
  with torchax.default_env():
    torch.manual_seed(0)
    x = torch.rand(4, 6, device="jax") + 0.1
    results, counts = [], []
    for number in numbers:
      torch.manual_seed(1)
      results.append(function(x, number))
      counts.append(program_limit.count())
    assert len(set(counts[1:])) == 1
    torch.manual_seed(1)
    expected = jax_jit(lambda x: function(x, numbers[-1]))(x)
    torch.testing.assert_close(results[-1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1e-12, 1 - 1e-12, 0.3])
def test_a_prepared_probability_draws_the_same(p):
  """Steps of 2**-62 as operands, against the number itself as a constant."""
  key = jax.random.key(3)
  steps = tuple([jax.numpy.int32(word) for word in uniform.steps_below(p)])
  found = samplers.bernoulli(key, (999,), steps)
  assert (found == samplers.bernoulli(key, (999,), p)).all()


SPANS = (1, 2, 3, 7, 2**10, 2**16 + 1, 2**31 - 1, 2**31, 2**31 + 7, 2**32 - 1, 2**32)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("low", [-7, 5, -(2**31)])
def test_a_prepared_range_draws_the_same(low, span):
  key = jax.random.key(3)
  first, operand = range_operands(low, low + span)
  operand = jax.numpy.int32(operand) if type(operand) is int else operand.value
  found = samplers.integers_from(key, (99,), jax.numpy.int32, first, operand)
  expected = samplers.integers(key, (99,), jax.numpy.int32, low, low + span)
  assert (found == expected).all()


# Calls with three numbers that are valid for (6, 6), and one invalid for less.
UNFIT = {
  "select_scatter": (lambda x, n: x.select_scatter(x[0], 0, n), IndexError),
  "slice_scatter": (lambda x, n: x.slice_scatter(x[:1], 0, n, n + 1), RuntimeError),
  "narrow_copy": (lambda x, n: x.narrow_copy(0, n, 1), RuntimeError),
  "select_copy": (lambda x, n: torch.select_copy(x, 0, n), IndexError),
  "diagonal_scatter": (
    lambda x, n: x.diagonal_scatter(x[0, : 6 - n], -n),
    RuntimeError,
  ),
}


@pytest.mark.parametrize(("function", "error"), UNFIT.values(), ids=UNFIT)
def test_numbers_that_are_operands_fit_each_shape(function, error):
  """A number that was valid for another shape is checked again."""
  with torchax.default_env():
    x = torch.rand(6, 6, device="jax")
    for n in (1, 2, 3, 4):
      torch.testing.assert_close(function(x, n).cpu(), function(x.cpu(), n))
    with pytest.raises(error):
      function(x.cpu()[:4], 4)
    with pytest.raises(error):
      function(x[:4], 4)


# Values from Dynamo: the first is a constant, the next ones may be operands.
COMPILED = {
  "a factor": (lambda x, n: x * (2 * n + 1), FRACTIONS),
  "a sum with an integer": (lambda x, n: x + n, (2, 3, 4, 5)),
  "sums of an integer": (lambda x, n: x * (n + 1) - n // 2, (2, 3, 4, 5)),
  "a sum of integers": (lambda x, n: x.int() + n, (2, 3, 4, 5)),
  "a power": (lambda x, n: x**n, (0.3, 0.7, 1.3)),
  "a power with an integer": (lambda x, n: x**n, (4, 5, 6, 2, 7)),
  "a bound": (lambda x, n: x.clamp(n, max=10 * n), (*FRACTIONS, 1.5)),
  "a bound that is an integer": (lambda x, n: x.clamp(n), (2, 3, 4, 5)),
  "a limit": (lambda x, n: torch.where(x > n, x, n), (1.5, 2.5, 3.5, 4.5)),
  "a slope": (lambda x, n: F.leaky_relu(x - 9, n), (*FRACTIONS, 1.5)),
  "a named factor": (lambda x, n: torch.add(x, x, alpha=n), (*FRACTIONS, 1.5)),
  "what fills": (lambda x, n: x.masked_fill(x > 9, n), (*FRACTIONS, 1.5)),
  "a position": (lambda x, n: x[n] * 2, (0, 2, 3, 1)),
  "a position from the end": (lambda x, n: x[n] * 2, (-1, -2, -3, -4)),
  "a column": (lambda x, n: x[:, n] * 2, (0, 2, 3, 1)),
  "a column from the end": (lambda x, n: x[..., n] * 2, (-1, -2, -3, -4)),
  "two positions": (lambda x, n: x[n, n + 1] * 2, (0, 2, 3, 1)),
  "a part": (lambda x, n: x.narrow(1, n, 3) * 2, (0, 2, 3, 1)),
  "a slice": (lambda x, n: x[0, n : n + 3] * 2, (0, 2, 3, 1)),
  "an assigned row": (lambda x, n: _assigned(x, n), (0, 2, 3, 1)),
  "an assigned column": (lambda x, n: _assigned(x, (..., n)), (0, 2, 3, 1)),
}
# Functions of few, special numbers.
SPECIAL = {"a power with an integer": 1}


def _assigned(x, index):
  y = x.clone()
  y[index] = x.sum(1)[0]
  return y


@pytest.mark.parametrize("row", COMPILED)
def test_numbers_are_operands_of_graphs(row):
  function, numbers = COMPILED[row]
  with torchax.default_env():
    x = torch.arange(1.0, 25.0, device="jax").reshape(4, 6)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="jax")
    counts = []
    for number in numbers:
      before = program_limit.count()
      found = compiled(x, number)
      counts.append(program_limit.count() - before)
      torch.testing.assert_close(found, function(x, number))
  assert sum(counts[2:]) == SPECIAL.get(row, 0)


DIFFERENTIATED = {
  "a bound": (lambda x, n: (x * x).clamp(n, 3 * n) * x, (0.5, 0.7, 0.9, 1.1)),
  "a slope": (lambda x, n: F.elu(x - 0.6, n) * x, (0.5, 0.7, 0.9, 1.1)),
  "a column": (lambda x, n: (x * x)[:, n] * x[:, 0], (0, 2, 3, 1)),
  "a part": (lambda x, n: (x * x).narrow(1, n, 2) * x[:, :2], (0, 2, 3, 1)),
  "a slice from the end": (lambda x, n: (x**3)[:, n : n + 2], (-5, -4, -3, -6)),
  "what is taken and changed": (lambda x, n: (x * x)[:, n].mul_(x[:, 0]), (0, 2, 3, 1)),
}


@pytest.mark.parametrize("row", DIFFERENTIATED)
def test_gradients_use_the_numbers_of_their_call(row):
  """Calls with other numbers before a first or second backward pass change nothing."""
  function, numbers = DIFFERENTIATED[row]

  def slopes(function):
    x = torch.linspace(0.3, 1.4, 24, device="jax").reshape(4, 6).requires_grad_()
    results = [function(x, number).sum() for number in numbers]
    first = [torch.autograd.grad(y, x, create_graph=True)[0] for y in results]
    return first, [torch.autograd.grad(slope.sum(), x)[0] for slope in first]

  with torchax.default_env():
    torch.compiler.reset()
    found = slopes(torch.compile(function, backend="jax"))
    torch.testing.assert_close(found, slopes(function))


def test_numbers_of_graphs_inside_of_a_compiled_function():
  """There they are constants, before and after they were operands."""
  with torchax.default_env():
    x = torch.linspace(-1, 1, 5, device="jax")
    torch.compiler.reset()
    compiled = torch.compile(lambda x, n: x.clamp(n), backend="jax")

    def inside(n):
      return jax_jit(lambda x: 2 * compiled(x, n))(x)

    for n in (0.1, 0.2, 0.3, 0.4):
      torch.testing.assert_close(compiled(x, n), x.clamp(n))
      torch.testing.assert_close(inside(n / 2), 2 * x.clamp(n / 2))


def test_graph_numbers_stay_inputs_in_functions_above_aten():
  with torchax.default_env():
    x = torch.linspace(-1, 1, 12, device="jax").reshape(2, 6)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, n: F.layer_norm(x, (6,), eps=n), backend="jax")
    for n in (0.41, 0.42, 0.43):
      torch.testing.assert_close(compiled(x, n), F.layer_norm(x, (6,), eps=n))


def test_graph_assigns_at_a_changing_index():
  def assigned(x, n):
    y = x.clone()
    y[n] = 1.0
    return y

  with torchax.default_env():
    x = torch.arange(12.0, device="jax").reshape(4, 3)
    torch.compiler.reset()
    compiled = torch.compile(assigned, backend="jax")
    for n in (0, 2, 3, -1):
      torch.testing.assert_close(compiled(x, n), assigned(x, n))
