"""Tensors made with device="jax", inside and outside of the environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same
from ops.harness import floats

import torchax
from torchax.errors import UnsupportedDtypeError
from torchax.interop import jax_jit
from torchax.tensor import Tensor

A = floats(2, 3)
env = torchax.default_env()


@pytest.fixture(params=[False, True], ids=["without_env", "with_env"])
def in_and_out(request):
  """Run a test outside of the environment and inside."""
  if not request.param:
    yield
    return
  with env:
    yield


@pytest.fixture
def default_jax():
  """Set `torch.set_default_device("jax")` for one test."""
  torch.set_default_device("jax")
  yield
  torch.set_default_device(None)


FACTORIES = {
  "zeros": lambda **kw: torch.zeros(2, 3, **kw),
  "zeros_size": lambda **kw: torch.zeros((2, 3), **kw),
  "zeros_dtype": lambda **kw: torch.zeros(2, dtype=torch.bfloat16, **kw),
  "ones": lambda **kw: torch.ones(2, 3, **kw),
  "ones_bool": lambda **kw: torch.ones(2, dtype=torch.bool, **kw),
  "full": lambda **kw: torch.full((2, 3), 7, **kw),
  "full_float": lambda **kw: torch.full((2,), 1.5, **kw),
  "full_bool": lambda **kw: torch.full((2,), True, **kw),
  "arange": lambda **kw: torch.arange(5, **kw),
  "arange_start": lambda **kw: torch.arange(2, 5, **kw),
  "arange_step": lambda **kw: torch.arange(0, 1, 0.25, **kw),
  "arange_dtype": lambda **kw: torch.arange(3, dtype=torch.float16, **kw),
  "linspace": lambda **kw: torch.linspace(0, 1, 5, **kw),
  "logspace": lambda **kw: torch.logspace(0, 2, 3, **kw),
  "eye": lambda **kw: torch.eye(3, **kw),
  "eye_wide": lambda **kw: torch.eye(2, 3, **kw),
  "tril_indices": lambda **kw: torch.tril_indices(3, 3, **kw),
  "triu_indices": lambda **kw: torch.triu_indices(3, 3, **kw),
  "scalar_tensor": lambda **kw: torch.scalar_tensor(2.5, **kw),
  "complex": lambda **kw: torch.full((2,), 1 + 2j, **kw),
  "hann_window": lambda **kw: torch.hann_window(4, **kw),
  "kaiser_window": lambda **kw: torch.kaiser_window(4, **kw),
  "empty_zero": lambda **kw: torch.empty(0, 3, **kw),
}
each_factory = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)


@each_factory
def test_factories_match_the_cpu(make, in_and_out):
  made = make(device="jax")
  assert isinstance(made, Tensor)
  assert made.device == torch.device("jax:0")
  assert_same(made, make(device="cpu"))


@each_factory
def test_a_factory_follows_the_default_device(make, default_jax):
  assert_same(make(), make(device="cpu"))


@pytest.mark.parametrize(
  "name", ("arange", "linspace", "logspace", "zeros", "ones", "eye", "empty")
)
def test_factory_with_output_accepts_its_device(name, in_and_out):
  arguments = (0, 3, 4) if name in ("linspace", "logspace") else (3,)
  out = torch.tensor((), device="jax")
  assert getattr(torch, name)(*arguments, device="jax", out=out) is out
  if name != "empty":
    assert_same(out, getattr(torch, name)(*arguments, dtype=torch.float32))


@each_factory
def test_a_factory_follows_the_device_context(make, in_and_out):
  with torch.device("jax"):
    assert_same(make(), make(device="cpu"))


@each_factory
def test_a_factory_works_inside_a_compiled_function(make):
  assert_same(jax_jit(lambda: make(device="jax"))(), make(device="cpu"))


@pytest.mark.parametrize("device", ["jax", "jax:0", torch.device("jax", 0)], ids=str)
def test_every_form_of_the_device_argument_works(device, in_and_out):
  assert_same(torch.ones(2, device=device), torch.ones(2))


def test_a_factory_without_device_stays_on_the_cpu(in_and_out):
  assert type(torch.ones(2)) is torch.Tensor
  assert type(torch.empty(2)) is torch.Tensor
  assert type(torch.randn(2)) is torch.Tensor


SHAPES_ONLY = {
  "empty": lambda: torch.empty(2, 3, device="jax", dtype=torch.int8),
  "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2), device="jax"),
  "empty_permuted": lambda: torch.empty_permuted((2, 3), (1, 0), device="jax"),
  "rand": lambda: torch.rand(2, 3, device="jax"),
  "randn": lambda: torch.randn(2, 3, device="jax"),
  "randint": lambda: torch.randint(0, 5, (2, 3), device="jax"),
  "normal": lambda: torch.normal(0.0, 1.0, (2, 3), device="jax"),
}


@pytest.mark.parametrize("make", SHAPES_ONLY.values(), ids=SHAPES_ONLY)
def test_a_factory_of_unspecified_numbers_has_the_shape(make, in_and_out):
  made = make()
  assert isinstance(made, Tensor)
  assert made.shape == (2, 3)
  assert made.isfinite().all()


LIKE = {
  "zeros_like": torch.zeros_like,
  "ones_like": torch.ones_like,
  "full_like": lambda t: torch.full_like(t, 3),
  "ones_like_dtype": lambda t: torch.ones_like(t, dtype=torch.int32),
  "new_zeros": lambda t: t.new_zeros(4),
  "new_ones": lambda t: t.new_ones((2, 2), dtype=torch.bool),
  "new_full": lambda t: t.new_full((2,), 1.5),
  "zeros_of_shape": lambda t: torch.zeros(t.shape, device=t.device, dtype=t.dtype),
}


@pytest.mark.parametrize("make", LIKE.values(), ids=LIKE)
def test_a_factory_follows_a_tensor(make, in_and_out):
  assert_same(make(A.to("jax")), make(A))
  assert_same(make(A.bfloat16().to("jax")), make(A.bfloat16()))


def test_empty_like_and_new_empty_have_shape_and_dtype(in_and_out):
  x = A.to("jax").half()
  assert torch.empty_like(x).shape == (2, 3)
  assert torch.empty_like(x).dtype == x.new_empty(3).dtype == torch.float16
  assert isinstance(x.new_empty(3), Tensor)


def test_like_crosses_devices(in_and_out):
  assert type(torch.zeros_like(A.to("jax"), device="cpu")) is torch.Tensor
  assert_same(torch.ones_like(A, device="jax"), torch.ones(2, 3))


@pytest.mark.parametrize("ramp", [torch.linspace, torch.logspace])
def test_a_ramp_between_tensors_is_on_its_own_device(ramp, in_and_out):
  start, end = (torch.tensor(value, device="jax") for value in (0.0, 2.0))
  for device in ("cpu", "jax"):
    made = ramp(start, end, 3, device=device)
    assert made.device.type == device
    torch.testing.assert_close(made.cpu(), ramp(0.0, 2.0, 3, device="cpu"))
  assert ramp(start, 2.0, 3).device.type == torch.get_default_device().type


# Functions whose results depend on the values of a constant that they make.
READS = {
  "tolist": lambda x: x * torch.tensor([2, 0], device=x.device).tolist()[0],
  "item": lambda x: x * torch.as_tensor(2.0, device=x.device).item(),
  "if": lambda x: x + 1 if x.new_tensor(1.0) else x,
  "mask": lambda x: x[:, torch.tensor([True, False, True]).to(x.device)],
  "nonzero": lambda x: x[:, torch.tensor([0, 3, 1], device=x.device).nonzero()[:, 0]],
  "repeat": lambda x: x.repeat_interleave(torch.tensor([2, 1, 0], device=x.device), 1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_constant_of_a_compiled_function_has_values(read):
  assert_same(jax_jit(read)(A.to("jax")), read(A))


def test_the_default_dtype_is_followed(in_and_out):
  torch.set_default_dtype(torch.bfloat16)
  try:
    assert torch.ones(2, device="jax").dtype == torch.bfloat16
    assert torch.empty(2, device="jax").dtype == torch.bfloat16
    assert torch.arange(0, 1, 0.5, device="jax").dtype == torch.bfloat16
  finally:
    torch.set_default_dtype(torch.float32)


def test_a_factory_makes_leaves(in_and_out):
  made = torch.ones(3, device="jax", requires_grad=True)
  assert made.requires_grad and made.is_leaf
  (made * 2).sum().backward()
  assert_same(made.grad, torch.full((3,), 2.0))


def test_wide_dtypes_are_kept_under_x64():
  with jax.enable_x64(True):
    assert torch.ones(2, dtype=torch.float64, device="jax").dtype == torch.float64
    assert torch.arange(3, device="jax").jax().dtype == jnp.int64
  assert torch.arange(3, device="jax").jax().dtype == jnp.int32


UNSUPPORTED = {
  "quantised": {"dtype": torch.quint8},
  "sparse": {"layout": torch.sparse_coo},
  "sparse_csr": {"layout": torch.sparse_csr},
}


@pytest.mark.parametrize("options", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_layouts_and_dtypes_raise(options, in_and_out):
  with pytest.raises(UnsupportedDtypeError, match="to_dense|quint8"):
    torch.zeros(2, 2, device="jax", **options)


# From data ----------------------------------------------------------------------------

DATA = {
  "list": [1, 2, 3],
  "floats": [[1.0, 2.0], [3.0, 4.0]],
  "number": 2.5,
  "bool": [True, False],
  "empty": [],
  "array": np.arange(3, dtype=np.float32),
  "complex": [1 + 2j],
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("function", [torch.tensor, torch.as_tensor])
def test_data_becomes_a_jax_tensor_inside_the_environment(function, data):
  with env:
    assert_same(function(data, device="jax"), function(data))


def test_data_takes_dtype_and_requires_grad():
  with env:
    made = torch.tensor([1, 2], dtype=torch.float16, device="jax", requires_grad=True)
  assert made.dtype == torch.float16 and made.requires_grad and made.is_leaf


def test_data_follows_the_default_device(default_jax):
  with env:
    assert_same(torch.tensor([1.0, 2.0]), torch.ones(2, device="cpu").cumsum(0))


@pytest.mark.parametrize("function", [torch.tensor, torch.as_tensor, torch.asarray])
def test_data_becomes_a_jax_tensor_without_the_environment(function):
  assert_same(function([1.0, 2.0], device="jax"), torch.tensor([1.0, 2.0]))
  assert_same(function(3.0, device="jax"), torch.tensor(3.0))


def test_numbers_and_jax_tensors_are_data():
  x = A.to("jax")
  made = torch.tensor([x[0, 0], 2.0], device="jax")
  assert_same(made, torch.stack([A[0, 0], torch.tensor(2.0)]))


def test_data_follows_the_default_device_without_environment(default_jax):
  assert_same(torch.tensor([1.0, 2.0]), torch.ones(2, device="cpu").cumsum(0))


@pytest.mark.parametrize("where", ["hook", "post_accumulate_hook", "backward"])
def test_factories_work_inside_backward(where, in_and_out):
  """User code that autograd calls creates tensors on jax as any other code does."""

  class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * 2

    @staticmethod
    def backward(ctx, grad):
      return grad * torch.tensor(2.0, device=grad.device)

  x = torch.ones(3, device="jax", requires_grad=True)
  made = []

  def hook(tensor):
    made.append(torch.as_tensor(0.5, device=tensor.device))
    made.append(torch.where(tensor > 0, tensor, 1.0))
    return None

  if where == "hook":
    x.register_hook(hook)
  elif where == "post_accumulate_hook":
    x.register_post_accumulate_grad_hook(lambda leaf: hook(leaf.grad))
  Double.apply(x).sum().backward()
  assert all(isinstance(tensor, Tensor) for tensor in (x.grad, *made))
  assert_same(x.grad, torch.full((3,), 2.0))
  assert len(made) == (0 if where == "backward" else 2)


@pytest.mark.parametrize("cast", [torch.Tensor.type_as, torch.Tensor.to])
def test_to_another_tensor_moves_to_its_device(cast, in_and_out):
  made = cast(torch.ones(4), torch.zeros(2, dtype=torch.int32, device="jax"))
  assert isinstance(made, Tensor)
  assert_same(made, torch.ones(4, dtype=torch.int32))


def test_the_default_device_can_be_asked_for(default_jax, in_and_out):
  assert torch.get_default_device() == torch.device("jax:0")


def test_a_jax_array_is_data():
  array = jnp.arange(3.0)
  with env:
    made = torch.tensor(array, device="jax")
    same = torch.as_tensor(array, device="jax")
  assert_same(made, torch.arange(3.0))
  assert_same(same, torch.arange(3.0))


def test_a_jax_tensor_is_copied_by_tensor_and_kept_by_as_tensor():
  x = A.to("jax")
  with env:
    copied = torch.tensor(x, device="jax")
    kept = torch.as_tensor(x)
  assert kept is x
  copied.zero_()
  assert_same(x, A)


def test_data_of_a_cpu_tensor_is_copied():
  source = A.clone()
  with env:
    made = torch.as_tensor(source, device="jax")
  source.zero_()
  assert_same(made, A)


def test_from_numpy_stays_on_the_cpu(in_and_out):
  assert type(torch.from_numpy(np.ones(3))) is torch.Tensor


# Modules ------------------------------------------------------------------------------


def test_modules_are_made_on_the_default_device(default_jax):
  # BatchNorm calls `torch.tensor`, which needs the environment.
  with env:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
  assert all(isinstance(p, Tensor) for p in model.parameters())
  assert all(isinstance(b, Tensor) for b in model.buffers())
  assert model(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.parametrize(
  "init",
  [
    torch.nn.init.xavier_uniform_,
    torch.nn.init.kaiming_normal_,
    torch.nn.init.orthogonal_,
    torch.nn.init.trunc_normal_,
  ],
)
def test_initialisers_fill_parameters(init, in_and_out):
  parameter = torch.nn.Parameter(torch.zeros(3, 3, device="jax"))
  assert init(parameter) is parameter
  assert parameter.requires_grad
  assert parameter.detach().abs().sum() > 0


def test_pinned_memory_of_the_host_is_plain():
  made = torch.zeros(3).pin_memory()
  assert type(made) is torch.Tensor and made.tolist() == [0.0, 0.0, 0.0]
  # C++ does not dispatch this call; docs/devices.md has the remedy.
  with pytest.raises(RuntimeError, match="(?i)pinned"):
    torch.zeros(3, pin_memory=True)
