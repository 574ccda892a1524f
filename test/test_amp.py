"""Automatic mixed precision: dtypes of operations, and scope of the context."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same, to_jax

import torchax
from torchax import amp
from torchax.amp import CastPolicy
from torchax.registry.operators import Kind, Operator

env = torchax.default_env()
bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten

inside_and_outside = pytest.mark.parametrize("inside", [True, False])


def _numbers(*shape, dtype=f32) -> torch.Tensor:
  generator = torch.Generator().manual_seed(sum(shape))
  # Positive, for logarithms and powers.
  return (torch.rand(shape, generator=generator) + 0.25).to(dtype)


SQUARE, BATCH, IMAGE = _numbers(4, 4), _numbers(2, 4, 4), _numbers(1, 2, 5, 5)
LOW = SQUARE.to(bf16)
VECTOR = _numbers(4)
CLASSES = torch.tensor([0, 3, 1, 2])
MASKS = (SQUARE > 0.5).float()
KERNEL = _numbers(2, 2, 3, 3)


def _named(*rows):
  return pytest.mark.parametrize(
    ("function", "tensors"),
    [pytest.param(function, tensors, id=name) for name, function, *tensors in rows],
  )


def _autocast(device: str, dtype=bf16, **options) -> torch.autocast:
  return torch.autocast(device, dtype=dtype, **options)


def _scope(inside: bool):
  return env if inside else contextlib.nullcontext()


def _under_autocast(inside: bool, function, tensors):
  moved = to_jax(tensors)
  with _scope(inside), _autocast("jax"):
    return function(*moved)


# Which operation runs in which precision ----------------------------------------------


@inside_and_outside
@_named(
  ("mm", torch.mm, SQUARE, SQUARE),
  ("matmul", torch.matmul, BATCH, SQUARE),
  ("operator @ of bfloat16 and float32", lambda a, b: a @ b, LOW, SQUARE),
  ("bmm", torch.bmm, BATCH, BATCH),
  ("addmm", torch.addmm, SQUARE, SQUARE, SQUARE),
  ("baddbmm", torch.baddbmm, BATCH, BATCH, BATCH),
  ("linear", F.linear, SQUARE, SQUARE, VECTOR),
  ("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), SQUARE, SQUARE),
  ("conv2d", F.conv2d, IMAGE, KERNEL),
  ("conv_transpose2d", F.conv_transpose2d, IMAGE, KERNEL),
  ("attention", F.scaled_dot_product_attention, BATCH, BATCH, BATCH),
  ("linalg.vecdot", torch.linalg.vecdot, SQUARE, SQUARE),
  ("mse_loss", F.mse_loss, LOW, SQUARE),
  ("smooth_l1_loss", F.smooth_l1_loss, LOW, SQUARE),
  ("cross_entropy", F.cross_entropy, LOW, CLASSES),
  ("with_logits", F.binary_cross_entropy_with_logits, LOW, MASKS),
  ("binary_cross_entropy", F.binary_cross_entropy, LOW / 4, MASKS),
  ("svdvals", torch.linalg.svdvals, LOW),
  ("rfft", torch.fft.rfft, LOW),
  ("prod", torch.prod, LOW),
  ("cat", lambda a, b: torch.cat([a, b]), LOW, SQUARE),
  ("cat of bfloat16", lambda a: torch.cat([a, a]), LOW),
  ("stack", lambda a, b: torch.stack([a, b]), LOW, SQUARE),
  ("add", torch.add, LOW, SQUARE),
  ("relu", F.relu, LOW),
  ("gelu", F.gelu, SQUARE),
  ("max", torch.amax, LOW),
  ("a product in place", lambda a, b: a.clone().addmm_(b, b), SQUARE, SQUARE),
  ("integers", lambda a: a.int() * 2, CLASSES),
)
def test_result_dtypes_match_cpu_autocast(inside, function, tensors):
  with _autocast("cpu"):
    expected = function(*tensors)
  actual = _under_autocast(inside, function, tensors)
  assert_same(actual, expected)


@inside_and_outside
@_named(
  ("exp", torch.exp, LOW),
  ("log", torch.log, LOW),
  ("rsqrt", torch.rsqrt, LOW),
  ("pow of a tensor and a number", lambda a: a**3, LOW),
  ("pow of a number and a tensor", lambda a: 2.0**a, LOW),
  ("softmax", lambda a: F.softmax(a, -1), LOW),
  ("log_softmax", lambda a: F.log_softmax(a, -1), LOW),
  ("cumsum", lambda a: a.cumsum(0), LOW),
  ("sum", torch.sum, LOW),
  ("sum of a dimension", lambda a: a.sum(0, keepdim=True), LOW),
  ("norm", lambda a: aten.norm.Scalar(a), LOW),
  ("norm of a dimension", lambda a: aten.norm.ScalarOpt_dim(a, 1, [0]), LOW),
  ("torch.norm", lambda a: torch.norm(a, dim=0), LOW),
  ("vector_norm", torch.linalg.vector_norm, LOW),
  ("layer_norm", lambda a, w: F.layer_norm(a, (4,), w, w), LOW, VECTOR),
  ("rms_norm", lambda a, w: F.rms_norm(a, (4,), w), LOW, VECTOR),
  ("group_norm", lambda a, w: F.group_norm(a, 2, w), LOW, VECTOR),
  ("softplus", F.softplus, LOW),
  ("cdist", torch.cdist, LOW, LOW),
  ("interpolate", lambda a: F.interpolate(a, scale_factor=2.0), IMAGE.to(bf16)),
  ("addcmul", torch.addcmul, LOW, SQUARE, LOW),
  ("scatter_add", lambda a, i, b: a.scatter_add(0, i[None], b), LOW, CLASSES, SQUARE),
)
def test_wide_range_operations_run_in_float32(inside, function, tensors):
  """Torch runs these in bfloat16 on the CPU; we follow the list for CUDA."""
  widened = [t.float() if t.is_floating_point() else t for t in tensors]
  assert_same(_under_autocast(inside, function, tensors), function(*widened))


@inside_and_outside
@_named(
  ("a dtype that was asked for", lambda a: torch.sum(a, 0, dtype=bf16), LOW),
  ("one by position", lambda a: torch.softmax(a, 0, bf16), LOW),
  ("addcmul of bfloat16", torch.addcmul, LOW, LOW, LOW),
)
def test_bfloat16_operands_stay_bfloat16_without_wider_ones(inside, function, tensors):
  assert _under_autocast(inside, function, tensors).dtype == bf16


@inside_and_outside
def test_matrix_vector_product_runs_in_lower_precision(inside):
  """It is in torch's list for CUDA, but not in the one for the CPU."""
  product = _under_autocast(inside, torch.mv, [SQUARE, VECTOR])
  assert_same(product, torch.mv(SQUARE.to(bf16), VECTOR.to(bf16)))


def test_statistics_run_in_float32():
  assert_same(_under_autocast(True, torch.cov, [LOW]), torch.cov(LOW.float()))


def _first(out) -> torch.Tensor:
  return out[0] if isinstance(out, tuple) else out


@inside_and_outside
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.GRUCell])
def test_recurrent_modules_run_in_lower_precision(inside, kind):
  torch.manual_seed(0)
  module = kind(4, 3)
  with torch.no_grad():
    expected = _first(module(SQUARE))
  actual = _first(_under_autocast(inside, module.to("jax"), [SQUARE]))
  assert actual.dtype == bf16
  assert_same(actual, expected.to(bf16))


@inside_and_outside
def test_batch_norm_keeps_the_dtype_of_its_input(inside):
  module = torch.nn.BatchNorm1d(4)
  with _autocast("cpu"):
    expected = module(LOW)
  module = torch.nn.BatchNorm1d(4).to("jax")
  assert_same(_under_autocast(inside, module, [LOW]), expected)
  assert module.running_mean.dtype == f32


@inside_and_outside
def test_multihead_attention_equals_cpu_autocast(inside):
  torch.manual_seed(0)
  module = torch.nn.MultiheadAttention(4, 2, batch_first=True)
  with _autocast("cpu"):
    expected, _ = module(BATCH, BATCH, BATCH, need_weights=False)
  module.to("jax")
  actual = _under_autocast(
    inside, lambda x: module(x, x, x, need_weights=False)[0], [BATCH]
  )
  assert_same(actual, expected)


@inside_and_outside
def test_operands_are_rounded_once_before_a_product(inside):
  x = _numbers(4, 4)
  product = _under_autocast(inside, torch.mm, [x, x])
  assert_same(product, x.to(bf16) @ x.to(bf16))


@inside_and_outside
def test_cpu_tensors_are_not_cast(inside):
  with _scope(inside), _autocast("jax"):
    assert (SQUARE @ SQUARE).dtype == f32
    assert F.linear(SQUARE, SQUARE).dtype == f32


@inside_and_outside
@_named(
  ("linear", F.linear, SQUARE, SQUARE),
  ("einsum", lambda a: torch.einsum("ij,jk->ik", a, a), SQUARE),
  ("square", torch.square, LOW),
  ("special.expm1", torch.special.expm1, LOW),
  ("linalg.norm", torch.linalg.norm, LOW),
  ("nll_loss", F.nll_loss, LOW, CLASSES),
  ("trapezoid", torch.trapezoid, LOW),
  ("matrix_power", lambda a: torch.linalg.matrix_power(a, 2), SQUARE),
  ("instance_norm", lambda a: F.instance_norm(a[None]), LOW),
)
def test_inference_mode_applies_the_same_casts(inside, function, tensors):
  expected = _under_autocast(inside, function, tensors).cpu()
  with torch.inference_mode():
    assert_same(_under_autocast(inside, function, tensors), expected)


def test_decomposed_composites_have_composite_kernels():
  for op in amp._functional_overloads(amp._COMPOSITES):
    assert torchax.compat.torch_compat.is_composite(op), op


def test_policy_table_accepts_only_overloads():
  before = dict(amp.autocast_policy)
  with pytest.raises(TypeError, match=r"expects an overload.*aten\.mm"):
    amp.autocast_policy[aten.mm] = CastPolicy.FP32
  assert dict(amp.autocast_policy) == before


def test_out_argument_determines_the_precision():
  x = SQUARE.to("jax")
  out = torch.empty_like(x)
  with env, _autocast("jax"):
    torch.matmul(x, x, out=out)
  assert_same(out, SQUARE @ SQUARE)


# Where it is on -----------------------------------------------------------------------


def test_torch_reports_the_autocast_state():
  assert not torch.is_autocast_enabled("jax")
  with _autocast("jax", f16):
    assert torch.is_autocast_enabled("jax")
    assert torch.get_autocast_dtype("jax") == f16
    assert env.param.autocast_dtype == f16
  assert not torch.is_autocast_enabled("jax")
  assert env.param.autocast_dtype is None


@inside_and_outside
def test_autocast_blocks_nest(inside):
  x = SQUARE.to("jax")

  def dtypes() -> set:
    return {(x @ x).dtype, F.linear(x, x).dtype}

  with _scope(inside):
    assert dtypes() == {f32}
    with _autocast("jax"):
      assert dtypes() == {bf16}
      with torch.autocast("jax", enabled=False):
        assert dtypes() == {f32}
      with _autocast("jax", f16):
        assert dtypes() == {f16}
      assert dtypes() == {bf16}
    assert dtypes() == {f32}


def test_autocast_is_off_after_an_exception():
  with pytest.raises(KeyError), _autocast("jax"):
    raise KeyError
  x = SQUARE.to("jax")
  assert (x @ x).dtype == f32


def test_autocast_decorates_functions():
  x = SQUARE.to("jax")
  product = torch.autocast("jax", dtype=bf16)(torch.mm)
  assert product(x, x).dtype == bf16
  assert torchax.amp.autocast("jax")(torch.mm)(x, x).dtype == bf16


def test_autocast_applies_to_one_thread():
  x, seen = SQUARE.to("jax"), []
  with _autocast("jax"):
    thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))
    thread.start()
    thread.join()
  assert seen == [f32]


def test_environment_property_turns_autocast_on_and_off():
  x = SQUARE.to("jax")
  with env.override_property(autocast_dtype=bf16):
    assert (x @ x).dtype == env.param.autocast_dtype == bf16
    with env.override_property(mesh=None):
      assert (x @ x).dtype == bf16
    with env.override_property(autocast_dtype=None):
      assert (x @ x).dtype == f32
  assert (x @ x).dtype == f32


@pytest.mark.parametrize(
  ("context", "error", "match"),
  [
    (lambda: amp.autocast("cpu"), ValueError, "torch.autocast for another device"),
    (lambda: amp.autocast("jax", dtype=f64), TypeError, "bfloat16 or torch.float16"),
    (lambda: amp.autocast("jax", dtype="bf16"), TypeError, "but got bf16"),
    (lambda: env.override_property(autocast_dtype=f32), TypeError, "but got torch.fl"),
  ],
)
def test_unsupported_device_or_dtype_raises(context, error, match):
  with pytest.raises(error, match=match), context():
    pass
  assert not torch.is_autocast_enabled("jax")


def test_torch_warns_about_an_unsupported_dtype():
  x = SQUARE.to("jax")
  with pytest.warns(UserWarning, match="not supported"), _autocast("jax", f64):
    assert (x @ x).dtype == f32


# Policies -----------------------------------------------------------------------------

_MIXED = (torch.ones(2), torch.ones(2, dtype=bf16), torch.arange(2), 3, None)


@pytest.mark.parametrize(
  ("policy", "args", "expected"),
  [
    (CastPolicy.LOWER_PRECISION_FP, _MIXED, [bf16, bf16, torch.int64]),
    (CastPolicy.FP32, _MIXED, [f32, f32, torch.int64]),
    (CastPolicy.PROMOTE, _MIXED, [f32, f32, torch.int64]),
    (CastPolicy.PROMOTE, _MIXED[1:], [bf16, torch.int64]),
    (CastPolicy.LOWER_PRECISION_FP, (torch.ones(2, dtype=f64),), [f64]),
    (CastPolicy.FP32, (torch.ones(2, dtype=torch.complex64),), [torch.complex64]),
    (CastPolicy.LOWER_PRECISION_FP, ([torch.ones(2)],), [bf16]),
  ],
)
def test_a_policy_casts_floating_point_tensors(policy, args, expected):
  cast, kwargs = amp.execute_policy(policy, args, {"weight": args[:1]}, bf16)
  leaves = torch.utils._pytree.tree_leaves(cast)
  assert [t.dtype for t in leaves if isinstance(t, torch.Tensor)] == expected
  assert [v for v in leaves if not isinstance(v, torch.Tensor)] == [
    value for value in args if not isinstance(value, torch.Tensor | list)
  ]
  (weight,) = torch.utils._pytree.tree_leaves(kwargs)
  assert weight.dtype == expected[0]


@pytest.mark.parametrize(
  ("args", "kwargs", "expected"),
  [
    ((torch.ones(2),), {}, {"dtype": f32}),
    ((torch.ones(2),), {"dtype": None}, {"dtype": f32}),
    ((torch.ones(2),), {"dtype": bf16}, {"dtype": bf16}),
    ((torch.ones(2), 0, bf16), {}, {}),
    ((torch.arange(2),), {}, {}),
  ],
)
def test_policy_adds_a_dtype_unless_one_is_given(args, kwargs, expected):
  policy = CastPolicy.FP32_SET_OPT_DTYPE
  assert amp.execute_policy(policy, args, kwargs, bf16) == (args, expected)


def test_unknown_policy_raises():
  with pytest.raises(TypeError, match="CastPolicy"):
    amp.execute_policy("FP32", (), {}, bf16)


def test_each_operation_is_in_one_list():
  lists = [names.split() for _, names in amp._LISTS]
  names = [name for group in lists for name in group]
  named = [op._schema.name[6:] for op in (*amp._WITH_OPTIONAL_DTYPE, *amp._WITH_DTYPE)]
  assert len(set(names)) == len(names)
  assert not set(names) & set(named)


def test_a_policy_can_be_changed(monkeypatch):
  x = SQUARE.to("jax")
  monkeypatch.setitem(amp.autocast_policy, aten.mm.default, CastPolicy.FP32)
  monkeypatch.delitem(amp.autocast_policy, aten.bmm.default)
  monkeypatch.setitem(
    amp.autocast_policy, aten.sin.default, CastPolicy.LOWER_PRECISION_FP
  )
  with _autocast("jax"):
    assert torch.mm(x, x).dtype == f32
    assert torch.bmm(x[None], x[None]).dtype == f32
    assert torch.sin(x).dtype == bf16
  monkeypatch.undo()
  with _autocast("jax"):
    assert torch.mm(x, x).dtype == torch.bmm(x[None], x[None])[0].dtype == bf16
    assert torch.sin(x).dtype == f32


def test_function_above_aten_uses_policy_of_its_aten_namesake():
  here = torchax.Environment()
  seen = []

  def product(a, b):
    seen.append((a.dtype, torch.is_autocast_enabled("jax")))
    return a

  operator = Operator(torch.bmm, product, kind=Kind.TENSORS)
  here._ops[torch.bmm] = operator
  x = here.to_xla(BATCH)
  with here, _autocast("jax"):
    torch.bmm(x, x)
  assert seen == [(bf16, False)]


# Around and below it ------------------------------------------------------------------


@pytest.mark.parametrize(
  ("transform", "x", "expected"),
  [
    (lambda f: torch.func.vmap(f), BATCH, bf16),
    (lambda f: torch.func.grad(lambda v: f(v).float().sum()), SQUARE, f32),
    (lambda f: lambda v: torch.func.jvp(f, (v,), (v,))[1], SQUARE, bf16),
  ],
)
@inside_and_outside
def test_autocast_applies_inside_torch_func_transforms(inside, transform, x, expected):
  transformed = transform(lambda v: F.linear(v, v))
  assert _under_autocast(inside, transformed, [x]).dtype == expected


def test_compiled_decomposition_does_not_keep_autocast_casts():
  # torch makes this of `softmax`, which autocast would widen.
  softmax = aten._safe_softmax.default
  here = torchax.Environment()  # a new one, which has compiled nothing yet
  x = here.to_xla(LOW)
  with _autocast("jax"):
    assert here.dispatch(softmax, (), (x, -1), {}).dtype == bf16
  assert here.dispatch(softmax, (), (x, -1), {}).dtype == bf16
