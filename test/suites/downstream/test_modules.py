"""Modules, views of compiled programs and names in downstream programs."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from compare import assert_same

import torchax
from torchax import interop
from torchax.train import make_train_step


class Model(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.w = torch.nn.Parameter(torch.eye(2))
    self.tied = self.w
    self.register_buffer("b", torch.zeros(2))
    self.inner = torch.nn.Linear(2, 2)

  def forward(self, x):
    return x @ self.w @ self.tied + self.b


X = torch.ones(1, 2)


@pytest.fixture(name="model")
def _model():
  return Model().to("jax")


def test_a_tensor_put_in_params_reaches_the_module(model):
  jitted = interop.JittableModule(model)
  assert_same(jitted(X.to("jax")), X)
  jitted.params["w"] = torch.eye(2, device="jax") * 3
  assert_same(jitted(X.to("jax")), X * 9)
  assert_same(model.w.detach(), torch.eye(2) * 3)
  assert model.tied is model.w is jitted.params["w"]
  assert isinstance(model.w, torch.nn.Parameter) and model.w.requires_grad


def test_tensors_put_in_tables_are_in_the_state_dict(model):
  jitted = interop.JittableModule(model)
  jitted.buffers["b"] = torch.ones(2, device="jax")
  jitted.params["w"] = torch.zeros(2, 2, device="jax")
  state = jitted.state_dict()
  assert_same(state["_model.b"], torch.ones(2))
  assert_same(state["_model.w"], torch.zeros(2, 2))
  assert_same(dict(jitted.named_parameters())["_model.w"].detach(), torch.zeros(2, 2))
  assert_same(jitted(X.to("jax")), X)


def test_params_are_assigned_as_a_whole_and_are_a_tree(model):
  jitted = interop.JittableModule(model)
  jitted.params = jax.tree.map(lambda p: p.detach() * 2, jitted.params)
  assert type(jitted.params) is dict
  assert_same(jitted(X.to("jax")), X * 4)
  arrays = interop.jax_view(jitted.params)
  on_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  placed = jax.device_put(arrays, {name: on_one for name in jitted.params})
  jitted.params.update(interop.torch_view(placed))
  assert_same(jitted(X.to("jax")), X * 4)


def test_a_change_of_the_module_shows_in_params(model):
  jitted = interop.JittableModule(model)
  params = jitted.params
  model.w = torch.nn.Parameter(torch.zeros(2, 2, device="jax"))
  assert jitted.params["w"] is model.w and jitted.params is params


def test_a_name_that_the_module_lacks_is_refused(model):
  jitted = interop.JittableModule(model)
  jitted.params["nowhere"] = torch.zeros(1, device="jax")
  with pytest.raises(KeyError, match="nowhere"):
    jitted(X.to("jax"))


@pytest.mark.parametrize("mode", ["jax", "dynamo"])
def test_a_wrapper_is_an_instance_of_the_models_class(model, mode):
  wrapper = torchax.compile(model, torchax.CompileOptions(mode=mode))
  assert isinstance(wrapper, Model) and isinstance(wrapper, torch.nn.Module)
  assert isinstance(wrapper, type(wrapper)) and wrapper.__class__ is Model
  for copied in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
    assert type(copied) is type(wrapper)
    assert_same(copied._model.w.detach(), torch.eye(2))


def test_a_training_loop_hands_tables_back(model):
  jitted = interop.JittableModule(model)
  optimizer = optax.sgd(0.1)
  step = make_train_step(
    lambda weights, buffers, args: jitted.functional_call(
      "forward", weights, buffers, *args
    ),
    lambda out, label: ((out - label) ** 2).mean(),
    optimizer,
  )
  state = interop.call_jax(optimizer.init, jitted.params)
  losses = []
  for _ in range(3):
    loss, jitted.params, state = step(
      jitted.params, jitted.buffers, state, (X.to("jax"),), X.to("jax") * 2
    )
    losses.append(float(loss))
  assert losses[2] < losses[1] < losses[0]


# Programs compiled ahead of time ------------------------------------------------------


def test_an_executable_takes_parameters(model):
  executable = jax.jit(jnp.matmul).lower(jnp.eye(2), jnp.eye(2)).compile()
  for out in (
    interop.torch_view(executable)(model.w, model.w),
    interop.call_jax(executable, model.w, model.w),
  ):
    assert_same(out, torch.eye(2))
    assert not out.requires_grad


def test_shard_map_is_jaxs():
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
  spec = jax.sharding.PartitionSpec("x")
  double = interop.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
  assert_same(interop.torch_view(double)(X.to("jax")), X * 2)


# Names --------------------------------------------------------------------------------

MODULES = (
  *("torch", "jax", "amp", "checkpoint", "config", "device_module", "interop"),
  *("ops", "tensor", "types", "util", "view"),
)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_found_on_the_package(name):
  assert getattr(torchax, name).__name__ in (name, f"torchax.{name}")


def test_forward_is_compiled_by_default():
  assert torchax.CompileOptions().methods_to_compile == ["forward"]
  double = torchax.compile(lambda x: 2 * x, torchax.CompileOptions())
  assert_same(double(X.to("jax")), X * 2)


def test_a_file_of_torch_is_loaded_onto_jax(tmp_path):
  path = tmp_path / "x.pt"
  torch.save({"w": torch.arange(3.0), "step": 3, "l": [torch.zeros(1)]}, path)
  state = torchax.load_checkpoint(str(path))
  assert state["step"] == 3 and state["w"].device.type == "jax"
  assert_same(state["w"], torch.arange(3.0))
  np.testing.assert_array_equal(interop.jax_view(state["l"][0]), np.zeros(1))
