"""Operators of one environment: overrides, and tables that programs change."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same

import torchax
from torchax.interop import call_jax, jax_jit, torch_view
from torchax.ops.ops_registry import Operator, all_aten_ops
from torchax.tensor import Tensor, XLAFunctionMode

F = torch.nn.functional
ONES = torch.ones(3)
aten = torch.ops.aten


@pytest.fixture(name="env")
def _env():
  return torchax.Environment()


OVERRIDDEN = {
  "packet": (aten.tanh, torch.tanh),
  "overload": (aten.tanh.default, torch.tanh),
  "function": (F.softsign, F.softsign),
  # Operations with a shortcut.
  "shortcut": (F.gelu, F.gelu),
  "method": (torch.Tensor.matmul, lambda x: x.matmul(x)),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
@pytest.mark.parametrize("is_view_op", [False, True])
def test_an_override_gets_tensors_and_may_call_torch(env, name, is_view_op):
  op, call = OVERRIDDEN[name]
  seen = []

  def impl(x, *args, **kwargs):
    seen.append(type(x))
    return torch.cat([x, x])

  env.override_op_definition(op, impl, is_view_op=is_view_op)
  with env:
    assert_same(call(env.to_xla(ONES)), torch.ones(6))
  assert seen == [Tensor]
  assert env._ops[op].func is impl


def test_an_override_may_ask_for_arrays(env):
  seen = []

  def impl(x):
    seen.append(isinstance(x, jax.Array))
    return x + 2

  env.override_op_definition(F.softsign, impl, is_jax_function=True)
  x = env.to_xla(ONES).requires_grad_()
  with env:
    F.softsign(x).sum().backward()
  assert seen and all(seen)
  assert_same(x.grad, ONES)


def test_an_override_reaches_the_in_place_and_out_forms(env):
  env.override_op_definition(aten.tanh, lambda x: x + 5)
  with env:
    x = env.to_xla(ONES)
    assert_same(torch.tanh(x, out=torch.zeros(3, device="jax")), ONES + 5)
    view = x[:2]
    view.tanh_()
    assert_same(x, torch.tensor([6.0, 6.0, 1.0]))


def test_attention_is_replaced_by_a_kernel_and_falls_back(env):
  """Programs with a kernel of their own do this for long sequences."""
  ours = env._ops[F.scaled_dot_product_attention]
  kernel = lambda q, k, v: q + k + v  # noqa: E731

  def attention(query, key, value, *args, env=None, **kwargs):
    if query.shape[-2] < 8:
      return ours.func(query, key, value, *args, env=env, **kwargs)
    return call_jax(kernel, query, key, value)

  env._ops[F.scaled_dot_product_attention] = Operator(
    F.scaled_dot_product_attention,
    functools.partial(attention, env=env),
    is_jax_function=False,
    is_user_defined=True,
    needs_env=False,
    is_view_op=False,
  )
  short, long = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8, 8)
  with env:
    on_jax = [env.to_xla(q) for q in (short, long)]
    eager = [F.scaled_dot_product_attention(q, q, q, is_causal=True) for q in on_jax]
  expected = F.scaled_dot_product_attention(short, short, short, is_causal=True)
  torch.testing.assert_close(eager[0].cpu(), expected, rtol=1e-4, atol=1e-5)
  assert_same(eager[1], 3 * long)


def test_operator_in_the_table_can_be_replaced_and_restored(env):
  before = env._ops[aten.tanh]
  x = env.to_xla(ONES)
  env._ops[aten.tanh] = Operator(aten.tanh, lambda x: x * 7, True, False, False, False)
  assert_same(torch.tanh(x), ONES * 7)
  assert_same(torch.tanh(torch.ones(3).to("jax")), torch.tanh(ONES))
  env._ops[aten.tanh] = before
  assert env._ops[aten.tanh] is before
  assert_same(torch.tanh(x), torch.tanh(ONES))


def test_decomposition_runs_after_its_operator_is_deleted(env):
  x = env.to_xla(torch.rand(2, 4))
  expected = F.silu(x)
  del env._ops[aten.silu]
  assert aten.silu not in env._ops
  env._decomps[aten.silu.default] = Operator(
    aten.silu.default, lambda x: 10 * x, is_jax_function=False
  )
  assert_same(aten.silu(x), (10 * x).cpu())
  assert_same(F.silu(x.cpu().to("jax")), expected.cpu())


def test_tables_read_as_dicts(env):
  assert aten.add in env._ops and F.linear in env._ops
  assert len(env._ops) == len(list(env._ops)) > 400
  assert env._ops.get(object()) is None
  decomposed = next(iter(env._decomps))
  assert callable(env._decomps[decomposed].func)
  with pytest.raises(KeyError):
    del env._ops["aten::no_such"]


@pytest.mark.parametrize("of_one", [False, True])
def test_an_overload_is_found_where_its_packet_is_registered(env, of_one):
  """Programs that wrap an existing lowering do this."""
  table = env._ops if of_one else all_aten_ops
  ours = table[aten.mul.Tensor]
  assert ours is table[aten.mul] and ours.is_jax_function
  assert_same(torch_view(ours.func(jnp.ones(3), 2)), ONES * 2)
  assert table[aten.mm] is table[aten.mm.default] and table[aten.mm].is_jax_function
  if of_one:
    assert aten.mul.Tensor in table
    doubled = lambda *args: 2 * ours.func(*args)  # noqa: E731
    table[aten.mul.Tensor] = Operator(
      aten.mul.Tensor, doubled, True, False, False, False
    )
    assert_same(torch.mul(env.to_xla(ONES), 3), ONES * 6)
    assert table[aten.mul.Scalar] is ours


def test_an_operation_of_no_registry_has_no_entry():
  with pytest.raises(KeyError):
    all_aten_ops[aten.copy_.default]


def test_an_entry_that_is_no_operator_is_refused(env):
  before = env._ops[aten.tanh]
  with pytest.raises(TypeError, match="Operator"):
    env._ops[aten.tanh] = jnp.tanh
  assert env._ops[aten.tanh] is before


def test_a_compiled_function_runs_the_override(env):
  default = torchax.default_env()
  default.override_op_definition(aten.softplus, lambda x, *a: x + 4)
  try:
    with default:
      assert_same(jax_jit(F.softplus)(torch.ones(3, device="jax")), ONES + 4)
  finally:
    default._ops[aten.softplus] = default._ops[aten.softplus].replaced
  assert_same(F.softplus(ONES.to("jax")), F.softplus(ONES))


# Modes and mesh -----------------------------------------------------------------------


def test_the_modes_are_entered_by_themselves(env):
  with env._dispatch_mode, env._function_mode:
    assert torch.ones(3, device="jax").device.type == "jax"
    env.override_op_definition(F.softsign, lambda x: x * 9)
    assert_same(F.softsign(env.to_xla(ONES)), ONES * 9)


def test_a_mode_of_the_programs_own_is_used(env):
  seen = []

  class Noting(XLAFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
      seen.append(getattr(func, "__name__", ""))
      return super().__torch_function__(func, types, args, kwargs)

  env._function_mode = mode = Noting(env)
  assert env._function_mode is mode
  with env:
    F.softsign(env.to_xla(ONES))
  assert "softsign" in seen


def test_the_mesh_is_set_on_the_environment(env):
  mesh = jax.make_mesh((1,), ("x",))
  assert env._mesh is None
  env._mesh = mesh
  assert env._mesh is env.param.mesh is mesh
  with env.override_property(mesh=None):
    assert env._mesh is None
  assert env._mesh is mesh and str(mesh) in repr(env)
  assert torchax.default_env()._mesh is None
