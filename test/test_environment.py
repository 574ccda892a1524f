"""`Environment`: turning it on and off, properties and conversions."""

import contextlib
import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_close, assert_same
from ops.harness import floats
from torch.overrides import TorchFunctionMode

import torchax
from torchax.config import Configuration
from torchax.environment import (
  Environment,
  RuntimeProperty,
  XLADispatchMode,
  XLAFunctionMode,
  _None,
)
from torchax.errors import MixedDeviceError
from torchax.tensor import Tensor
from torchax.view import View

A = floats(2, 3)
env = torchax.default_env()


def modes() -> int:
  """Return the number of torch function modes of this thread."""
  return torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
  before = modes()
  yield
  assert modes() == before
  assert not env.enabled


class Passing(TorchFunctionMode):
  """Mode of another library, which only records calls."""

  def __init__(self):
    super().__init__()
    self.seen = 0

  def __torch_function__(self, func, types, args=(), kwargs=None):
    self.seen += 1
    return func(*args, **(kwargs or {}))


# On and off ---------------------------------------------------------------------------


def test_there_is_one_default_environment():
  assert torchax.default_env() is env
  found = []
  thread = threading.Thread(target=lambda: found.append(torchax.default_env()))
  thread.start()
  thread.join()
  assert found == [env]


def test_the_block_enables_and_disables():
  assert not env.enabled
  with env as entered:
    assert entered is env and env.enabled
  assert not env.enabled


def test_operations_on_jax_tensors_need_no_block():
  assert_same(A.to("jax") + 1, A + 1)
  assert_same(torch.ones(2, device="jax").exp(), torch.ones(2).exp())


def test_cpu_tensors_stay_on_the_cpu_inside_the_block():
  with env:
    assert type(torch.ones(2)) is torch.Tensor
    assert type(torch.tensor([1.0]) + 1) is torch.Tensor
    assert type(A.to(torch.float64)) is torch.Tensor
    assert A.to("cpu") is A


def test_blocks_nest():
  with env:
    with env:
      assert env.enabled
    assert env.enabled
  assert not env.enabled


def test_block_ends_after_an_exception():
  with pytest.raises(KeyError), env:
    raise KeyError
  assert not env.enabled


def test_the_environment_decorates_functions():
  @env
  def inside():
    return env.enabled

  assert inside()
  assert not env.enabled


def test_environment_is_on_in_one_thread_only():
  seen = []
  with env:
    thread = threading.Thread(target=lambda: seen.append(env.enabled))
    thread.start()
    thread.join()
  assert seen == [False]


def test_enabling_globally_lasts_until_it_is_disabled():
  torchax.enable_globally()
  try:
    assert env.enabled
    assert isinstance(torch.tensor([1.0], device="jax"), Tensor)
  finally:
    torchax.disable_globally()
  assert not env.enabled


def test_enabling_globally_nests_with_blocks():
  torchax.enable_globally()
  with env:
    pass
  assert env.enabled
  torchax.enable_globally()
  torchax.disable_globally()
  assert env.enabled
  torchax.disable_globally()
  assert not env.enabled


def test_disable_without_enable_raises():
  with pytest.raises(RuntimeError, match="not enabled"):
    torchax.disable_globally()


def test_disable_temporarily_runs_plain_torch_in_its_block():
  with env:
    with torchax.disable_temporarily():
      assert not env.enabled
    assert env.enabled


def test_disabled_environment_handles_no_torch_function():
  own = Environment()
  own.override_op_definition(torch.nn.functional.softsign, lambda x: x * 9)
  x = own.to_xla(A)
  with own, own.disabled():
    assert_same(torch.nn.functional.softsign(x), torch.nn.functional.softsign(A))
  assert_same(torch.nn.functional.softsign(x), A * 9)


def test_disable_temporarily_ends_after_an_exception():
  with env:
    with pytest.raises(KeyError), torchax.disable_temporarily():
      raise KeyError
    assert env.enabled


def test_disable_temporarily_nests():
  with env:
    with torchax.disable_temporarily():
      with torchax.disable_temporarily():
        assert not env.enabled
      assert not env.enabled
    assert env.enabled


def test_disable_temporarily_without_a_block_is_allowed():
  with torchax.disable_temporarily():
    assert not env.enabled
  assert not env.enabled


def test_block_inside_disable_temporarily_stays_disabled():
  with torchax.disable_temporarily(), env:
    assert not env.enabled


def test_block_may_end_before_a_mode_entered_inside_it():
  other = Passing()
  env.enable_torch_modes()
  with other:
    env.disable_torch_modes()
    assert not env.enabled
    torch.ones(2)
    assert other.seen
    env.enable_torch_modes()
    assert isinstance(torch.tensor([1.0], device="jax"), Tensor)
  assert env.enabled
  env.disable_torch_modes()


def test_another_mode_inside_a_block_sees_every_function():
  other = Passing()
  with env, other:
    x = torch.tensor([1.0], device="jax")
    torch.nn.functional.silu(x)
  assert other.seen >= 2
  with other, env:
    torch.nn.functional.silu(x)


def test_mode_may_exit_before_the_block_around_it():
  with contextlib.ExitStack() as stack:
    stack.enter_context(env)
    with Passing():
      with torchax.disable_temporarily():
        assert not env.enabled
      assert env.enabled
    assert env.enabled


def test_two_environments_can_be_on_at_once():
  other = Environment()
  with env, other:
    assert env.enabled and other.enabled
  with other:
    assert not env.enabled


def test_the_modes_of_upstream_exist():
  assert issubclass(XLAFunctionMode, TorchFunctionMode)
  assert issubclass(XLADispatchMode, torch.utils._python_dispatch.TorchDispatchMode)
  with XLAFunctionMode(env), XLADispatchMode(env):
    assert_same(A.to("jax") + 1, A + 1)


def test_load_ops_exists_for_upstream_callers():
  assert env.load_ops() is None


# "cuda" means "jax" -------------------------------------------------------------------

CUDA = {
  "factory": lambda: torch.ones(2, device="cuda"),
  "factory_index": lambda: torch.ones(2, device="cuda:0"),
  "factory_device": lambda: torch.ones(2, device=torch.device("cuda")),
  "random": lambda: torch.randn(2, device="cuda"),
  "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda"),
  "to": lambda: torch.ones(2).to("cuda"),
  "to_keyword": lambda: torch.ones(2).to(device="cuda", dtype=torch.float16),
  "cuda": lambda: torch.ones(2).cuda(),
  "jax_to_cuda": lambda: torch.ones(2, device="jax").to("cuda"),
  "module_to": lambda: torch.nn.Linear(2, 1).to("cuda").weight,
  "module_cuda": lambda: torch.nn.Linear(2, 1).cuda().weight,
}


@pytest.mark.parametrize("make", CUDA.values(), ids=CUDA)
def test_cuda_means_jax_if_configured(make):
  with Environment(Configuration(treat_cuda_as_jax_device=True)):
    assert isinstance(make(), Tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda itself would answer")
@pytest.mark.parametrize("name", [name for name in CUDA if name != "jax_to_cuda"])
def test_cuda_is_unchanged_outside_the_environment(name):
  with pytest.raises((AssertionError, RuntimeError)):
    CUDA[name]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda itself would answer")
def test_cuda_does_not_mean_jax_by_default():
  for name in ("factory", "to", "cuda", "tensor"):
    with env, pytest.raises((AssertionError, RuntimeError)):
      CUDA[name]()


# Conversions --------------------------------------------------------------------------


def test_iso_conversions_copy_nothing_and_keep_the_tree():
  x = A.to("jax")
  tree = {"a": [x, 1, "s"], "b": (x, None)}
  arrays = env.t2j_iso(tree)
  assert arrays["a"][0] is x.jax() and arrays["a"][1:] == [1, "s"]
  back = env.j2t_iso(arrays)
  assert back["b"][0].jax() is x.jax() and back["b"][1] is None
  assert_same(back["a"][0], A)


def test_t2j_iso_reads_views_and_dtypes():
  x = A.to("jax")
  assert isinstance(x[0], View)
  assert jnp.array_equal(env.t2j_iso(x[0]), x.jax()[0])
  assert env.t2j_iso(torch.bfloat16) == jnp.bfloat16


def test_meta_operand_raises():
  with pytest.raises(MixedDeviceError, match="is on meta.*no numbers"):
    A.to("jax") + torch.ones(2, device="meta")


def test_t2j_iso_accepts_only_0d_cpu_tensors():
  with pytest.raises(MixedDeviceError, match="t2j_iso"):
    env.t2j_iso([A])
  assert float(env.t2j_iso(torch.tensor(2.0))) == 2.0


def test_copies_cross_devices():
  tree = {"a": [A, 1], "b": A.to("jax")}
  arrays = env.t2j_copy(tree)
  assert isinstance(arrays["a"][0], jax.Array) and arrays["a"][1] == 1
  assert isinstance(arrays["b"], jax.Array)
  back = env.j2t_copy(arrays)
  assert_close(back["a"][0], A)
  assert_close(back["b"], A)
  copies = env.j2t_copy([A.to("jax"), (A, 1)])
  assert copies[0].device.type == "cpu" and copies[1][1] == 1
  assert copies[1][0].data_ptr() != A.data_ptr()


def test_to_xla_moves_trees_and_modules():
  x = A.to("jax")
  moved = env.to_xla({"a": A, "b": x, "c": 3})
  assert moved["b"] is x and moved["c"] == 3
  assert_same(moved["a"], A)
  model = env.to_xla(torch.nn.Linear(2, 2))
  assert isinstance(model.weight, Tensor)


# Properties ---------------------------------------------------------------------------


def test_properties_are_overridden_inside_a_block():
  mesh = object()
  with env.override_property(mesh=mesh):
    assert env._mesh is mesh and env.param.mesh is mesh
    with env.override_property(prng=jax.random.key(7)):
      assert env._mesh is mesh
    with env.override_property(mesh=None):
      assert env._mesh is None
  assert env._mesh is None


def test_properties_are_restored_after_an_exception():
  with pytest.raises(KeyError), env.override_property(mesh=object()):
    raise KeyError
  assert env._mesh is None


def test_property_override_applies_to_one_thread():
  seen = []
  with env.override_property(mesh=object()):
    thread = threading.Thread(target=lambda: seen.append(env._mesh))
    thread.start()
    thread.join()
  assert seen == [None]


def test_runtime_property_override_replaces_given_fields():
  base = RuntimeProperty("mesh", "prng", None)
  replaced = RuntimeProperty.override(base, mesh=None)
  assert replaced == RuntimeProperty(None, "prng", None)
  assert base.mesh == "mesh"
  assert RuntimeProperty.override(base) == base
  assert RuntimeProperty.override(base, prng=_None) == base


# Tensors of an environment ------------------------------------------------------------


def test_tensor_keeps_the_environment_that_created_it():
  other = Environment()
  x = other.to_xla(A)
  assert (x + 1)._env is other
  assert x[0]._env is other
  assert copy.deepcopy(x)._env is other


def test_unpickled_tensors_use_the_default_environment():
  back = pickle.loads(pickle.dumps(A.to("jax")))
  assert back._env is env
