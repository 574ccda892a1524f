"""Between the worlds: conversion, calls across, modules as compiled programs.

That random draws agree across these boundaries is asserted in `rng/`.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same
from ops.harness import floats

import torchax
from torchax import interop
from torchax.errors import MixedDeviceError, MutationError
from torchax.interop import JittableModule, jax_jit
from torchax.tensor import Tensor

A = floats(3, 4)
B = floats(3, 4, seed=1)
env = torchax.default_env()


@pytest.fixture(name="x")
def _x() -> Tensor:
  return A.to("jax")


# Views of values ----------------------------------------------------------------------


def test_trees_convert_without_copies(x):
  tree = {"a": [x, 1, "s", None], "b": (x, 2.5)}
  arrays = interop.jax_view(tree)
  assert arrays["a"][0] is x.jax() and arrays["a"][1:] == [1, "s", None]
  back = interop.torch_view(arrays)
  assert back["b"][0].jax() is x.jax() and back["b"][1] == 2.5
  assert isinstance(back["a"][0], Tensor)


DTYPES = {
  torch.float32: jnp.dtype("float32"),
  torch.bfloat16: jnp.dtype("bfloat16"),
  torch.int32: jnp.dtype("int32"),
  torch.bool: jnp.dtype("bool"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_convert(dtype):
  assert interop.jax_view(dtype) == DTYPES[dtype]
  assert interop.torch_view(DTYPES[dtype]) == dtype


@pytest.mark.parametrize("scalar_type", [np.float32, np.int32], ids=str)
def test_numpy_scalar_types_are_dtypes(scalar_type):
  assert interop.torch_view(scalar_type) == interop.torch_view(np.dtype(scalar_type))


def test_elem_views_convert_one_value_not_a_tree(x):
  assert interop.jax_view_elem(x) is x.jax()
  assert interop.torch_view_elem(x.jax()).jax() is x.jax()
  assert interop.jax_view_elem("s") == interop.torch_view_elem("s") == "s"
  assert interop._jax_view(x) is x.jax()
  assert interop._torch_view(x.jax()).jax() is x.jax()


def test_other_values_are_unchanged():
  values = [1, 2.5, "s", None, True, slice(1)]
  assert interop.jax_view(values) == values
  assert interop.torch_view(values) == values
  assert interop.torch_view(int) is int and interop.jax_view(int) is int


def test_typed_keys_stay_keys():
  key = jax.random.key(0)
  assert interop.torch_view(key) is key


def test_a_cpu_tensor_is_no_jax_value():
  with pytest.raises(MixedDeviceError, match=r'to\("jax"\)'):
    interop.jax_view([A])


def test_a_view_reads_its_base(x):
  assert jnp.array_equal(interop.jax_view(x.t()[1]), x.jax().T[1])


# Functions ----------------------------------------------------------------------------


def test_a_torch_function_is_a_jax_function(x):
  function = interop.jax_view(torch.nn.functional.gelu)
  result = function(x.jax())
  assert isinstance(result, jax.Array)
  assert_same(interop.torch_view(result), torch.nn.functional.gelu(A))
  assert function.__name__ == "gelu" and "gelu" in repr(function)


TRANSFORMS = {
  "jit": jax.jit,
  "vmap": jax.vmap,
  "jit_of_vmap": lambda f: jax.jit(jax.vmap(f)),
  "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_torch_function_takes_jax_transformations(transform, x):
  function = interop.jax_view(lambda a: torch.softmax(a * 2, -1) + a.sum(-1, True))
  expected = torch.softmax(A * 2, -1) + A.sum(-1, True)
  assert_same(interop.torch_view(transform(function)(x.jax())), expected)


def test_a_torch_function_takes_jax_differentiation(x):
  function = interop.jax_view(lambda a, w: ((a @ w.t()) ** 2).sum())
  value, grads = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(
    x.jax(), jnp.asarray(B.numpy())
  )
  a, w = A.clone().requires_grad_(), B.clone().requires_grad_()
  expected = ((a @ w.t()) ** 2).sum()
  expected.backward()
  assert_same(interop.torch_view(value), expected.detach())
  assert_same(interop.torch_view(list(grads)), [a.grad, w.grad])


def test_a_module_is_a_jax_function(x):
  model = torch.nn.Linear(4, 2)
  expected = model(A)
  function = jax.jit(interop.jax_view(model.to("jax")))
  assert_same(interop.torch_view(function(x.jax())), expected.detach())


def test_a_jax_function_is_a_torch_function(x):
  function = interop.torch_view(lambda a, b, scale=1: {"sum": (a + b) * scale})
  result = function(x, x, scale=2)
  assert isinstance(result["sum"], Tensor)
  assert_same(result, {"sum": A * 4})


def test_call_jax_converts_arguments_and_results(x):
  assert_same(interop.call_jax(jnp.matmul, x, x.t()), A @ A.t())
  assert_same(
    interop.call_jax(
      lambda tree, dtype: tree["a"].astype(dtype), {"a": x}, torch.int32
    ),
    A.int(),
  )
  assert interop.call_jax(lambda a: a.shape, x) == (3, 4)


def test_call_jax_takes_functions_as_arguments(x):
  doubled = interop.call_jax(jax.vmap, lambda row: row * 2)(x)
  assert_same(doubled, A * 2)
  carry, rows = interop.call_jax(
    jax.lax.scan, lambda c, row: (c + row, c * 1.0), torch.zeros(4, device="jax"), x
  )
  assert_same(carry, A.sum(0))
  assert_same(rows, torch.stack([torch.zeros(4), A[0], A[0] + A[1]]))


def test_call_torch_converts_arguments_and_results(x):
  result = interop.call_torch(torch.matmul, x.jax(), x.jax().T)
  assert isinstance(result, jax.Array)
  assert_same(interop.torch_view(result), A @ A.t())
  cast = interop.call_torch(lambda a, dtype: a.to(dtype), x.jax(), jnp.dtype("int8"))
  assert cast.dtype == jnp.int8
  assert interop.call_torch(lambda a: a.shape[0], x.jax()) == 3


def test_call_torch_enables_the_environment_for_the_call():
  assert interop.call_torch(lambda: env.enabled)
  assert not env.enabled


def test_call_torch_ends_after_an_error():
  def fail():
    raise KeyError("stop")

  with pytest.raises(KeyError, match="stop"):
    interop.call_torch(fail)
  assert not env.enabled


def test_call_torch_changes_outer_tensors_outside_of_a_trace(x):
  interop.call_torch(lambda a: x.add_(a), jnp.ones(()))
  assert_same(x, A + 1)


def test_raw_transformation_rejects_a_captured_write(x):
  function = interop.jax_view(lambda a: x.add_(a) * 1)
  with pytest.raises(MutationError, match="jax_jit") as error:
    jax.jit(function)(jnp.ones(()))
  assert "[3, 4]" in str(error.value)
  assert_same(x, A)


def test_raw_transformation_keeps_an_argument_write_inside(x):
  function = jax.jit(interop.jax_view(lambda a: a.add_(1) * 2))
  assert_same(interop.torch_view(function(x.jax())), (A + 1) * 2)
  assert_same(x, A)


# jax_jit ------------------------------------------------------------------------------


def test_a_compiled_function_equals_the_function(x):
  def function(a, b, *, scale=1.0, extra=None):
    out = {"mm": a @ b.t() * scale, "rows": [a[0], b.sum()]}
    return (out, extra)

  other = B.to("jax")
  compiled = jax_jit(function)
  assert_same(compiled(x, other), function(A, B))
  assert_same(compiled(x, other, scale=2.0), function(A, B, scale=2.0))
  assert_same(compiled(x, other, extra=x), function(A, B, extra=A))


def test_a_compiled_function_is_traced_once_per_shape(x):
  traces = []

  @jax_jit
  def function(a):
    traces.append(tuple(a.shape))
    return a * 2

  for values in (x, x + 1, x[:2], x):
    function(values)
  assert traces == [(3, 4), (2, 4)]
  assert function.__name__ == "function"


def test_static_argnums_refer_to_the_users_arguments(x):
  compiled = jax_jit(lambda a, name, n: getattr(a, name)(n), {"static_argnums": (1, 2)})
  assert_same(compiled(x, "sum", 0), A.sum(0))
  assert_same(compiled(x, "mean", 1), A.mean(1))
  by_name = jax_jit(lambda a, *, dim: a.sum(dim), {"static_argnames": ("dim",)})
  assert_same(by_name(x, dim=1), A.sum(1))
  last = jax_jit(lambda a, dim: a.sum(dim), {"static_argnums": -1})
  assert_same(last(x, 1), A.sum(1))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donate_argnums_refer_to_the_users_arguments(x):
  kept = B.to("jax")
  compiled = jax_jit(lambda a, b: a + b, {"donate_argnums": (0,)})
  assert_same(compiled(x, kept), A + B)
  assert not kept.jax().is_deleted()


def test_a_compiled_function_can_be_lowered(x):
  compiled = jax_jit(lambda a: torch.tanh(a))
  assert "tanh" in compiled.lower(x).as_text()
  assert "tanh" in str(compiled.trace(x).jaxpr)
  assert_same(compiled(x), A.tanh())


def test_changes_of_arguments_reach_the_caller(x):
  alias = x.view(-1)

  @jax_jit
  def change(a, b):
    a.mul_(2)
    b[0] = a[1]
    return a.sum()

  other = B.to("jax")
  change(x, other)
  expected = B.clone()
  expected[0] = A[1] * 2
  assert_same(x, A * 2)
  assert_same(alias, A.view(-1) * 2)
  assert_same(other, expected)


def test_changes_of_captured_tensors_reach_the_caller(x):
  counter = torch.zeros((), dtype=torch.int32, device="jax")

  @jax_jit
  def count(a):
    counter.add_(1)
    return a * counter

  for n in (1, 2, 3):
    assert_same(count(x), A * n)
  assert_same(counter, torch.tensor(3, dtype=torch.int32))


def test_captured_tensors_are_operands_not_constants(x):
  weight = B.to("jax")
  traces = []

  @jax_jit
  def function(a):
    traces.append(1)
    return a * weight

  assert_same(function(x), A * B)
  before = len(traces)
  weight.zero_()
  assert_same(function(x), A * 0)
  assert len(traces) == before


def test_one_tensor_given_twice_is_one_tensor(x):
  @jax_jit
  def change(a, b):
    a.add_(1)
    return b * 1

  assert_same(change(x, x), A + 1)
  assert_same(x, A + 1)


def test_compiled_functions_nest(x):
  inner = jax_jit(lambda a: a.mul_(2))
  outer = jax_jit(lambda a: inner(a) + 1)
  assert_same(outer(x), A * 2 + 1)
  assert_same(x, A * 2)


def test_a_cpu_tensor_is_refused_by_a_compiled_function(x):
  compiled = jax_jit(lambda a, b: a + b)
  with pytest.raises(MixedDeviceError, match="jax"):
    compiled(x, B)
  assert_same(compiled(x, torch.tensor(1.0)), A + 1)


def test_another_compiler_can_be_wrapped(x):
  calls = []

  def my_jit(function, **kwargs):
    calls.append(kwargs)
    return jax.jit(function, **kwargs)

  compiled = interop.wrap_jax_jit(
    lambda a, n: a.add_(n), my_jit, {"static_argnums": (1,)}
  )
  assert_same(compiled(x, 2), A + 2)
  assert_same(x, A + 2)
  assert len(calls) == 1
  assert_same(interop.wrap_jax_jit(torch.neg)(x), -(A + 2))


# Differentiation and rematerialisation ------------------------------------------------


def test_value_and_grad_gives_the_gradients_of_torch(x):
  def loss(a, b):
    return (a * b).tanh().sum()

  a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
  loss(a, b).backward()
  other = B.to("jax")
  value, grad = interop.jax_value_and_grad(loss)(x, other)
  assert_same([value, grad], [loss(A, B), a.grad])
  _, grads = interop.jax_value_and_grad(loss, {"argnums": (0, 1)})(x, other)
  assert_same(list(grads), [a.grad, b.grad])
  (_, aux), grad = interop.jax_value_and_grad(
    lambda a, b: (loss(a, b), {"aux": a + b}), {"has_aux": True, "argnums": 1}
  )(x, other)
  assert_same([aux, grad], [{"aux": A + B}, b.grad])


def test_value_and_grad_takes_trees_of_parameters(x):
  params = {"w": B.to("jax"), "b": torch.zeros(3, device="jax")}
  value, grads = interop.jax_value_and_grad(
    lambda p, a: ((a @ p["w"].t() + p["b"]) ** 2).sum()
  )(params, x)
  w, b = B.clone().requires_grad_(), torch.zeros(3, requires_grad=True)
  expected = ((A @ w.t() + b) ** 2).sum()
  expected.backward()
  assert_same([value, grads], [expected.detach(), {"w": w.grad, "b": b.grad}])


def test_value_and_grad_can_be_compiled(x):
  compiled = jax_jit(interop.jax_value_and_grad(lambda a: (a**3).sum()))
  assert_same(list(compiled(x)), [(A**3).sum(), 3 * A**2])


def test_changes_under_value_and_grad_reach_the_caller(x):
  calls = torch.zeros((), device="jax")

  def loss(a):
    calls.add_(1)
    return (a**2).sum()

  _, grad = interop.jax_value_and_grad(loss)(x)
  assert_same([grad, calls], [A * 2, torch.ones(())])


def test_a_checkpoint_keeps_values_and_gradients(x):
  def block(a):
    return (a.sin() * a).sum()

  checkpointed = interop.gradient_checkpoint(block)
  assert_same(checkpointed(x), block(A))
  leaf = A.clone().requires_grad_()
  block(leaf).backward()
  _, grad = interop.jax_value_and_grad(checkpointed)(x)
  assert_same(grad, leaf.grad)
  text = jax.make_jaxpr(interop.jax_view(checkpointed))(x.jax()).pretty_print()
  assert "checkpoint" in text or "remat" in text


# Modules ------------------------------------------------------------------------------


class Everything(torch.nn.Module):
  """Holds tensors in every place where a module can hold them."""

  def __init__(self):
    super().__init__()
    self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    self.layers[1].weight = self.layers[0].weight
    self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4))])
    self.norm = torch.nn.BatchNorm1d(4)
    self.register_buffer("offset", torch.full((4,), 0.5))
    self.register_buffer("hidden", torch.zeros(4), persistent=False)
    self.register_parameter("missing", None)
    self.attribute = torch.full((4,), 2.0)

  def forward(self, x):
    for layer in self.layers:
      x = layer(x)
    return self.norm(x * self.scales[0]) + self.offset + self.hidden + self.attribute

  def twice(self, x, *, scale=1.0):
    """A method of another name."""
    return self.scales[0] * x * 2 * scale


def everything() -> tuple[Everything, Everything]:
  """A module on the CPU and its twin on jax, plain attributes included."""
  torch.manual_seed(0)
  cpu = Everything()
  model = copy.deepcopy(cpu).to("jax")
  model.attribute = cpu.attribute.to("jax")
  model.layers[1].weight = model.layers[0].weight
  return cpu, model


NAMES = {
  "layers.0.weight",
  "layers.0.bias",
  "layers.1.weight",
  "layers.1.bias",
  "scales.0",
  "norm.weight",
  "norm.bias",
}
BUFFERS = {
  "offset",
  "hidden",
  "attribute",
  "norm.running_mean",
  "norm.running_var",
  "norm.num_batches_tracked",
}


def test_all_tensors_of_a_module_are_found():
  params, buffers = interop.extract_all_buffers(everything()[1])
  assert set(params) == NAMES
  assert set(buffers) == BUFFERS


def test_all_tensors_of_a_module_can_be_replaced():
  cpu, model = everything()
  params, buffers = interop.extract_all_buffers(model)
  zeros = {name: torch.zeros_like(value) for name, value in params.items()}
  ones = {name: torch.ones_like(value) for name, value in buffers.items()}
  interop.set_all_buffers(model, zeros, ones)
  found = interop.extract_all_buffers(model)
  assert all(found[0][name] is zeros[name] for name in NAMES)
  assert all(found[1][name] is ones[name] for name in BUFFERS)
  interop.set_all_buffers(model, params, buffers)
  assert_same(model.eval()(A.to("jax")).detach(), cpu.eval()(A).detach())


def test_set_all_buffers_names_an_unknown_tensor():
  with pytest.raises(KeyError, match="nowhere"):
    interop.set_all_buffers(everything()[1], {"nowhere": A}, {})


def test_a_compiled_module_equals_the_module():
  cpu, model = everything()
  jitted = JittableModule(model)
  assert_same(jitted(A.to("jax")).detach(), cpu(A).detach())
  assert_same(jitted.forward(B.to("jax")).detach(), cpu(B).detach())


def test_a_compiled_module_updates_its_statistics():
  cpu, model = everything()
  jitted = JittableModule(model)
  for values in (A, B, A):
    cpu(values)
    jitted(values.to("jax"))
  assert_same(dict(model.norm.state_dict()), dict(cpu.norm.state_dict()))
  assert not any(isinstance(b.jax(), jax.core.Tracer) for b in model.buffers())


def test_parameter_updates_do_not_retrace_a_compiled_module():
  cpu, model = everything()
  traces = []
  model.register_forward_hook(lambda *args: traces.append(1))
  jitted = JittableModule(model.eval())
  cpu.eval()
  jitted(A.to("jax"))
  before = len(traces)
  for net in (cpu, model):
    with torch.no_grad():
      for parameter in net.parameters():
        parameter.mul_(0.5)
      net.attribute.add_(1)
      net.offset.zero_()
  assert_same(jitted(A.to("jax")).detach(), cpu(A).detach())
  model.load_state_dict(Everything().state_dict())
  cpu.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
  assert_same(jitted(A.to("jax")).detach(), cpu(A).detach())
  assert len(traces) == before


def test_train_and_eval_compile_separately():
  cpu, model = everything()
  jitted = JittableModule(model)
  for mode in (True, False, True):
    cpu.train(mode)
    model.train(mode)
    assert_same(jitted(A.to("jax")).detach(), cpu(A).detach())
  model.norm.eval()  # one module of many
  cpu.norm.eval()
  assert_same(jitted(B.to("jax")).detach(), cpu(B).detach())


def test_the_wrapper_passes_train_and_eval_on():
  cpu, model = everything()
  jitted = JittableModule(model)
  jitted.eval()
  assert not model.training and not model.norm.training
  assert_same(jitted(A.to("jax")).detach(), cpu.eval()(A).detach())


def test_any_method_can_be_compiled():
  cpu, model = everything()
  jitted = JittableModule(model)
  result = jitted.jittable_call("twice", A.to("jax"), scale=3.0)
  assert_same(result.detach(), cpu.twice(A, scale=3.0).detach())
  jitted.make_jitted("forward")
  assert_same(jitted(A.to("jax")).detach(), cpu(A).detach())


def test_a_functional_call_uses_the_given_tensors():
  cpu, model = everything()
  jitted = JittableModule(model.eval())
  cpu.eval()
  params = {name: value * 0 for name, value in jitted.params.items()}
  result = jitted.functional_call("forward", params, {}, A.to("jax"))
  own = jitted.functional_call("forward", {}, {}, A.to("jax"))
  assert_same(own.detach(), cpu(A).detach())
  for parameter in cpu.parameters():
    parameter.data.zero_()
  assert_same(result.detach(), cpu(A).detach())
  assert model.layers[0].weight.abs().sum() > 0


def test_a_functional_call_takes_a_function_of_the_module():
  _, model = everything()
  jitted = JittableModule(model)
  result = jitted.functional_call(lambda m, x: m.offset * x, {}, {}, A.to("jax"))
  assert_same(result, A * 0.5)


def test_a_functional_call_can_be_compiled_and_differentiated():
  cpu, model = everything()
  jitted = JittableModule(model.eval())
  cpu.eval()

  def loss(params, buffers, x):
    return (jitted.functional_call("forward", params, buffers, x) ** 2).sum()

  step = jax_jit(interop.jax_value_and_grad(loss))
  value, grads = step(jitted.params, jitted.buffers, A.to("jax"))
  expected = (cpu(A) ** 2).sum()
  expected.backward()
  assert_same(value.detach(), expected.detach())
  for name, parameter in cpu.named_parameters():
    assert_same(grads[name].detach(), parameter.grad, name)


def test_shared_parameters_are_passed_once_if_deduplicated():
  _, model = everything()
  assert set(JittableModule(model).params) == NAMES - {"layers.1.weight"}
  kept = JittableModule(model, dedup_parameters=False)
  assert set(kept.params) == NAMES
  assert set(kept.buffers) == BUFFERS


def test_options_of_jax_jit_reach_it():
  _, model = everything()
  jitted = JittableModule(model.eval(), {"static_argnums": (1,)})
  jitted._model.twice = functools.partial(_static_method, model)
  assert_same(jitted.jittable_call("twice", A.to("jax"), 3), A * 3)


def _static_method(model, x, n):
  assert type(n) is int
  return x * n


def test_a_backward_pass_can_be_compiled_with_its_module():
  cpu, model = everything()
  # In training, BatchNorm leaves the bias before it a gradient of rounding errors.
  cpu.eval()
  model.eval()

  @jax_jit
  def step(x):
    loss = (model(x) ** 2).sum()
    loss.backward()
    return loss.detach()

  expected = (cpu(A) ** 2).sum()
  expected.backward()
  assert_same(step(A.to("jax")), expected.detach())
  for (name, have), want in zip(model.named_parameters(), cpu.parameters()):
    assert_same(have.grad, want.grad, name)
