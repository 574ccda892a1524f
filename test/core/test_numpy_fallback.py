"""numpy fallback while shapes are new: bits, devices, errors, counts."""

import warnings

import compile_events
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerators import cpu_only

import torchax
from torchax.core import numpy_fallback

pytestmark = cpu_only("numpy computes for small arrays of CPU devices only")

DTYPES = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int32
SIZE = iter(range(20, 20_000))


@pytest.fixture(autouse=True)
def _inside_the_environment():
  with torchax.default_env():
    torch.ones(2, device="jax").cos()  # one-time costs of JAX and its compiler
    yield


def given(*shape, dtype=torch.float32):
  """Return CPU numbers of all bit patterns except NaNs."""
  values = torch.arange(torch.Size(shape).numel()).reshape(shape) * 7919 % 251 - 125
  return values.to(dtype)


# Functions of a tensor (n, 4) with a number of rows that no other row has.
MOVES = {
  "cat": lambda x: torch.cat((x, x[:3]), 0),
  "cat of a view": lambda x: torch.cat((x.t()[:, 1:], x.t()), 1),
  "cat along the last dimension": lambda x: torch.cat((x, x), -1),
  "cat of one that is empty": lambda x: torch.cat((x, x[:0])),
  "stack": lambda x: torch.stack((x, x), 1),
  "clone of a view": lambda x: x.t().clone(),
  "contiguous": lambda x: x.t().contiguous(),
  "reshape that copies": lambda x: x.t().reshape(-1),
  "pad": lambda x: F.pad(x, (0, 1, 2, 3)),
  "pad with a number": lambda x: F.pad(x, (1, 2), value=1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_numpy_fallback_the_bits_of_the_program(move, dtype, monkeypatch):
  x = given(next(SIZE), 4, dtype=dtype)
  there = x.to("jax")
  with compile_events.recorded() as events:
    found = move(there)
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)  # the cost is paid by now
  with compile_events.recorded() as events:
    compiled = move(there)
  assert events
  for result in (found, compiled):
    assert result.dtype == dtype
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    assert torch.equal(result.cpu().view(carrier), move(x).view(carrier))


def test_rows_of_a_loop_are_joined_on_the_host():
  """Slices of one form share a program; their starts are operands."""
  x = given(next(SIZE), 2, 4)
  there = x.to("jax")
  for n in range(14):
    torch.testing.assert_close(
      torch.cat((there[n], there[n + 1])).cpu(), torch.cat((x[n], x[n + 1]))
    )


@pytest.mark.usefixtures("strict_mode")  # counts programs
def test_shapes_that_come_often_get_a_program(monkeypatch):
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 2 * numpy_fallback.CALL)
  x = given(next(SIZE), 3).to("jax")
  counts = []
  for _ in range(5):
    with compile_events.recorded() as events:
      torch.cat((x, x))
    counts.append(len(events))
  assert counts == [0, 0, 1, 0, 0]


def test_the_more_bytes_the_sooner_there_is_a_program():
  x = torch.ones(numpy_fallback.MOST_BYTES // 8, device="jax")
  counts = []
  for _ in range(4):
    with compile_events.recorded() as events:
      torch.cat((x, x))
    counts.append(len(events))
  assert counts == [0, 0, 1, 0]


def test_many_bytes_are_left_to_a_program():
  x = torch.ones(numpy_fallback.MOST_BYTES // 4 + 1, device="jax")
  with compile_events.recorded() as events:
    torch.cat((x, x))
  assert len(events) == 1


def test_few_bytes_of_many_are_moved_by_the_host():
  x = torch.ones(2, numpy_fallback.MOST_BYTES // 4, device="jax")
  with compile_events.recorded() as events:
    torch.cat((x[:, : next(SIZE)], x[:, :3]), 1)
  assert not events


def test_concatenation_of_recorded_tensors_has_gradients():
  x = given(next(SIZE), 2).to("jax").requires_grad_()
  joined = torch.cat((x, x.detach(), 2 * x))
  joined.sum().backward()
  assert (x.grad == 3).all()


def test_the_result_is_where_jax_would_put_it():
  first = jax.devices()[0]
  free = given(next(SIZE), 3).to("jax")
  held = torchax.interop.torch_view(jax.device_put(jnp.ones((2, 3)), first))
  assert not torch.cat((free, free)).jax().committed
  assert torch.cat((free, held)).jax().committed


def test_results_outlive_donated_operands():
  """A copy shares no memory with an array that is donated afterwards."""
  x = given(next(SIZE), 3).to("jax")
  copy = x.clone()
  expected = copy.cpu().clone()
  replaced = jax.jit(lambda a: a * 0 - 1, donate_argnums=0)
  replaced(x.jax()).block_until_ready()
  assert torch.equal(copy.cpu(), expected)


def test_a_view_under_a_transfer_guard_is_moved_by_a_program():
  x = given(next(SIZE), 3).to("jax")
  with jax.transfer_guard("disallow_explicit"):
    joined = torch.cat((x, x))
  assert joined.shape[0] == 2 * x.shape[0]


REFUSED = {
  "cat of other sizes": lambda x: torch.cat((x, x[:, :2]), 0),
  "cat along a dimension that is not there": lambda x: torch.cat((x, x), 2),
  "stack of other sizes": lambda x: torch.stack((x, x[:1])),
  "an odd number of widths": lambda x: torch.ops.aten.constant_pad_nd(x, [1, 2, 3]),
  "too many widths": lambda x: torch.ops.aten.constant_pad_nd(x, [1] * 6),
  "a number that the dtype does not hold": lambda x: F.pad(x, (0, 1), value=1e300),
  "a width that leaves nothing": lambda x: F.pad(x, (-5, 0)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_refusals_of_torch_are_kept(call):
  x = given(next(SIZE), 4)
  with pytest.raises(Exception) as expected:
    call(x)
  with pytest.raises(expected.type):
    call(x.to("jax"))


TRANSFERS = {
  "to": lambda n: torch.ones(n).to("jax"),
  "to, of a view": lambda n: torch.ones(n, 2).t().to("jax"),
  "to, of half precision": lambda n: torch.ones(n, dtype=torch.bfloat16).to("jax"),
  "to, of 64 bits": lambda n: torch.ones(n, dtype=torch.int64).to("jax"),
  "tensor of a list": lambda n: torch.tensor([1.0] * n, device="jax"),
  "tensor of a list of integers": lambda n: torch.tensor([1] * n, device="jax"),
  "as_tensor": lambda n: torch.as_tensor(torch.ones(n).numpy(), device="jax"),
  "copy_": lambda n: torch.empty(4, device="jax").copy_(torch.ones(n, 4)[0]),
  "new_tensor": lambda n: torch.ones((), device="jax").new_tensor([1] * n),
  "to_xla": lambda n: torchax.default_env().to_xla(torch.ones(n)),
}


@pytest.mark.parametrize("move", TRANSFERS.values(), ids=TRANSFERS)
def test_moving_to_jax_compiles_nothing(move):
  with torch.device("cpu"):
    move(next(SIZE))  # compiles the programs that a move needs
    with compile_events.recorded() as events:
      moved = move(next(SIZE))
  assert moved.device.type == "jax"
  assert not events


def test_numbers_of_the_host_may_change_once_they_were_moved():
  source = torch.zeros(next(SIZE), 64)
  moved = source.to("jax")
  source.fill_(1)
  assert (moved == 0).all()


# Functions of floats (n, 4), integers and masks of the same shape.
ARITHMETIC = {
  "add": lambda x, i, mask: x + x.flip(0),
  "add an integer tensor of no dimension": lambda x, i, mask: x + i[0, 0],
  "add a float to integers": lambda x, i, mask: i + 0.5,
  "subtract with alpha": lambda x, i, mask: torch.sub(x, x, alpha=2),
  "multiply by a column": lambda x, i, mask: x * x[:, :1],
  "multiply a view by a number": lambda x, i, mask: x.t() * 3,
  "multiply integers past 32 bits": lambda x, i, mask: i * 2**30,
  "divide by zeros": lambda x, i, mask: x / (x * 0),
  "divide": lambda x, i, mask: x / x.flip(0),
  "square and root": lambda x, i, mask: (x**2).sqrt(),
  "reciprocal": lambda x, i, mask: (x * 7).reciprocal(),
  "overflow": lambda x, i, mask: x * 3e38,
  "a number that overflows": lambda x, i, mask: x * 1e300,
  "compare": lambda x, i, mask: (x > x.flip(0)) | (i == 3) & ~mask,
  "where with a number": lambda x, i, mask: torch.where(mask, x, 0.25),
  "masked_fill": lambda x, i, mask: x.masked_fill(mask, float("-inf")),
  "masked_fill of integers": lambda x, i, mask: i.masked_fill(mask, -7),
  "convert": lambda x, i, mask: i.float() + mask.int(),
  "index": lambda x, i, mask: x[:, i[0].abs() % 4],
  "index_select": lambda x, i, mask: x.index_select(0, i[:, 0].abs() % len(x)),
  "gather": lambda x, i, mask: x.gather(1, i.abs()[:, :2] % 4),
  "embedding": lambda x, i, mask: F.embedding(i.abs() % len(x), x),
  "fill": lambda x, i, mask: torch.full_like(x, 2) - torch.ones_like(i),
  "read by a mask": lambda x, i, mask: x[mask],
  "read by a mask of rows": lambda x, i, mask: x[mask[:, 0]],
  "read by a mask of columns": lambda x, i, mask: x[:, mask[0]],
  "read by a mask and a number": lambda x, i, mask: x[mask[:, 0], 1],
  "masked_select": lambda x, i, mask: torch.masked_select(x, mask[:, :1]),
  "nonzero": lambda x, i, mask: mask.nonzero().int(),
  "any": lambda x, i, mask: mask.any(),
  "all along a dimension": lambda x, i, mask: mask.all(1, keepdim=True),
  "bincount": lambda x, i, mask: torch.bincount(i.abs().flatten()).int(),
  "repeat": lambda x, i, mask: x.repeat_interleave(i[:, 0].abs() % 3, 0),
  "repeat each": lambda x, i, mask: i.repeat_interleave(2),
  "repeat positions": lambda x, i, mask: torch.repeat_interleave(i[:, 0].abs() % 3),
  "write by a mask": lambda x, i, mask: put(x, mask, x.flip(0)[mask]),
  "write by a mask of rows": lambda x, i, mask: put(x, mask[:, 0], x[0] * 2),
  "write another dtype": lambda x, i, mask: put(x, mask, i[mask].float() / 4),
  "add in place": lambda x, i, mask: x.clone().add_(x.flip(0), alpha=3),
  "add integers in place": lambda x, i, mask: x.clone().add_(i),
  "add to a view": lambda x, i, mask: x.clone()[:, ::2].add_(1),
  "fill in place": lambda x, i, mask: x.clone().masked_fill_(mask, 3),
}


def put(x, index, values):
  x = x.clone()
  x[index] = values
  return x


@pytest.mark.parametrize("function", ARITHMETIC.values(), ids=ARITHMETIC)
def test_host_arithmetic_has_bits_of_program(function, monkeypatch):
  x = given(next(SIZE), 4) * 1.37
  arguments = x, given(*x.shape, dtype=torch.int32), x > 40
  there = [argument.to("jax") for argument in arguments]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    found = function(*there)
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)  # the cost is paid by now
  compiled = function(*there)
  expected = function(*arguments)
  for result in (found, compiled):
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# Functions of floats (n, 4), indices (n, 4) from 0 to 3, and values (n, 4) to write.
INDEXED = {
  "rows": lambda x, i, v: put(x, i[:, 0], v),
  "elements": lambda x, i, v: put(x, (i, i[0]), v),
  "columns": lambda x, i, v: put(x, (slice(None), i[0]), v[:, :1]),
  "add to rows": lambda x, i, v: add(x, (i[:, 0],), v),
  "add to elements": lambda x, i, v: add(x, (i, i[0]), v[0]),
  "add to integers": lambda x, i, v: add(i, (i,), i[:, None]),
  "index_add": lambda x, i, v: x.index_add(0, i[:, 1], v),
  "index_add in place": lambda x, i, v: x.clone().index_add_(1, i[3], v),
  "index_copy": lambda x, i, v: x.index_copy(-1, i[0, :2].long(), v[:, 2:]),
  "scatter": lambda x, i, v: x.scatter(1, i[:, :2], v),
  "scatter a number": lambda x, i, v: x.scatter(0, i[2:], 2.5),
  "scatter_add": lambda x, i, v: x.scatter_add(0, i, v),
  "scatter_add in place": lambda x, i, v: x.clone().scatter_add_(-1, i, v),
  "gradient of embedding": lambda x, i, v: torch.ops.aten.embedding_dense_backward(
    v, i[:, 0], 7, 2, False
  ),
  "gradient of an index": lambda x, i, v: gradient(lambda y: y[i[:, 0]], x, v),
  "gradient of gather": lambda x, i, v: gradient(lambda y: y.gather(1, i), x, v),
}


def add(x, index, values):
  return torch.ops.aten.index_put(x, index, values, True)


def gradient(function, x, v):
  x = x.detach().requires_grad_()
  return torch.autograd.grad(function(x), x, v)[0]


@pytest.mark.parametrize("function", INDEXED.values(), ids=INDEXED)
def test_writes_at_indices_have_bits_of_the_program(function, monkeypatch):
  x = given(next(SIZE), 4) * 1.37
  arguments = x, given(*x.shape, dtype=torch.int32).abs() % 4, x * 0.7
  there = [argument.to("jax") for argument in arguments]
  with compile_events.recorded() as events:
    found = function(*there)
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)  # the cost is paid by now
  for result in (found, function(*there)):
    assert torch.equal(result.cpu(), function(*arguments))


def test_sums_are_flushed_as_by_the_program(monkeypatch):
  """The first two numbers differ by a subnormal number, which XLA flushes to zero."""
  x = torch.zeros(next(SIZE), 1, device="jax")
  index = torch.zeros(3, dtype=torch.int32, device="jax")
  values = torch.tensor([[3e-38], [-2.5e-38], [3e-38]]).to("jax")
  with compile_events.recorded() as events:
    found = x.index_add(0, index, values).cpu()
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  assert torch.equal(found, x.index_add(0, index, values).cpu())


# Functions of floats (n, 4) and the number of elements that a mask chooses.
MASKED = {
  "read": lambda x, mask: x[mask],
  "masked_select": lambda x, mask: torch.masked_select(x, mask),
  "write": lambda x, mask: put(x, mask, x[mask] * 2),
  "add in place": lambda x, mask: x[mask].add_(1),
  "any": lambda x, mask: (x[mask] > 3).any(),
  "bincount": lambda x, mask: torch.bincount((x[mask] > 3).int()).int(),
  "repeat": lambda x, mask: x.repeat_interleave(mask[:, 0].int(), 0),
}


@pytest.mark.parametrize("function", MASKED.values(), ids=MASKED)
def test_other_counts_of_a_mask_compile_nothing(function):
  x = given(next(SIZE), 4)
  masks = [(x > limit).to("jax") for limit in (0, 20, 40, 60)]
  there = x.to("jax")
  function(there, masks[0])
  with compile_events.recorded() as events:
    found = [function(there, mask) for mask in masks[1:]]
  assert not events
  for result, mask in zip(found, masks[1:]):
    assert torch.equal(result.cpu(), function(x, mask.cpu()))


# Functions of floats whose results or operands are subnormal.
SUBNORMAL = {
  "half": lambda x, y: x * 0.5,
  "sum": lambda x, y: x + y,
  "difference": lambda x, y: x - y,
  "product": lambda x, y: x * y,
  "quotient": lambda x, y: x / y,
  "square": lambda x, y: x**2,
  "root": lambda x, y: x.abs().sqrt(),
  "reciprocal": lambda x, y: x.reciprocal(),
  "negation": lambda x, y: -x,
  "equal": lambda x, y: x == 0,
  "less": lambda x, y: x < y,
}


@pytest.mark.parametrize("function", SUBNORMAL.values(), ids=SUBNORMAL)
def test_subnormal_numbers_are_flushed_as_by_the_program(function, monkeypatch):
  x, y = torch.randint(-(2**31), 2**31 - 1, (2, next(SIZE), 4), dtype=torch.int32)
  x[::2] &= -(2**31) + 2**24 - 1  # subnormal, and the smallest normal numbers
  y[::3] &= -(2**31) + 2**23 - 1
  x, y = x.view(torch.float32).to("jax"), y.view(torch.float32).to("jax")
  with compile_events.recorded() as events:
    found = function(x, y).cpu()
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  expected = function(x, y).cpu()
  assert torch.equal(found.isnan(), expected.isnan())
  found, expected = (t.nan_to_num(7).view(torch.uint8) for t in (found, expected))
  assert torch.equal(found, expected)


@pytest.mark.parametrize("flushes", [False, True])
def test_the_users_subnormal_numbers_stay(flushes):
  torch.set_flush_denormal(flushes)
  try:
    x = torch.ones(next(SIZE), device="jax") + 1
    with pytest.raises(IndexError, match="out of range"):
      x.index_add(0, torch.tensor([2**20], device="jax"), x[:1])
    assert (torch.tensor(1e-40) * 1 == 0).item() == flushes
  finally:
    torch.set_flush_denormal(False)


# Shapes of a dividend and a divisor for a size n.
QUOTIENTS = {
  "equal": lambda n: ((7, n), (7, n)),
  "number": lambda n: ((7, n), ()),
  "row": lambda n: ((7, n), (n,)),
  "column": lambda n: ((7, n), (7, 1)),
  "smaller dividend": lambda n: ((n,), (7, n)),
  "both": lambda n: ((4, 1, n), (1, 7, 1)),
  "one element": lambda n: ((1,) * (n % 60), ()),
}


@pytest.mark.parametrize("shapes", QUOTIENTS.values(), ids=QUOTIENTS)
def test_quotients_have_bits_of_the_program(shapes, monkeypatch):
  """XLA multiplies by the reciprocal of a broadcast divisor, which rounds twice."""
  x, y = (torch.randn(shape).to("jax") for shape in shapes(next(SIZE)))
  with compile_events.recorded() as events:
    found = (x / y).cpu()
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  assert torch.equal(found, (x / y).cpu())


def test_a_number_divides_as_in_the_program(monkeypatch):
  x = given(next(SIZE), 4).to("jax")
  found = (x / 3).cpu()
  assert not torch.equal(found, x.cpu() / 3)
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  assert torch.equal(found, (x / 3).cpu())


# Functions of two lists of tensors.
LISTS = {
  "sum": lambda x, y: torch._foreach_add(x, y),
  "sum with a number": lambda x, y: torch._foreach_add(x, 1.5),
  "products in place": lambda x, y: changed(torch._foreach_mul_, x, 0.9),
  "sums in place": lambda x, y: changed(torch._foreach_add_, x, y),
  "quotients by numbers": lambda x, y: changed(torch._foreach_div_, x, [1.1, 2.2]),
  "roots": lambda x, y: torch._foreach_sqrt(torch._foreach_abs(x)),
  "zeros": lambda x, y: changed(torch._foreach_zero_, x),
  "copies": lambda x, y: changed(torch._foreach_copy_, x, y),
}


def changed(function, tensors, *args):
  function(tensors, *args)
  return tensors


@pytest.mark.parametrize("function", LISTS.values(), ids=LISTS)
def test_lists_have_bits_of_the_program(function, monkeypatch):
  rows = next(SIZE)
  lists = [[torch.randn(rows, 3), torch.randn(rows)] for _ in range(2)]

  def run():
    there = [[tensor.to("jax") for tensor in tensors] for tensors in lists]
    return [tensor.cpu() for tensor in function(*there)]

  with compile_events.recorded() as events:
    found = run()
  assert not events
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  for first, second in zip(found, run(), strict=True):
    assert torch.equal(first, second)


@pytest.mark.parametrize(("repeats", "calls"), [(True, 1), (False, 4)])
def test_lists_that_repeat_shapes_are_compiled_sooner(repeats, calls, monkeypatch):
  """XLA compiles a kernel for each shape, and numpy is called for each tensor."""
  sizes = [next(SIZE)] * 4 if repeats else [next(SIZE) for _ in range(4)]
  tensors = [torch.zeros(size, dtype=torch.int32, device="jax") for size in sizes]
  torch._foreach_neg([tensors[0][:1]] * 4)  # XLA's options for lists are tried once
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 4 * numpy_fallback.CALL)
  for _ in range(calls):
    with compile_events.recorded() as events:
      torch._foreach_neg(tensors)
    assert not events
  with compile_events.recorded() as events:
    torch._foreach_neg(tensors)
  assert events


def test_elements_of_a_tensor_share_a_program():
  """Arithmetic of single elements compiles nothing while shapes are new."""
  x = given(next(SIZE), 6).to("jax")
  with compile_events.recorded() as events:
    total = sum(x[n, n % 6] * x[n + 1, 0] for n in range(12))
  assert not events
  cpu = x.cpu()
  assert total.item() == sum(cpu[n, n % 6] * cpu[n + 1, 0] for n in range(12)).item()


def test_reads_of_views_compile_nothing_while_shapes_are_new():
  x = given(next(SIZE), 4)
  there = x.to("jax")
  reads = (
    lambda t: t[3],
    lambda t: t.t()[1:, 2:9:3],
    lambda t: t.view(4, -1).unsqueeze(1).expand(4, 2, -1),
    lambda t: t[5, 2],
    lambda t: t.flatten()[7:],
  )
  with compile_events.recorded() as events:
    found = [read(there).cpu() for read in reads]
    length = torch.arange(3, 3 + 2 * len(x), 2, device="jax")
  assert not events
  assert torch.equal(length.cpu(), torch.arange(3, 3 + 2 * len(x), 2))
  for view, read in zip(found, reads, strict=True):
    assert torch.equal(view, read(x))


# --- Writes to views ------------------------------------------------------------------

WRITES = {
  "a row": lambda x: x[3].copy_(x[0]),
  "an element": lambda x: x[2, 1].fill_(5),
  "a column": lambda x: x[:, 2].add_(1),
  "rows": lambda x: x[1:3].mul_(x[4:6]),
  "every other row": lambda x: x[::2].fill_(4),
  "a transposed view": lambda x: x.t()[1:].neg_(),
  "a flat view": lambda x: x.view(-1)[3:9].sub_(1),
  "a longer view": lambda x: x[:1].unsqueeze(-1).mul_(2),
  "a mask": lambda x: x[1:].masked_fill_(x[1:] > 3, -1),
  "integers": lambda x: x[1].copy_(torch.arange(4, device=x.device)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_views_equal_those_of_the_program(write, monkeypatch):
  x = given(next(SIZE), 4) / 8
  first, second = x.to("jax"), x.to("jax")
  old = first.jax()
  with compile_events.recorded() as events:
    write(first)
  assert not events
  assert np.array_equal(old, x)
  monkeypatch.setattr(numpy_fallback, "PROGRAM", 1)
  write(second)
  write(x)
  assert torch.equal(first.cpu(), x)
  assert torch.equal(second.cpu(), x)


OTHER_WRITES = {
  "repeated elements": lambda x: x[:1].expand(3, 4).fill_(2),
  "a diagonal": lambda x: x.diagonal().fill_(3),
  "strides": lambda x: x.as_strided((2,), (3,)).fill_(9),
  "bits": lambda x: x[1:].view(torch.int32).fill_(1),
  "no element": lambda x: x[:0].fill_(1),
  "a cast": lambda x: x[0].copy_(x[1].half()),
}


@pytest.mark.parametrize("write", OTHER_WRITES.values(), ids=OTHER_WRITES)
def test_other_writes_equal_those_of_torch(write):
  x = given(next(SIZE), 4) / 8
  there = x.to("jax")
  write(there)
  write(x)
  assert torch.equal(there.cpu(), x)


def test_writes_of_a_loop_go_to_the_host():
  """Slices of one form have their starts as operands after some calls."""
  x = given(next(SIZE), 4)
  there, column = x.to("jax"), x.to("jax")[:, 0]
  with compile_events.recorded() as events:
    for n in range(14):
      there[n] += n
      column[n].fill_(n)
  assert not events
  for n in range(14):
    x[n] += n
  assert torch.equal(there.cpu(), x)
  assert column[:14].tolist() == list(range(14))
