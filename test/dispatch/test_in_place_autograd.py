"""In-place changes and autograd: version counters, refusals and gradients.

Changes of shape and of memory in compiled functions reach the caller's tensor. Aliasing
is tested in `test_view.py`.
"""

import jax
import pytest
import torch
from compare import assert_close, assert_same, to_jax
from ops.harness import floats

from torchax.errors import MutationError
from torchax.interop import jax_jit
from torchax.tensor import Tensor

BASE = floats(4, 6)


def base() -> torch.Tensor:
  """Return a new CPU tensor that a test may change."""
  return BASE.clone()


# Gradients through views and writes ---------------------------------------------------


def _rows_scaled(t):
  scaled = t.clone()
  scaled[0].mul_(2)
  return scaled * t


def _views_of_views(t):
  scaled = t * 2
  scaled[1:].t()[2].mul_(t[0, :3])
  return scaled.diagonal() ** 2


def _assigned(t):
  zeros = torch.zeros_like(t)
  zeros[1] = t[0] * 3
  zeros[:, 2] = t[:, 1] ** 2
  zeros[[0, 3], [4, 5]] = t[[1, 2], [0, 0]]
  return zeros * t


def _masked(t):
  scaled = t * 1
  scaled[t > 0] = 0.5
  scaled[1:].masked_fill_(t[1:] < -0.5, 2.0)
  return scaled * t


def _accumulated(t):
  at = torch.tensor([0, 0, 2]).to(t.device)
  return (t * 1).index_put_((at,), t[:3] * 2, accumulate=True) ** 2


def _as_strided(t):
  return (t * 2).as_strided((3, 2), (7, 2), 1) ** 2


def _as_strided_of_view(t):
  return (t * 2)[1:].as_strided((2, 3), (3, 1), 2) ** 2


def _unfolded(t):
  return t.unfold(1, 3, 2) ** 2


def _unfolded_number(t):
  return t[0, 0].unfold(0, 1, 1) ** 2


def _complex(t):
  paired = torch.view_as_complex((t * 1).view(4, 3, 2))
  paired.imag.mul_(2)
  conjugate = paired.conj()
  conjugate[0].mul_(-2)
  return torch.view_as_real(paired) ** 2


def _resized_view_of(t):
  doubled = t * 2
  doubled.t_().unsqueeze_(0)
  return doubled[0, 1:].squeeze(0) ** 2


def _split(t):
  first, second = (t * 2).split(2)
  return first * second.detach() + first.unbind(0)[0]


GRADIENTS = (
  *(_rows_scaled, _views_of_views, _assigned, _masked, _accumulated, _as_strided),
  *(_as_strided_of_view, _unfolded, _unfolded_number, _complex, _resized_view_of),
  *(_split,),
)


@pytest.mark.parametrize("function", GRADIENTS)
def test_gradients_follow_views_and_writes(function):
  cpu = base().requires_grad_()
  tensor = to_jax(cpu)
  function(cpu).sum().backward()
  function(tensor).sum().backward()
  assert_close(tensor.grad.cpu(), cpu.grad)


def test_compiled_gradients_follow_views_and_writes():
  def all_of(t):
    return sum(function(t).sum() for function in GRADIENTS)

  cpu = base().requires_grad_()
  tensor = to_jax(cpu)
  all_of(cpu).backward()
  jax_jit(all_of)(tensor).backward()
  assert_close(tensor.grad.cpu(), cpu.grad)


# Refusals of torch --------------------------------------------------------------------


def _saved_is_changed(t):
  doubled = t * 2
  squares = doubled**2
  doubled.add_(1)
  squares.sum().backward()


def _saved_is_changed_by_view(t):
  doubled = t * 2
  squares = doubled**2
  doubled[0].t().zero_()
  squares.sum().backward()


def _saved_is_changed_by_detached(t):
  doubled = t * 2
  squares = doubled**2
  doubled.detach().zero_()
  squares.sum().backward()


def _saved_view_is_changed_by_base(t):
  doubled = t * 2
  squares = doubled[1:] ** 2
  doubled[0] = 1.0
  squares.sum().backward()


REFUSED = {
  "leaf": lambda t: t.add_(1),
  "view_of_leaf": lambda t: t[0].add_(1),
  "assigned_leaf": lambda t: t.__setitem__(0, 1.0),
  "assigned_leaf_by_list": lambda t: t.__setitem__([0], 1.0),
  "shape_of_leaf": lambda t: t.t_(),
  "resized": lambda t: t.resize_(2),
  "unbound": lambda t: (t * 1).unbind()[0].add_(1),
  "split": lambda t: (t * 1).split(2)[0].add_(1),
  "detached_view_": lambda t: t[0].detach_(),
  "no_grad_view": lambda t: _view_without_grad(t * 1).add_(t[0]),
  "saved": _saved_is_changed,
  "saved_by_view": _saved_is_changed_by_view,
  "saved_by_detached": _saved_is_changed_by_detached,
  "saved_view": _saved_view_is_changed_by_base,
}


def _view_without_grad(t):
  with torch.no_grad():
    return t[0]


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_writes_that_torch_refuses_raise(refused):
  cpu = base().requires_grad_()
  tensor = to_jax(cpu)
  with pytest.raises(RuntimeError) as cpu_error:
    refused(cpu)
  with pytest.raises(RuntimeError) as error:
    refused(tensor)
  assert str(error.value)[:40] == str(cpu_error.value)[:40]
  assert_same(tensor, BASE)


# .data --------------------------------------------------------------------------------


def test_data_shares_numbers_and_is_not_counted():
  results = []
  for leaf in (base().requires_grad_(), to_jax(base().requires_grad_())):
    squares = (leaf**2).sum()
    leaf.data.mul_(3)
    assert leaf.data.grad_fn is None and not leaf.data.requires_grad
    assert not leaf.data._is_view() and leaf._version == 0
    squares.backward()
    results.append((leaf.detach(), leaf.grad))
  assert_same(results[1], results[0])


def test_data_can_be_replaced_by_another_shape_and_dtype():
  results = []
  for leaf in (base(), base().to("jax")):
    view, other = leaf[0], torch.ones(2, 2, dtype=torch.int32).to(leaf.device)
    leaf.data = other
    other.add_(1)  # they share memory from now on
    leaf[0] = 7
    results.append((leaf, view, other))
  assert_same(results[1], results[0])


def test_a_parameter_stays_one_when_its_data_is_replaced():
  parameter = torch.nn.Parameter(base().to("jax"))
  parameter.data = parameter.data * 2
  assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf
  assert_same(parameter.detach(), BASE * 2)


def test_tensors_can_be_swapped():
  first, second = base().to("jax"), torch.ones(2, device="jax")
  torch.utils.swap_tensors(first, second)
  first.add_(1)
  assert_same(first, torch.full((2,), 2.0))
  assert_same(second, BASE)


# In a compiled function ---------------------------------------------------------------

ARGUMENT_CHANGES = {
  "t_": lambda t: t.t_().mul_(2),
  "unsqueeze_": lambda t: t.unsqueeze_(0).squeeze_(0).unsqueeze_(1),
  "transpose_": lambda t: t.mul_(2).transpose_(0, -1),
  "as_strided_": lambda t: t.as_strided_((2, 3), (6, 2), 1).add_(1),
  "resize_": lambda t: t.resize_(2, 3).mul_(2),
  "resize_and_back": lambda t: t.resize_(3).mul_(2).resize_(4, 6).add_(1),
  "grow": lambda t: t.resize_(5, 6)[4:].fill_(3.0),
  "resize_as_": lambda t: t.resize_as_(t[1:].clone()),
  "data": lambda t: setattr(t, "data", t.data * 2),
  "set_": lambda t: t.set_(t * 3),
}


def test_an_argument_of_a_compiled_function_takes_its_new_shape():
  def change_all(tensors):
    for tensor, change in zip(tensors, ARGUMENT_CHANGES.values()):
      change(tensor)
    return [tensor * 1 for tensor in tensors]

  cpu = [base() for _ in ARGUMENT_CHANGES]
  tensors = [base().to("jax") for _ in ARGUMENT_CHANGES]
  aliases = [(t.view(-1), u.view(-1)) for t, u in zip(tensors, cpu)]
  jitted = jax_jit(change_all)
  assert_same(jitted(tensors), change_all(cpu))
  assert_same(tensors, cpu, "the arguments")
  assert [t.stride() for t in tensors] == [t.stride() for t in cpu]
  for name, (alias, cpu_alias) in zip(ARGUMENT_CHANGES, aliases):
    if name not in ("data", "set_"):  # those have new memory on the CPU
      assert_same(alias, cpu_alias, name)


def test_a_second_call_changes_the_shape_again():
  turn = jax_jit(lambda t: t.t_())
  tensor = base().to("jax")
  for _ in range(3):
    turn(tensor)
  assert_same(tensor, BASE.t())


SHAPE_CHANGES = {
  "t_": lambda t: t.t_(),
  "resize_": lambda t: t.resize_(3),
  "set_": lambda t: t.set_(),
  "data": lambda t: setattr(t, "data", t[0] * 1),
}


@pytest.mark.parametrize("change", SHAPE_CHANGES.values(), ids=SHAPE_CHANGES)
def test_a_closed_over_tensor_keeps_its_shape(change):
  tensor = base().to("jax")
  with pytest.raises(MutationError, match="shape"):
    jax_jit(lambda: change(tensor))()
  assert_same(tensor, BASE)


def test_set_of_an_argument_raises_in_a_compiled_function():
  tensor = base().to("jax")
  with pytest.raises(MutationError, match="Return the new tensor"):
    jax_jit(lambda t: t.set_(t[0] * 1))(tensor)
  assert_same(tensor, BASE)


def test_data_of_a_captured_parameter_is_replaced_per_call():
  parameter = torch.nn.Parameter(base().to("jax"))
  view = parameter.detach()[0]

  @jax_jit
  def step():
    parameter.data = parameter.data * 2

  step()
  step()
  assert_same(parameter.detach(), BASE * 4)
  assert_same(view, BASE[0] * 4)


# XLA ----------------------------------------------------------------------------------


def _shifted(t):
  picked = t.flatten()[torch.tensor([0, 2, 4, 6]).to(t.device)]
  picked[1:].copy_(picked[:-1].clone())
  return picked


def _turned_in_flat(t):
  square = t.view(-1)[:4].view(2, 2)
  square.copy_(square.t().clone())
  return t + 0, square.clone()


def _flipped_row(t):
  picked = t[torch.tensor([3, 1]).to(t.device)]
  picked[1].copy_(picked[1].flip(0))
  return picked


def _diagonal_shifted(t):
  t.diagonal()[1:].copy_(t.diagonal()[:-1].clone())
  return t.diagonal().clone(), t.clone()


@pytest.mark.parametrize(
  "function", [_shifted, _turned_in_flat, _flipped_row, _diagonal_shifted]
)
def test_write_after_an_overlapping_read_keeps_the_values_read(function):
  assert_same(jax_jit(function)(base().to("jax")), function(base()))


def test_write_at_a_traced_index_keeps_the_values_read():
  def flip(t, i):
    picked = t[torch.tensor([3, 1]).to(t.device)]
    picked[i].copy_(picked[i].flip(0))
    picked[:, 1 + i].copy_(picked[:, i].clone())
    return picked

  places = torch.tensor(1)
  expected = flip(base(), places)
  assert_same(jax_jit(flip)(base().to("jax"), places.to("jax")), expected)


def test_views_read_their_base_at_the_time_of_use():
  tensor = base().to("jax")
  view = tensor[1:].t()
  assert isinstance(view, Tensor)
  with jax.ensure_compile_time_eval():
    tensor.zero_()
  assert_same(view, torch.zeros(6, 3))
