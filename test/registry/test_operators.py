"""Registration of lowerings: kinds, options, arguments, duplicates and replacements.

`registries.define` registers operators with torch, in a namespace of the tests' own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same
from registries import ONES, define, on_jax

import torchax
from torchax.ops import builtin, jtorch
from torchax.ops.op_base import op
from torchax.registry import operators
from torchax.registry.operators import (
  Kind,
  Operator,
  register_torch_dispatch_op,
  register_torch_function_op,
)


def test_a_jax_function_is_the_default():
  packet = define("(Tensor x, int n) -> Tensor")

  @op(packet)
  def lowering(x, n):
    assert isinstance(x, jnp.ndarray)
    return x * n

  assert_same(packet(on_jax(), 3), ONES * 3)


def test_an_overload_can_be_lowered_alone():
  packet = define("(Tensor x) -> Tensor")
  op(packet.default)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)


def test_one_lowering_serves_many_operations():
  first, second = define("(Tensor x) -> Tensor"), define("(Tensor x) -> Tensor")
  op(first, second)(lambda x: x + 1)
  assert_same(first(on_jax()), second(on_jax()).cpu())


def test_a_function_of_tensors_may_call_torch():
  packet = define("(Tensor x) -> Tensor")

  @op(packet, is_jax_function=False)
  def lowering(x):
    assert isinstance(x, torchax.tensor.Tensor)
    return torch.cat([x, x])

  assert_same(packet(on_jax()), torch.ones(6))


@pytest.mark.parametrize("is_jax_function", [True, False])
def test_needs_env_passes_the_environment(is_jax_function):
  packet = define("(Tensor x) -> Tensor")
  seen = []

  @op(packet, needs_env=True, is_jax_function=is_jax_function)
  def lowering(x, *, env):
    seen.append(env)
    return x + 1

  assert_same(packet(on_jax()), ONES + 1)
  assert seen == [torchax.default_env()]


def test_a_lowering_with_the_environment_draws_from_its_stream():
  packet = define("(Tensor x) -> Tensor")

  @op(packet, needs_env=True)
  def lowering(x, *, env):
    return jax.random.uniform(env.get_and_rotate_prng_key(), x.shape)

  before = int(torchax.default_env().rng.state.count)
  first, second = packet(on_jax()), packet(on_jax())
  assert not torch.equal(first, second)
  assert int(torchax.default_env().rng.state.count) == before + 2


def test_a_view_op_sees_the_tensor_and_may_alias():
  packet = define("(Tensor(a) x) -> Tensor(a)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x[1:]

  tensor = on_jax()
  packet(tensor).zero_()
  assert_same(tensor, torch.tensor([1.0, 0.0, 0.0]))


def test_a_view_op_may_change_its_argument():
  packet = define("(Tensor(a!) x) -> Tensor(a!)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x.mul_(2)

  tensor = on_jax()
  assert packet(tensor) is tensor
  assert_same(tensor, ONES * 2)


def test_a_lowering_may_return_many_results():
  packet = define("(Tensor x) -> (Tensor, Tensor[])")
  op(packet)(lambda x: (x + 1, [x, x * 2]))
  assert_same(packet(on_jax()), (ONES + 1, [ONES, ONES * 2]))


def test_static_argument_of_a_builtin_is_a_python_number():
  packet = define("(Tensor x, float p) -> Tensor")

  @builtin.op(packet, static=("p",))
  def lowering(x, p):
    assert type(p) is float
    return x if p > 1 else -x

  assert_same(packet(on_jax(), 2.0), ONES)
  assert_same(packet(on_jax(), 0.5), -ONES)


STYLES = {
  "of the library": builtin.op,
  "that says so": functools.partial(op, dynamic=("p",)),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_number_that_is_an_operand_does_not_recompile(style):
  packet = define("(Tensor x, float p, int n) -> Tensor")
  traces = []

  @STYLES[style](packet)
  def lowering(x, p, n):
    traces.append(type(n))
    return x * p + n

  for p in (0.5, 1.5, 2.5):
    assert_same(packet(on_jax(), p, 1), ONES * p + 1)
  assert traces == [int]
  packet(on_jax(), 0.5, 2)
  assert traces == [int, int]


def test_a_check_runs_before_anything_is_computed():
  packet = define("(Tensor x, float p) -> Tensor")
  computed = []

  def check(x, p):
    if p < 0:
      raise ValueError(f"p must not be negative, but is {p}.")

  @op(packet, check=check)
  def lowering(x, p):
    computed.append(True)
    return x

  with pytest.raises(ValueError, match="-1.0"):
    packet(on_jax(), -1.0)
  assert not computed


def test_a_lowering_whose_shape_depends_on_data_is_not_compiled():
  packet = define("(Tensor x) -> Tensor")
  op(packet, compiled=False)(lambda x: x[x > 1])
  assert_same(packet(torch.arange(4.0).to("jax")), torch.tensor([2.0, 3.0]))


# Options ------------------------------------------------------------------------------

NUMBERS = (True, 1, 1.0, 0.0, -0.0, float("inf"), 1j)


def test_numbers_stay_python_numbers():
  """One program for each, though some of them are equal."""
  packet = define("(Tensor x, Scalar a, *, Scalar? b=None) -> Tensor")
  seen = []

  @op(packet)
  def lowering(x, a, *, b=None):
    seen.append((repr(a), repr(b)))
    return x

  for number in NUMBERS:
    for _ in range(2):
      packet(on_jax(), number, b=number)
  assert seen == [(repr(number),) * 2 for number in NUMBERS]


def test_numbers_in_lists_stay_python_numbers():
  packet = define("(Tensor x, Scalar[] a, float[] b) -> Tensor")
  seen = []

  @op(packet)
  def lowering(x, a, b):
    seen.append((a, b))
    return x

  packet(on_jax(), [1, 2.5], [0.5])
  assert seen == [((1, 2.5), (0.5,))]


def test_number_for_a_tensor_argument_stays_a_number():
  packet = define("(Tensor x, Tensor y) -> Tensor")
  op(packet)(lambda x, y: x + 1 if isinstance(y, float) and y > 2 else x)
  called = torchax.default_env().dispatch(packet.default, (), (on_jax(), 2.5), {})
  assert_same(called, ONES + 1)


def test_options_are_fields_of_an_operator_or_of_its_groups():
  packet = define("(Tensor x, int n) -> Tensor")
  op(packet, dynamic=("n",), compiled=False, distribution="none")(lambda x, n: x)
  operator = operators.all_aten_ops[packet]
  assert operator.numbers == operators.Numbers(dynamic=("n",))
  assert operator.execution == operators.Execution(compiled=False)
  assert operator.draw.distribution == "none"
  assert operator.checks is not None and not operator.is_builtin


def test_unknown_option_raises_and_is_named():
  with pytest.raises(TypeError, match="dynamics"):
    op(define("(Tensor x) -> Tensor"), dynamics=("x",))(lambda x: x)


def test_builtins_declare_if_they_do_not_compile():
  packet = define("(Tensor x) -> Tensor")
  builtin.op(packet)(lambda x: x[x > 1])
  with pytest.raises(jax.errors.NonConcreteBooleanIndexError):
    packet(on_jax())


# Duplicates and replacements ----------------------------------------------------------

REGISTER = {
  "op": lambda operation, func: op(operation)(func),
  "register_torch_dispatch_op": register_torch_dispatch_op,
}


def test_a_duplicate_in_the_library_raises_and_changes_nothing():
  packet = define("(Tensor x) -> Tensor")
  builtin.op(packet)(lambda x: x + 1)
  with pytest.raises(ValueError, match="is_user_defined=True") as error:
    builtin.op(packet)(lambda x: x + 2)
  assert str(packet) in str(error.value)
  assert_same(packet(on_jax()), ONES + 1)


@pytest.mark.parametrize("name", REGISTER)
def test_user_lowering_replaces_a_builtin_with_a_warning(name):
  packet = define("(Tensor x) -> Tensor")
  builtin.op(packet)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)
  with pytest.warns(UserWarning, match="already has the lowering <lambda>") as warned:
    REGISTER[name](packet, lambda x: x + 2)
  assert warned[0].filename == __file__
  assert str(packet) in str(warned[0].message)
  assert_same(packet(on_jax()), ONES + 2)


@pytest.mark.parametrize("name", REGISTER)
def test_user_lowering_stays_if_the_builtin_loads_later(name):
  packet = define("(Tensor x) -> Tensor")
  REGISTER[name](packet, lambda x: x + 2)
  builtin.op(packet)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 2)


@pytest.mark.filterwarnings("error")
def test_is_user_defined_suppresses_the_warning():
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  register_torch_dispatch_op(packet, lambda x: x + 2, is_user_defined=True)
  assert_same(packet(on_jax()), ONES + 2)


def test_a_torch_function_is_replaced_in_the_same_way():
  def torch_function(x):
    return x

  of_library = Operator(torch_function, jnp.negative, is_builtin=True)
  try:
    operators.register(of_library)
    with pytest.raises(ValueError, match="torch_function"):
      operators.register(dataclasses.replace(of_library))
    for register in (
      functools.partial(register_torch_function_op, torch_function),
      jtorch.register_function(torch_function),
    ):
      with pytest.warns(UserWarning, match="torch_function"):
        register(jnp.abs)
      assert operators.all_torch_functions[torch_function].func is jnp.abs
  finally:
    del operators.all_torch_functions[torch_function]


def test_a_user_may_replace_a_lowering_of_the_library():
  aten_op = torch.ops.aten.erfinv
  ours = operators.all_aten_ops[aten_op]
  register_torch_dispatch_op(aten_op, lambda x: x * 0 + 7, is_user_defined=True)
  try:
    assert_same(torch.erfinv(on_jax()), torch.full((3,), 7.0))
  finally:
    operators.register(dataclasses.replace(ours, is_user_defined=True))
  assert_same(torch.erfinv(on_jax() / 2), torch.erfinv(ONES / 2))


# Kinds --------------------------------------------------------------------------------

KINDS = {
  (True, False, False): Kind.ARRAYS,
  (True, True, False): Kind.ENV_ARRAYS,
  (False, False, False): Kind.TENSORS,
  (False, True, False): Kind.TENSORS,
  (False, False, True): Kind.TENSORS,
  (False, True, True): Kind.TENSORS,
  (True, False, True): Kind.TENSORS,
}


@pytest.mark.parametrize("flags", KINDS, ids=str)
def test_flags_of_upstream_map_to_one_kind(flags):
  is_jax_function, needs_env, is_view_op = flags
  operator = Operator(
    None,
    None,
    is_jax_function=is_jax_function,
    needs_env=needs_env,
    is_view_op=is_view_op,
  )
  assert operator.kind is KINDS[flags]
  kept = (operator.is_jax_function, operator.needs_env, operator.is_view_op)
  assert kept == flags


def test_a_function_of_tensors_may_ask_for_the_environment():
  assert Operator(None, None, kind=Kind.TENSORS, needs_env=True).needs_env
  assert not Operator(None, None, kind=Kind.SAMPLER, needs_env=True).needs_env


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_kind_sets_the_flags_of_upstream(kind):
  operator = Operator(None, None, kind=kind)
  flags = (operator.is_jax_function, operator.needs_env, operator.is_view_op)
  if kind is not Kind.SAMPLER:
    assert Kind.from_flags(*flags) is kind
  else:
    assert flags == (True, False, False)


def test_the_lowerings_of_the_library_are_built_in():
  """Others compile one program per number; ported lowerings are in `ported`."""
  others = [
    f"{operation}: {operator.func.__module__}"
    for table in (operators.all_aten_ops, operators.all_torch_functions)
    for operation, operator in table.items()
    if operator.func.__module__.startswith("torchax.")
    and not operator.func.__module__.rpartition(".")[2].startswith("ported")
    and not (operator.is_builtin or operator.is_user_defined)
  ]
  assert not others, "take `op` from torchax.ops.builtin"


def test_every_registered_lowering_names_its_operation():
  for operation, operator in operators.all_aten_ops.items():
    assert operator.torch_op is operation
    assert callable(operator.func)
