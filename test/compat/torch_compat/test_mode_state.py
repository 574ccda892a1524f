"""Modes of torch, disabled and counted."""

import torch
from torch.overrides import TorchFunctionMode

import torchax
from torchax.compat import torch_compat


class Mode(TorchFunctionMode):
  """Notes that it was asked."""

  asked = 0

  def __torch_function__(self, func, types, args=(), kwargs=None):
    self.asked += 1
    return func(*args, **(kwargs or {}))


def test_without_function_modes_bypasses_function_modes():
  mode = Mode()
  with mode:
    torch.ones(1)
    before = mode.asked
    with torch_compat.without_function_modes():
      torch.ones(1)
    assert mode.asked == before
    torch.ones(1)
  assert mode.asked == before + 1


def test_without_modes_disables_all_modes():
  mode = Mode()
  seen = []

  class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  with mode, Dispatch():
    with torch_compat.without_modes():
      torch.ones(1)
    assert not seen
    torch.ones(1)
  assert seen


def test_operations_are_recorded_above_dispatch():
  """Also in a handler, and with a mode on that catches what C++ makes."""
  seen = []

  class Handler(torch_compat.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(str(func))
      if func is not torch.ops.aten.neg.default:
        return func(*args, **(kwargs or {}))
      with torch_compat.at_top_level(), Handler():
        leaf = args[0].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.clamp(0.0, 1.0).sum(), leaf)
      return gradient

  with Handler():
    gradient = torch.neg(torch.tensor([0.5, 2.0]))
  assert gradient.tolist() == [1.0, 0.0]
  assert "aten.where.self" in seen and "aten.scalar_tensor.default" in seen


def test_saved_tensors_hooks_are_seen():
  assert not torch_compat.has_saved_tensors_hooks()
  with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
    assert torch_compat.has_saved_tensors_hooks()
  assert not torch_compat.has_saved_tensors_hooks()


def test_dispatch_modes_receive_higher_order_operators():
  seen = []

  class Mode(torch_compat.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  cond = torch.ops.higher_order.cond
  x = torch.ones(2)
  with Mode():
    (result,) = cond(torch.tensor(True), lambda x: [x + 1], lambda x: [x], (x,))
  assert cond in seen and torch.equal(result, x + 1)


def test_holder_is_plain_under_any_mode():
  with torchax.default_env(), torch.device("jax"):
    holder = torch_compat.attribute_holder()
  assert type(holder) is torch.Tensor
  assert holder.device.type == "cpu"
