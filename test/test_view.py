"""Views alias and write through; CPU torch runs the same program for comparison.

Each row is a function of one tensor. Shapes are shared, so that little compiles. Writes
by other operations are in `dispatch/test_in_place.py`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_close, assert_same, to_jax
from ops.harness import floats, ints

import torchax
from torchax.core.view_steps import AsStridedInfo
from torchax.tensor import Tensor
from torchax.view import NarrowInfo, SelectInfo, View

BASE = floats(4, 6)


CUBE = floats(2, 3, 4)
COMPLEX = torch.complex(floats(3, 2), floats(3, 2, seed=1))


def base() -> torch.Tensor:
  """Return a new CPU tensor, which a test may change."""
  return BASE.clone()


# Views of one tensor ------------------------------------------------------------------

VIEWS = {
  "view": lambda t: t.view(2, 12),
  "view_infer": lambda t: t.view(-1),
  "view_as": lambda t: t.view_as(torch.empty(3, 8, device=t.device)),
  "reshape": lambda t: t.reshape(8, 3),
  "flatten": lambda t: t.flatten(),
  "ravel": lambda t: t.ravel(),
  "unflatten": lambda t: t.unflatten(1, (2, 3)),
  "slice": lambda t: t[1:3],
  "slice_step": lambda t: t[::2, 1::3],
  "slice_beyond": lambda t: t[2:100],
  "slice_negative": lambda t: t[-3:-1],
  "select": lambda t: t[2],
  "select_negative": lambda t: t.select(1, -1),
  "select_two": lambda t: t[1, 2:4],
  "element": lambda t: t[3, 5],
  "narrow": lambda t: t.narrow(1, 2, 3),
  "narrow_negative": lambda t: t.narrow(-1, -3, 2),
  "transpose": lambda t: t.transpose(0, 1),
  "transpose_negative": lambda t: t.transpose(-1, -2),
  "t": lambda t: t.t(),
  "T": lambda t: t.T,
  "mT": lambda t: t.mT,
  "swapaxes": lambda t: t.swapaxes(0, 1),
  "permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1),
  "permute_negative": lambda t: t.permute(-1, 0),
  "movedim": lambda t: t.view(2, 2, 6).movedim(0, -1),
  "squeeze": lambda t: t.view(1, 4, 1, 6).squeeze(),
  "squeeze_dim": lambda t: t.view(1, 4, 1, 6).squeeze(2),
  "squeeze_dims": lambda t: t.view(1, 4, 1, 6).squeeze((0, 2)),
  "squeeze_nothing": lambda t: t.squeeze(0),
  "unsqueeze": lambda t: t.unsqueeze(1),
  "unsqueeze_last": lambda t: t.unsqueeze(-1),
  "none_index": lambda t: t[:, None],
  "ellipsis": lambda t: t[..., 2],
  "diagonal": lambda t: t.diagonal(),
  "diagonal_offset": lambda t: t.diagonal(-1),
  "diagonal_dims": lambda t: t.diagonal(2, 1, 0),
  "diag_of_diag": lambda t: t.view(2, 2, 6).diagonal(0, 1, 2),
  "unfold_apart": lambda t: t.unfold(1, 2, 3),
  "as_strided": lambda t: t.as_strided((2, 3), (6, 2), 1),
  "split": lambda t: t.split(2)[1],
  "split_sizes": lambda t: t.split([1, 2, 3], dim=1)[2],
  "chunk": lambda t: t.chunk(3, dim=1)[1],
  "tensor_split": lambda t: t.tensor_split((1, 3))[1],
  "hsplit": lambda t: t.hsplit(2)[0],
  "unbind": lambda t: t.unbind(1)[4],
  "detach": lambda t: t.detach(),
  "data": lambda t: t.data,
  "alias": lambda t: torch.ops.aten.alias(t),
  "view_same_dtype": lambda t: t.view(torch.float32),
}
CHAINS = {
  "slice_of_transpose": lambda t: t.t()[1:5:2],
  "select_of_slice": lambda t: t[1:3][0],
  "view_of_slice": lambda t: t[1:3].view(3, 4),
  "slice_of_view": lambda t: t.view(24)[3:20:4],
  "transpose_twice": lambda t: t.t().t(),
  "strided_of_slice": lambda t: t[1:].as_strided((2, 2), (6, 1), 7),
  "unfold_of_transpose": lambda t: t.t().unfold(0, 2, 2),
  "diagonal_of_permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1).diagonal(0, 0, 1),
  "five_deep": lambda t: t.view(2, 2, 6)[1].t().unsqueeze(0)[..., 1],
}
ALIASING = {**VIEWS, **CHAINS}
each_view = pytest.mark.parametrize("view", ALIASING.values(), ids=ALIASING)


@each_view
def test_view_metadata_and_values_equal_torch(view):
  expected, actual = view(base()), view(base().to("jax"))
  assert actual.stride() == expected.stride()
  assert actual.storage_offset() == expected.storage_offset()
  assert actual.is_contiguous() == expected.is_contiguous()
  assert_same(actual, expected)


@each_view
def test_writes_propagate_between_view_and_base(view):
  cpu, jax_base = base(), base().to("jax")
  expected, actual = view(cpu), view(jax_base)
  expected.mul_(3)
  actual.mul_(3)
  assert_same(jax_base, cpu, "base after a write to the view")
  cpu.add_(1)
  jax_base.add_(1)
  assert_same(actual, expected, "view after a write to the base")


def test_views_of_one_base_alias_each_other():
  cpu, jax_base = base(), base().to("jax")
  for tensor in (cpu, jax_base):
    tensor[0].zero_()
    tensor.t()[2].fill_(5)
  assert_same(jax_base.view(-1), cpu.view(-1))


def test_a_view_keeps_its_base_alive():
  assert_same(base().to("jax")[1:].t()[2], base()[1:].t()[2])


def test_a_view_outlives_a_replaced_name():
  tensor = base().to("jax")
  view = tensor[0]
  tensor = tensor + 1  # a new tensor; the view stays on the old one
  tensor.zero_()
  assert_same(view, BASE[0])


EXPANDS = {
  "new_dim": lambda t: t.expand(2, 4, 6),
  "size_one": lambda t: t[:, :1].expand(4, 6),
  "keep": lambda t: t[:1].expand(3, -1),
  "expand_as": lambda t: t[0].expand_as(torch.empty(2, 6, device=t.device)),
  "broadcast_to": lambda t: torch.broadcast_to(t[0], (2, 6)),
}
OVERLAPPING = {**EXPANDS, "unfold": lambda t: t.unfold(1, 3, 1)}


@pytest.mark.parametrize("view", OVERLAPPING.values(), ids=OVERLAPPING)
def test_overlapping_view_sees_writes_to_its_base(view):
  cpu, jax_base = base(), base().to("jax")
  expected, actual = view(cpu), view(jax_base)
  assert actual.stride() == expected.stride()
  cpu.mul_(2)
  jax_base.mul_(2)
  assert_same(actual, expected)


@pytest.mark.parametrize("view", EXPANDS.values(), ids=EXPANDS)
def test_write_to_expanded_view_raises_like_torch(view):
  with pytest.raises(RuntimeError, match="single memory location"):
    view(base()).add_(1)
  tensor = base().to("jax")
  with pytest.raises(RuntimeError, match="single memory location"):
    view(tensor).add_(1)
  assert_same(tensor, BASE)


def test_empty_expanded_view_accepts_writes():
  for device in ("cpu", "jax"):
    empty = torch.ones(1, 0, device=device).expand(2, 0)
    assert empty.add_(1).shape == (2, 0)


# Complex numbers and other dtypes -----------------------------------------------------

REINTERPRETATIONS = {
  "real": (COMPLEX, lambda t: t.real),
  "imag": (COMPLEX, lambda t: t.imag),
  "view_as_real": (COMPLEX, torch.view_as_real),
  "view_as_complex": (floats(3, 2), torch.view_as_complex),
  "real_of_slice": (COMPLEX, lambda t: t[1:].real),
  "slice_of_view_as_real": (COMPLEX, lambda t: torch.view_as_real(t)[..., 1]),
  "float_as_int": (BASE, lambda t: t.view(torch.int32)),
  "int_as_float": (BASE.view(torch.int32), lambda t: t.view(torch.float32)),
  "bfloat16_as_int16": (BASE.bfloat16(), lambda t: t.view(torch.int16)),
  "wide_as_narrow": (BASE, lambda t: t.view(torch.int16)),
  "narrow_as_wide": (ints(4, 6, dtype=torch.int16), lambda t: t.view(torch.int32)),
  "slice_as_int": (BASE, lambda t: t[1:3].view(torch.int32)),
  "strided_as_int": (BASE, lambda t: t.view(torch.int32).as_strided((2, 2), (7, 2), 3)),
  "strided_as_int16": (BASE, lambda t: t.view(torch.int16).as_strided((3,), (9,), 5)),
  "strided_as_real": (COMPLEX, lambda t: t.imag.as_strided((2,), (4,), 1)),
  "strided_as_complex": (
    floats(3, 2),
    lambda t: torch.view_as_complex(t).as_strided((2,), (2,), 0),
  ),
  "strided_as_int_of_complex": (
    COMPLEX,
    lambda t: torch.view_as_real(t).view(torch.int32).as_strided((2,), (4,), 1),
  ),
  "complex_as_int": (COMPLEX, lambda t: t.view(torch.int32)),
  "number_as_int": (torch.tensor(1.5), lambda t: t.view(torch.int32)),
  "empty_as_complex": (torch.empty(0, 4), lambda t: t.view(torch.complex64)),
  "empty_complex_as_int": (COMPLEX[:0], lambda t: t.view(torch.int16)),
  "unfold_as_int": (BASE, lambda t: t.view(torch.int32).unfold(1, 2, 2)),
}


@pytest.mark.parametrize("row", REINTERPRETATIONS.values(), ids=REINTERPRETATIONS)
def test_dtype_view_aliases(row):
  source, view = row
  cpu, jax_base = source.clone(), source.to("jax")
  expected, actual = view(cpu), view(jax_base)
  assert_same(actual, expected)
  assert actual.stride() == expected.stride()
  expected.mul_(2)
  actual.mul_(2)
  assert_same(jax_base, cpu)
  cpu.zero_()
  jax_base.zero_()
  assert_same(actual, expected)


def test_conj_has_conjugate_values():
  actual = COMPLEX.to("jax").conj()
  assert_same(actual, COMPLEX.conj())
  assert_same(actual.imag, COMPLEX.conj().resolve_conj().imag)


def test_real_of_a_real_tensor_is_the_tensor():
  tensor = base().to("jax")
  assert tensor.real is tensor


# Copies -------------------------------------------------------------------------------

COPIES = {
  "reshape_of_transpose": lambda t: t.t().reshape(24),
  "reshape_of_expand": lambda t: t[0].expand(2, 6).reshape(12),
  "flatten_of_slice": lambda t: t[:, 1:3].flatten(),
  "contiguous_of_transpose": lambda t: t.t().contiguous(),
  "clone": lambda t: t.clone(),
  "clone_of_view": lambda t: t[1].clone(),
  "list_index": lambda t: t[[0, 1]],
  "tuple_index": lambda t: t[:, (0, 5)],
  "range_index": lambda t: t[range(2), range(2)],
  "list_of_lists": lambda t: t[[0, 1], [2, 3]],
  "bool_list": lambda t: t[[True, False, True, False]],
  "empty_list": lambda t: t[[]],
  "array_index": lambda t: t[np.array([0, 1])],
  "jax_array_index": lambda t: t[jnp.array([0, 1])] if t.is_jax else t[[0, 1]],
  "mask": lambda t: t[t > -10],
  "index_select": lambda t: t.index_select(0, torch.tensor([0, 1]).to(t.device)),
  "arithmetic": lambda t: t[0] + 0,
  "to_copy": lambda t: t.to(t.device, copy=True),
  "repeat": lambda t: t.repeat(1, 1),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copy_has_its_own_memory(copy):
  cpu, tensor = base(), base().to("jax")
  with torchax.default_env():
    expected, actual = copy(cpu), copy(tensor)
  assert_same(actual, expected)
  actual.zero_()
  assert_same(tensor, BASE)


def test_list_index_ignores_the_default_device():
  tensor = base().to("jax")
  with torch.device("jax"):
    assert_same(tensor[[0, 2]], BASE[[0, 2]])
    tensor[[0, 2], [1, 1]] = 5
  expected = base()
  expected[[0, 2], [1, 1]] = 5
  assert_same(tensor, expected)


def test_contiguous_of_a_contiguous_tensor_is_the_tensor():
  tensor = base().to("jax")
  assert tensor.contiguous() is tensor
  tensor.reshape(24).zero_()
  assert_same(tensor, torch.zeros(4, 6))


def test_clone_of_a_view_is_not_a_view():
  assert type(base().to("jax")[1]) is View
  assert type(base().to("jax")[1].clone()) is Tensor


# Errors -------------------------------------------------------------------------------

WRONG = {
  "view_size": lambda t: t.view(5, 5),
  "view_of_transpose": lambda t: t.t().view(24),
  "reshape_size": lambda t: t.reshape(7),
  "two_infers": lambda t: t.view(-1, -1),
  "expand": lambda t: t.expand(4, 7),
  "expand_fewer": lambda t: t.expand(6),
  "squeeze_dim": lambda t: t.squeeze(2),
  "unsqueeze_dim": lambda t: t.unsqueeze(4),
  "select_index": lambda t: t.select(0, 4),
  "index": lambda t: t[4],
  "index_many": lambda t: t[0, 0, 0],
  "transpose_dim": lambda t: t.transpose(0, 2),
  "permute_repeat": lambda t: t.permute(0, 0),
  "narrow_length": lambda t: t.narrow(0, 3, 2),
  "t_of_three": lambda t: t.view(2, 2, 6).t(),
  "diagonal_dims": lambda t: t.diagonal(0, 1, 1),
  "split_sizes": lambda t: t.split([1, 1]),
  "unfold_size": lambda t: t.unfold(0, 5, 1),
  "step": lambda t: t[::-1],
  "as_strided_negative": lambda t: t.as_strided((2,), (-1,)),
  "view_as_real": lambda t: torch.view_as_real(t),
  "imag_of_real": lambda t: t.imag,
  "view_dtype_odd": lambda t: t[:, :3].contiguous().view(torch.complex64),
}


@pytest.mark.parametrize("view", WRONG.values(), ids=WRONG)
def test_invalid_view_raises_like_torch(view):
  refusals = (RuntimeError, IndexError, ValueError, TypeError)
  with pytest.raises(refusals) as cpu_error:
    view(base())
  tensor = base().to("jax")
  with pytest.raises(cpu_error.type):
    view(tensor)
  assert_same(tensor, BASE)


# Upstream's names ---------------------------------------------------------------------


def test_view_class_applies_a_step():
  env = torchax.default_env()
  tensor = base().to("jax")
  view = View(tensor, NarrowInfo((slice(1, 3), slice(0, 4))), env)
  assert_same(view, BASE[1:3, :4])
  inner = view.create_sub_view(SelectInfo(1, 0, 4, 2))
  assert_same(inner, BASE[1:3, 0:4:2])
  assert len(inner.get_transformation_chain()) == 2
  inner.update(jnp.zeros((2, 2)))
  expected = base()
  expected[1:3, 0:4:2] = 0
  assert_same(tensor, expected)
  assert type(view.torch()) is Tensor


def test_view_reads_and_replaces_its_source():
  tensor = base().to("jax")
  view = View(tensor, NarrowInfo(slice(0, 2)), torchax.default_env())
  assert view.source_jax() is tensor.jax()
  view.replace_source_jax(jnp.ones((4, 6)))
  assert_same(tensor, torch.ones(4, 6))
  view.update(torch.zeros(2, 6, device="jax"))
  assert_same(tensor[:2], torch.zeros(2, 6))
  view.update(jnp.full((6,), 2.0), [AsStridedInfo((1,), 18, (6,))])
  assert_same(tensor[3], torch.full((6,), 2.0))


def test_v2t_iso_copies_views():
  tensor = base().to("jax")
  separate = torchax.default_env().v2t_iso({"a": tensor[0], "b": tensor})
  assert type(separate["a"]) is Tensor and separate["b"] is tensor
  separate["a"].zero_()
  assert_same(tensor, BASE)


# Gradients ----------------------------------------------------------------------------


def test_gradient_is_correct_with_several_views_of_a_base():
  cpu = base().requires_grad_()
  tensor = to_jax(cpu)
  for leaf in (cpu, tensor):
    scaled = leaf * 2
    scaled[0].mul_(3)
    (scaled.t()[1:3] ** 2).sum().backward()
  assert_close(tensor.grad.cpu(), cpu.grad)
