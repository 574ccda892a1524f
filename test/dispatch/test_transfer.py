"""`Tensor.to` and its relatives, and tensors that jax cannot hold."""

import pytest
import torch
from compare import assert_same
from small_tensors import DATA, in_environment, rows, x  # noqa: F401  a fixture

from torchax.errors import MixedDeviceError, UnsupportedDtypeError

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")

f16, f32, i8 = torch.float16, torch.float32, torch.int8


# Signatures ---------------------------------------------------------------------------


def other(device: str) -> torch.Tensor:
  return torch.zeros(1, dtype=i8).to(device)


FORMS_OF_TO = {
  "nothing": lambda d: x(d).to(),
  "dtype": lambda d: x(d).to(f16),
  "dtype non_blocking": lambda d: x(d).to(f16, True),
  "dtype non_blocking copy": lambda d: x(d).to(f16, False, True),
  "dtype=": lambda d: x(d).to(dtype=f16, copy=True),
  "dtype and all keywords": lambda d: x(d).to(
    f16, non_blocking=True, copy=True, memory_format=torch.preserve_format
  ),
  "device": lambda d: x(d).to(torch.device(d)),
  "device copy=": lambda d: x(d).to(d, copy=True),
  "device dtype": lambda d: x(d).to(d, f16),
  "device dtype non_blocking": lambda d: x(d).to(d, f16, True),
  "device dtype non_blocking copy": lambda d: x(d).to(d, f16, False, True),
  "device dtype copy=": lambda d: x(d).to(d, f16, copy=True),
  "device= dtype=": lambda d: x(d).to(device=d, dtype=f16),
  "None dtype": lambda d: x(d).to(None, f16),
  "device None": lambda d: x(d).to(d, None),
  "tensor": lambda d: x(d).to(other(d)),
  "tensor non_blocking copy": lambda d: x(d).to(other(d), False, True),
  "tensor copy=": lambda d: x(d).to(other(d), copy=True),
  "memory_format": lambda d: x(d).to(memory_format=torch.contiguous_format),
  "from the CPU, all": lambda d: DATA.to(d, f16, True, True),
  "from the CPU, copy=": lambda d: DATA.to(d, f16, copy=True),
  "from the CPU, tensor": lambda d: DATA.to(other(d)),
  "to the CPU, dtype": lambda d: x(d).to("cpu", f16, copy=True).to(d),
  "type dtype": lambda d: x(d).type(f16),
  "type dtype=": lambda d: x(d).type(dtype=f16, non_blocking=True),
  "type_as": lambda d: x(d).type_as(other(d)),
  "float": lambda d: x(d).to(f16).float(),
  "half": lambda d: x(d).half(),
  "bfloat16": lambda d: x(d).bfloat16(),
  "double": lambda d: x(d).double(),
  "int": lambda d: x(d).int(),
  "long": lambda d: x(d).long(),
  "short": lambda d: x(d).short(),
  "char": lambda d: x(d).char(),
  "byte": lambda d: x(d).byte(),
  "bool": lambda d: x(d).bool(),
  "cfloat": lambda d: x(d).cfloat(),
  "cdouble": lambda d: x(d).cdouble(),
  "memory_format of float": lambda d: x(d).float(memory_format=torch.preserve_format),
  "new_tensor": lambda d: x(d).new_tensor([1, 2]),
  "new_full": lambda d: x(d).new_full((2,), 3, dtype=i8),
  "gradient": lambda d: gradient_through(lambda t: t.to(f16), d),
  "gradient across devices": lambda d: gradient_through(
    lambda t: t.to("cpu", torch.float64), d
  ),
  "gradient through complex": lambda d: gradient_through(
    lambda t: t.to(torch.complex64).real, d
  ),
}


def gradient_through(convert, device: str) -> torch.Tensor:
  leaf = x(device).requires_grad_()
  return torch.autograd.grad(convert(leaf).sum(), leaf)[0]


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@rows(FORMS_OF_TO)
def test_every_conversion_signature_equals_torch(row):
  assert_same(row("jax"), row("cpu"))


def test_conversion_without_a_change_returns_same_tensor():
  t = x("jax")
  same = (
    *(t.to(), t.to("jax"), t.to(f32), t.to("jax", f32, True), t.to(t)),
    *(t.float(), t.type(f32), t.type_as(t), t.to(None, f32)),
  )
  assert all(converted is t for converted in same)


COPIES = {
  "device": lambda t: t.to("jax", copy=True),
  "dtype": lambda t: t.to(f32, copy=True),
  "positional": lambda t: t.to("jax", f32, False, True),
  "dtype_positional": lambda t: t.to(f32, False, True),
  "tensor": lambda t: t.to(t, copy=True),
}


@rows(COPIES)
def test_requested_copy_has_its_own_memory(row):
  t = x("jax")
  row(t).zero_()
  assert_same(t, DATA)


WRONG_TO = {
  "too many": lambda d: x(d).to(d, f16, False, True, 1),
  "unknown device": lambda d: x(d).to("nonsense"),
  "unknown keyword": lambda d: x(d).to(foo=1),
  "two dtypes": lambda d: x(d).to(f16, f16),
  "unknown type": lambda d: x(d).type("torch.FooTensor"),
}


@rows(WRONG_TO)
def test_wrong_conversion_arguments_raise_like_torch(row):
  with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
    row("cpu")
  with pytest.raises(expected.type):
    row("jax")


def test_type_name_contains_jax_and_converts_back():
  t = x("jax").half()
  assert t.type() == "torch.jax.HalfTensor"
  assert_same(x("jax").type(t.type()), DATA.half())
  with pytest.raises(ValueError, match="FooTensor"):
    t.type("torch.jax.FooTensor")


@pytest.mark.parametrize("kind", [torch.LongTensor, "torch.LongTensor"], ids=str)
def test_cpu_tensor_type_moves_to_the_cpu(kind):
  moved = x("jax").type(kind)
  assert moved.device.type == "cpu"
  assert torch.equal(moved, DATA.type(kind))


def test_cpu_tensor_is_converted_before_narrowing():
  large = torch.tensor([2**40, -1])
  assert_same(large.to("jax", torch.float32), large.float())
  assert_same(torch.zeros(2, device="jax").copy_(large), large.float())


MODULES = {
  "device_dtype": lambda m, d: m.to(d, f16),
  "keywords": lambda m, d: m.to(device=d, dtype=f16, non_blocking=True),
  "tensor": lambda m, d: m.to(x(d).half()),
  "half": lambda m, d: m.to(d).half(),
  "type": lambda m, d: m.to(d).type(f16),
}


@rows(MODULES)
def test_module_conversion_casts_floating_point_tensors(row):
  module = row(torch.nn.BatchNorm1d(2), "jax")
  dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
  assert dtypes.pop("num_batches_tracked") in (torch.int32, f16, torch.int64)
  assert set(dtypes.values()) == {f16}
  assert all(t.device.type == "jax" for t in module.state_dict().values())


# Unsupported tensors ------------------------------------------------------------------


@pytest.mark.parametrize(
  "dtype",
  [torch.complex32, torch.quint8, torch.uint4, torch.bits8],
  ids=str,
)
def test_error_names_a_dtype_that_jax_lacks(dtype):
  for make in (
    lambda: x("jax").to(dtype),
    lambda: torch.zeros(2, dtype=dtype, device="jax"),
  ):
    with pytest.raises(UnsupportedDtypeError, match=f"{dtype}|quantised"):
      make()


def quantised() -> torch.Tensor:
  return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def nested(layout=torch.strided) -> torch.Tensor:
  return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def coordinates(device: str) -> tuple:
  return torch.tensor([[0], [1]]).to(device), torch.ones(1).to(device), (2, 2)


SQUARE = torch.eye(2)
NOT_DENSE = {
  "coo": (lambda: SQUARE.to_sparse().to("jax"), "to_dense"),
  "csr": (lambda: SQUARE.to_sparse_csr().to("jax"), "to_dense"),
  "csc": (lambda: SQUARE.to_sparse_csc().to("jax"), "to_dense"),
  "bsr": (lambda: SQUARE.to_sparse_bsr((1, 1)).to("jax"), "to_dense"),
  "nested": (lambda: nested().to("jax"), "to_padded_tensor"),
  "quantised": (lambda: quantised().to("jax"), "dequantize"),
  "copy_ of sparse": (lambda: SQUARE.to("jax").copy_(SQUARE.to_sparse()), "to_dense"),
  "copy_ of quantised": (lambda: torch.ones(2).to("jax").copy_(quantised()), "dequant"),
  "to_sparse": (lambda: SQUARE.to("jax").to_sparse(), "cpu"),
  "to_sparse_csr": (lambda: SQUARE.to("jax").to_sparse_csr(), "cpu"),
  "to_sparse_bsr": (lambda: SQUARE.to("jax").to_sparse_bsr((1, 1)), "cpu"),
  "to_mkldnn": (lambda: SQUARE.to("jax").to_mkldnn(), "cpu"),
  "quantize": (
    lambda: torch.quantize_per_tensor(SQUARE.to("jax"), 0.1, 0, torch.quint8),
    "cpu",
  ),
  "quantize_dynamic": (
    lambda: torch.quantize_per_tensor_dynamic(SQUARE.to("jax"), torch.quint8, False),
    "cpu",
  ),
  "dequantize": (lambda: SQUARE.to("jax").dequantize(), "cpu"),
  "as_nested": (lambda: torch.nested.as_nested_tensor([SQUARE.to("jax")]), "cpu"),
  "coo of jax tensors": (lambda: torch.sparse_coo_tensor(*coordinates("jax")), "cpu"),
  "spdiags": (
    lambda: torch.sparse.spdiags(SQUARE.to("jax"), torch.arange(2), (2, 2)),
    "cpu",
  ),
  "coo with device": (
    lambda: torch.sparse_coo_tensor(*coordinates("cpu"), device="jax"),
    "to_dense",
  ),
  "zeros_like": (
    lambda: torch.zeros_like(SQUARE.to("jax"), layout=torch.sparse_coo),
    "to_dense",
  ),
  "sparse matmul": (
    lambda: torch.sparse.mm(SQUARE.to_sparse(), SQUARE.to("jax")),
    "to_dense",
  ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@rows(NOT_DENSE)
def test_non_dense_tensor_raises_with_alternative(row):
  make, way_out = row
  with pytest.raises(UnsupportedDtypeError, match=way_out):
    make()


def test_torch_rejects_an_mkldnn_tensor():
  with pytest.raises(NotImplementedError, match="mkldnn layout: jax"):
    SQUARE.to_mkldnn().to("jax")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_jagged_tensor_moves_its_parts():
  moved = nested(torch.jagged).to("jax")
  assert moved.values().device.type == moved.offsets().device.type == "jax"
  assert (moved * 2).values().tolist() == [2.0] * 5


def test_sparse_operand_raises():
  with pytest.raises(MixedDeviceError, match="jax"):
    SQUARE.to("jax") + SQUARE.to_sparse()


def test_pin_memory_supports_cpu_tensors_only():
  assert x("jax").is_pinned() is False
  with pytest.raises(RuntimeError, match="CPU"):
    x("jax").pin_memory()
