"""Modules as compiled programs and as functions of their tensors."""

import copy
import functools

import jax
import pytest
import torch
from compare import assert_same
from ops.harness import floats

from torchax import interop
from torchax.interop import JittableModule, jax_jit

A = floats(3, 4)


B = floats(3, 4, seed=1)


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


def test_extract_jax_takes_a_single_argument():
  arrays, function = interop.extract_jax(torch.nn.Linear(4, 2))
  x = jax.numpy.ones((3, 4))
  assert (function(arrays, x) == function(arrays, (x,))).all()


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
