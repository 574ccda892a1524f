"""Dispatch of one operation: derived variants, promotion, errors.

Results of each lowering are tested in `ops/`; here are laws of all operations.
"""

import contextlib
import math
import threading

import jax.numpy as jnp
import pytest
import torch
from compare import assert_same, to_jax
from ops.harness import floats, ints

import torchax
from torchax import config
from torchax.dispatch.operands import Flattener
from torchax.errors import MixedDeviceError, OperatorNotFound
from torchax.interop import jax_jit
from torchax.tensor import Tensor, XLADispatchMode, XLAFunctionMode

A = floats(3, 4)
B = floats(3, 4, seed=1)
INTS = ints(3, 4, dtype=torch.int32)


@pytest.fixture(name="x")
def _x() -> Tensor:
  return A.to("jax")


# Forms derived from the schema --------------------------------------------------------

IN_PLACE = {
  "add": lambda t, o: t.add_(o, alpha=2),
  "add_number": lambda t, o: t.add_(1.5),
  "operator": lambda t, o: t.__imul__(o),
  "relu": lambda t, o: t.relu_(),
  "clamp": lambda t, o: t.clamp_(0.1, 0.5),
  "copy": lambda t, o: t.copy_(o),
  "copy_int": lambda t, o: t.copy_(o > 0),
  "zero": lambda t, o: t.zero_(),
  "fill": lambda t, o: t.fill_(o[0, 0]),
  "lerp": lambda t, o: t.lerp_(o, 0.25),
  "cumsum": lambda t, o: t.cumsum_(1),
  "tril": lambda t, o: t.tril_(),
  "comparison": lambda t, o: t.gt_(o),
  "pow": lambda t, o: t.pow_(2),
  "addcmul": lambda t, o: t.addcmul_(o, o, value=0.5),
  "masked_fill": lambda t, o: t.masked_fill_(o > 0, 2),
  "itself": lambda t, o: t.add_(t),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_in_place_form_changes_the_tensor_itself(change):
  cpu, tensor = A.clone(), A.to("jax")
  alias = tensor.detach()
  assert change(cpu, B) is cpu
  assert change(tensor, B.to("jax")) is tensor
  assert_same(tensor, cpu)
  assert_same(alias, cpu)


OUT = {
  "add": lambda a, b, out: torch.add(a, b, out=out),
  "mm": lambda a, b, out: torch.mm(a, b.t(), out=out),
  "sum": lambda a, b, out: torch.sum(a, 0, out=out),
  "cat": lambda a, b, out: torch.cat([a, b], out=out),
  "arange": lambda a, b, out: torch.arange(4, out=out),
  "clamp": lambda a, b, out: torch.clamp(a, 0.0, 1.0, out=out),
}


@pytest.mark.parametrize("function", OUT.values(), ids=OUT)
@pytest.mark.parametrize("empty", [True, False])
def test_out_receives_the_result(function, empty, x):
  expected = function(A, B, torch.empty(0))
  out = torch.empty(0 if empty else expected.shape, device="jax")
  result = function(x, B.to("jax"), out)
  assert result is out
  assert_same(out, expected)


def test_an_out_argument_keeps_its_dtype(x):
  out = torch.empty(3, 4, dtype=torch.bfloat16, device="jax")
  torch.add(x, x, out=out)
  assert_same(out, (A + A).bfloat16())


def test_several_out_arguments_receive_the_results(x):
  expected = torch.max(A, 0)
  values = torch.empty(0, device="jax")
  indices = torch.empty(0, dtype=torch.int64, device="jax")
  result = torch.max(x, 0, out=(values, indices))
  assert result[0] is values and result[1] is indices
  assert_same([values, indices], list(expected))


def test_out_of_another_shape_is_resized_with_a_warning(x):
  out = torch.zeros(2, device="jax")
  with pytest.warns(UserWarning, match=r"resized.*\[2\].*\[3, 4\]"):
    torch.add(x, x, out=out)
  assert_same(out, x.cpu() * 2)


@pytest.mark.parametrize("function", [torch.sum, torch.prod, torch.cumsum])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_sums_and_products_compute_in_the_dtype_of_out(function, dtype):
  values = torch.tensor([[1.5, 2.7], [3.6, 4.2]])
  outs = [torch.empty(0, dtype=dtype, device=device) for device in ("cpu", "jax")]
  function(values, 0, out=outs[0])
  function(values.to("jax"), 0, out=outs[1])
  assert_same(outs[1], outs[0])


def test_a_view_is_not_resized_beyond_its_base(x):
  base = torch.zeros(4, device="jax")
  with pytest.raises(RuntimeError, match=r"sizes \[3, 4\].*12 elements, .* has 4"):
    torch.add(x, x, out=base[:2])
  assert_same(base, torch.zeros(4))


def test_out_with_overlapping_memory_raises(x):
  base = torch.zeros(4, device="jax")
  with pytest.raises(RuntimeError, match="single memory location"):
    torch.add(x, x, out=base.expand(3, 4))
  assert_same(base, torch.zeros(4))


def test_composite_operations_write_through_unsafe_views():
  a, b = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)
  out = torch.zeros(4, 4, device="jax")
  assert torch.kron(a.to("jax"), b.to("jax"), out=out) is out
  assert_same(out, torch.kron(a, b))


def test_out_on_the_cpu_raises(x):
  out = torch.zeros(3, 4)
  with pytest.raises(MixedDeviceError, match=r"aten\.add\.out"):
    torch.add(x, x, out=out)
  assert not out.any()


UNCASTABLE = {
  "add": lambda i, f: i.add_(f),
  "add_number": lambda i, f: i.add_(1.5),
  "div": lambda i, f: i.div_(2),
  "out": lambda i, f: torch.add(f, f, out=i),
  "to_bool": lambda i, f: (i > 0).add_(i),
}


@pytest.mark.parametrize("function", UNCASTABLE.values(), ids=UNCASTABLE)
def test_in_place_result_of_a_higher_dtype_raises_as_in_torch(function):
  with pytest.raises(RuntimeError, match="can't be cast"):
    function(INTS.clone(), A)
  tensor = INTS.to("jax")
  with pytest.raises(RuntimeError, match="can't be cast"):
    function(tensor, A.to("jax"))
  assert_same(tensor, INTS)


# Numbers ------------------------------------------------------------------------------

PROMOTIONS = {
  "bf16_float": (A.bfloat16(), lambda t: t + 1.5),
  "bf16_int": (A.bfloat16(), lambda t: t * 2),
  "half_float": (A.half(), lambda t: 1.5 - t),
  "int_float": (INTS, lambda t: t * 1.5),
  "int_int": (INTS, lambda t: t + 2),
  "int_true_div": (INTS, lambda t: t / 2),
  "bool_int": (INTS > 3, lambda t: t + 1),
  "bool_float": (INTS > 3, lambda t: t * 0.5),
  "uint8_int": (INTS.to(torch.uint8), lambda t: t + 1),
  "float_complex": (A, lambda t: t * 1j),
  "zero_dim_float": (A.bfloat16(), lambda t: t + torch.ones((), device=t.device)),
  "zero_dim_int": (INTS, lambda t: t + torch.ones((), device=t.device)),
  "two_zero_dims": (INTS[0, 0], lambda t: t + torch.ones((), device=t.device)),
  "two_dtypes": (INTS, lambda t: t + torch.ones(4, device=t.device).bfloat16()),
  "comparison": (INTS, lambda t: t > 2.5),
  "floor_div": (INTS, lambda t: t // 2),
  "power": (INTS, lambda t: t**2),
  "reverse": (INTS, lambda t: 2.0**t),
}


@pytest.mark.parametrize("row", PROMOTIONS.values(), ids=PROMOTIONS)
def test_dtypes_promote_as_in_torch_eagerly_and_compiled(row):
  source, function = row
  expected = function(source)
  assert_same(function(source.to("jax")), expected, "eager")
  assert_same(jax_jit(function)(source.to("jax")), expected, "jit")


def test_numbers_do_not_recompile(x):
  env = torchax.default_env()
  plan = env._dispatcher.choose(torch.ops.aten.add.Tensor).plan
  for number in (0.5, 1.5, -2.5, math.inf):
    plan((x, number), {})
  assert len(plan.programs) == 1
  plan((x, 2), {})
  assert len(plan.programs) == 1


def test_shapes_recompile(x):
  env = torchax.default_env()
  plan = env._dispatcher.choose(torch.ops.aten.sum.dim_IntList).plan
  plan((x, [0]), {})
  plan((x, [0]), {})
  plan((x, [1]), {})
  assert len(plan.programs) == 2


def test_results_have_no_weak_type(x):
  assert not torch.full((2,), 2.0, device="jax").jax().weak_type
  assert not (torch.ones((), device="jax") * 2).jax().weak_type
  assert not torch.scalar_tensor(1.0, device="jax").jax().weak_type


def test_integers_beyond_32_bits_stay_exact():
  tensor = torch.full((2,), 3, dtype=torch.int32, device="jax")
  assert_same(tensor.to(torch.float32) * 2**40, torch.full((2,), 3.0) * 2**40)


@pytest.mark.parametrize(
  "number", [2**63 - 1, -(2**63), 2**31, -(2**31) - 1, 2**31 - 1]
)
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_integers_beyond_32_bits_compare_exactly(name, number):
  values = torch.tensor([0, 2**31 - 1, -(2**31)])
  expected = getattr(values, name)(number)
  assert_same(getattr(values.to("jax"), name)(number), expected)


@pytest.mark.parametrize("name", ["eq", "lt"])
def test_uint32_compares_exactly(name):
  values = torch.tensor([0, 3 * 10**9], dtype=torch.uint32)
  expected = getattr(values.long(), name)(3 * 10**9)
  assert_same(getattr(values.to("jax"), name)(3 * 10**9), expected)


def test_nan_and_infinity_pass(x):
  assert (x * math.inf).isinf().all()
  assert torch.full_like(x, math.nan).isnan().all()
  assert_same(torch.nan_to_num(x * math.nan, nan=1.0), torch.ones(3, 4))


# Operands and keys --------------------------------------------------------------------


ARGUMENTS = {
  "numbers": ((1, 2.5, True, None), {}),
  "shapes": (([2, 3], (1,), torch.Size([4])), {"dim": 1}),
  "names": (("mean", torch.float32), {"flag": False}),
  "nested": (([[1], [2.5]],), {}),
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_rebuild_returns_tuples_for_lists_without_tensors(arguments):
  flattener = Flattener("test", torchax.default_env())
  args, kwargs = arguments
  operands, key = flattener.flatten(args, kwargs)
  assert operands == []
  hash(key)
  args_again, kwargs_again = flattener.rebuild(key, operands)
  assert tuple(args_again) == _tuples(args)
  assert kwargs_again == kwargs


def _tuples(tree):
  if isinstance(tree, list | tuple):
    return tuple(_tuples(value) for value in tree)
  return tree


def test_tensors_become_operands_and_views_part_of_the_key(x):
  flattener = Flattener("test", torchax.default_env())
  operands, key = flattener.flatten((x, [x[None], None], x.t()), {"out": x})
  assert len(operands) == 4
  assert all(operand is x.jax() for operand in operands)
  assert any(part is x.t()._chain for part in key)
  args, kwargs = flattener.rebuild(key, operands)
  assert args[0] is x.jax() and args[1][1] is None
  assert jnp.array_equal(args[2], x.jax().T)
  assert list(kwargs) == ["out"]


def test_device_arguments_are_not_part_of_the_key(x):
  flattener = Flattener("test", torchax.default_env())
  plain = flattener.flatten((x,), {})
  placed = flattener.flatten(
    (x,), {"device": torch.device("jax"), "memory_format": torch.preserve_format}
  )
  assert plain[1] == placed[1]


# Decompositions -----------------------------------------------------------------------

DECOMPOSED = {
  "renorm": lambda t: torch.renorm(t, 2, 0, 0.5),
  "std_mean": lambda t: torch.std_mean(t, dim=1),
  "fftshift": lambda t: torch.fft.fftshift(t),
  "margin_ranking_loss": lambda t: torch.nn.functional.margin_ranking_loss(
    t, t.flip(0), torch.ones_like(t)
  ),
  "logit": lambda t: torch.logit(t.sigmoid(), eps=1e-3),
  "safe_softmax": lambda t: torch.ops.aten._safe_softmax(t, 1),
  "in_place": lambda t: t.clone().renorm_(2, 0, 0.5),
}


@pytest.mark.parametrize("function", DECOMPOSED.values(), ids=DECOMPOSED)
def test_an_operation_without_lowering_runs_by_its_decomposition(function, x):
  assert_same(function(x), function(A))


# Modes --------------------------------------------------------------------------------


def test_operations_work_on_any_thread(x):
  results = []
  thread = threading.Thread(target=lambda: results.append(x @ x.t() + 1))
  thread.start()
  thread.join()
  assert_same(results[0], A @ A.t() + 1)


@pytest.mark.parametrize("mode", [XLADispatchMode, XLAFunctionMode])
def test_entering_the_mode_by_hand_changes_nothing(mode, x):
  with mode(torchax.default_env()):
    assert_same(x + 1, A + 1)
    assert type(A + 1) is torch.Tensor


def test_an_operation_under_another_dispatch_mode_is_seen_by_it(x):
  seen = []

  class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(str(func))
      return func(*args, **(kwargs or {}))

  with Spy():
    result = x + 1
  assert seen == ["aten.add.Tensor"]
  assert_same(result, A + 1)


# Bad input ----------------------------------------------------------------------------

MIXED = {
  "add": (lambda t, c: t + c, "aten.add.Tensor"),
  "add_reversed": (lambda t, c: c + t, "aten.add.Tensor"),
  "mm": (lambda t, c: t @ c.t(), "aten.mm.default"),
  "cat": (lambda t, c: torch.cat([t, c]), "aten.cat.default"),
  "where": (lambda t, c: torch.where(c > 0, t, t), "aten.where.self"),
  "in_place": (lambda t, c: t.add_(c), "aten.add"),
  "in_place_on_cpu": (lambda t, c: c.add_(t), "aten.add_.Tensor"),
  "linear": (lambda t, c: torch.nn.functional.linear(t, c), "linear|addmm|mm"),
  "loss": (torch.nn.functional.mse_loss, "mse_loss"),
  "index": (lambda t, c: c[t > 0], "index"),
}


@pytest.mark.parametrize("row", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_error_for_mixed_devices_names_operation_and_remedy(row, with_env, x):
  function, name = row
  cpu = B.clone()
  env = torchax.default_env() if with_env else contextlib.nullcontext()
  with env, pytest.raises(MixedDeviceError, match=name) as error:
    function(x, cpu)
  assert '.to("jax")' in str(error.value) and ".cpu()" in str(error.value)
  assert_same(x, A)
  assert torch.equal(cpu, B)


ZERO_DIM = {
  "right": lambda t, n: t + n,
  "left": lambda t, n: n - t,
  "where": lambda t, n: torch.where(t > 0, t, n),
  "clamp": lambda t, n: torch.clamp(t, max=n),
  "in_place": lambda t, n: t.clone().mul_(n),
  "int_number": lambda t, n: t * n.to(torch.int64),
}


@pytest.mark.parametrize("function", ZERO_DIM.values(), ids=ZERO_DIM)
def test_a_zero_dimensional_cpu_tensor_mixes_as_in_torch(function, x):
  number = torch.tensor(0.5)
  assert_same(function(x, number), function(A, number))


def test_zero_dimensional_mixing_can_be_turned_off():
  configuration = config.Configuration(allow_mixed_math_with_scalar_tensor=False)
  env = torchax.tensor.Environment(configuration)
  with pytest.raises(MixedDeviceError, match="aten.add.Tensor"):
    env.to_xla(A) + torch.tensor(1.0)


WRONG_SHAPES = {
  "add": lambda t: t + t[:, :3],
  "mul": lambda t: t * torch.ones(5, device=t.device),
  "mm": lambda t: t @ t,
  "where": lambda t: torch.where(t > 0, t, t[:2]),
  "cat": lambda t: torch.cat([t, t[:, :2]]),
  "stack": lambda t: torch.stack([t, t.t()]),
  "sum_dim": lambda t: t.sum(2),
  "in_place": lambda t: t.add_(t[:2]),
  "in_place_grows": lambda t: t[0].add_(t),
  "linear": lambda t: torch.nn.functional.linear(t, t.t()),
  "gather": lambda t: t.gather(0, torch.full((1, 1), 7, device=t.device)[0]),
  "mse_loss": lambda t: torch.nn.functional.mse_loss(t, t[:2, :3]),
}


@pytest.mark.parametrize("function", WRONG_SHAPES.values(), ids=WRONG_SHAPES)
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_wrong_shapes_raise_as_in_torch_and_change_nothing(function, x):
  with pytest.raises((RuntimeError, IndexError)) as cpu_error:
    function(A.clone())
  with pytest.raises(cpu_error.type):
    function(x)
  assert_same(x, A)


library = torch.library.Library("torchax_test_dispatch", "DEF")
library.define("unknown(Tensor x, Tensor[] others, float scale) -> Tensor")


def test_error_for_a_missing_lowering_explains_how_to_write_one(x):
  with pytest.raises(
    OperatorNotFound, match=r"torchax_test_dispatch\.unknown"
  ) as error:
    torch.ops.torchax_test_dispatch.unknown(x, [x[0]], 2.0)
  message = str(error.value)
  assert "op_base.op" in message and ".cpu()" in message


def test_error_for_a_missing_lowering_describes_the_arguments(x):
  with pytest.raises(OperatorNotFound) as error:
    torch.ops.torchax_test_dispatch.unknown(x, [x[0]], 2.0)
  message = str(error.value)
  assert "[3, 4]" in message and "[4]" in message and "torch.float32" in message


def test_an_operation_that_fails_draws_nothing(x):
  state = torchax.default_env().rng.state
  failing = (
    lambda: torch.nn.functional.dropout(x, 2.0),
    lambda: torch.bernoulli(x, -1.0),
    lambda: x.uniform_(2.0, 1.0),
    lambda: torch.randperm(-1, device="jax"),
    lambda: torch.multinomial(x[0].abs(), 9),
  )
  for draw in failing:
    with pytest.raises((RuntimeError, ValueError)):
      draw()
  after = torchax.default_env().rng.state
  assert int(after.count) == int(state.count)
  assert_same(x, A)


def test_error_in_a_compiled_function_leaves_no_tracer(x):
  def fail(t):
    t.mul_(2)
    raise KeyError("stop")

  with pytest.raises(KeyError, match="stop"):
    jax_jit(fail)(x)
  assert_same(x, A)
  assert_same(x + 1, A + 1)


def test_to_jax_moves_a_tree_of_tensors():
  tree = {"a": [A, 1], "b": (B,)}
  assert_same(to_jax(tree), tree)
