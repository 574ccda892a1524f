"""Results of graphs on the CPU: shared memory, numbers, unused draws."""

import itertools

import compile_events
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import graph_break

import torchax

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def compiled(function, **options):
  return torch.compile(function, backend="jax", **options)


def row(x):
  y = x * 2
  return y, y[0]


def columns(x):
  """Return views of a tensor that is not returned itself, in another memory order."""
  y = (x * 2).t()
  return y[1:3], y[2:5], y.reshape(-1)


def chunks(x):
  return (x + 1).chunk(2)


def twice(x):
  y = x * 2
  return y, y


def flat(x):
  y = x * 2
  return y.view(-1), y.unsqueeze(0)


def detached(x):
  y = x * 2
  return y, y.detach(), y.data[1]


def apart(x):
  return x * 2, x * 2, (x * 2).clone()


def overlaps(results) -> list[bool]:
  """Return, for each pair, True if a change of the first is seen in the second."""
  found = []
  for first in results:
    for second in results:
      before = second.clone()
      first.add_(1)
      found.append(not torch.equal(before, second))
      first.sub_(1)
  return found


def detached_view(x):
  y = x * 2
  return y.view(y.dtype), y[0]


IDLE = [
  lambda x: F.dropout(x, 0.5, training=False),
  lambda x: F.dropout(x, 0.0, inplace=True),
  torch.nn.Dropout(0.5).eval(),
  lambda x: torch.ops.aten.dropout(x, 0.5, train=False),
]

SHARING = [row, columns, chunks, twice, flat, detached, detached_view, apart]


@pytest.mark.parametrize(
  ("function", "needs_grad"), itertools.product(SHARING, [False, True])
)
def test_results_share_memory_as_they_do_eagerly(function, needs_grad):
  x = X.clone().requires_grad_(needs_grad)
  actual, expected = compiled(function)(x), function(x)
  torch.testing.assert_close(actual, expected)
  assert [r.stride() for r in actual] == [r.stride() for r in expected]
  found = [overlaps([r.detach() for r in rs]) for rs in (actual, expected)]
  assert found[0] == found[1]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("drop", IDLE, ids=["eval", "zero", "module", "aten"])
def test_dropout_that_is_off_returns_its_input(drop, is_inside, needs_grad):
  """torch's decomposition copies it, and loses the change of the input."""

  def function(x):
    y = drop(x)
    if is_inside:
      y += y
    return y

  def changed(function):
    x = X.clone().requires_grad_(needs_grad) * 1
    y = function(x)
    if not is_inside:
      with torch.no_grad():
        y.mul_(2)
    return x.detach(), y.detach()

  x, y = changed(compiled(function))
  assert torch.equal(x, 2 * X) and torch.equal(y, 2 * X)
  assert all(map(torch.equal, changed(function), (x, y)))


def test_write_to_a_result_leaves_saved_tensors_alone():
  x = X.clone().requires_grad_()
  (result,) = compiled(lambda x: (x.exp().t(),))(x)
  result.detach().add_(1)
  result.sum().backward()
  torch.testing.assert_close(x.grad, X.exp())


def test_change_after_a_graph_break_is_visible():
  def function(x):
    y = x * 2
    view = y[0]
    graph_break()
    view.zero_()
    return y

  torch.testing.assert_close(compiled(function)(X), function(X))


@pytest.mark.filterwarnings("error::torchax.errors.NarrowingWarning")
@pytest.mark.parametrize("factor", [1.0, 1e40])
def test_python_floats_keep_their_precision(factor):
  def function(x, number):
    return x * 1, number + 1234567890.123, number * factor

  run = compiled(function)
  for number in (0.5, 0.7, -0.7):
    assert run(X, number)[1:] == function(X, number)[1:]


def test_changing_float_does_not_recompile():
  count = torch._dynamo.testing.CompileCounterWithBackend("jax")
  run = torch.compile(lambda x, number: x * number, backend=count)
  for number in (0.5, 0.7, 0.9, 1.1):
    torch.testing.assert_close(run(X, number), X * number)
  assert count.frame_count <= 2, "the first value is a constant, then a number"


def unused(x):
  F.dropout(x, 0.5)
  torch.rand(3, device=x.device)
  return F.dropout(x, 0.5)


def of_nothing(x):
  return torch.cat([F.dropout(x[:0], 0.5), F.dropout(x, 0.5)])


def overwritten(x):
  noise = torch.empty_like(x).uniform_()
  noise.zero_()
  return F.dropout(x, 0.5) + noise


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("function", [unused, of_nothing, overwritten])
def test_unused_draws_advance_the_stream(function, needs_grad):
  x = torch.ones(64)
  with torchax.default_env() as env:
    torch.manual_seed(5)
    expected = [function(x.to("jax")).cpu(), torch.rand(3).cpu()]
    count = env.rng.state.count
  torch.manual_seed(5)
  run = compiled(function)
  actual = [run(x.clone().requires_grad_(needs_grad)).detach()]
  with torchax.default_env() as env:
    actual.append(torch.rand(3).cpu())
    assert env.rng.state.count == count
  torch.testing.assert_close(actual, expected, rtol=0, atol=0)


NUMBERS = {
  "factor": lambda x: x * x.int().max().item(),
  "results": lambda x: (x + 1, x.int().max().item(), 2 * x.sum().item()),
  "integer": lambda x: x * int(x.sum()) + round(x.mean().item()),
  "bool": lambda x: x * (x > 0).all().item(),
  "masked": lambda x: x.masked_fill(x > 1, x.max().item()),
  "chain": lambda x: (x * x.sum().item()) ** 2 * x.int().sum().item(),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_numbers_of_tensors_are_computed_in_the_graph(function, needs_grad):
  run = compiled(function, fullgraph=True)
  setting = torch._dynamo.config.patch(capture_scalar_outputs=True)
  counts = []
  for scale in (1, 2, 3):
    x = (torch.arange(1.0, 5) * scale).requires_grad_(needs_grad)
    with setting, compile_events.recorded() as events:
      found = run(x)
    expected = function(x)
    if isinstance(expected, tuple):
      assert found[1:] == expected[1:]
      assert list(map(type, found)) == list(map(type, expected))
      found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected)
    if needs_grad:
      gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
      torch.testing.assert_close(*gradients)
    counts.append(len(events))
  assert counts[1:] == [0, 0]


def test_checks_of_numbers_raise_after_the_call():
  def function(x):
    torch._check(x.int().max().item() < 3, lambda: "a number below 3")
    return x * 2

  run = compiled(function, fullgraph=True)
  with torch._dynamo.config.patch(capture_scalar_outputs=True):
    run(torch.ones(3))
    with pytest.raises(RuntimeError, match="assertion failed"):
      run(torch.full((3,), 4.0))


@pytest.mark.parametrize("function", [lambda x: x[x > 0], lambda x: x.nonzero()])
def test_data_dependent_code_raises_in_a_graph(function):
  settings = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
  }
  refused = pytest.raises(Exception, match="depends on the values of a tensor")
  with torch._dynamo.config.patch(settings), refused as error:
    compiled(function, fullgraph=True)(X)
  assert "DataDependentError" in str(error.value)
  assert "test_torch_io.py" in str(error.value), "the line of the user's code"
  torch.testing.assert_close(compiled(function)(X), function(X))


def test_a_custom_operation_that_changes_its_argument_is_named():
  @torch.library.custom_op("torchax_test::bump", mutates_args=("x",))
  def bump(x: torch.Tensor) -> None:
    x.add_(1)

  def function(x):
    y = x * 2
    bump(y)
    return y

  with pytest.raises(Exception, match=r"torchax_test\.bump\.default has no lowering"):
    compiled(function)(X)
