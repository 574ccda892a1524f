"""Reads and assignments by index in all forms of torch; CPU torch is the oracle.

Each row is an index, given the device of the tensor; each is read, assigned a number
and assigned a tensor. The lowerings' own rows are in `test/ops/jaten/test_indexing.py`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same, to_jax
from ops.harness import floats

import torchax
from torchax.errors import MixedDeviceError, MutationError, TracedStateError
from torchax.interop import jax_jit, jax_vmap

CUBE = floats(2, 2, 6)


def _at(device):
  """Return a maker of index tensors on a device."""
  return lambda *values: torch.tensor(values[0] if len(values) == 1 else values).to(
    device
  )


ROW_MASK, LAST_MASK = [True, False], [True, False, True, True, False, False]

# Function from a maker of tensors to an index.
INDICES = {
  "int": lambda at: 1,
  "negative": lambda at: (-1, -2),
  "slice": lambda at: (slice(None), slice(0, 1)),
  "steps": lambda at: (slice(None, None, 2), ..., slice(1, None, 3)),
  "beyond": lambda at: (..., slice(4, 100)),
  "empty_slice": lambda at: (..., slice(4, 2)),
  "ellipsis": lambda at: ...,
  "ellipsis_last": lambda at: (1, ...),
  "ellipsis_for_nothing": lambda at: (1, ..., 0, 2),
  "none": lambda at: (None, 0, None, ..., None),
  "empty_tuple": lambda at: (),
  "true": lambda at: True,
  "false": lambda at: False,
  "true_inside": lambda at: (0, True),
  "true_and_list": lambda at: (True, [1, 0]),
  "numpy_int": lambda at: np.int64(1),
  "numpy_0d": lambda at: np.array(1),
  "list": lambda at: [1, 0, 1],
  "list_negative": lambda at: [-1],
  "list_of_floats": lambda at: [1.0, 0.0],
  "empty_list": lambda at: [],
  "list_inside": lambda at: (slice(None), [1, 0]),
  "two_lists": lambda at: ([0, 1], [1, 0]),
  "lists_apart": lambda at: ([0, 1], slice(None), [2, 5]),
  "list_and_int": lambda at: (1, slice(None), [2, 5]),
  "list_and_none": lambda at: (None, [0, 1], None),
  "nested_lists": lambda at: ([[0], [1]], [[0, 1]]),
  "tuple_inside": lambda at: (..., (0, 5)),
  "range": lambda at: (range(2), range(1, -1, -1)),
  "numpy": lambda at: (..., np.array([0, 4])),
  "numpy_2d": lambda at: np.array([[0, 1], [1, 0]]),
  "numpy_int32": lambda at: np.array([1, 0], np.int32),
  "tensor": lambda at: at(1, 0),
  "tensor_2d": lambda at: at([[0, 1], [1, 0]]),
  "tensors": lambda at: (at(0, 1), at(1, 0), at(5, 2)),
  "tensors_broadcast": lambda at: (at([[0], [1]]), slice(None), at(0, 2, 4)),
  "tensor_negative": lambda at: (slice(None), slice(None), at(-1, -6)),
  "int32_tensor": lambda at: at(1, 0).int(),
  "0d": lambda at: at(1),
  "0d_negative": lambda at: (..., at(-2)),
  "0d_int8": lambda at: at(1).to(torch.int8),
  "0d_and_list": lambda at: (at(1), slice(None), [2, 5]),
  "0d_in_slice": lambda at: (slice(at(1), None), ..., slice(at(1), at(5), at(2))),
  "0d_bool": lambda at: at(True),
  "0d_bool_inside": lambda at: (1, at(False)),
  "mask_list": lambda at: [True, False],
  "mask_numpy": lambda at: np.array(ROW_MASK),
  "mask": lambda at: at(*ROW_MASK),
  "mask_full": lambda at: at(*LAST_MASK).expand(2, 2, 6),
  "mask_2d": lambda at: at([[True, False], [False, True]]),
  "mask_and_slice": lambda at: (at(*ROW_MASK), slice(None), slice(1, 4)),
  "mask_and_int": lambda at: (at(*ROW_MASK), 1),
  "mask_last": lambda at: (..., at(*LAST_MASK)),
  "mask_2d_last": lambda at: (0, at(*LAST_MASK).expand(2, 6)),
  "masks": lambda at: (at(*ROW_MASK), slice(None), at(False, True, *[False] * 4)),
  "mask_and_tensor": lambda at: (at(*ROW_MASK), at(0, 1)),
  "mask_of_nothing": lambda at: at(False, False),
}
each_index = pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)


@each_index
def test_reads_by_index_equal_torch(index):
  cpu, tensor = CUBE.clone(), CUBE.to("jax")
  expected, actual = cpu[index(_at("cpu"))], tensor[index(_at("jax"))]
  assert_same(actual, expected)
  assert actual._is_view() == expected._is_view()


@each_index
def test_indices_of_the_cpu_read_the_same(index):
  assert_same(CUBE.to("jax")[index(_at("cpu"))], CUBE[index(_at("cpu"))])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
def test_uint8_mask_reads_like_a_bool_mask():
  mask = torch.tensor(ROW_MASK).to(torch.uint8)
  assert_same(CUBE.to("jax")[mask], CUBE[mask])
  assert_same(CUBE.to("jax")[mask.to("jax"), 0], CUBE[mask, 0])


@each_index
def test_a_number_and_a_tensor_are_assigned_as_by_torch(index):
  cpu, tensor = CUBE.clone(), CUBE.to("jax")
  cpu_alias, alias = cpu.view(-1), tensor.view(-1)
  at_cpu, at_jax = index(_at("cpu")), index(_at("jax"))
  cpu[at_cpu] = 7
  tensor[at_jax] = 7
  assert_same(tensor, cpu, "number")
  values = torch.arange(cpu[at_cpu].numel(), dtype=torch.float32)
  values = values.reshape(cpu[at_cpu].shape)
  cpu[at_cpu] = values
  tensor[at_jax] = values.to("jax")
  assert_same(alias, cpu_alias, "values")


FUNCTIONS = {
  "list": ([1, 0],),
  "lists": (([0, 1], slice(None), [2, 5]),),
  "numpy": (np.array(ROW_MASK),),
  "tensor": (torch.tensor([1, 0]),),
}


@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=FUNCTIONS)
def test_index_functions_accept_the_same_as_subscripts(row):
  (index,) = row
  cpu, tensor = CUBE.clone(), CUBE.to("jax")
  with torchax.default_env():
    assert_same(torch.Tensor.__getitem__(tensor, index), cpu[index])
    torch.Tensor.__setitem__(tensor, index, 3.0)
    assert torch.equal(torch.Tensor.__getitem__(CUBE, index), cpu[index])
  cpu[index] = 3.0
  assert_same(tensor, cpu)


def test_a_traced_jax_array_is_an_index():
  tensor = CUBE.to("jax")

  def pick(place):
    return tensor[place.jax()]

  assert_same(jax_jit(pick)(torch.tensor(1).to("jax")), CUBE[1])
  assert_same(jax_jit(pick)(torch.tensor([1, 0]).to("jax")), CUBE[[1, 0]])


# Values -------------------------------------------------------------------------------

VALUES = {
  "broadcast": (0, floats(6)),
  "leading_ones": (0, floats(1, 1, 6)),
  "leading_ones_by_list": ([0, 1], floats(1, 1, 2, 6)),
  "one_by_mask": (CUBE > 0, floats(1)),
  "one_integer_by_mask": (CUBE > 0, torch.tensor(3)),
  "0d_by_list": ([0, 1], floats()),
  "row_by_mask": (torch.tensor(ROW_MASK), floats(6)),
  "columns_by_mask": (torch.tensor(ROW_MASK), floats(2, 1)),
  "integers": (0, torch.arange(6)),
  "bools": (0, torch.arange(6) > 2),
  "halves": ((..., 0), torch.arange(4.0).half().reshape(2, 2)),
  "numpy_number": ((0, 0), np.float64(1.5)),
  "numpy_number_by_list": ([0, 1], np.float64(1.5)),
  "numpy_integer": ((0, 0), np.int32(2)),
  "numpy_integer_by_mask": (CUBE > 0, np.uint8(3)),
}


@pytest.mark.parametrize("row", VALUES.values(), ids=VALUES)
def test_a_value_is_broadcast_and_converted_as_by_torch(row):
  index, value = row
  cpu, tensor = CUBE.clone(), CUBE.to("jax")
  cpu[index] = value
  tensor[index] = value.to("jax") if isinstance(value, torch.Tensor) else value
  assert_same(tensor, cpu)


@pytest.mark.parametrize("where", ["tensor", "mask", "two"])
def test_repeated_indices_accumulate(where):
  results = []
  for device in ("cpu", "jax"):
    at, tensor = _at(device), CUBE.clone().to(device)
    index = {
      "tensor": (at(0, 1, 0, 0),),
      "mask": (tensor > 0,),
      "two": (at(0, 1, 0), at(1, 1, 1)),
    }[where]
    value = floats(1).to(device)
    tensor.index_put_(index, value, accumulate=True)
    tensor[0].index_put_((at(1, 1),), value, accumulate=True)
    results.append(tensor)
  assert_same(results[1], results[0])


# Errors -------------------------------------------------------------------------------

BAD_INDICES = {
  "negative_step": slice(None, None, -1),
  "zero_step": slice(None, None, 0),
  "beyond": 2,
  "beyond_negative": -3,
  "beyond_inside": (0, 0, 6),
  "list_beyond": [0, 2],
  "list_beyond_negative": (slice(None), [-3]),
  "tensor_beyond": torch.tensor([[0, 5]]),
  "0d_beyond": torch.tensor(2),
  "too_many": (0, 0, 0, 0),
  "too_many_tensors": ([0], [0], [0], [0]),
  "float": 1.0,
  "float_tensor": torch.tensor([0.0]),
  "int16_tensor": torch.tensor([0], dtype=torch.int16),
  "string": "a",
  "mask_length": torch.tensor([True, False, True]),
  "mask_shape": torch.ones(2, 3, dtype=torch.bool),
  "mask_list_length": [True],
  "lists_do_not_broadcast": ([0, 1], [0, 1, 0]),
}


@pytest.mark.parametrize("index", BAD_INDICES.values(), ids=BAD_INDICES)
def test_wrong_indices_raise_as_in_torch(index):
  tensor = CUBE.to("jax")
  with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as cpu_error:
    CUBE[index]
  with pytest.raises(cpu_error.type):
    tensor[index]
  with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as cpu_error:
    CUBE.clone()[index] = 1.0
  with pytest.raises(cpu_error.type):
    tensor[index] = 1.0
  assert_same(tensor, CUBE)


def test_numpy_bool_is_not_an_index():
  # Since torch 2.12; before, CPU torch takes it for True.
  with pytest.raises(IndexError, match="numpy.bool"):
    CUBE.to("jax")[np.bool_(True)]


BAD_VALUES = {
  "shape": (0, floats(5)),
  "shape_by_list": ([0, 1], floats(5)),
  "shape_by_mask": (CUBE > 0, floats(5)),
  "rows_by_mask": (torch.tensor([True, True]), floats(3, 2, 6)),
  "row_by_mask": (torch.tensor([True, True]), floats(5)),
  "more_dims": (0, floats(2, 2, 6)),
  "dtype_by_list": ([0, 1], torch.ones(6, dtype=torch.int32)),
  "dtype_by_mask": (torch.tensor(ROW_MASK), torch.ones(6, dtype=torch.int32)),
  "complex": (0, 1j),
  "complex_by_list": ([0], 1j),
  "list": (0, [1.0] * 6),
  "text": ([0], "a"),
}


@pytest.mark.parametrize("row", BAD_VALUES.values(), ids=BAD_VALUES)
def test_wrong_values_raise_as_in_torch(row):
  index, value = row
  tensor = CUBE.to("jax")
  with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as cpu_error:
    CUBE.clone()[index] = value
  with pytest.raises(cpu_error.type):
    tensor[to_jax(index)] = to_jax(value)
  assert_same(tensor, CUBE)


@pytest.mark.parametrize("index", [0, [0], slice(None)], ids=str)
def test_number_out_of_an_integers_range_raises_as_in_torch(index):
  cpu = torch.zeros(3, dtype=torch.int8)
  tensor = cpu.to("jax")
  with pytest.raises(RuntimeError, match="overflow"):
    cpu[index] = 300
  with pytest.raises(RuntimeError, match="overflow"):
    tensor[index] = 300
  assert_same(tensor, cpu)


# Under a trace ------------------------------------------------------------------------


def _assign(index, value):
  def assign(t, i, j):
    t[index(t, i, j)] = value(t) if callable(value) else value

  return assign


# Functions of a cube and two 0-d tensors.
TRACED_READS = {
  "first": lambda t, i, j: t[i],
  "last": lambda t, i, j: t[..., j],
  "negative": lambda t, i, j: t[-i, 0, -j],
  "two": lambda t, i, j: t[i, :, j],
  "with_none": lambda t, i, j: t[None, i, ..., None, j],
  "with_slice": lambda t, i, j: t[:1, i, 1::2],
  "with_int": lambda t, i, j: t[0, i, j],
  "with_list": lambda t, i, j: t[i, :, [0, 1, 2]],
  "with_list_before": lambda t, i, j: t[:, [1, 0], j],
  "with_known_mask": lambda t, i, j: t[i, [True, False]],
  "with_tensor": lambda t, i, j: t[j.reshape(1) * 0, i],
  "known_mask": lambda t, i, j: t[..., LAST_MASK],
  "list": lambda t, i, j: t[[1, 0]],
  "int8": lambda t, i, j: t[i.to(torch.int8)],
  "view_of_it": lambda t, i, j: t[i].t()[1:3].unfold(0, 2, 1),
}
TRACED_WRITES = {
  "number": _assign(lambda t, i, j: i, 5.0),
  "tensor": _assign(lambda t, i, j: (i, slice(None), j), lambda t: t[0, :, 0] * 3),
  "leading_ones": _assign(lambda t, i, j: i, lambda t: t[:1, :1, :] + 1),
  "other_dtype": _assign(lambda t, i, j: (0, i), lambda t: (t[0, 0] * 9).int()),
  "with_list": _assign(lambda t, i, j: (i, slice(None), [0, 2]), 7.0),
  "with_mask": _assign(lambda t, i, j: (i, t[0] > 0), 7.0),
  "with_none": _assign(lambda t, i, j: (i, None, ..., j), 7.0),
  "0d_bool": _assign(lambda t, i, j: i > 0, 5.0),
  "0d_bool_false": _assign(lambda t, i, j: (1, i > 1), 5.0),
  "in_place": lambda t, i, j: t[i].add_(1),
  "in_place_of_view": lambda t, i, j: t[i].t()[1:3].mul_(5),
  "in_place_of_two": lambda t, i, j: t[:, i, j].zero_(),
  "augmented": lambda t, i, j: t[i].__iadd__(3),
  "copy_": lambda t, i, j: t[i].copy_(t[0] * 2),
  "mask_number": _assign(lambda t, i, j: t > 0, 0),
  "mask_tensor": _assign(lambda t, i, j: t > 0, lambda t: t.max()),
  "mask_row": _assign(lambda t, i, j: t[:, 0, 0] < 5, lambda t: t[0, 0] * 2),
  "mask_and_slice": _assign(lambda t, i, j: (t[:, 0, 0] < 5, slice(None), 1), 2.0),
  "mask_last": _assign(lambda t, i, j: (slice(None), t[0, :, 0] > 0), 2.0),
  "masked_fill_": lambda t, i, j: t.masked_fill_(t > 0, 2.0),
  "index_put_": lambda t, i, j: t.index_put_((i,), t[0] * 2, accumulate=True),
}


def test_traced_indices_read_as_in_torch():
  def read(t, i, j):
    return {name: function(t, i, j) for name, function in TRACED_READS.items()}

  numbers = torch.tensor(1), torch.tensor(4)
  actual = jax_jit(read)(CUBE.to("jax"), *[n.to("jax") for n in numbers])
  assert_same(actual, read(CUBE, *numbers))


def test_traced_indices_and_masks_assign_as_in_torch():
  def write(t, i, j):
    results = {}
    for name, function in TRACED_WRITES.items():
      results[name] = t.clone()
      function(results[name], i, j)
    return results

  numbers = torch.tensor(1), torch.tensor(4)
  actual = jax_jit(write)(CUBE.to("jax"), *[n.to("jax") for n in numbers])
  assert_same(actual, write(CUBE, *numbers))


def test_captured_index_is_read_at_each_call():
  tensor, place = CUBE.to("jax"), torch.tensor(0).to("jax")
  pick = jax_jit(lambda t: t[place])
  assert_same(pick(tensor), CUBE[0])
  place.add_(1)
  assert_same(pick(tensor), CUBE[1])


def test_vmap_over_an_index_reads_each_row():
  def change(t, i):
    t = t.clone()
    t[i] = 5.0
    t[i].add_(1)
    return t, t[i]

  places = torch.tensor([1, 0])
  actual = jax_vmap(change)(CUBE.to("jax"), places.to("jax"))
  expected = CUBE.clone()
  expected[0, 1] = expected[1, 0] = 6.0
  assert_same(actual, (expected, torch.full((2, 6), 6.0)))


def _loss_of_a_read(t, i):
  return ((t * 2)[i] ** 2).sum()


def _loss_of_writes(t, i):
  scaled = torch.zeros_like(t)
  scaled[i] = t[0] * 3
  scaled[i, 0] = t[1, 0]
  return (scaled**2).sum()


@pytest.mark.parametrize("loss", [_loss_of_a_read, _loss_of_writes])
def test_gradients_reach_the_traced_index(loss):
  cpu = CUBE.clone().requires_grad_()
  tensor = to_jax(cpu)
  loss(cpu, torch.tensor(1)).backward()
  jax_jit(loss)(tensor, torch.tensor(1).to("jax")).backward()
  assert_same(tensor.grad, cpu.grad)


def _put(method, accumulate=False):
  return lambda t, mask, v: method(t * 1, (mask,), v[0], accumulate)


def _where(index, value=lambda v: v):
  """Return a function that assigns where a mask is True, to a copy."""

  def write(t, mask, v):
    t = t * 1
    t[index(mask)] = value(v)
    return t

  return write


# Values of shape (2, 1, 6): the mask is True at one of two rows.
MASKED_WRITES = {
  "row": _where(lambda m: (slice(None), m)),
  "rows": _where(lambda m: torch.stack([m, ~m]), lambda v: v[:, 0]),
  "vector": _where(lambda m: m, lambda v: v[1, 0]),
  "leading_ones": _where(lambda m: m, lambda v: v[None, :1]),
  "number": _where(lambda m: m, lambda v: v[0, 0, 0]),
  "number_of_other_dtype": _where(lambda m: m, lambda v: v[0, 0, :1].bfloat16()),
  "uint8": _where(lambda m: (0, m.byte(), slice(2, None)), lambda v: v[0, :, 2:]),
  "no_rows": _where(lambda m: m & ~m, lambda v: v[:0]),
  "0d": _where(lambda m: m.any(), lambda v: v),
  "index_put": _put(torch.index_put),
  "index_put_": _put(torch.Tensor.index_put_),
  "accumulate": _put(torch.Tensor.index_put, True),
  "under_func": lambda t, mask, v: torch.func.grad(
    lambda v: (_where(lambda m: (..., m, slice(None)))(t * v, mask, v) ** 3).sum()
  )(v),
}


@pytest.mark.parametrize("write", MASKED_WRITES.values(), ids=MASKED_WRITES)
def test_values_assigned_by_a_traced_mask_have_gradients(write):
  def gradients(t, mask, v):
    return torch.autograd.grad((write(t, mask, v) ** 2).sum(), (t, v))

  mask, values = torch.tensor([False, True]), floats(2, 1, 6) + 1
  inputs = [CUBE.clone().requires_grad_(), mask, values.requires_grad_()]
  actual = jax_jit(gradients)(*map(to_jax, inputs))
  assert_same(actual, gradients(*inputs))


def test_values_that_do_not_fit_a_traced_mask_are_refused():
  write = jax_jit(_where(lambda m: m))
  t, mask = CUBE.to("jax"), torch.tensor([False, True], device="jax")
  for values, message in (
    (torch.ones(2, 5), "shape mismatch"),
    (torch.ones(2, 6, dtype=torch.float16), "dtypes match"),
  ):
    with pytest.raises(RuntimeError, match=message):
      write(t, mask, to_jax(values.requires_grad_()))


def _change_of_a_recorded_read(t, i):
  doubled = t * 2
  doubled[i].mul_(2)
  return doubled


def _recorded_change(t, i):
  zeros = torch.zeros_like(t)
  zeros[i].add_(t[0])
  return zeros


def _put_by_mask_and_index(t, i):
  t = t.clone()
  t[:, torch.tensor([0, 1, 1], device="jax"), t[0, 0] > 0] = 1.0
  return t


NEEDS_KNOWN = {
  "mask": (TracedStateError, "fixed shape", lambda t, i: t[t > 0]),
  "0d_mask": (TracedStateError, "fixed shape", lambda t, i: t[i > 0]),
  "mask_and_index": (TracedStateError, "fixed shape", _put_by_mask_and_index),
  "slice": (TracedStateError, "traced", lambda t, i: t[i:]),
  "as_strided": (MutationError, "clone", lambda t, i: t[i].as_strided((2,), (1,))),
}


@pytest.mark.parametrize("row", NEEDS_KNOWN.values(), ids=NEEDS_KNOWN)
def test_index_that_needs_a_value_raises(row):
  error, match, function = row
  with pytest.raises(error, match=match):
    jax_jit(function)(CUBE.to("jax"), torch.tensor(1).to("jax"))


@pytest.mark.parametrize("function", [_change_of_a_recorded_read, _recorded_change])
def test_write_that_autograd_cannot_follow_raises(function):
  tensor = CUBE.to("jax").requires_grad_()
  with pytest.raises(MutationError, match=r"x\[i\] = "):
    jax_jit(function)(tensor, torch.tensor(1).to("jax"))


def test_split_points_may_be_on_jax():
  with torchax.default_env():
    for points in (torch.tensor([1, 3]), torch.tensor(2)):
      actual = torch.tensor_split(CUBE.to("jax"), points.to("jax"), dim=2)
      assert_same(actual, torch.tensor_split(CUBE, points, dim=2))
      assert_same(
        CUBE.to("jax").tensor_split(points.to("jax")), CUBE.tensor_split(points)
      )


def test_an_index_of_jax_numpy_is_an_index():
  tensor = CUBE.to("jax")
  assert_same(tensor[jnp.array([1, 0])], CUBE[[1, 0]])
  tensor[:, jnp.array([True, False])] = 0.0
  expected = CUBE.clone()
  expected[:, 0] = 0
  assert_same(tensor, expected)


def _row(index):
  return index.reshape(-1, 1).expand(-1, 6)


# Functions of a tensor and an index: as with CUDA, both must be on one device.
OF_INDICES = {
  "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
  "index_fill_": lambda x, i: x.clone().index_fill_(0, i, 1.0),
  "index_add": lambda x, i: x.index_add(0, i, x[:1]),
  "index_copy": lambda x, i: x.index_copy(0, i, x[:1]),
  "index_reduce": lambda x, i: x.index_reduce(0, i, x[:1], "amax"),
  "index_select": lambda x, i: x.index_select(0, i),
  "gather": lambda x, i: x.gather(0, _row(i)),
  "scatter": lambda x, i: x.scatter(0, _row(i), 1.0),
  "scatter_add": lambda x, i: x.scatter_add(0, _row(i), x),
  "take": lambda x, i: x.take(i),
  "put": lambda x, i: x.put(i, x[0, :1]),
}


@pytest.mark.parametrize("function", OF_INDICES.values(), ids=OF_INDICES)
def test_cpu_index_of_a_jax_tensor_raises(function):
  x, index = CUBE[0].to("jax"), torch.tensor([1])
  with pytest.raises(MixedDeviceError, match="on jax"):
    function(x, index)
  assert_same(function(x, index.to("jax")), function(CUBE[0], index))


# Forms that CUDA takes: indices in brackets, and 0-d indices.
WITH_CPU_INDEX = {
  "read": lambda x, i: x[i],
  "index_put": lambda x, i: x.index_put((i,), torch.tensor(1.0)),
  "index_fill of one": lambda x, i: x.index_fill(0, i[0], 1.0),
  "index_select of one": lambda x, i: x.index_select(0, i[0]),
}


@pytest.mark.parametrize("function", WITH_CPU_INDEX.values(), ids=WITH_CPU_INDEX)
def test_cpu_index_works_if_cuda_accepts_it(function):
  index = torch.tensor([1, 0])
  assert_same(function(CUBE[0].to("jax"), index), function(CUBE[0], index))
