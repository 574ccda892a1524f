"""Operations on lists of tensors against torch: values, dtypes, aliasing, errors."""

import dataclasses
import random

import pytest
import torch
from compare import assert_same, to_jax
from ops.harness import floats
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import torchax
from torchax.compat import torch_compat
from torchax.core import program_limit
from torchax.errors import MixedDeviceError, WrongDtypeError
from torchax.interop import jax_jit
from torchax.ops.jaten import foreach
from torchax.tensor import Tensor

aten = torch.ops.aten
f32, bf16, i64, c64 = torch.float32, torch.bfloat16, torch.int64, torch.complex64

INFOS = {
  info.name: info
  for infos in (
    database.foreach_unary_op_db,
    database.foreach_binary_op_db,
    database.foreach_pointwise_op_db,
    database.foreach_reduce_op_db,
    database.foreach_other_op_db,
  )
  for info in infos
}
# Operations also tested with numbers of a higher type than the tensors'; each compiles.
HIGHER_SCALARS = ("_foreach_add", "_foreach_pow")
# torch has only in-place functions for these two.
IN_PLACE_ONLY = ("_foreach_zero", "_foreach_copy")
ROWS = [(name, f32) for name in INFOS]
ROWS += [("_foreach_add", i64), ("_foreach_div", i64), ("_foreach_sqrt", i64)]
ROWS += [("_foreach_add", bf16), ("_foreach_addcdiv", bf16), ("_foreach_norm", bf16)]
ROWS += [("_foreach_mul", c64), ("_foreach_abs", c64), ("_foreach_norm", c64)]

pytestmark = pytest.mark.usefixtures("env")


def copies(tree):
  return pytree.tree_map(
    lambda value: value.clone() if isinstance(value, torch.Tensor) else value, tree
  )


def samples(info, dtype):
  """Return torch's samples for a list of three tensors, and a list of empty ones."""
  random.seed(0)
  torch.manual_seed(0)
  higher = info.name in HIGHER_SCALARS
  found = info.sample_inputs(
    "cpu", dtype, allow_higher_dtype_scalars=higher, num_input_tensors=[3]
  )
  for sample in found:
    kwargs = {k: v for k, v in sample.kwargs.items() if k != "disable_fastpath"}
    yield (sample.input, *sample.args), kwargs


def run(function, args, kwargs):
  """Return the result and the first list afterwards, or the error."""
  try:
    result = function(*args, **kwargs)
  except (RuntimeError, NotImplementedError) as error:
    return error
  return [None if result is None else list(result), args[0]]


def assert_close_products(actual, expected):
  """Compare sums of 20 products of numbers below 10; MKL adds in another order."""
  for have, want in zip(actual[0], expected[0], strict=True):
    torch.testing.assert_close(have.cpu(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=lambda value: str(value))
def test_foreach_functions_equal_torch(name, dtype):
  info = INFOS[name]
  functions = [info.inplace_variant]
  if name not in IN_PLACE_ONLY:
    functions.append(info.method_variant)
  compared = 0
  for args, kwargs in samples(info, dtype):
    for function in filter(None, functions):
      expected = run(function, copies(args), kwargs)
      if isinstance(expected, Exception):
        continue  # a number type that torch refuses on the CPU
      actual = run(function, to_jax(args), kwargs)
      assert not isinstance(actual, Exception), actual
      if name == "_foreach_mm":
        assert_close_products(actual, expected)
      else:
        assert_same(actual, expected, f"{name} {args[1:]}")
      compared += 1
  assert compared


def test_every_foreach_operation_of_torch_has_a_lowering(env):
  packets = [
    packet
    for packet in torch_compat.aten_packets()
    if packet.__name__.startswith("_foreach_")
  ]
  assert len(packets) > 90
  for packet in packets:
    for overload in packet.overloads():
      if not overload.endswith("out"):
        env._dispatcher.plan_for(getattr(packet, overload))


def test_replaced_elementwise_lowering_runs_once_for_equal_rows(monkeypatch):
  assert foreach.ROWS[aten._foreach_add.List] is aten.add.Tensor
  operator, shapes = foreach._operator(aten.add.Tensor), []
  rows = [torch.ones(*shape, device="jax") for shape in ((17,), (1, 17), (17,))]

  def replaced(self, other, alpha=1):
    shapes.append(self.shape)
    return self * 0 + 42

  in_jax = dataclasses.replace(operator.execution, on_host=None)
  monkeypatch.setattr(operator, "func", replaced)
  monkeypatch.setattr(operator, "execution", in_jax)
  results = torch._foreach_add(rows, rows)
  assert [result.unique().tolist() for result in results] == [[42]] * 3
  assert shapes == [(17,), (1, 17)]


# Types and shapes ---------------------------------------------------------------------

LISTS = {
  "shapes": [floats(2, 3), floats(), floats(0)],
  "dtypes": [floats(3), torch.arange(3), floats(3, dtype=bf16), torch.tensor([True])],
}


@pytest.mark.parametrize("tensors", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
  "function",
  [
    lambda xs: torch._foreach_add(xs, 2.5),
    lambda xs: torch._foreach_mul(xs, [2, 2.5, True, 3][: len(xs)]),
    lambda xs: torch._foreach_mul(xs, torch.tensor(2.5, dtype=torch.float64)),
    lambda xs: torch._foreach_div(xs, [x.to(f32) + 1 for x in xs]),
    lambda xs: torch._foreach_sqrt(torch._foreach_abs(xs[:2])),
  ],
)
def test_rows_of_a_list_may_differ_in_shape_and_dtype(function, tensors):
  assert_same(list(function(to_jax(tensors))), list(function(tensors)))


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_scalars_may_be_a_cpu_tensor(name):
  tensors = [floats(3), floats(2, 2)]
  others = [floats(3, low=1, high=2), floats(2, 2, low=1, high=2)]
  scalars = torch.tensor([0.5, 2.0])
  function = getattr(torch, f"_foreach_{name}")
  expected = function(tensors, others, others, scalars)
  on_jax = to_jax((tensors, others, others))
  assert_same(list(function(*on_jax, scalars)), list(expected))
  getattr(torch, f"_foreach_{name}_")(*on_jax, scalars)
  assert_same(on_jax[0], list(expected))


# Writing ------------------------------------------------------------------------------


def views_of_one(x):
  return [x[0], x[1:, ::2], x.t()[1]]


ALIASED = {
  "distinct": lambda x, y: ([x, y], [y.clone(), x.clone()]),
  "views": lambda x, y: (views_of_one(x), views_of_one(y)),
  "the same twice": lambda x, y: ([x, x, y], [y, y, y.clone()]),
  "crosswise": lambda x, y: ([x, y], [y, x]),
  "with themselves": lambda x, y: ([x, y], [x, y]),
  "a part first": lambda x, y: ([x[0], y], [y[0], x]),
}


@pytest.mark.parametrize("lists", ALIASED.values(), ids=ALIASED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_writes_to_a_list_keep_torch_s_order(lists, compiled):
  def program(x, y):
    targets, others = lists(x, y)
    torch._foreach_mul_(targets, others)
    torch._foreach_addcdiv_(targets, others, others, [0.5, 2, 3.0][: len(targets)])
    torch._foreach_sub_(targets, 1)
    return x + 0, y + 0

  x, y = floats(3, 3, low=1, high=2), floats(3, 3, seed=1, low=1, high=2)
  on_jax = to_jax((x, y))
  expected = program(x, y)
  assert_same((jax_jit(program) if compiled else program)(*on_jax), expected)
  assert_same(on_jax, (x, y))


def test_scalar_tensor_in_the_list_is_read_row_by_row():
  def program(scale, x):
    torch._foreach_div_([scale, x], scale)
    return scale, x

  assert_same(
    program(torch.tensor(4.0).to("jax"), torch.ones(2).to("jax")),
    program(torch.tensor(4.0), torch.ones(2)),
  )


def test_aliased_rows_with_scalars_in_a_tensor_equal_torch():
  def program(x):
    torch._foreach_addcmul_([x, x], [x, x], [x, x], torch.tensor([1.0, 2.0]))
    return x

  assert_same(program(floats(3).to("jax")), program(floats(3)))


def test_parameters_are_written_in_place_under_no_grad():
  parameter = torch.nn.Parameter(torch.ones(3).to("jax"))
  with pytest.raises(RuntimeError, match="leaf Variable"):
    torch._foreach_add_([parameter], 1.0)
  with torch.no_grad():
    torch._foreach_add_([parameter], 1.0)
  assert parameter.tolist() == [2, 2, 2] and parameter.requires_grad


def test_copies_between_lists_cross_devices():
  targets = [torch.zeros(2, device="jax"), torch.zeros(2, 2, device="jax")[0]]
  torch._foreach_copy_(targets, [torch.ones(2), torch.full((2,), 3.0)])
  assert [target.tolist() for target in targets] == [[1, 1], [3, 3]]
  on_cpu = [torch.zeros(2), torch.zeros(2)]
  torch._foreach_copy_(on_cpu, targets)
  assert [target.tolist() for target in on_cpu] == [[1, 1], [3, 3]]
  with pytest.raises(RuntimeError, match="same number"):
    torch._foreach_copy_(on_cpu, targets[:1])


# Gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "function",
  [
    lambda xs, ys: torch._foreach_mul(xs, ys),
    lambda xs, ys: torch._foreach_addcdiv(xs, ys, ys, 0.5),
    lambda xs, ys: torch._foreach_norm(torch._foreach_sqrt(ys), 3),
    lambda xs, ys: torch._foreach_lerp(xs, ys, 0.3),
  ],
)
def test_gradients_equal_torch(function):
  def gradients(tensors):
    xs, ys = tensors[:2], tensors[2:]
    results = function(xs, ys)
    loss = sum((result * result).sum() for result in results)
    return torch.autograd.grad(loss, tensors, allow_unused=True)

  tensors = [floats(3, seed=n, low=0.5, high=2).requires_grad_() for n in range(4)]
  actual, expected = gradients(to_jax(tensors)), gradients(tensors)
  with torchax.disable_temporarily():
    assert_same(list(actual), list(expected))


def test_in_place_operation_is_differentiable():
  def gradient(x):
    rows = [x * 1.0, x * 2.0]
    torch._foreach_mul_(rows, [x * 3.0, x * 4.0])
    return torch.autograd.grad(sum(row.sum() for row in rows), x)

  x = floats(3, low=0.5, high=2).requires_grad_()
  assert_same(gradient(to_jax(x)), gradient(x))


# Errors -------------------------------------------------------------------------------

ONES = torch.ones(2)
ERRORS = {
  "empty": lambda move: torch._foreach_add_([], move([ONES])),
  "lengths": lambda move: torch._foreach_add_(move([ONES]), move([ONES, ONES])),
  "scalars": lambda move: torch._foreach_add(move([ONES]), [1.0, 2.0]),
  "lerp": lambda move: torch._foreach_lerp(*[move([ONES, ONES])] * 2, move([ONES])),
  "packed length": lambda move: torch._foreach_addcdiv(
    *[move([ONES])] * 3, torch.ones(2)
  ),
  "packed shape": lambda move: torch._foreach_addcdiv(
    *[move([ONES])] * 3, torch.ones(1, 1)
  ),
  "packed scalar": lambda move: torch._foreach_addcdiv(
    *[move([ONES])] * 3, torch.tensor(2.0)
  ),
  "packed and strided": lambda move: torch._foreach_addcdiv(
    *[move([ONES, ONES])] * 3, torch.ones(2, 2)[:, 0]
  ),
  "not a scalar": lambda move: torch._foreach_mul(move([ONES]), move(torch.ones(3))),
  "shapes": lambda move: torch._foreach_add(move([ONES]), move([torch.ones(3)])),
  "no elements": lambda move: torch._foreach_max(move([ONES, torch.ones(0)])),
  "no largest": lambda move: torch._foreach_norm(move([torch.ones(0)]), torch.inf),
  "norm of integers": lambda move: torch._foreach_norm(move([torch.arange(2)])),
  "norm of integers, with dtype": lambda move: torch._foreach_norm(
    move([torch.arange(2)]), dtype=torch.float32
  ),
  "leaf": lambda move: torch._foreach_zero_(move([ONES.clone().requires_grad_()])),
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
def test_arguments_invalid_in_torch_raise(call):
  with pytest.raises(RuntimeError):
    call(lambda tree: tree)
  with pytest.raises(RuntimeError):
    call(to_jax)


@pytest.mark.parametrize("name", ["round", "sign", "max", "ceil"])
def test_complex_numbers_are_refused(name):
  with pytest.raises(WrongDtypeError, match="complex"):
    getattr(torch, f"_foreach_{name}")([torch.ones(2, dtype=c64, device="jax")])


@pytest.mark.parametrize(
  "call",
  [
    lambda x: torch._foreach_clamp_max([x], 1j),
    lambda x: torch.clamp_max(x, 1j),
    lambda x: torch.clamp_min(x, 1j),
  ],
)
def test_complex_bounds_raise_the_error_of_torch(call):
  for x in (ONES, to_jax(ONES)):
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex"):
      call(x)


def test_failed_write_changes_nothing():
  first, second = torch.ones(2).to("jax"), torch.ones(2, dtype=i64).to("jax")
  with pytest.raises(RuntimeError, match="can't be cast"):
    torch._foreach_add_([first, second], 1.5)
  with pytest.raises(RuntimeError, match="same number"):
    torch._foreach_add_([first, first], [second])
  assert first.tolist() == second.tolist() == [1, 1]


def test_list_on_another_device_raises():
  with pytest.raises(MixedDeviceError, match="tensor on cpu"):
    torch._foreach_add_([torch.ones(2)], [torch.ones(2, device="jax")])


def test_write_to_overlapping_elements_raises():
  with pytest.raises(RuntimeError, match="more than one element"):
    torch._foreach_add_([torch.ones(1, device="jax").expand(3)], 1.0)


# Steps of optimizers ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_gradients_are_unscaled_and_checked(bad):
  def unscale(move):
    grads = [floats(3), floats(2, 2, dtype=torch.float16)]
    if bad is not None:
      grads[1][0, 1] = bad
    grads, found = move(grads), move(torch.zeros(1))
    torch._amp_foreach_non_finite_check_and_unscale_(
      grads, found, move(torch.tensor(0.5))
    )
    return grads, found

  assert_same(unscale(to_jax), unscale_by_hand(bad))


def unscale_by_hand(bad):
  """The CPU has no kernel for lists of several dtypes."""
  grads = [floats(3) * 0.5, floats(2, 2, dtype=torch.float16) * 0.5]
  if bad is not None:
    grads[1][0, 1] = bad
  return grads, torch.tensor([0.0 if bad is None else 1.0])


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracked", [0, 2])
@pytest.mark.parametrize("scale", [8.0, 3e38])
def test_loss_scale_equals_torch(scale, tracked, found):
  def update(move):
    values = [torch.tensor([scale]), torch.tensor([tracked], dtype=torch.int32)]
    values = move(values)
    returned = torch._amp_update_scale_(*values, move(torch.tensor(found)), 2.0, 0.5, 3)
    assert returned is values[0]
    return values

  assert_same(update(to_jax), update(lambda tree: tree))


def state(count, seed=0):
  shapes = [(3,), (2, 2)]
  return [
    [floats(*shape, seed=seed + n, low=0.1, high=1) for shape in shapes]
    for n in range(count)
  ]


# Function, number of lists, True if it counts steps, options.
ADAM = dict(lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, maximize=False)
SGD = dict(
  weight_decay=0.1,
  momentum=0.9,
  lr=0.1,
  dampening=0.2,
  nesterov=False,
  maximize=False,
  is_first_step=False,
)
ADAGRAD = dict(lr=0.1, lr_decay=0.1, weight_decay=0.1, eps=1e-8, maximize=True)
FUSED = {
  "adam": (torch._fused_adam_, 4, True, {**ADAM, "amsgrad": False}),
  "amsgrad": (torch._fused_adam_, 5, True, {**ADAM, "amsgrad": True, "maximize": True}),
  "adamw": (torch._fused_adamw_, 5, True, {**ADAM, "amsgrad": True}),
  "sgd": (torch._fused_sgd_, 3, False, {**SGD, "nesterov": True, "maximize": True}),
  "sgd-first": (torch._fused_sgd_, 3, False, {**SGD, "is_first_step": True}),
  "sgd-plain": (torch._fused_sgd_, 2, False, {**SGD, "momentum": 0.0}),
  "adagrad": (torch._fused_adagrad_, 3, True, ADAGRAD),
}
# Number of lists of a function whose last list may be empty.
LISTS_OF = {torch._fused_adam_: 5, torch._fused_adamw_: 5, torch._fused_sgd_: 3}


@pytest.mark.parametrize("scaling", [None, 0.0, 1.0], ids=["", "scaled", "overflow"])
@pytest.mark.parametrize("row", FUSED.values(), ids=FUSED)
def test_fused_step_equals_torch(row, scaling):
  function, count, counts, options = row

  def step(move):
    lists = move(state(count))
    lists += [[]] * (LISTS_OF.get(function, count) - count)
    if counts:
      lists.append(move([torch.tensor(3.0), torch.tensor(7.0)]))
    scale = {}
    if scaling is not None:
      scale = {
        "grad_scale": move(torch.tensor(4.0)),
        "found_inf": move(torch.tensor(scaling)),
      }
    function(*lists, **options, **scale)
    return lists

  actual = step(to_jax)
  assert all(isinstance(parameter, Tensor) for parameter in actual[0])
  assert_same(actual, step(lambda tree: tree))


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (3, 3, 4, 4)], ids=str)
def test_equal_rows_share_their_kernels(sizes, monkeypatch):
  """XLA's newer emitters compile equal kernels once; few kernels take them longer."""
  efforts, jit = {}, program_limit.jit

  def recorded(function, effort=program_limit.Effort.LEAST, **options):
    efforts[function.__name__] = effort
    return jit(function, effort=effort, **options)

  monkeypatch.setattr(program_limit, "jit", recorded)
  torchax.clear_caches()
  rows = [torch.rand(size, device="jax").requires_grad_() for size in sizes]
  sum(row.sum() for row in rows).backward()
  torch.nn.utils.clip_grad_norm_(rows, 1.0)
  for options in ({"fused": True}, {"foreach": True, "capturable": True}):
    torch.optim.AdamW(rows, **options).step()
  assert efforts.pop("aten__foreach_norm_Scalar") is program_limit.Effort.REPEATED
  wanted = "REPEATED" if len(set(sizes)) == 1 else "LEAST"
  for name in ("foreach_lerp_Scalar", "foreach_div_List", "fused_adamw_default"):
    assert efforts[f"aten__{name}"] is program_limit.Effort[wanted]
  # One step count for each parameter.
  of_steps = efforts["aten__foreach_pow_ScalarAndTensor"]
  assert of_steps is program_limit.Effort.REPEATED
