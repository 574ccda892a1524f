"""Graphs of exported programs: symbols, branches, and parts that cannot compile."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export.test_export import arrays, assert_equals, export_of, program_of
from torch import nn
from torch.export import Dim

from torchax import export
from torchax.compat import versions
from torchax.core import mappings
from torchax.errors import DataDependentError, OperatorNotFound, RngError
from torchax.export import (
  JaxInterpreter,
  exported_program_to_jax,
  exported_program_to_stablehlo,
  extract_avals,
)
from torchax.rng import RngState, rng_scope

X = torch.randn(4, 8)
BATCH = Dim("batch", min=2, max=50)

# Symbolic sizes -----------------------------------------------------------------------

IS_OLD = versions.is_older(torch.__version__, "2.13")

SYMBOLIC = {
  "slice": lambda x: x[1:, ::2],
  "slice from the end": lambda x: x[-2:],
  "half": lambda x: x[: x.shape[0] // 2],
  "select": lambda x: x[1] + x[-1],
  "arange": lambda x: x + torch.arange(x.shape[0])[:, None],
  "size as a number": lambda x: x * x.shape[0] + 1 / x.shape[0],
  "cat": lambda x: torch.cat([x, x], 0),
  "reshape": lambda x: x.reshape(-1, 4).T.reshape(2, -1),
  "expand": lambda x: x[:, None].expand(-1, 3, 8),
  "new": lambda x: torch.zeros(x.shape[0], 2) + x.new_ones(x.shape[0], 1),
  "reductions": lambda x: x.mean(0) + x.std() + x.amax(0),
  "softmax": lambda x: x.softmax(0) + x.log_softmax(1),
  "cumsum": lambda x: x.cumsum(0),
  "pad": lambda x: F.pad(x, (1, 1)),
  "norms": lambda x: F.layer_norm(x, (8,)) + F.normalize(x),
  "where": lambda x: torch.where(x > 0, x, x.sum()),
  "matmul": lambda x: x.T @ x,
  "stack": lambda x: torch.stack([x, x], 1).flatten(1),
  "split": lambda x: torch.cat(x.split(4, 1)[::-1]),
  "index": lambda x: x[:, torch.tensor([0, 2])],
  "gather": lambda x: x.gather(1, x.argsort(1)),
  "pool": lambda x: F.avg_pool1d(x[None], 2),
  "convolution": lambda x: F.conv1d(x.T[None], torch.ones(4, 8, 3), padding=1),
  "groups": lambda x: F.conv1d(x.T[None], torch.ones(4, 2, 3), groups=4),
  "depthwise": lambda x: F.conv1d(x.T[None], torch.ones(8, 1, 2), groups=8),
  "transposed": lambda x: F.conv_transpose1d(x.T[None], torch.ones(8, 2, 2), stride=2),
  "cast": lambda x: x.to(torch.float16),
  "cast to integers": lambda x: (x * 3).long() + (x * 3).int(),
  "cast of a mask": lambda x: (x > 0).float() + (x > 0).type_as(x),
  "one_hot": lambda x: F.one_hot((x[:, 0] > 0).long(), 3),
  "scatter": lambda x: x.scatter_add(1, x.long().abs(), x),
  "embedding": lambda x: F.embedding(x.long().abs(), torch.ones(9, 2)),
  "quantile": lambda x: x.quantile(0.5, 1),
  "resize": lambda x: F.interpolate(x[:, None], scale_factor=1.5, mode="linear"),
}
# Torch 2.11 itself refuses to export a power with a size as its exponent.
if not IS_OLD:
  SYMBOLIC["power"] = lambda x: x.abs() ** x.shape[0]


def _row(name: str):
  is_torch_wrong = name == "quantile" and (
    IS_OLD or versions.release(torch.__version__) >= (2, 15)
  )
  reason = "torch's own `run_decompositions` fails on a quantile of a derived size"
  return pytest.param(name, marks=[pytest.mark.xfail(reason=reason)] * is_torch_wrong)


@pytest.mark.parametrize("name", map(_row, SYMBOLIC))
def test_operations_take_symbolic_sizes(name):
  function = SYMBOLIC[name]
  even = 2 * Dim("half", min=2, max=25)
  program = export_of(function, X, dynamic_shapes=({0: even},))
  states, stablehlo = exported_program_to_stablehlo(program)
  other = torch.randn(6, 8)
  assert_equals(stablehlo.call(states, (arrays(other),))[0], function(other))


def derived():
  return export_of(
    lambda x, y: torch.cat([x, y])[: x.shape[0] // 2],
    torch.randn(4, 8),
    torch.randn(5, 8),
    dynamic_shapes=({0: 2 * BATCH}, {0: 2 * BATCH + 1}),
  )


def test_avals_have_symbols_with_torch_constraints():
  x, y = extract_avals(derived())
  (symbol,) = {str(x.shape[0]).removeprefix("2*")}
  assert str(y.shape[0]) == f"2*{symbol} + 1"
  assert x.shape[1] == 8
  constraints = jax.export.symbolic_shape(symbol, scope=x.shape[0].scope)[0] <= 50
  assert constraints


def test_equal_sizes_share_a_symbol():
  program = export_of(torch.add, X, X.clone(), dynamic_shapes=({0: BATCH}, {0: BATCH}))
  x, y = extract_avals(program)
  assert x.shape == y.shape


BAD_SIZES = {"another": (6, 6), "odd": (5, 6), "too large": (200, 201)}


@pytest.mark.parametrize("sizes", BAD_SIZES.values(), ids=BAD_SIZES)
def test_sizes_outside_of_the_constraints_raise(sizes):
  inputs = tuple(jnp.ones((size, 8)) for size in sizes)
  states, program = exported_program_to_jax(derived())
  with pytest.raises(ValueError, match=r"Argument [xy] should have the shape \[2\*s"):
    program(states, inputs)
  states, stablehlo = exported_program_to_stablehlo(derived())
  with pytest.raises(ValueError, match="polymorphic shapes|symbolic shape constraint"):
    stablehlo.call(states, inputs)


def test_changing_number_is_an_operand():
  program = export_of(torch.mul, X, 3, dynamic_shapes=(None, Dim.DYNAMIC))
  assert [aval.shape for aval in extract_avals(program)] == [(4, 8), ()]
  states, function = exported_program_to_jax(program)
  assert_equals(function(states, (arrays(X), 7))[0], X * 7)
  states, stablehlo = exported_program_to_stablehlo(program)
  assert_equals(stablehlo.call(states, (arrays(X), np.int32(7)))[0], X * 7)


@pytest.mark.parametrize("x64, integer", [(False, jnp.int32), (True, jnp.int64)])
def test_wide_dtypes_become_jax_dtypes(x64, integer):
  with jax.enable_x64(x64):
    tokens = torch.arange(4)
    program = export_of(lambda x: x * 2, tokens)
    assert extract_avals(program)[0].dtype == integer
    states, stablehlo = exported_program_to_stablehlo(program)
    (output,) = stablehlo.call(states, (jnp.arange(4),))
    assert output.dtype == integer


# Regions ------------------------------------------------------------------------------


def _branches(x):
  return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def _loop(x):
  turn = lambda i, x: (i + 1, x * 2)  # noqa: E731
  return torch._higher_order_ops.while_loop(
    lambda i, x: i < 3, turn, (torch.tensor(0, device=x.device), x)
  )[1]


def _scan(x):
  step = lambda carry, x: (carry + x, carry * x)  # noqa: E731
  return torch._higher_order_ops.scan(step, x[0] * 1, x)[1]


def _map(x):
  scale = x.sum()
  return torch._higher_order_ops.map(lambda row: row * scale, x)


REGIONS = {"cond": _branches, "while_loop": _loop, "scan": _scan, "map": _map}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("name", REGIONS)
def test_regions_run_as_in_torch(name, transform):
  states, program = exported_program_to_jax(export_of(REGIONS[name], X))
  for x in (X.abs(), -X.abs()):
    assert_equals(transform(program)(states, (arrays(x),))[0], REGIONS[name](x))


class Region(nn.Module):
  """Module with an operator of control flow."""

  def __init__(self, function):
    super().__init__()
    self.function = function

  def forward(self, x):
    return self.function(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_torch_exports_regions_on_jax(name, strict):
  x, function = X.abs().to("jax"), REGIONS[name]
  exported = torch.export.export(Region(function), (x,), strict=strict).module()
  for value in (x, -x):
    torch.testing.assert_close(exported(value), function(value))


def test_autocast_is_part_of_the_program():
  def function(x):
    with torch.autocast("cpu", torch.bfloat16):
      return x @ x.T

  (output,) = program_of(function, X)([], (arrays(X),))
  assert output.dtype == jnp.bfloat16
  one_rounding = 2**-8
  expected = function(X).float().numpy()
  np.testing.assert_allclose(output.astype(np.float32), expected, rtol=one_rounding)


def test_stream_continues_after_draws_in_a_branch():
  def draw(x):
    one, two = (lambda x: F.dropout(x), lambda x: F.dropout(F.dropout(x)))
    return torch.cond(x.sum() > 0, one, two, (x,)) + torch.rand_like(x)

  program = program_of(draw, X)
  x = arrays(X.abs())
  (output,) = program([], (x,), rng=1)
  plain = program_of(lambda x: F.dropout(x), X)([], (x,), rng=1)[0]
  state = RngState.from_seed(1)
  later = program_of(torch.rand_like, X)([], (x,), rng=state.advance(2))[0]
  np.testing.assert_allclose(output, plain + later, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(program)([], (x,), rng=1)[0], output, rtol=1e-6)


def _drawing_loop(x):
  turn = lambda i, x: (i + 1, x + torch.rand_like(x))  # noqa: E731
  return torch._higher_order_ops.while_loop(
    lambda i, x: i < 3, turn, (torch.tensor(0), x)
  )[1]


def test_while_loop_draws_from_a_child_stream():
  """Iterations differ, and the loop advances the stream by one draw."""
  function = export_of(lambda x: _drawing_loop(x) + torch.rand_like(x), X)
  states, program = exported_program_to_jax(function)
  draw = lambda: torch.rand(X.shape, device="jax").cpu()  # noqa: E731
  with rng_scope(0) as stream:
    with rng_scope(stream.next_key()):
      expected = X + draw() + draw() + draw()
    expected = expected + draw()
  (output,) = program(states, (arrays(X),), rng=0)
  np.testing.assert_allclose(output, expected, rtol=1e-6)
  (jitted,) = jax.jit(program)(states, (arrays(X),), rng=0)
  np.testing.assert_allclose(jitted, expected, rtol=1e-6)


def test_exported_scan_draws_as_the_unrolled_loop():
  def scanned(x):
    step = lambda carry, x: (carry + x, F.dropout(x))  # noqa: E731
    return torch._higher_order_ops.scan(step, x[0] * 1, x)[1] + torch.rand_like(x)

  def unrolled(x):
    return torch.stack([F.dropout(row) for row in x]) + torch.rand_like(x)

  expected = program_of(unrolled, X)([], (arrays(X),), rng=1)[0]
  program = program_of(scanned, X)
  for run in (program, jax.jit(program)):
    np.testing.assert_allclose(run([], (arrays(X),), rng=1)[0], expected, rtol=1e-6)


def test_draws_in_a_while_loop_condition_raise():
  def loop(x):
    return torch._higher_order_ops.while_loop(
      lambda x: torch.rand_like(x).sum() < 3, lambda x: (x + 1,), (x,)
    )[0]

  states, program = exported_program_to_jax(export_of(loop, X))
  with pytest.raises(RngError, match="torch.while_loop"):
    program(states, (arrays(X),), rng=0)


NUMBERS = {
  "factor": lambda x, n: x * n.max().item(),
  "factor of halves": lambda x, n: x.bfloat16() * x.sum().item(),
  "term": lambda x, n: torch.add(x, x, alpha=n.max().item()),
  "bound": lambda x, n: x.clamp(max=x.mean().item()),
  "exponent": lambda x, n: x.abs() ** n.min().item(),
  "filler": lambda x, n: torch.full((3,), n.sum().item()).float(),
  "masked": lambda x, n: x.masked_fill(x > 1, x.max().item()),
  "index": lambda x, n: x[n.min().item()],
  "quotient": lambda x, n: x * ((n.max().item() + 1) // 2),
  "bool": lambda x, n: x * (x > 0).all().item(),
  "checked": lambda x, n: (torch._check(n.max().item() < 9), x)[1],
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_tensors_are_values_of_the_program(function):
  n = torch.tensor([2, 1])
  program = jax.jit(program_of(function, X, n))
  for x, numbers in ((X, n), (2 * X, n - 1)):
    (found,) = program([], (arrays(x), arrays(numbers)))
    expected = function(x, numbers)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.float(), rtol=1e-6)
    assert found.dtype == mappings.t2j_dtype(expected.dtype)


def test_gradients_stop_where_torch_stops_them():
  def loss(x):
    with torch.no_grad():
      scale = x * 2
    return (x * scale + x.detach() ** 2 + x * x.sum().item()).sum()

  x = X.clone().requires_grad_()
  loss(x).backward()
  program = program_of(loss, X)
  gradient = jax.grad(lambda array: program([], (array,))[0])(arrays(X))
  assert_equals(gradient, x.grad)


# Refusals -----------------------------------------------------------------------------


def _item(x):
  length = x.abs().sum().int().item()
  torch._check(length >= 0)
  return torch.ones(length)


DATA_DEPENDENT = {"aten.nonzero": torch.nonzero, "aten.ones": _item}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_data_dependent_op_runs_eagerly_and_raises_when_traced(name):
  program = export_of(DATA_DEPENDENT[name], X)
  states, function = exported_program_to_jax(program)
  expected = DATA_DEPENDENT[name](X)
  assert function(states, (arrays(X),))[0].shape == tuple(expected.shape)
  with pytest.raises(DataDependentError, match=rf"{name}(.|\n)*\.py, line \d+"):
    exported_program_to_stablehlo(program)


library = torch.library.Library("torchax_test_export", "DEF")
library.define("unknown(Tensor x) -> Tensor")
for key in ("CPU", "Meta"):  # a kernel for all devices would run on jax too
  library.impl("unknown", torch.clone, key)


def _in_strict_mode(x):
  return torch.ops.higher_order.strict_mode(lambda x: (x + 1,), (x,))[0]


UNSUPPORTED = {
  "torchax_test_export.unknown": torch.ops.torchax_test_export.unknown,
  "higher_order.strict_mode": _in_strict_mode,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_operation_is_named_with_its_line(name):
  program = program_of(UNSUPPORTED[name], X)
  with pytest.raises(OperatorNotFound, match=rf"{name}(.|\n)*\.py, line \d+"):
    program([], (arrays(X),))


def test_a_failing_operation_has_a_note_with_its_line():
  program = program_of(lambda x: x @ x.T, X)
  graph = JaxInterpreter(program._graph.module)
  with pytest.raises(Exception, match="") as caught:
    graph.run(jnp.ones((2, 3, 4, 5)))
  assert any("aten." in note and ".py, line" in note for note in caught.value.__notes__)


# The interpreter ----------------------------------------------------------------------


def test_the_interpreter_runs_a_graph_on_arrays():
  linear = nn.Linear(8, 2)
  program = torch.export.export(linear, (X,)).run_decompositions()
  states = arrays(tuple(linear.state_dict().values()))
  (output,) = JaxInterpreter(program.graph_module).run(*states, arrays(X))
  assert_equals(output, linear(X))


def test_the_interpreter_refuses_operations_that_write():
  program = export_of(lambda x: x.clone().add_(1), X)
  with pytest.raises(OperatorNotFound, match=r"aten.add_.Tensor .*run_decompositions"):
    JaxInterpreter(program.graph_module).run(arrays(X))


def test_debug_logs_operations_with_their_results(monkeypatch, caplog):
  monkeypatch.setattr(export, "DEBUG", True)
  program = program_of(torch.relu, X)
  with caplog.at_level(logging.INFO, logger="torchax.export"):
    program([], (arrays(X),))
  assert "aten.relu.default" in caplog.text
  assert "(4, 8)" in caplog.text


UNDECIDED = {
  "a resized dimension": lambda x: F.interpolate(x.T[None], scale_factor=1.5),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_operation_that_needs_a_concrete_size_raises(name):
  exported = export_of(UNDECIDED[name], X, dynamic_shapes=({0: BATCH},))
  with pytest.raises(OperatorNotFound, match=r"needs to know a size that is a symbol"):
    exported_program_to_stablehlo(exported)


SOLVES = {
  "inv": torch.linalg.inv,
  "solve": lambda x: torch.linalg.solve(x, x[0]),
  "lu_factor": lambda x: torch.linalg.lu_factor(x).LU,
  "tensorinv": lambda x: torch.linalg.tensorinv(x[None], ind=2),
}


@pytest.mark.parametrize("name", SOLVES)
def test_checks_of_singular_matrices_are_exported(name):
  """torch's graphs pass a token through the check, as it is an effect on the host."""
  x = torch.eye(3) * 2 + torch.ones(3, 3)
  program = program_of(SOLVES[name], x)
  (output,) = program([], arrays((x,)))
  assert_equals(output, SOLVES[name](x))
  (jitted,) = jax.jit(program)([], arrays((x,)))
  assert_equals(jitted, SOLVES[name](x))
  with pytest.raises(torch.linalg.LinAlgError):
    program([], arrays((torch.zeros(3, 3),)))


def test_detached_result_stops_gradients():
  program = program_of(lambda x: (x * 2, (x * 3).detach()), X)
  outputs = program([], arrays((X,)))
  assert_equals(outputs[0], X * 2)
  assert_equals(outputs[1], X * 3)
  (slope,) = jax.grad(lambda inputs: sum(map(jnp.sum, program([], inputs))))(
    tuple(arrays((X,)))
  )
  assert (slope == 2).all()


# Tensors that `forward` makes ---------------------------------------------------------

NEW_TENSORS = {
  "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
  "number": lambda x: x * torch.tensor(2.0, device=x.device),
  "as_tensor": lambda x: x + torch.as_tensor([1, 2, 3], device=x.device),
  "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
  "index": lambda x: x[:, torch.tensor([2, 0], device=x.device)],
}


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", NEW_TENSORS)
def test_export_of_new_tensors_on_jax(name, strict):
  """torch's tracers see a CPU tensor and its move, as without accelerators."""

  class Module(torch.nn.Module):
    def forward(self, x):
      return NEW_TENSORS[name](x)

  x = torch.arange(6.0).view(2, 3)
  exported = torch.export.export(Module(), (x.to("jax"),), strict=strict)
  output = exported.module()(x.to("jax"))
  assert output.device.type == "jax"
  torch.testing.assert_close(output.cpu(), Module()(x))
