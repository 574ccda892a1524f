"""Laws of every random ATen operation of torch, overload by overload.

torch's own tag finds the overloads. A row has the arguments of a functional overload;
in-place and `out=` variants are called as torch's schemas require. An overload without
a row, and without a functional variant that has one, needs a reason.
"""

import functools
import warnings

import jax
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import torchax
from torchax.interop import jax_jit, jax_view
from torchax.registry.schema import functional_form, is_in_place, schema_of

pytestmark = pytest.mark.distributions

aten = torch.ops.aten
N = 24


def _x(value=0.5, dtype=torch.float32) -> torch.Tensor:
  return torch.full((N,), value, dtype=dtype, device="jax")


def _spread(low=0.1, high=2.0) -> torch.Tensor:
  return torch.linspace(low, high, N).to("jax")


def _recurrent(gates: int, states: int):
  """Return arguments of a recurrent network of two layers with dropout between them."""

  def arguments():
    sizes = [(gates * 4, 3), (gates * 4, 4), (gates * 4, 4), (gates * 4, 4)]
    weights = [torch.linspace(-1, 1, a * b).reshape(a, b).to("jax") for a, b in sizes]
    hidden = [torch.zeros(2, 5, 4, device="jax") for _ in range(states)]
    data = torch.linspace(-1, 1, 6 * 5 * 3).reshape(6, 5, 3).to("jax")
    hidden = hidden if states > 1 else hidden[0]
    return data, hidden, weights, False, 2, 0.5, True, False, False

  return arguments


def _attention():
  query = torch.linspace(-1, 1, 2 * 8 * 4).reshape(1, 2, 8, 4).to("jax")
  return query, query, query, None, 0.5


def _features():
  return torch.ones(6, 9, 2, device="jax"), 0.5, True


_SIZE = {"device": "jax"}
_OUT_OF = {"out": lambda: _x(0.0)}

# Functional overload -> (arguments, keyword arguments); composite operations as well.
ROWS = {
  aten._fused_dropout.default: (lambda: (_x(), 0.5), {}),
  aten._sample_dirichlet.default: (lambda: (_spread(),), {}),
  aten._standard_gamma.default: (lambda: (_spread(),), {}),
  aten._scaled_dot_product_attention_math.default: (_attention, {}),
  aten.scaled_dot_product_attention.default: (_attention, {}),
  aten.alpha_dropout.default: (lambda: (_spread(), 0.5, True), {}),
  aten.alpha_dropout_.default: (lambda: (_spread(), 0.5, True), {}),
  aten.bernoulli.Tensor: (lambda: (_x(), _spread(0.2, 0.8)), {}),
  aten.bernoulli.default: (lambda: (_spread(0.2, 0.8),), {}),
  aten.bernoulli.p: (lambda: (_x(), 0.4), {}),
  aten.binomial.default: (lambda: (_x(60.0), _spread(0.05, 0.95)), {}),
  aten.cauchy.default: (lambda: (_x(), 1.0, 2.0), {}),
  aten.dropout.default: (lambda: (_x(), 0.5, True), {}),
  aten.dropout_.default: (lambda: (_x(), 0.5, True), {}),
  aten.exponential.default: (lambda: (_x(), 2.0), {}),
  aten.feature_alpha_dropout.default: (_features, {}),
  aten.feature_alpha_dropout_.default: (_features, {}),
  aten.feature_dropout.default: (_features, {}),
  aten.feature_dropout_.default: (_features, {}),
  aten.geometric.default: (lambda: (_x(), 0.1), {}),
  aten.gru.input: (_recurrent(3, 1), {}),
  aten.log_normal.default: (lambda: (_x(), 0.5, 0.25), {}),
  aten.lstm.input: (_recurrent(4, 2), {}),
  aten.multinomial.default: (lambda: (_spread(), 9), {}),
  aten.native_dropout.default: (lambda: (_x(), 0.5, True), {}),
  aten.normal.Tensor_Tensor: (lambda: (_spread(), _spread()), {}),
  aten.normal.Tensor_float: (lambda: (_spread(), 2.0), {}),
  aten.normal.float_Tensor: (lambda: (1.0, _spread()), {}),
  aten.normal.float_float: (lambda: (1.0, 2.0, [N]), _SIZE),
  aten.normal_functional.default: (lambda: (_x(), 1.0, 2.0), {}),
  aten.poisson.default: (lambda: (_spread(0.5, 40.0),), {}),
  aten.rand.default: (lambda: ([N],), _SIZE),
  aten.rand.generator: (lambda: ([N],), _SIZE),
  aten.rand_like.default: (lambda: (_x(),), {}),
  aten.rand_like.generator: (lambda: (_x(),), {}),
  aten.randint.default: (lambda: (1000, [N]), _SIZE),
  aten.randint.generator: (lambda: (1000, [N]), _SIZE),
  aten.randint.low: (lambda: (-9, 1000, [N]), _SIZE),
  aten.randint.low_generator: (lambda: (-9, 1000, [N]), _SIZE),
  aten.randint_like.Tensor: (lambda: (_x(), torch.tensor(1000)), {}),
  aten.randint_like.Tensor_generator: (lambda: (_x(), torch.tensor(1000)), {}),
  aten.randint_like.default: (lambda: (_x(), 1000), {}),
  aten.randint_like.generator: (lambda: (_x(), 1000), {}),
  aten.randint_like.low_dtype: (lambda: (_x(), -9, 1000), {}),
  aten.randint_like.low_generator_dtype: (lambda: (_x(), -9, 1000), {}),
  aten.randn.default: (lambda: ([N],), _SIZE),
  aten.randn.generator: (lambda: ([N],), _SIZE),
  aten.randn_like.default: (lambda: (_x(),), {}),
  aten.randn_like.generator: (lambda: (_x(),), {}),
  aten.random.default: (lambda: (_x(),), {}),
  getattr(aten.random, "from"): (lambda: (_x(), -9, 1000), {}),
  aten.random.to: (lambda: (_x(), 1000), {}),
  aten.randperm.default: (lambda: (N,), _SIZE),
  aten.randperm.generator: (lambda: (N,), _SIZE),
  aten.rnn_relu.input: (_recurrent(1, 1), {}),
  aten.rnn_tanh.input: (_recurrent(1, 1), {}),
  aten.rrelu.default: (lambda: (_x(-1.0), 0.2, 0.8, True), {}),
  aten.rrelu_with_noise.default: (lambda: (_x(-1.0), _x(), 0.2, 0.8, True), {}),
  aten.rrelu_with_noise.out: (lambda: (_x(-1.0), _x(), 0.2, 0.8, True), _OUT_OF),
  aten.rrelu_with_noise_.default: (lambda: (_x(-1.0), _x(), 0.2, 0.8, True), {}),
  aten.rrelu_with_noise_functional.default: (
    lambda: (_x(-1.0), _x(), 0.2, 0.8, True),
    {},
  ),
  aten.uniform.default: (lambda: (_x(), -1.0, 3.0), {}),
}

_PACKED = "takes packed sequences: the sizes of its batches depend on data"
_FUSED = "an attention kernel of one kind of device; the function calls its own form"
# Overload or packet -> reason why it has no lowering.
REASONS = {
  "_cudnn_attention_backward": _FUSED,
  "_cudnn_attention_forward": _FUSED,
  "_cudnn_init_dropout_state": "a buffer of cuDNN",
  "_cudnn_rnn": "cuDNN; the recurrent functions have lowerings",
  "_efficient_attention_forward": _FUSED,
  "_fill_mem_eff_dropout_mask_": _FUSED,
  "_flash_attention_forward": _FUSED,
  "_fused_sdp_choice": "chooses a kernel among torch's own, and draws nothing",
  "_lstm_mps": "of Apple's devices; the recurrent functions have lowerings",
  "_nested_tensor_softmax_with_shape": "of nested tensors, and draws nothing",
  "_scaled_dot_product_attention_math_for_mps": _FUSED,
  "_scaled_dot_product_cudnn_attention": _FUSED,
  "_scaled_dot_product_cudnn_attention_backward": _FUSED,
  "_scaled_dot_product_efficient_attention": _FUSED,
  "_scaled_dot_product_efficient_attention_backward": _FUSED,
  "_scaled_dot_product_flash_attention": _FUSED,
  "_scaled_dot_product_flash_attention_for_cpu": _FUSED,
  "_scaled_dot_product_fused_attention_overrideable": _FUSED,
  "_triton_scaled_dot_attention": _FUSED,
  "gru.data": _PACKED,
  "lstm.data": _PACKED,
  "miopen_rnn": "MIOpen; the recurrent functions have lowerings",
  "rnn_relu.data": _PACKED,
  "rnn_tanh.data": _PACKED,
}


def _random_overloads() -> list:
  found = []
  for schema in torch._C._jit_get_all_schemas():
    namespace, name = schema.name.split("::")
    if namespace == "aten":
      packet = getattr(aten, name, None)
      overload = getattr(packet, schema.overload_name or "default", None)
      if overload and torch.Tag.nondeterministic_seeded in overload.tags:
        found.append(overload)
  return sorted(set(found), key=str)


def _base(op):
  """Return the overload whose row has the arguments of `op`, or None."""
  if op in ROWS:
    return op
  functional = functional_form(op) if schema_of(op).written else None
  return functional if functional in ROWS else None


# Overloads that some supported versions of torch lack.
for _op in _random_overloads():
  if "names" in str(_op).rpartition(".")[2]:
    REASONS[_op._name.removeprefix("aten::")] = "of named tensors, which went"
for _name_of_one in (
  "_cudnn_attention_forward_no_dropout_inplace",
  "_flash_attention_forward_no_dropout_inplace",
):
  if hasattr(aten, _name_of_one):
    REASONS[_name_of_one] = _FUSED


def _reason(op) -> str | None:
  name = str(op).removeprefix("aten.")
  return REASONS.get(name) or REASONS.get(name.partition(".")[0])


def _name(op) -> str:
  return str(op).removeprefix("aten.")


OPS = {_name(op): op for op in _random_overloads() if _base(op)}
BASES = {name: op for name, op in OPS.items() if _base(op) is op}
WITH_GENERATOR = {
  name: op for name, op in OPS.items() if "generator" in schema_of(op).names
}


def test_every_random_operation_of_torch_has_a_row_or_a_reason():
  overloads = _random_overloads()
  assert len(overloads) > 120
  missing = [str(op) for op in overloads if not _base(op) and not _reason(op)]
  assert not missing
  both = [str(op) for op in overloads if _base(op) and _reason(op)]
  assert not both
  known = {_name(op) for op in overloads}
  known |= {name.partition(".")[0] for name in known}
  assert set(REASONS) <= known


def _outputs(op) -> dict:
  """Return new tensors for an `out=` variant, with the functional one's dtypes."""
  if is_in_place(op) or op in ROWS:
    return {}
  with torchax.rng_scope(0):
    results = _leaves(_call(_base(op), None))
  return dict(zip(schema_of(op).written, map(torch.zeros_like, results)))


def _arguments(op) -> tuple:
  return ROWS[_base(op)][0]()


def _call(op, generator, arguments=None):
  options = {name: v() if callable(v) else v for name, v in ROWS[_base(op)][1].items()}
  names = schema_of(op).names
  options = {name: value for name, value in options.items() if name in names}
  options.update(_outputs(op))
  # Keyword-only arguments go by name; older operations take theirs by position as well.
  if "generator" in names:
    options["generator"] = generator
  return op(*(arguments or _arguments(op)), **options)


def _leaves(result) -> list:
  return [result] if isinstance(result, torch.Tensor) else list(result)


def _drawn(result) -> torch.Tensor:
  """Return the first result that holds random numbers."""
  return _leaves(result)[0]


def _program(arguments: dict, generators=None) -> dict:
  """Return a program of all operations, each from the same position of the stream."""
  drawn = {}
  for name, given in arguments.items():
    generator = generators and generators[name]
    with torchax.rng_scope(7):
      drawn[name] = _leaves(_call(OPS[name], generator, given))
  return drawn


def _compile(names, generators=None):
  """Compile a program of operations on tensor operands, so that nothing is folded."""
  leaves, spec = pytree.tree_flatten({name: _arguments(OPS[name]) for name in names})
  tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

  @jax_jit
  def run(tensors):
    rest = iter(tensors)
    given = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return _program(pytree.tree_unflatten(given, spec), generators)

  return lambda: run([tensor.clone() for tensor in tensors])


@functools.cache
def _eager() -> dict:
  with torchax.default_env():
    return _program({name: _arguments(op) for name, op in OPS.items()})


@functools.cache
def _compiled() -> dict:
  return _compile(BASES)()


# Rounding of matrix products depends on fusion; a wrong mask would change the first
# digit.
WITH_PRODUCTS = ("gru", "lstm", "rnn", "scaled_dot", "_scaled_dot")


def _assert_same(first, second, **tolerance):
  assert len(first) == len(second)
  for one, other in zip(first, second):
    torch.testing.assert_close(one, other, **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize("name", BASES)
def test_an_operation_draws_the_same_eagerly_and_compiled(name):
  exact = not name.startswith(WITH_PRODUCTS)
  tolerance = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
  _assert_same(_compiled()[name], _eager()[name], **tolerance)


@pytest.mark.parametrize("name", OPS)
def test_draws_differ_and_depend_only_on_the_state(env, name):
  with env, env.rng_scope(7) as stream:
    first = _drawn(_call(OPS[name], None)).clone()
    drawn = stream.draws
    second = _drawn(_call(OPS[name], None)).clone()
    assert stream.draws == 2 * drawn > 0
  assert torch.equal(first, _eager()[name][0])
  assert not torch.equal(first, second)


@pytest.mark.parametrize(
  "name", [name for name in OPS if _base(OPS[name]) != OPS[name]]
)
def test_in_place_and_out_variants_draw_as_the_functional_form(name):
  _assert_same(_eager()[name], _eager()[_name(_base(OPS[name]))])


@pytest.mark.parametrize(
  "name", ["rrelu_with_noise.default", "rrelu_with_noise_.default", "rrelu.default"]
)
def test_the_forms_of_rrelu_draw_the_same(name):
  expected = _eager()["rrelu_with_noise_functional.default"]
  assert torch.equal(_eager()[name][0], expected[0])


@functools.cache
def _compiled_with_generators() -> tuple:
  """Return two results of one compiled function, and the generators' states after."""
  names = [name for name in WITH_GENERATOR if name in BASES]
  generators = {name: torch.Generator().manual_seed(5) for name in names}
  run = _compile(names, generators)
  calls = run(), run()
  return calls, {name: g.get_state() for name, g in generators.items()}


def _two_draws(op, generator) -> list[torch.Tensor]:
  with torchax.default_env():
    return [_drawn(_call(op, generator)).clone() for _ in range(2)]


@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_generator_advances_and_the_stream_does_not(env, name):
  op, generator = WITH_GENERATOR[name], torch.Generator().manual_seed(5)
  before = env.rng.state.state_dict()
  first, second = _two_draws(op, generator)
  assert env.rng.state.state_dict() == before
  assert not torch.equal(first, second)
  _assert_same(_two_draws(op, generator.manual_seed(5)), [first, second])


@pytest.mark.parametrize("name", [name for name in WITH_GENERATOR if name in BASES])
def test_a_generator_draws_the_same_compiled(name):
  generator = torch.Generator().manual_seed(5)
  eager = _two_draws(WITH_GENERATOR[name], generator)
  calls, states = _compiled_with_generators()
  _assert_same([call[name][0] for call in calls], eager)
  assert torch.equal(generator.get_state(), states[name])


# Dtypes -----------------------------------------------------------------------------

DTYPES = (
  *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64),
  *(torch.int8, torch.uint8, torch.int64, torch.bool, torch.uint16),
)


def _ones(device, dtype, value=1.0) -> torch.Tensor:
  return torch.full((4,), value).to(dtype).to(device)


BY_DTYPE = {
  "rand": lambda d, t: torch.rand(4, device=d, dtype=t),
  "randn": lambda d, t: torch.randn(4, device=d, dtype=t),
  "randint": lambda d, t: torch.randint(0, 2, (4,), device=d, dtype=t),
  "randperm": lambda d, t: torch.randperm(4, device=d, dtype=t),
  "rand_like": lambda d, t: torch.rand_like(_ones(d, t)),
  "randn_like": lambda d, t: torch.randn_like(_ones(d, t)),
  "randint_like": lambda d, t: torch.randint_like(_ones(d, t), 2),
  "normal, size": lambda d, t: torch.normal(0.0, 1.0, (4,), device=d, dtype=t),
  "normal, tensor mean": lambda d, t: torch.normal(_ones(d, t), 1.0),
  "normal, tensor std": lambda d, t: torch.normal(0.0, _ones(d, t)),
  "normal, tensors": lambda d, t: torch.normal(_ones(d, t), _ones(d, torch.float16)),
  "normal_": lambda d, t: _ones(d, t).normal_(),
  "uniform_": lambda d, t: _ones(d, t).uniform_(),
  "exponential_": lambda d, t: _ones(d, t).exponential_(),
  "cauchy_": lambda d, t: _ones(d, t).cauchy_(),
  "log_normal_": lambda d, t: _ones(d, t).log_normal_(),
  "geometric_": lambda d, t: _ones(d, t).geometric_(0.5),
  "random_": lambda d, t: _ones(d, t).random_(),
  "random_ to": lambda d, t: _ones(d, t).random_(2),
  "random_ from": lambda d, t: _ones(d, t).random_(0, 2),
  "bernoulli": lambda d, t: torch.bernoulli(_ones(d, t)),
  "bernoulli_": lambda d, t: _ones(d, t).bernoulli_(0.5),
  "bernoulli_ of a tensor": lambda d, t: _ones(d, t).bernoulli_(_ones(d, t)),
  "poisson": lambda d, t: torch.poisson(_ones(d, t)),
  "binomial": lambda d, t: torch.binomial(_ones(d, t), _ones(d, t, 0.5)),
  "_standard_gamma": lambda d, t: torch._standard_gamma(_ones(d, t)),
  "_sample_dirichlet": lambda d, t: torch._sample_dirichlet(_ones(d, t)),
  "multinomial": lambda d, t: torch.multinomial(_ones(d, t), 2),
  "rrelu": lambda d, t: torch.rrelu(_ones(d, t), 0.1, 0.3, True),
  "native_dropout": lambda d, t: torch.native_dropout(_ones(d, t), 0.5, True)[0],
}
_HALVES = (torch.bfloat16, torch.float16)
# torch draws these on accelerators but not on the CPU.
WIDER = {(name, t) for name in ("binomial", "_standard_gamma") for t in _HALVES}
WIDER |= {("_sample_dirichlet", t) for t in _HALVES} | {("rrelu", torch.float16)}


def _outcome(draw, device: str, dtype):
  """Return the dtype of the result or the type of the error; on jax, only trace."""

  def traced(_):
    return draw("jax", dtype)

  try:
    if device == "cpu":
      return draw("cpu", dtype).dtype
    result = jax.eval_shape(lambda x: jax_view(traced)(x, rng=0), np.float32(0))
    return torchax.mappings.j2t_dtype(result.dtype)
  except Exception as error:
    if isinstance(error, AssertionError):
      raise
    return type(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_DTYPE)
def test_an_operation_takes_the_dtypes_that_torch_takes(name, dtype):
  expected = _outcome(BY_DTYPE[name], "cpu", dtype)
  if (name, dtype) in WIDER:
    assert not isinstance(expected, torch.dtype)
    expected = dtype
  with jax.enable_x64(True):
    assert _outcome(BY_DTYPE[name], "jax", dtype) == expected


# Refusals ---------------------------------------------------------------------------

t = torch.tensor
NAN = float("nan")
REFUSED = {
  "binomial of integer counts": lambda d: torch.binomial(t([4]).to(d), t([0.5]).to(d)),
  "binomial of two dtypes": lambda d: torch.binomial(
    t([4.0]).to(d), t([0.5], dtype=torch.float16).to(d)
  ),
  "bernoulli_ p of integers": lambda d: t([1.0]).to(d).bernoulli_(t([1]).to(d)),
  "bernoulli_ p of another shape": lambda d: (
    t([1.0, 2.0]).to(d).bernoulli_(t([0.5, 0.5, 0.5]).to(d))
  ),
  "normal std complex": lambda d: torch.normal(0.0, t([1j]).to(d)),
  "normal_ std nan": lambda d: t([1.0]).to(d).normal_(0.0, NAN),
  "uniform_ nan": lambda d: t([1.0]).to(d).uniform_(NAN, 1.0),
  "uniform_ inf": lambda d: t([1.0]).to(d).uniform_(0.0, float("inf")),
  "uniform_ too wide": lambda d: t([1.0]).to(d).uniform_(-3e38, 3e38),
  "uniform_ beyond float16": lambda d: t([1.0]).half().to(d).uniform_(0.0, 1e6),
  "exponential_ nan": lambda d: t([1.0]).to(d).exponential_(NAN),
  "log_normal_ nan": lambda d: t([1.0]).to(d).log_normal_(0.0, NAN),
  "random_ beyond float16": lambda d: t([1.0]).half().to(d).random_(70_000),
  "random_ beyond bool": lambda d: t([True]).to(d).random_(3),
  "random_ beyond uint8": lambda d: t([1], dtype=torch.uint8).to(d).random_(257),
  "random_ below uint8": lambda d: t([1], dtype=torch.uint8).to(d).random_(-1, 3),
  "randint beyond float16": lambda d: torch.randint(
    70_000, (2,), dtype=torch.half, device=d
  ),
  "randint_like high < 0": lambda d: torch.randint_like(t([1.0]).to(d), t(-1)),
  "randint_like high of one dimension": lambda d: torch.randint_like(
    t([1.0]).to(d), t([4])
  ),
  "randperm beyond uint8": lambda d: torch.randperm(257, dtype=torch.uint8, device=d),
  "randperm beyond float16": lambda d: torch.randperm(2050, dtype=torch.half, device=d),
  "multinomial of too many categories": lambda d: torch.multinomial(
    torch.ones(1, device=d).expand(2**24 + 1), 1
  ),
  "multinomial without categories": lambda d: torch.multinomial(
    torch.ones(3, 0, device=d), 1, True
  ),
  "multinomial of a number": lambda d: torch.multinomial(t(1.0).to(d), 1),
  "rrelu lower > upper": lambda d: torch.rrelu(t([-1.0]).to(d), 0.5, 0.1, True),
  "rrelu lower nan": lambda d: torch.rrelu(t([-1.0]).to(d), NAN, 0.1, True),
  "rrelu noise of another shape": lambda d: aten.rrelu_with_noise(
    t([-1.0]).to(d), t([1.0, 1.0]).to(d), 0.1, 0.3, True
  ),
  "native_dropout of integers": lambda d: torch.native_dropout(t([1]).to(d), 0.5, True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_torchs_type_and_draw_nothing(env, name):
  with pytest.raises(Exception) as on_cpu:
    REFUSED[name]("cpu")
  before = env.rng.state.state_dict()
  with pytest.raises(on_cpu.type):
    REFUSED[name]("jax")
  assert env.rng.state.state_dict() == before


def test_a_refused_draw_leaves_its_generator_alone():
  generator = torch.Generator().manual_seed(3)
  before = generator.get_state()
  with pytest.raises(NotImplementedError):
    torch.poisson(t([1]).to("jax"), generator)
  with pytest.raises(RuntimeError, match="deviation"):
    torch.normal(0.0, t([1j]).to("jax"), generator=generator)
  assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("bound, low, high", [("from", -257, 5), ("to - 1", 0, 258)])
def test_a_range_with_integers_that_the_dtype_lacks_warns(bound, low, high):
  x = torch.empty(3, dtype=torch.bfloat16, device="jax")
  with pytest.warns(UserWarning, match=rf"{bound} is out of bounds \[-256, 256\]"):
    x.random_(low, high)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    x.random_(-256, 257)
    x.random_()
