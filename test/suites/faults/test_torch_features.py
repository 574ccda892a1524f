"""TorchScript, make_fx, quantization and counters of operations on jax tensors."""

import io

import pytest
import torch
from torch import nn
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import torchax
from torchax.errors import UnsupportedDtypeError


def _model() -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


POINTS = torch.linspace(-1, 1, 8).reshape(2, 4)
JIT = {"script": torch.jit.script, "trace": lambda m: torch.jit.trace(m, POINTS)}
each_jit = pytest.mark.parametrize("way", JIT)


def test_data_parallel_without_process_group_names_missing_call():
  with pytest.raises(RuntimeError, match=r'init_process_group\("jax"\)'):
    DistributedDataParallel(_model().to("jax"))


def test_data_parallel_of_cpu_modules_is_torchs_own():
  with pytest.raises(ValueError, match="process group"):
    DistributedDataParallel(_model())


def _in_environment(is_on: bool):
  return torchax.default_env() if is_on else torchax.disable_temporarily()


@pytest.mark.parametrize("is_on", [True, False])
@each_jit
def test_torchscript_of_jax_module_computes_values_and_gradients(way, is_on):
  expected = _model()(POINTS)
  with _in_environment(is_on):
    points, model = POINTS.to("jax"), _model().to("jax")
    scripted = (
      torch.jit.script(model) if way == "script" else torch.jit.trace(model, points)
    )
    actual = scripted(points)
    actual.sum().backward()
    again = scripted(2 * points)  # the graph records operations, not numbers
  torch.testing.assert_close(actual.cpu(), expected)
  torch.testing.assert_close(again.cpu(), _model()(2 * POINTS))
  assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("is_on", [True, False])
def test_trace_of_functions_records_operations_not_numbers(is_on):
  def run(x):
    weight = torch.eye(4, device="jax")
    x = nn.functional.layer_norm(nn.functional.linear(x, weight), (4,))
    return nn.functional.scaled_dot_product_attention(x, x, x) @ weight

  with _in_environment(is_on), torch.no_grad():
    points = POINTS.to("jax")
    traced = torch.jit.trace(run, points)
    torch.testing.assert_close(traced(points * 3), run(points * 3))


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_trace_records_convolutions(layer):
  images, model = torch.randn(1, 3, 5, 5, device="jax"), layer(3, 4, 3).to("jax")
  traced = torch.jit.trace(model, images)
  torch.testing.assert_close(traced(images * 2), model(images * 2))
  traced(images).sum().backward()
  assert model.weight.grad is not None
  assert "aten::_convolution" in str(traced.graph)


def _shorten(x):
  x = x.clone()
  x[:, : x.shape[1] - 1] = 0.0
  return x


def _copy_into_zeros(x):
  padded = torch.zeros(x.shape[0], 9, device=x.device)
  padded[:, : x.shape[1]].copy_(x)
  return padded.gather(1, torch.zeros(x.shape[0], 1, dtype=int, device=x.device))


@pytest.mark.parametrize("run", [_shorten, _copy_into_zeros])
def test_trace_passes_sizes_of_tensors_as_arguments(run):
  traced = torch.jit.trace(run, POINTS.to("jax"))
  other = torch.rand(2, 4, device="jax")
  assert torch.equal(traced(other), run(other))


@each_jit
def test_saving_torchscript_of_jax_tensors_raises(way, tmp_path):
  points, model = POINTS.to("jax"), _model().to("jax")
  scripted = (
    torch.jit.script(model) if way == "script" else torch.jit.trace(model, points)
  )
  for file in (str(tmp_path / "model.pt"), io.BytesIO()):
    with pytest.raises(RuntimeError):
      torch.jit.save(scripted, file)


@each_jit
def test_a_torchscript_file_of_cpu_tensors_is_torchs_own(way, tmp_path):
  path = str(tmp_path / "model.pt")
  torch.jit.save(JIT[way](_model()), path)
  torch.testing.assert_close(torch.jit.load(path)(POINTS), _model()(POINTS))


@each_jit
def test_scripted_module_stays_where_it_is(way):
  scripted = JIT[way](_model())
  with pytest.raises(RuntimeError):
    scripted.to("jax")
  assert {p.device.type for p in scripted.parameters()} == {"cpu"}
  assert scripted.to(torch.float64)(POINTS.double()).dtype == torch.float64


MAKE_FX = {
  "pointwise": lambda x: x.sin() * 2,
  "linear": lambda x: nn.functional.linear(x, torch.eye(4, device="jax")),
  "view and write": lambda x: x.t().add_(1).exp(),
  "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("function", MAKE_FX.values(), ids=MAKE_FX)
def test_make_fx_records_operations_not_numbers(function, is_on):
  with _in_environment(is_on):
    graph = proxy_tensor.make_fx(function)(POINTS.to("jax"))
    other = POINTS.flip(0) * 3
    actual = graph(other.to("jax"))
    torch.testing.assert_close(actual, function(other.to("jax")))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamic_quantisation_names_torchao():
  quantize = torch.ao.quantization.quantize_dynamic
  with (
    torchax.default_env(),
    pytest.raises(UnsupportedDtypeError, match="Int8WeightOnlyConfig"),
  ):
    quantize(_model().to("jax"), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("way", ["eager", "compiled", "compiled from the CPU"])
def test_sparse_embeddings_name_the_dense_ones(way):
  embedding, words = nn.Embedding(8, 4, sparse=True), torch.tensor([1, 2, 2])
  if way != "compiled from the CPU":
    embedding, words = embedding.to("jax"), words.to("jax")

  def step(words):
    return embedding(words).sum()

  if way != "eager":
    step = torch.compile(step, backend="jax")
  with (
    torchax.default_env(),
    pytest.raises(UnsupportedDtypeError, match="`sparse=False`"),
  ):
    step(words).backward()
  assert embedding.weight.grad is None


class Attention(nn.Module):
  """Model with a product in a linear map, and two in attention."""

  def __init__(self):
    super().__init__()
    self.inner = nn.Linear(4, 4)

  def forward(self, x):
    x = self.inner(x)[None, None]
    return nn.functional.scaled_dot_product_attention(x, x, x)


class Scores(nn.Linear):
  """Linear layer, and the products of its output in a stack of two batch dimensions."""

  def __init__(self):
    super().__init__(4, 4)

  def forward(self, x):
    x = super().forward(x)[None, None]
    return x @ x.mT


FLOPS = {"linear": _model, "attention": Attention, "stack": Scores}


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("row", FLOPS)
def test_counter_of_operations_counts_operations_on_jax(row, is_on):
  make = FLOPS[row]

  def count(model, points) -> dict:
    with FlopCounterMode(display=False) as counter:
      model(points).sum().backward()
    return counter.get_total_flops()

  # The CPU's kernels for attention are not counted.
  with sdpa_kernel(SDPBackend.MATH):
    expected = count(make(), POINTS)
  with _in_environment(is_on):
    actual = count(make().to("jax"), POINTS.to("jax"))
  assert actual == expected > 0


def test_a_counter_of_operations_leaves_draws_as_they_are():
  def run(scope) -> torch.Tensor:
    torch.manual_seed(1)
    with scope:
      dropped = nn.functional.dropout(torch.ones(8, device="jax"), 0.5)
      return torch.cat([dropped, torch.rand(2, device="jax")]).cpu()

  with torchax.default_env():
    expected = run(torchax.default_env())
    assert torch.equal(run(FlopCounterMode(display=False)), expected)
