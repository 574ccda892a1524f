"""In-place operations on bases and views: shapes, index assignment and writes."""

import jax.numpy as jnp
import pytest
import torch
from compare import assert_same
from ops.harness import floats

from torchax.errors import MixedDeviceError, MutationError
from torchax.interop import jax_jit

BASE = floats(4, 6)

# Shapes and storage -------------------------------------------------------------------

RESHAPES_IN_PLACE = {
  "t_": lambda t: t.t_(),
  "transpose_": lambda t: t.transpose_(0, 1),
  "swapaxes_": lambda t: t.swapaxes_(0, 1),
  "unsqueeze_": lambda t: t.unsqueeze_(1),
  "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(),
  "squeeze_dim_": lambda t: t.unsqueeze_(0).squeeze_(0),
  "as_strided_": lambda t: t.as_strided_((2, 3), (6, 2), 1),
}


@pytest.mark.parametrize("change", RESHAPES_IN_PLACE.values(), ids=RESHAPES_IN_PLACE)
def test_an_in_place_change_of_shape_keeps_memory_and_identity(change):
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  cpu_alias, alias = cpu.view(-1), tensor.view(-1)
  assert change(cpu) is cpu and change(tensor) is tensor
  assert tensor.stride() == cpu.stride()
  assert_same(tensor, cpu)
  cpu.mul_(2)
  tensor.mul_(2)
  assert_same(alias, cpu_alias)
  assert_same(tensor + 1, cpu + 1)


@pytest.mark.parametrize("size", [(2, 6), (24,), (2, 2), (0,)], ids=str)
def test_resize_to_fewer_elements_keeps_the_first_values(size):
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  assert tensor.resize_(size) is tensor
  assert_same(tensor, cpu.resize_(size))


def test_resize_to_more_elements_keeps_all_values():
  tensor = BASE.clone().to("jax").resize_(5, 6)
  assert tensor.shape == (5, 6)
  assert_same(tensor.view(-1)[:24], BASE.view(-1))


def test_resize_as_uses_the_shape_of_its_argument():
  tensor = BASE.clone().to("jax").resize_as_(torch.empty(3, 4, device="jax"))
  assert_same(tensor, BASE.clone().resize_as_(torch.empty(3, 4)))


RESIZES = {
  "part": lambda t: t[1:].resize_(2, 3),
  "row_over_rows": lambda t: t[0].resize_(3, 2),
  "transposed": lambda t: t.t().resize_(4, 5),
  "shrink_and_back": lambda t: t.resize_(2, 3).resize_(4, 6),
  "grow": lambda t: t.resize_(3, 9)[:2],
  "grow_view": lambda t: t[2:].resize_(4, 4)[:3],
  "grow_as_int": lambda t: t.view(torch.int32).resize_(5, 5)[:4],
  "same_numel": lambda t: t.resize_(3, 8),
  "as": lambda t: t[1:].resize_as_(t[:, :2].clone()),
  "nothing": lambda t: t.t().resize_(6, 4),
}


@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES)
def test_resized_tensor_keeps_its_aliases(resize):
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  others = [(t.t(), t[1:3].view(3, 4), t.detach()) for t in (cpu, tensor)]
  expected, actual = resize(cpu), resize(tensor)
  assert actual.stride() == expected.stride()
  assert actual.storage_offset() == expected.storage_offset()
  assert_same(actual, expected)
  expected.mul_(2)
  actual.mul_(2)
  assert_same(others[1], others[0], "others after a write to the resized")
  others[0][0].add_(1)
  others[1][0].add_(1)
  assert_same(actual, expected, "the resized after a write to another")


def test_resizing_a_leaf_that_requires_grad_raises():
  tensor = BASE.clone().to("jax").requires_grad_()
  with pytest.raises(RuntimeError, match="resize"):
    tensor.resize_(3)
  assert tensor.shape == (4, 6)


def test_set_makes_two_tensors_alias():
  tensor, other = torch.zeros(2, device="jax"), BASE.clone().to("jax")
  assert tensor.set_(other) is tensor
  other.add_(1)
  assert_same(tensor, BASE + 1)
  tensor.mul_(2)
  assert_same(other, (BASE + 1) * 2)


def test_set_to_a_view_creates_a_view():
  tensor, other = torch.zeros(2, device="jax"), BASE.clone().to("jax")
  tensor.set_(other[1])
  tensor.zero_()
  assert_same(other[1], torch.zeros(6))
  assert_same(other[0], BASE[0])


def test_set_without_a_source_empties_the_tensor():
  assert BASE.clone().to("jax").set_().shape == BASE.clone().set_().shape == (0,)


def test_set_to_a_cpu_tensor_raises():
  tensor = BASE.clone().to("jax")
  with pytest.raises((MutationError, MixedDeviceError), match="jax"):
    tensor.set_(BASE)
  assert_same(tensor, BASE)


# Assignment by index ------------------------------------------------------------------


def _index(t, values):
  return torch.tensor(values).to(t.device)


ASSIGNMENTS = {
  "number": lambda t: t.__setitem__(0, 7),
  "float_number": lambda t: t.__setitem__((slice(1, 3), 2), 0.5),
  "all": lambda t: t.__setitem__(slice(None), 1.0),
  "ellipsis": lambda t: t.__setitem__(..., 2),
  "tensor": lambda t: t.__setitem__(1, t[2] * 2),
  "broadcast": lambda t: t.__setitem__(slice(0, 2), t[3]),
  "zero_dim": lambda t: t.__setitem__((0, 0), t[3, 3]),
  "step": lambda t: t.__setitem__((slice(None, None, 2), slice(1, None, 2)), 9),
  "negative": lambda t: t.__setitem__((-1, -2), 9),
  "mask_number": lambda t: t.__setitem__(t > 0, 0),
  "mask_values": lambda t: t.__setitem__(t > 0, t[t > 0] * 2),
  "row_mask": lambda t: t.__setitem__(t[:, 0] > 0, -1.0),
  "list": lambda t: t.__setitem__([0, 2], 3.0),
  "index_tensor": lambda t: t.__setitem__(_index(t, [0, 3]), t[1:3] * 4),
  "two_index_tensors": lambda t: t.__setitem__(
    (_index(t, [0, 3]), _index(t, [1, 2])), _index(t, [5.0, 6.0])
  ),
  "index_and_slice": lambda t: t.__setitem__((slice(1, 3), _index(t, [0, 5])), 8.0),
  "index_apart": lambda t: t.view(2, 2, 6).__setitem__(
    (_index(t, [0, 1]), slice(None), _index(t, [2, 3])), 4.0
  ),
  "into_view": lambda t: t[1:].t().__setitem__(2, 6.0),
  "into_view_by_mask": lambda t: t[1:].__setitem__(t[1:] < 0, 6.0),
  "into_view_by_index": lambda t: t.t().__setitem__(_index(t, [0, 2]), 6.0),
  "none": lambda t: t.__setitem__((None, 0), 2.0),
  "other_dtype": lambda t: t.__setitem__(0, _index(t, [1, 2, 3, 4, 5, 6])),
  "overlap": lambda t: t.__setitem__(slice(1, None), t[:-1].clone()),
}


@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_index_assignment_equals_torch(assign):
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  alias = tensor.view(24)
  assign(cpu)
  assign(tensor)
  assert_same(tensor, cpu)
  assert_same(alias, cpu.view(24))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16], ids=str)
def test_assigned_number_is_cast_to_the_dtype(dtype):
  cpu, tensor = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype, device="jax")
  cpu[1] = 1.5
  tensor[1] = 1.5
  assert_same(tensor, cpu)


def test_cpu_indices_index_jax_tensors():
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  rows, mask = torch.tensor([0, 2]), BASE > 0
  assert_same(tensor[rows], cpu[rows])
  assert_same(tensor[mask], cpu[mask])
  cpu[rows] = 0.0
  tensor[rows] = 0.0
  assert_same(tensor, cpu)


def test_a_cpu_tensor_is_assigned_by_copy():
  tensor = BASE.clone().to("jax")
  tensor[1] = torch.ones(6)
  expected = BASE.clone()
  expected[1] = 1
  assert_same(tensor, expected)


BAD_ASSIGNMENTS = {
  "shape": lambda t: t.__setitem__(0, t[:, 0]),
  "index": lambda t: t.__setitem__(4, 0),
  "mask_shape": lambda t: t.__setitem__(_index(t, [True, False]), 0),
}


@pytest.mark.parametrize("assign", BAD_ASSIGNMENTS.values(), ids=BAD_ASSIGNMENTS)
def test_invalid_assignment_raises_like_torch(assign):
  with pytest.raises((RuntimeError, IndexError)) as cpu_error:
    assign(BASE.clone())
  tensor = BASE.clone().to("jax")
  with pytest.raises(cpu_error.type):
    assign(tensor)
  assert_same(tensor, BASE)


# Other writes -------------------------------------------------------------------------

WRITES = {
  "copy_": lambda t: t[1].copy_(t[2]),
  "copy_broadcast": lambda t: t[:2].copy_(t[3]),
  "copy_from_cpu": lambda t: t[1].copy_(torch.ones(6)),
  "copy_other_dtype": lambda t: t[1].copy_(torch.ones(6, dtype=torch.int32)),
  "zero_": lambda t: t[:, 1].zero_(),
  "fill_": lambda t: t.t()[2].fill_(4),
  "masked_fill_": lambda t: t[1:].masked_fill_(t[1:] > 0, 0.0),
  "index_fill_": lambda t: t[:, 1:].index_fill_(0, _index(t, [0, 2]), 5.0),
  "index_add_": lambda t: t[1:].index_add_(0, _index(t, [0, 0]), t[:2].clone()),
  "scatter_": lambda t: t[0].scatter_(0, _index(t, [1, 2]), 7.0),
  "clamp_": lambda t: t[::2].clamp_(-0.1, 0.1),
  "out_argument": lambda t: torch.add(t[0], t[1], out=t[2]),
  "fill_diagonal_": lambda t: t[:, 1:].fill_diagonal_(3.0),
  "swap_rows": lambda t: t[[0, 1]].copy_(t[[1, 0]]),
  "augmented": lambda t: t[1].__iadd__(2),
  "sub_scaled": lambda t: t[1].sub_(t[2], alpha=2),
  "addcmul_": lambda t: t[0].addcmul_(t[1], t[2], value=0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_reaches_the_base(write):
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  write(cpu)
  write(tensor)
  assert_same(tensor, cpu)


def test_a_write_keeps_the_dtype_of_the_base():
  tensor = torch.zeros(4, dtype=torch.bfloat16, device="jax")
  tensor[:2].add_(1.5)
  assert tensor.jax().dtype == jnp.bfloat16
  with pytest.raises(RuntimeError, match="(?i)cast|dtype"):
    torch.zeros(4, dtype=torch.int32, device="jax").add_(1.5)


def test_invalid_write_raises_and_changes_nothing():
  tensor = BASE.clone().to("jax")
  with pytest.raises(RuntimeError, match="shape"):
    tensor[0].add_(tensor)
  with pytest.raises(RuntimeError):
    tensor[0].copy_(tensor[:, 0])
  assert_same(tensor, BASE)


def test_views_inside_a_compiled_function_write_through():
  @jax_jit
  def change(t):
    t[1].mul_(3)
    t.t()[2] = 0.0
    return t.view(-1)[::2]

  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  result = change(tensor)
  cpu[1].mul_(3)
  cpu.t()[2] = 0.0
  assert_same(tensor, cpu)
  assert_same(result, cpu.view(-1)[::2])


def test_compiled_function_writes_through_a_view_argument():
  change = jax_jit(lambda t: t.add_(1))
  cpu, tensor = BASE.clone(), BASE.clone().to("jax")
  change(tensor[1:3].t())
  cpu[1:3].add_(1)
  assert_same(tensor, cpu)
