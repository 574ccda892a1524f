"""`Tensor`: moving to jax and back, printing, copying, pickling, modules."""

import copy
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_close, assert_same
from ops.harness import floats, ints
from torch.autograd import forward_ad

import torchax
import torchax.tensor
from torchax.errors import MixedDeviceError, TracedStateError, UnsupportedDtypeError
from torchax.interop import jax_jit
from torchax.tensor import Tensor

DATA = floats(2, 3)
DTYPES = (
  torch.bool,
  torch.uint8,
  torch.int8,
  torch.int16,
  torch.int32,
  torch.int64,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.complex64,
)


@pytest.fixture(name="x")
def _x() -> Tensor:
  return DATA.to("jax")


@pytest.fixture(params=[False, True], ids=["without_env", "with_env"])
def in_and_out(request):
  """Run a test outside of the environment and inside."""
  if not request.param:
    yield
    return
  with torchax.default_env():
    yield


# Moving -------------------------------------------------------------------------------

TO_JAX = {
  "str": lambda t: t.to("jax"),
  "index": lambda t: t.to("jax:0"),
  "device": lambda t: t.to(torch.device("jax")),
  "keyword": lambda t: t.to(device="jax"),
  "with_dtype": lambda t: t.to("jax", torch.float32),
  "all_keywords": lambda t: t.to(device="jax", dtype=torch.float32, copy=True),
  "non_blocking": lambda t: t.to("jax", non_blocking=True),
  "method": lambda t: t.jax(),
}


@pytest.mark.parametrize("move", TO_JAX.values(), ids=TO_JAX)
def test_every_signature_of_to_returns_a_jax_tensor(move, in_and_out):
  moved = move(DATA)
  assert moved.device == torch.device("jax:0")
  assert_same(moved, DATA)


def test_to_follows_another_tensor_inside_the_environment():
  with torchax.default_env():
    assert_same(DATA.to(torch.zeros(1, device="jax")), DATA)


TO_CPU = {
  "cpu": lambda t: t.cpu(),
  "str": lambda t: t.to("cpu"),
  "device": lambda t: t.to(torch.device("cpu")),
  "keyword": lambda t: t.to(device="cpu"),
  "copy": lambda t: t.to("cpu", copy=True),
  "like_another": lambda t: t.to(torch.zeros(1)),
}


@pytest.mark.parametrize("move", TO_CPU.values(), ids=TO_CPU)
def test_every_signature_of_to_returns_a_cpu_tensor(move, x, in_and_out):
  moved = move(x)
  assert type(moved) is torch.Tensor
  assert moved.device == torch.device("cpu")
  assert_close(moved, DATA)


def test_to_without_a_change_returns_the_same_tensor(x, in_and_out):
  assert x.to("jax") is x
  assert x.to(torch.float32) is x
  assert x.to(x) is x
  assert x.to("jax", copy=True) is not x


CASTS = {
  "to": (lambda t: t.to(torch.int32), torch.int32),
  "to_other_dtype": (lambda t: t.to(torch.zeros(1, dtype=torch.int8)), torch.int8),
  "device_and_dtype": (lambda t: t.to("cpu", torch.float16), torch.float16),
  "half": (lambda t: t.half(), torch.float16),
  "bfloat16": (lambda t: t.bfloat16(), torch.bfloat16),
  "int": (lambda t: t.int(), torch.int32),
  "bool": (lambda t: t.bool(), torch.bool),
  "type": (lambda t: t.type(torch.float16), torch.float16),
}


@pytest.mark.parametrize("row", CASTS.values(), ids=CASTS)
def test_cast_equals_torch(row, x):
  cast, dtype = row
  result = cast(x)
  assert result.dtype == dtype
  assert_close(result.cpu(), cast(DATA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_keeps_every_bit(dtype):
  values = ints(2, 3, high=3).to(dtype)
  back = values.to("jax").cpu()
  assert_close(back, values)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)], ids=str)
def test_a_round_trip_keeps_every_shape(shape):
  assert_close(torch.ones(shape).to("jax").cpu(), torch.ones(shape))


def test_non_contiguous_cpu_tensor_moves_by_value():
  assert_same(DATA.t().to("jax"), DATA.t())
  assert_same(DATA[:, ::2].to("jax"), DATA[:, ::2])
  conjugated = torch.complex(DATA, DATA).conj()
  assert_same(conjugated.to("jax"), conjugated.resolve_conj())


def test_moving_copies(x):
  source = DATA.clone()
  moved = source.to("jax")
  source.zero_()
  assert_same(moved, DATA)
  back = moved.cpu()
  back.zero_()
  assert_same(moved, DATA)


def test_moving_to_another_accelerator_names_valid_devices(x):
  with pytest.raises(MixedDeviceError, match='"cpu" or "meta", but got cuda'):
    x.to("cuda")


def test_moving_a_meta_tensor_raises(in_and_out):
  with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
    torch.empty(2, device="meta").to("jax")


UNSUPPORTED_LAYOUTS = {
  "sparse_coo": lambda: torch.eye(3).to_sparse(),
  "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.parametrize("make", UNSUPPORTED_LAYOUTS.values(), ids=UNSUPPORTED_LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_tensor_raises_with_alternative(make, in_and_out):
  with pytest.raises(UnsupportedDtypeError, match="to_dense"):
    make().to("jax")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensor_raises_with_alternative(in_and_out):
  quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
  with pytest.raises(UnsupportedDtypeError, match="dequantize"):
    quantised.to("jax")


# Reading numbers ----------------------------------------------------------------------


def test_jax_returns_the_array(x):
  array = x.jax()
  assert isinstance(array, jax.Array)
  assert array.shape == (2, 3) and array.dtype == jnp.float32
  assert x._elem is array
  assert x.jax_device in jax.devices()


def test_numpy_is_a_copy(x):
  values = x.numpy()
  values[:] = 7
  assert_same(x, DATA)
  np.testing.assert_array_equal(np.asarray(x), DATA.numpy())


def test_numpy_of_a_tensor_that_requires_grad_needs_force(x):
  x.requires_grad_()
  with pytest.raises(RuntimeError, match="detach"):
    x.numpy()
  np.testing.assert_array_equal(x.numpy(force=True), DATA.numpy())


def test_item_and_tolist_return_python_numbers(x):
  assert x.tolist() == DATA.tolist()
  assert x[1, 2].item() == DATA[1, 2].item()
  assert type(torch.ones((), dtype=torch.int32, device="jax").item()) is int
  assert type(torch.ones((), dtype=torch.bool, device="jax").item()) is bool
  assert type(torch.ones((), device="jax").item()) is float


def test_python_conversions_work(x):
  one = torch.full((1,), 3.0, device="jax")
  assert float(one) == 3.0 and int(one) == 3 and bool(one) and len(x) == 2
  assert [row.tolist() for row in x] == DATA.tolist()
  assert list(range(5))[torch.ones((), dtype=torch.int32, device="jax")] == 1
  with pytest.raises(RuntimeError):
    bool(x)


def test_item_of_many_numbers_raises_as_torch_does(x):
  with pytest.raises(RuntimeError):
    DATA.item()
  with pytest.raises(RuntimeError):
    x.item()


NEEDS_A_NUMBER = {
  "item": lambda t: t.sum().item(),
  "bool": lambda t: t if t.sum() > 0 else -t,
  "int": lambda t: t[int(t.sum())],
  "float": lambda t: t * float(t.sum()),
}


@pytest.mark.parametrize("function", NEEDS_A_NUMBER.values(), ids=NEEDS_A_NUMBER)
def test_reading_a_traced_tensor_raises(function, x):
  with pytest.raises(TracedStateError, match=r"torch\.where"):
    jax_jit(function)(x)
  assert_same(x, DATA)


# Metadata -----------------------------------------------------------------------------


def test_a_jax_tensor_is_a_torch_tensor_on_jax(x):
  assert isinstance(x, torch.Tensor)
  assert x.device == torch.device("jax", 0)
  assert x.is_jax and not DATA.is_jax
  assert not x.is_meta and not x.is_cpu and not x.is_cuda
  assert x.stride() == (3, 1) and x.is_contiguous() and x.numel() == 6
  assert x.is_leaf and not x.requires_grad and x.grad is None


def test_strides_equal_torch_strides(x):
  assert x.t().stride() == DATA.t().stride()
  assert not x.t().is_contiguous()
  assert x.t().contiguous().is_contiguous()
  assert x[:, 1].storage_offset() == DATA[:, 1].storage_offset()


def test_results_of_operations_are_jax_tensors(x):
  assert type(x + 1) is Tensor
  assert type(x @ x.t()) is Tensor
  assert type(torch.cat([x, x])) is Tensor


# Printing -----------------------------------------------------------------------------


def test_printing_shows_the_numbers_and_the_device(x):
  values = torch.full((2,), 1.5, device="jax")
  assert repr(values) == "tensor([1.5000, 1.5000], device='jax:0')"
  assert str(values) == repr(values)
  assert repr(values.bfloat16()).endswith("dtype=torch.bfloat16, device='jax:0')")


def test_repr_of_a_view_names_the_device_once(x):
  assert repr(x[0]).count("jax:0") == 1
  assert repr(x.t()).count("jax:0") == 1


def test_printing_shows_the_autograd_state(x):
  x.requires_grad_()
  assert repr(x).endswith("device='jax:0', requires_grad=True)")
  assert "grad_fn=<MulBackward0>" in repr(x * 2)
  assert repr(torch.nn.Parameter(x.detach())).startswith(
    "Parameter containing:\ntensor("
  )
  with forward_ad.dual_level():
    dual = forward_ad.make_dual(x.detach(), x.detach())
    assert "device='jax:0', tangent=tensor(" in repr(dual)


def test_printing_a_traced_tensor_runs_nothing(x):
  texts = []

  def function(t):
    texts.extend([repr(t), f"{t}", repr(t[0])])
    return t

  jax_jit(function)(x)
  assert texts[0] == texts[1]
  assert texts[0] == "tensor(traced, size=(2, 3), dtype=torch.float32, device='jax:0')"
  assert "size=(3,)" in texts[2]


def test_0d_tensor_formats_as_its_number():
  assert f"{torch.full((), 1.25, device='jax'):.1f}" == f"{torch.tensor(1.25):.1f}"


# Replacing numbers --------------------------------------------------------------------


def test_replace_jax_keeps_shape_and_dtype(x):
  x.replace_jax(jnp.ones((2, 3), jnp.int32))
  assert_same(x, torch.ones(2, 3))
  with pytest.raises(ValueError, match=r"\(2, 3\)"):
    x.replace_jax(jnp.ones((3, 2)))
  x._elem = jnp.zeros((2, 3))
  assert_same(x, torch.zeros(2, 3))


def test_replace_jax_of_a_view_writes_to_its_base(x):
  x[1].replace_jax(jnp.zeros(3))
  expected = DATA.clone()
  expected[1] = 0
  assert_same(x, expected)


def test_apply_jax_runs_a_jax_function(x):
  assert_same(x.apply_jax(jnp.add, x), DATA + DATA)
  assert_same(x, DATA)
  alias = x[0]
  assert x.apply_jax_(jnp.multiply, 2.0) is x
  assert_same(x, DATA * 2)
  assert_same(alias, DATA[0] * 2)


def test_shard_keeps_the_numbers(x):
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  assert x.shard_(sharding) is x
  assert x.jax().sharding == sharding
  assert_same(x, DATA)


def test_type_as_does_not_change_the_tensor(x):
  other = x.type_as(torch.zeros(1, dtype=torch.int32, device="jax"))
  assert other.dtype == torch.int32 and x.dtype == torch.float32
  assert type(x.type_as(torch.zeros(1))) is torch.Tensor


@pytest.mark.parametrize(
  "make",
  [
    lambda x: x.new_tensor([[1.7, 2.0], [3.0, -4.0]]),
    lambda x: x.new_tensor(5, dtype=torch.int32),
    lambda x: x.new([1.0, 2.0]),
    lambda x: x.new(2, 5).fill_(1.0),
    lambda x: x.new(torch.Size([4])).fill_(2.0),
    lambda x: x.new(size=(2, 2), device=x.device).fill_(2.0),
    lambda x: x.new(),
  ],
)
def test_tensors_made_from_a_tensor_are_on_its_device(make, x, in_and_out):
  assert_same(make(x), make(DATA))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_new_tensor_copies_and_takes_options(x):
  copied = x.new_tensor(x, requires_grad=True)
  assert copied.requires_grad and copied.is_leaf
  copied.detach().zero_()
  assert_same(x, DATA)
  assert type(x.new_tensor([1.0], device="cpu")) is torch.Tensor


def test_data_shares_memory_without_history(x):
  x.requires_grad_()
  x.data.mul_(2)
  assert_same(x.detach(), DATA * 2)
  assert not x.data.requires_grad


def test_assigning_data_aliases_the_other_tensor(x):
  other = torch.zeros(4, device="jax", dtype=torch.int32)
  x.data = other
  assert x.shape == (4,) and x.dtype == torch.int32
  other.add_(1)
  assert_same(x, torch.ones(4, dtype=torch.int32))


def test_data_of_a_jax_tensor_is_never_on_the_cpu(x):
  with pytest.raises(MixedDeviceError, match="jax"):
    x.data = torch.zeros(2, 3)
  assert_same(x, DATA)


def test_assigning_data_accepts_cpu_scalars():
  flag = torch.tensor(False, device="jax")
  flag.data = torch.tensor(True)
  assert flag.item() and flag.device.type == "jax"


def test_is_set_to_is_true_for_the_same_view(x):
  assert x.is_set_to(x.detach())
  assert x[0].is_set_to(x[0])
  assert not x[0].is_set_to(x[1])
  assert not x.is_set_to(x.clone())


# Copies -------------------------------------------------------------------------------


def test_deepcopy_has_its_own_memory(x):
  copied = copy.deepcopy(x)
  copied.zero_()
  assert_same(x, DATA)
  assert_same(copied, torch.zeros(2, 3))


def test_deepcopy_keeps_aliasing(x):
  base, view, again, storage = copy.deepcopy([x, x[0], x, x.untyped_storage()])
  assert again is base and storage is base.untyped_storage()
  view.zero_()
  assert_same(base[0], torch.zeros(3))
  assert_same(x, DATA)


def test_deepcopy_copies_the_gradient_and_attributes(x):
  x.requires_grad_()
  x.label = ["a"]
  (x * 3).sum().backward()
  copied = copy.deepcopy(x)
  assert copied.requires_grad and copied.label == ["a"] and copied.label is not x.label
  copied.grad.zero_()
  assert_same(x.grad, torch.full((2, 3), 3.0))


def test_deepcopy_of_a_result_raises_as_torch_does(x):
  x.requires_grad_()
  with pytest.raises(RuntimeError, match="deepcopy"):
    copy.deepcopy(x * 2)


def test_deepcopy_of_a_module_keeps_tied_weights_tied():
  model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to("jax")
  model[1].weight = model[0].weight
  copied = copy.deepcopy(model)
  assert copied[1].weight is copied[0].weight
  assert copied[0].weight is not model[0].weight
  assert isinstance(copied[0].weight, torch.nn.Parameter)
  with torch.no_grad():
    copied[0].weight.zero_()
  assert model[0].weight.abs().sum() > 0
  assert copied[1].weight.abs().sum() == 0


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling_keeps_numbers_and_requires_grad(protocol, x):
  back = pickle.loads(pickle.dumps(x.requires_grad_(), protocol))
  assert back.requires_grad
  assert_same(back.detach(), DATA)


def test_pickling_a_view_keeps_its_numbers(x):
  assert_same(pickle.loads(pickle.dumps(x[:, 1])), DATA[:, 1])


def test_pickling_keeps_parameters_parameters(x):
  back = pickle.loads(pickle.dumps(torch.nn.Parameter(x)))
  assert isinstance(back, torch.nn.Parameter) and back.requires_grad
  frozen = torch.nn.Parameter(x, requires_grad=False)
  assert not pickle.loads(pickle.dumps(frozen)).requires_grad


def _saved_and_loaded(value, **kwargs):
  stream = io.BytesIO()
  torch.save(value, stream)
  stream.seek(0)
  return torch.load(stream, **kwargs)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_torch_save_and_load_round_trip(weights_only, dtype):
  values = {"a": DATA.to(dtype).to("jax"), "b": [DATA.to(dtype).to("jax")[0]]}
  loaded = _saved_and_loaded(values, weights_only=weights_only)
  assert_same(loaded, {"a": DATA.to(dtype), "b": [DATA.to(dtype)[0]]})


def test_a_state_dict_survives_saving(x):
  model = torch.nn.BatchNorm1d(3).to("jax")
  model(x)
  state = _saved_and_loaded(model.state_dict(), weights_only=True)
  other = torch.nn.BatchNorm1d(3).to("jax")
  other.load_state_dict(state)
  for name, value in model.state_dict().items():
    assert_same(other.state_dict()[name], value.cpu(), name)


# Modules ------------------------------------------------------------------------------

MOVES_OF_MODULES = {
  "to": lambda m: m.to("jax"),
  "to_device": lambda m: m.to(device=torch.device("jax")),
  "method": lambda m: m.jax(),
  "to_xla": lambda m: torchax.default_env().to_xla(m),
}


@pytest.mark.parametrize("move", MOVES_OF_MODULES.values(), ids=MOVES_OF_MODULES)
def test_a_module_moves_with_parameters_and_buffers(move, in_and_out):
  cpu = torch.nn.BatchNorm1d(3)
  cpu.weight.requires_grad_(False)
  model = move(copy.deepcopy(cpu))
  assert isinstance(model.weight, torch.nn.Parameter)
  assert isinstance(model.weight, Tensor)
  assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
  assert not model.weight.requires_grad and model.bias.requires_grad
  assert_same(dict(model.state_dict()), dict(cpu.state_dict()))


def test_moving_a_module_keeps_tied_weights_tied(in_and_out):
  model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
  model[1].weight = model[0].weight
  model = model.to("jax")
  assert model[1].weight is model[0].weight


def test_a_module_moves_back(in_and_out):
  model = torch.nn.Linear(3, 2)
  expected = model.weight.detach().clone()
  for back in (model.to("jax").cpu(), model.to("jax").to("cpu")):
    assert type(back.weight) is torch.nn.Parameter
    assert_close(back.weight.detach(), expected)


def test_a_module_moves_and_casts_in_one_call():
  model = torch.nn.Linear(3, 2).to("jax", torch.bfloat16)
  assert model.weight.dtype == torch.bfloat16
  assert model(torch.ones(1, 3, device="jax", dtype=torch.bfloat16)).shape == (1, 2)


@pytest.mark.filterwarnings("error")  # torch warns of copies into meta tensors
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_crosses_devices_by_copy(assign):
  cpu, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).to("jax")
  wanted = {k: v.clone() for k, v in cpu.state_dict().items()}
  model.load_state_dict(cpu.state_dict())
  assert_same(dict(model.state_dict()), wanted)
  back = torch.nn.Linear(3, 2)
  back.load_state_dict(model.state_dict(), assign=assign)
  assert isinstance(back.weight, torch.nn.Parameter)
  assert isinstance(back.weight, Tensor) is assign
  assert_close(back.weight.detach().cpu(), wanted["weight"])


def test_module_created_on_jax_stays_on_jax():
  with torch.device("jax"):
    model = torch.nn.Linear(3, 2)
  assert isinstance(model.weight, Tensor)
  assert isinstance(model.weight, torch.nn.Parameter)
  assert isinstance(torch.nn.Linear(3, 2, device="jax").weight, Tensor)
  assert type(torch.nn.Linear(3, 2).weight) is torch.nn.Parameter


# Upstream's names ---------------------------------------------------------------------

FORWARDED = (
  "Environment",
  "RuntimeProperty",
  "XLADispatchMode",
  "XLAFunctionMode",
  "TENSOR_CONSTRUCTORS",
  "debug_accuracy",
  "log_nested",
  "default_env",
)


@pytest.mark.parametrize("name", FORWARDED)
def test_upstream_names_exist_in_torchax_tensor(name):
  assert getattr(torchax.tensor, name) is not None
  with pytest.raises(AttributeError, match="no attribute"):
    getattr(torchax.tensor, name + "_")


def test_the_constructor_takes_an_array_and_an_environment():
  env = torchax.default_env()
  made = Tensor(jnp.ones(3), env, requires_grad=True)
  assert made.requires_grad and made.shape == (3,)
  assert_same(made.detach() + 1, torch.full((3,), 2.0))
  with pytest.raises(UnsupportedDtypeError, match="key"):
    Tensor(torchax.rng.RngState.from_seed(0).key, env)
