"""`torch.compile(backend="jax")` of plain CPU tensors against CPU torch."""

import gc
import re
import weakref

import jax
import pytest
import torch
import torch.nn.functional as F
from compile_events import recorded
from dynamo.counting import CountingBackend

import torchax
import torchax.dynamo
from torchax.errors import NarrowingWarning, OperatorNotFound

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def compiled(function, **options):
  return torch.compile(function, backend="jax", **{"fullgraph": True, **options})


def test_backend_is_found_by_name():
  assert "jax" in torch.compiler.list_backends()


# Numbers ------------------------------------------------------------------------------


def _in_arithmetic(x, n):
  return x * n + 2, n - x, x / n, x < n


@pytest.mark.parametrize(
  "function, programs",
  # The first value is a constant of its program, and so is one of 64 bits.
  [
    (_in_arithmetic, 3),
    (lambda x, n: x.roll(n % 5) * n, 5),
  ],
)
def test_integers_in_arithmetic_compile_one_program(function, programs):
  run = compiled(function)
  with recorded() as events:
    for n in (3, 5, 7, -2, 2**40):
      torch.testing.assert_close(run(X, n), function(X, n))
  assert len(events) == programs


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_products_of_integers_may_exceed_32_bits(device):
  def function(x, n):
    return x * (n * n) + n * 10**6

  run = compiled(function)
  for n in (3, 5, 100_000):
    torch.testing.assert_close(run(X.to(device), n).cpu(), function(X, n))


def test_integers_of_gradients_compile_one_program():
  run = compiled(lambda x, n: (x * n).sum() + (x.long() * n).sum())
  with recorded() as events:
    for n in (3, 5, 7, -2):
      x = X.clone().requires_grad_()
      run(x, n).backward()
      assert torch.equal(x.grad, torch.full_like(X, n))
  assert len(events) == 4  # a forward and a backward program for the first and the rest


# Results of functions -----------------------------------------------------------------

RESULTS = {
  "a tree": lambda x: {"a": [x * 2, None, 3], "b": (x.sum(),)},
  "transposed": lambda x: x.t() * 2,
  "permuted": lambda x: (x[:, :, None] * torch.ones(3)).permute(2, 0, 1).relu(),
  "expanded": lambda x: (x.sum(1, keepdim=True) * 2).expand(4, 5),
  "the input": lambda x: (x, x * 1, x + 0),
  "one result twice": lambda x: [x.exp()] * 2,
  "views of one result": lambda x: (x * 2).split(4, dim=1),
  "no elements": lambda x: (x * 2)[:0],
  "a scalar": lambda x: x.mean(),
  "integers": lambda x: (x.argmax(), torch.arange(5) * 2),
  "bool": lambda x: x > 0,
  "bfloat16": lambda x: x.bfloat16() * 2,
  "complex": lambda x: torch.view_as_complex(x.reshape(4, 4, 2)) * 2j,
  "float16": lambda x: x.half() + 1,
  "a constant": lambda x: x * torch.tensor([2.0] * 8),
  "a size": lambda x: (x.shape[0] * 2, x * x.shape[1]),
  "indexed": lambda x: x[torch.tensor([2, 0]), 1:5],
  "sorted": lambda x: torch.sort(x.sin(), dim=1, descending=True),
  "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
  "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
  "conv": lambda x: F.conv1d(x[None], torch.ones(2, 4, 3)),
  "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0),
}


@pytest.fixture(scope="module")
def results():
  """Return results by name, from one graph and from CPU torch."""

  def run_all(x):
    return [function(x) for function in RESULTS.values()]

  actual, expected = compiled(run_all)(X), run_all(X)
  return dict(zip(RESULTS, zip(actual, expected)))


@pytest.mark.parametrize("name", RESULTS)
def test_results_equal_torchs(name, results):
  actual, expected = results[name]
  flat, spec = torch.utils._pytree.tree_flatten(actual)
  wanted, wanted_spec = torch.utils._pytree.tree_flatten(expected)
  assert spec == wanted_spec
  for have, want in zip(flat, wanted):
    if isinstance(want, torch.Tensor):
      assert type(have) is torch.Tensor
      torch.testing.assert_close(have, want)
      # A part of a larger result has memory of its own.
      is_part = name in ("views of one result", "expanded")
      assert have.stride() == want.stride() or is_part
    else:
      assert have == want


def test_results_do_not_share_memory():
  x = torch.ones(4)
  same, times_one, plus_zero, twice, again = compiled(
    lambda x: (x, x * 1, x + 0, x.exp(), x.exp())
  )(x)
  assert same is x
  pointers = {t.data_ptr() for t in (x, times_one, plus_zero, twice, again)}
  assert len(pointers) == 5
  plus_zero.add_(1)
  assert x.tolist() == [1.0] * 4


def test_view_of_an_input_shares_its_memory():
  x = torch.ones(4, 4)
  view = compiled(lambda x: x[1:3])(x)
  assert view._base is x
  view.add_(1)
  assert x.sum().item() == 24


# Inputs -------------------------------------------------------------------------------

FORMS = {
  "a slice": lambda x: x[1:, ::2],
  "a transpose": lambda x: x.t(),
  "an offset": lambda x: torch.cat([x.flatten(), x.flatten()])[3:35].reshape(4, 8),
  "expanded": lambda x: x[:1].expand(4, 8),
  "conjugate": lambda x: torch.complex(x, x).conj(),
  "bfloat16": lambda x: x.bfloat16(),
  "int64": lambda x: (x * 100).long(),
  "bool": lambda x: x > 0,
}


@pytest.mark.parametrize("name", FORMS)
def test_inputs_of_any_form(name):
  given = FORMS[name](X)
  torch.testing.assert_close(compiled(lambda x: x * 2)(given), given * 2)


def test_inputs_may_change_right_after_the_call():
  """Results depend on the values at the call."""
  x = torch.ones(512, 512)
  run = compiled(lambda x: x @ x)
  for _ in range(10):
    x.fill_(1.0)
    result = run(x)
    x.fill_(100.0)
    assert result[0, 0].item() == 512.0


def test_inputs_are_not_copied():
  x = torch.ones(1 << 22)
  run = compiled(lambda x: x[:4].sum())
  run(x)
  array = torchax.dynamo.torch_io.as_numpy(x)
  assert array.ctypes.data == x.data_ptr()


def test_mutated_inputs_and_buffers():
  def update(x, total):
    total.add_(x.sum(0))
    x[:, 0] = 7.0
    return total * 2

  actual, expected = [X.clone(), torch.ones(8)], [X.clone(), torch.ones(8)]
  torch.testing.assert_close(compiled(update)(*actual), update(*expected))
  torch.testing.assert_close(actual, expected)


def test_inputs_that_share_memory():
  def update(first, second):
    first.add_(1)
    return second * 2

  x, y = torch.ones(6), torch.ones(6)
  torch.testing.assert_close(compiled(update)(x[:4], x[2:]), update(y[:4], y[2:]))
  assert torch.equal(x, y)


def test_batch_norm_follows_torch():
  torch.manual_seed(0)
  models = [torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)]
  run = compiled(models[0])
  for step in range(3):
    x = torch.randn(4, 8) + step
    torch.testing.assert_close(run(x), models[1](x))
  torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
  models[0].eval(), models[1].eval()
  torch.testing.assert_close(run(X), models[1](X))


def _zero_data(layer):
  layer.weight.data.zero_()


def _copy_under_no_grad(layer):
  with torch.no_grad():
    layer.weight.copy_(torch.zeros(8, 8))


def _load(layer):
  layer.load_state_dict({"weight": torch.zeros(8, 8)})


def _assign(layer):
  layer.weight.data = torch.zeros(8, 8)


def _step(layer):
  layer.weight.grad = layer.weight.detach().clone()
  torch.optim.SGD(layer.parameters(), lr=1.0).step()


@pytest.mark.parametrize(
  "change", [_zero_data, _copy_under_no_grad, _load, _assign, _step]
)
def test_changed_parameters_are_used_by_the_next_call(change):
  layer = torch.nn.Linear(8, 8, bias=False)
  run = compiled(layer)
  assert run(X).abs().sum() > 0
  change(layer)
  assert run(X).abs().sum() == 0


# Gradients ----------------------------------------------------------------------------


def make_network():
  torch.manual_seed(0)
  return torch.nn.Sequential(
    torch.nn.Conv1d(1, 4, 3, padding=1),
    torch.nn.GroupNorm(2, 4),
    torch.nn.GELU(),
    torch.nn.Flatten(),
    torch.nn.Linear(32, 3),
  )


def test_training_follows_torch():
  def train(model, run):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
      optimizer.zero_grad()
      loss = F.cross_entropy(run(X[:, None]), torch.tensor([0, 1, 2, 0]))
      loss.backward()
      optimizer.step()
      losses.append(loss.detach())
    return torch.stack(losses), dict(model.named_parameters())

  first, second = make_network(), make_network()
  actual, expected = train(first, compiled(first)), train(second, second)
  torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_inside_and_inputs_that_need_gradients():
  def loss(x, w):
    return (x @ w).softmax(-1).log().mean()

  w = torch.linspace(0, 1, 24).reshape(8, 3)
  gradients = []
  for function in (compiled(loss), loss):
    leaves = [X.clone().requires_grad_(), w.clone().requires_grad_()]
    gradients.append(torch.autograd.grad(function(*leaves), leaves))
  torch.testing.assert_close(*gradients)


def test_retained_graphs():
  x = X.clone().requires_grad_()
  result = compiled(lambda x: (x**3).sum())(x)
  first = torch.autograd.grad(result, x, retain_graph=True)
  assert torch.equal(*first, *torch.autograd.grad(result, x))


def test_second_derivative_raises_torchs_error():
  x = X.clone().requires_grad_()
  (gradient,) = torch.autograd.grad(
    compiled(lambda x: (x**3).sum())(x), x, create_graph=True
  )
  with pytest.raises(RuntimeError, match="double backward"):
    gradient.sum().backward()


def test_parameter_changed_before_backward_raises():
  x, w = X.clone(), torch.ones(8, requires_grad=True)
  result = compiled(lambda x, w: (x * w * w).sum())(x, w)
  with torch.no_grad():
    w.add_(1)
  with pytest.raises(RuntimeError, match="modified by an inplace operation"):
    result.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
  layer = torch.nn.Linear(8, 2)
  with mode():
    result = compiled(layer)(X)
    expected = layer(X)
  assert not result.requires_grad
  assert result.is_inference() == expected.is_inference()
  torch.testing.assert_close(result, expected)


def test_activations_are_freed_after_backward():
  layer = torch.nn.Linear(8, 8)
  result = compiled(lambda x: layer(x).exp().sum())(X)
  saved = weakref.ref(result.grad_fn)
  result.backward()
  del result
  gc.collect()
  assert saved() is None


@pytest.mark.parametrize("is_inside", [False, True])
def test_autocast(is_inside):
  torch.manual_seed(0)
  layer = torch.nn.Linear(8, 4)

  def forward(x):
    if is_inside:
      with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x).float().sum(), layer(x)
    return layer(x).float().sum(), layer(x)

  gradients, dtypes = [], []
  for function in (compiled(forward), forward):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_inside):
      total, result = function(X)
    gradients.append(torch.autograd.grad(total, layer.parameters()))
    dtypes.append(result.dtype)
  assert dtypes == [torch.bfloat16] * 2
  torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02)


# Shapes -------------------------------------------------------------------------------


def test_dynamic_shapes_compile_one_graph():
  def function(x):
    return x.reshape(x.shape[0] * 2, -1).cumsum(0) + x.shape[0], x.shape[0]

  backend = CountingBackend()
  run = torch.compile(function, backend=backend, dynamic=True)
  for rows in (3, 5, 7, 3):
    x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    torch.testing.assert_close(run(x), function(x))
  assert len(backend.graphs) == 1


def test_dynamic_shapes_have_gradients():
  layer = torch.nn.Linear(4, 2)
  run = compiled(lambda x: layer(x).square().mean(), dynamic=True)
  for rows in (3, 5):
    x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    actual = torch.autograd.grad(run(x), layer.parameters())
    expected = torch.autograd.grad(layer(x).square().mean(), layer.parameters())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("numbers", [(0.5, 0.7, 0.9), (1, 2, 3, 7)])
def test_python_numbers_among_the_inputs(numbers):
  run = compiled(lambda x, s: x * s)
  for number in numbers:
    torch.testing.assert_close(run(X, number), X * number)


def test_graph_breaks():
  def function(x):
    y = x * 2
    if y.sum().item() > 0:
      y = y + 1
    return y.relu()

  run = compiled(function, fullgraph=False)
  for x in (X + 1, X - 1):
    torch.testing.assert_close(run(x), function(x))


def test_data_dependent_result_shapes():
  run = compiled(lambda x: x[x > 0] * 2, fullgraph=False)
  torch.testing.assert_close(run(X), X[X > 0] * 2)


# Control flow -------------------------------------------------------------------------


def test_cond():
  def function(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

  run = compiled(function)
  for x in (X.abs(), -X.abs()):
    torch.testing.assert_close(run(x), function(x))


def test_cond_has_gradients():
  def function(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,)).sum()

  for x in (X.abs(), -X.abs()):
    leaf = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(compiled(function)(leaf), leaf)
    torch.testing.assert_close(actual, x.cos() if x.sum() > 0 else x * 0 + 3)


def test_while_loop():
  from torch._higher_order_ops.while_loop import while_loop

  def function(n, x):
    return while_loop(lambda n, x: n < 5, lambda n, x: (n + 1, x * 2), (n, x))

  actual = compiled(function)(torch.tensor(0), X)
  torch.testing.assert_close(actual, (torch.tensor(5), X * 32))


def test_assertions_are_checked_when_the_call_returns():
  def function(x):
    torch._assert_async(x.sum() > 0, "a positive sum")
    return x * 2

  run = compiled(function)
  torch.testing.assert_close(run(X.abs()), X.abs() * 2)
  with pytest.raises(RuntimeError, match="a positive sum"):
    run(-X.abs())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["inv", "cholesky", "lu_factor"])
def test_singular_matrices_raise_torchs_error(name, requires_grad):
  """torch's graphs pass a token through the check, as it is an effect on the host."""

  def function(x):
    result = getattr(torch.linalg, name)(x)
    return result.LU if name == "lu_factor" else result

  run = compiled(function)
  x = (X @ X.T + torch.eye(4)).requires_grad_(requires_grad)
  expected, actual = function(x), run(x)
  torch.testing.assert_close(actual, expected)
  if requires_grad:
    gradients = [torch.autograd.grad(y.sum(), x) for y in (actual, expected)]
    torch.testing.assert_close(*gradients)
  zeros = torch.zeros_like(x, requires_grad=requires_grad)
  with pytest.raises(RuntimeError) as raised:
    function(zeros)
  with pytest.raises(raised.type, match=re.escape(str(raised.value))):
    run(zeros)


# 64 bits, devices, refusals -----------------------------------------------------------


def test_64_bit_dtypes_without_x64():
  run = compiled(lambda i: i * 2)
  assert run(torch.arange(5)).dtype is torch.int64
  with pytest.raises(OverflowError, match="x64"):
    run(torch.tensor([2**40] * 5))


def test_float64_is_narrowed_with_a_warning(monkeypatch):
  monkeypatch.setattr("torchax.core.narrowing._warned", set())
  with pytest.warns(NarrowingWarning):
    result = compiled(lambda x: x / 3)(torch.ones(3, dtype=torch.float64))
  assert result.dtype is torch.float64
  assert result[0].item() != 1 / 3


def test_an_operation_without_lowering_names_the_line():
  library = torch.library.Library("torchax_compile_test", "DEF")
  library.define("unknown(Tensor x) -> Tensor")
  library.impl("unknown", lambda x: x.clone(), "CPU")
  library.impl("unknown", lambda x: torch.empty_like(x), "Meta")

  def function(x):
    return torch.ops.torchax_compile_test.unknown(x * 2)

  with pytest.raises(Exception) as caught:
    compiled(function)(X)
  message = str(caught.value)
  assert OperatorNotFound.__name__ in message
  assert "torchax_compile_test.unknown" in message
  assert "test_backend.py" in message
  assert "torch.compiler.disable" in message


def test_a_tensor_on_another_device_is_refused():
  run = compiled(lambda x: x * 2)
  with pytest.raises(Exception, match="one on meta"):
    run(torch.ones(3, device="meta"))


def test_tensors_of_two_devices_are_refused():
  run = compiled(lambda x, y: x + y)
  with pytest.raises(Exception, match=r'aten.add.Tensor.*"jax".*cpu'):
    run(torch.ones(3), torch.ones(3, device="jax"))


def test_sparse_inputs_run_in_torch_or_are_refused():
  """Dynamo has no sparse graphs for backends; with fullgraph it raises."""
  with pytest.raises(Exception, match=r"(?i)sparse"):
    compiled(lambda x: x * 2)(torch.eye(3).to_sparse())


def test_compiled_code_runs_outside_of_jax_traces():
  run = compiled(lambda x: x * 2)
  run(X)
  with jax.checking_leaks():
    torch.testing.assert_close(run(X), X * 2)
