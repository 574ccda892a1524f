"""The extension API: how lowerings are registered, replaced and found.

Operations are registered with torch under a namespace of the tests' own.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same

import torchax
from torchax import _torch_compat
from torchax.errors import OperatorNotFound
from torchax.ops import jaten, jtorch, ops_registry
from torchax.ops.op_base import op
from torchax.ops.ops_registry import (
  Kind,
  Operator,
  register_torch_dispatch_op,
  register_torch_function_op,
)

library = torch.library.Library("torchax_test", "DEF")
mylib = torch.ops.torchax_test
ONES = torch.ones(3)


@pytest.fixture(name="define")
def _define(request):
  """Defines an operation of the test's own: `define("(Tensor x) -> Tensor")`."""

  def define(signature: str, index: int = 0):
    name = f"{request.node.originalname.removeprefix('test_')}_{index}"
    library.define(name + signature)
    return getattr(mylib, name)

  return define


def on_jax() -> torch.Tensor:
  return ONES.to("jax")


# Registering --------------------------------------------------------------------------


def test_a_jax_function_is_the_default(define):
  packet = define("(Tensor x, int n) -> Tensor")

  @op(packet)
  def lowering(x, n):
    assert isinstance(x, jnp.ndarray)
    return x * n

  assert_same(packet(on_jax(), 3), ONES * 3)


def test_an_overload_can_be_lowered_alone(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet.default)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)


def test_one_lowering_serves_many_operations(define):
  first, second = define("(Tensor x) -> Tensor"), define("(Tensor x) -> Tensor", 1)
  op(first, second)(lambda x: x + 1)
  assert_same(first(on_jax()), second(on_jax()).cpu())


def test_a_function_of_tensors_may_call_torch(define):
  packet = define("(Tensor x) -> Tensor")

  @op(packet, is_jax_function=False)
  def lowering(x):
    assert isinstance(x, torchax.tensor.Tensor)
    return torch.cat([x, x])

  assert_same(packet(on_jax()), torch.ones(6))


@pytest.mark.parametrize("is_jax_function", [True, False])
def test_needs_env_hands_over_the_environment(define, is_jax_function):
  packet = define("(Tensor x) -> Tensor", int(is_jax_function))
  seen = []

  @op(packet, needs_env=True, is_jax_function=is_jax_function)
  def lowering(x, *, env):
    seen.append(env)
    return x + 1

  assert_same(packet(on_jax()), ONES + 1)
  assert seen == [torchax.default_env()]


def test_a_lowering_with_the_environment_draws_from_its_stream(define):
  packet = define("(Tensor x) -> Tensor")

  @op(packet, needs_env=True)
  def lowering(x, *, env):
    return jax.random.uniform(env.get_and_rotate_prng_key(), x.shape)

  before = int(torchax.default_env().rng.state.count)
  first, second = packet(on_jax()), packet(on_jax())
  assert not torch.equal(first, second)
  assert int(torchax.default_env().rng.state.count) == before + 2


def test_a_view_op_sees_the_tensor_and_may_alias(define):
  packet = define("(Tensor(a) x) -> Tensor(a)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x[1:]

  tensor = on_jax()
  packet(tensor).zero_()
  assert_same(tensor, torch.tensor([1.0, 0.0, 0.0]))


def test_a_view_op_may_change_its_argument(define):
  packet = define("(Tensor(a!) x) -> Tensor(a!)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x.mul_(2)

  tensor = on_jax()
  assert packet(tensor) is tensor
  assert_same(tensor, ONES * 2)


def test_a_lowering_may_return_many_results(define):
  packet = define("(Tensor x) -> (Tensor, Tensor[])")
  op(packet)(lambda x: (x + 1, [x, x * 2]))
  assert_same(packet(on_jax()), (ONES + 1, [ONES, ONES * 2]))


def test_a_static_argument_arrives_as_a_python_number(define):
  packet = define("(Tensor x, float p) -> Tensor")

  @op(packet, static=("p",))
  def lowering(x, p):
    assert type(p) is float
    return x if p > 1 else -x

  assert_same(packet(on_jax(), 2.0), ONES)
  assert_same(packet(on_jax(), 0.5), -ONES)


def test_a_number_that_is_not_static_does_not_recompile(define):
  packet = define("(Tensor x, float p, int n) -> Tensor")
  traces = []

  @op(packet)
  def lowering(x, p, n):
    traces.append(type(n))
    return x * p + n

  for p in (0.5, 1.5, 2.5):
    assert_same(packet(on_jax(), p, 1), ONES * p + 1)
  assert traces == [int]
  packet(on_jax(), 0.5, 2)
  assert traces == [int, int]


def test_a_check_runs_before_anything_is_computed(define):
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


def test_a_lowering_whose_shape_depends_on_data_is_not_compiled(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet, compiled=False)(lambda x: x[x > 1])
  assert_same(packet(torch.arange(4.0).to("jax")), torch.tensor([2.0, 3.0]))


# Twice --------------------------------------------------------------------------------

REGISTER = {
  "op": lambda operation, func: op(operation)(func),
  "register_torch_dispatch_op": register_torch_dispatch_op,
}


@pytest.mark.parametrize("name", REGISTER)
def test_a_duplicate_of_a_user_warns_and_replaces(define, name):
  packet = define("(Tensor x) -> Tensor", list(REGISTER).index(name))
  first, second = lambda x: x + 1, lambda x: x + 2
  op(packet)(first)
  with pytest.warns(UserWarning, match=f"{packet} already .*is_user_defined=True"):
    assert REGISTER[name](packet, second) is second
  assert_same(packet(on_jax()), ONES + 2)
  assert ops_registry.all_aten_ops[packet].replaced.func is first


def test_a_duplicate_of_the_library_raises_and_changes_nothing():
  packet, abs_ = torch.ops.aten.abs, ops_registry.all_aten_ops[torch.ops.aten.abs]
  assert abs_.func.__module__.startswith("torchax.")
  with pytest.raises(ValueError, match="already has the lowering"):
    op(packet)(ops_registry.all_aten_ops[torch.ops.aten.neg].func)
  assert ops_registry.all_aten_ops[packet] is abs_


def test_a_duplicate_function_warns():
  def torch_function(x):
    return x

  register_torch_function_op(torch_function, jnp.negative)
  with pytest.warns(UserWarning, match="torch_function"):
    register_torch_function_op(torch_function, jnp.negative)
  with pytest.warns(UserWarning, match="torch_function"):
    jtorch.register_function(torch_function)(jnp.negative)
  del ops_registry.all_torch_functions[torch_function]


def test_a_users_registration_replaces_ours(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)
  register_torch_dispatch_op(packet, lambda x: x + 2, is_user_defined=True)
  assert_same(packet(on_jax()), ONES + 2)


def test_a_user_may_replace_a_lowering_of_the_library():
  aten_op = torch.ops.aten.erfinv
  ours = ops_registry.all_aten_ops[aten_op]
  register_torch_dispatch_op(aten_op, lambda x: x * 0 + 7, is_user_defined=True)
  try:
    assert_same(torch.erfinv(on_jax()), torch.full((3,), 7.0))
  finally:
    ops_registry.register(
      Operator(aten_op, ours.func, is_user_defined=True, kind=ours.kind)
    )
  assert_same(torch.erfinv(on_jax() / 2), torch.erfinv(ONES / 2))


# Later --------------------------------------------------------------------------------


def test_a_living_environment_sees_a_later_registration(define):
  packet = define("(Tensor x) -> Tensor")
  tensor = on_jax()
  with pytest.raises(OperatorNotFound, match=str(packet)):
    packet(tensor)
  op(packet)(lambda x: x + 1)
  assert_same(packet(tensor), ONES + 1)


def test_a_living_environment_sees_a_later_function():
  def torch_function(x):
    return torch.overrides.handle_torch_function(torch_function, (x,), x)

  tensor = on_jax()
  with torchax.default_env():
    register_torch_function_op(torch_function, lambda x: x + 5)
    try:
      assert_same(torch_function(tensor), ONES + 5)
    finally:
      del ops_registry.all_torch_functions[torch_function]


def test_an_override_belongs_to_one_environment(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  other = torchax.tensor.Environment()
  other.override_op_definition(packet, lambda x: x + 9)
  assert_same(packet(on_jax()), ONES + 1)
  assert_same(packet(other.to_xla(ONES)), ONES + 9)


def test_an_override_takes_functions_of_tensors(define):
  packet = define("(Tensor x) -> Tensor")
  env = torchax.tensor.Environment()
  env.override_op_definition(packet, lambda x: torch.cat([x, x]))
  assert_same(packet(env.to_xla(ONES)), torch.ones(6))


def test_an_override_takes_torch_functions():
  env = torchax.tensor.Environment()
  env.override_op_definition(torch.nn.functional.silu, lambda x, inplace=False: x - 7)
  with env:
    assert_same(torch.nn.functional.silu(env.to_xla(ONES)), ONES - 7)
  silu = torch.nn.functional.silu
  assert_same(silu(on_jax()), silu(ONES))


def test_an_override_seen_after_use_drops_what_was_cached():
  env = torchax.tensor.Environment()
  tensor = env.to_xla(ONES)
  assert_same(torch.neg(tensor), -ONES)
  env.override_op_definition(torch.ops.aten.neg, lambda x: x + 3)
  assert_same(torch.neg(tensor), ONES + 3)


# Finding ------------------------------------------------------------------------------


def test_an_operation_is_found_by_packet_and_by_overload():
  env = torchax.default_env()
  by_packet = env._get_op_or_decomp(torch.ops.aten.add)
  by_overload = env._get_op_or_decomp(torch.ops.aten.add.Tensor)
  assert by_packet is by_overload
  assert by_packet.func(jnp.ones(2), jnp.ones(2)).tolist() == [2.0, 2.0]


def test_a_decomposition_stands_in_for_a_lowering():
  env = torchax.default_env()
  decomposed = [
    operation
    for operation in ops_registry.decompositions
    if isinstance(operation, torch._ops.OpOverload)
    and operation not in ops_registry.all_aten_ops
    and operation.overloadpacket not in ops_registry.all_aten_ops
    and not _torch_compat.is_composite(operation)
  ]
  assert decomposed
  for operation in decomposed:
    found = env._get_op_or_decomp(operation)
    assert found.func is ops_registry.decompositions[operation]
    assert found.kind is Kind.TENSORS


def test_torchs_own_kernel_makes_a_composite_operation_of_its_parts():
  """Its reference in Python may take other arguments, or ask for itself."""
  composite = torch.ops.aten.nll_loss.default
  assert composite in ops_registry.decompositions
  found = torchax.default_env()._get_op_or_decomp(composite)
  scores, target = torch.rand(4, 3), torch.arange(3).repeat(2)[:4]
  summed = found.func(scores, target, None, 2, -100)
  assert summed == torch.nn.functional.nll_loss(scores, target, reduction="sum")


def test_an_unknown_operation_is_not_found(define):
  packet = define("(Tensor x) -> Tensor")
  with pytest.raises(OperatorNotFound, match=str(packet)):
    torchax.default_env()._get_op_or_decomp(packet)


def test_upstreams_names_lead_to_the_registry():
  assert jaten.op is op
  assert jaten.all_ops is ops_registry.all_aten_ops
  assert ops_registry.all_aten_ops[torch.ops.aten.add].is_jax_function


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
def test_the_flags_of_upstream_stand_for_one_kind(flags):
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
def test_a_kind_tells_the_flags_of_upstream(kind):
  operator = Operator(None, None, kind=kind)
  flags = (operator.is_jax_function, operator.needs_env, operator.is_view_op)
  if kind is not Kind.SAMPLER:
    assert Kind.from_flags(*flags) is kind
  else:
    assert flags == (True, False, False)


def test_every_registered_lowering_names_its_operation():
  for operation, operator in ops_registry.all_aten_ops.items():
    assert operator.torch_op is operation
    assert callable(operator.func)
