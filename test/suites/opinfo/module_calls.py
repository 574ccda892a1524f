"""Groups of modules and functions of `torch.nn`, called on the CPU and on jax.

A group is compiled as one program, since compiling takes most of the time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax.interop import jax_jit


@dataclasses.dataclass
class Use:
  """One call of a module or a function.

  Args:
    build: return the module or the function.
    args: inputs on the CPU; gradients are computed for tensors that require them.
    kwargs: further inputs, such as masks.
  """

  build: Callable[[], Callable]
  args: tuple
  kwargs: dict[str, Any]


def use(build: Callable[[], Callable], *args, **kwargs) -> Use:
  return Use(build, args, kwargs)


def tensors_of(tree) -> list[torch.Tensor]:
  return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _moved(tree, device, dtype):
  def move(value):
    if not isinstance(value, torch.Tensor):
      return value
    moved = value.detach().to(device, dtype if value.is_floating_point() else None)
    return moved.clone().requires_grad_(value.requires_grad)

  return pytree.tree_map(move, tree)


class Group:
  """Uses on one device, with modules, inputs and parameters of their own.

  Args:
    uses: the uses.
    device: "cpu" or "jax".
    training: modules are in training mode.
    dtype: dtype of floating-point numbers, or None to keep theirs.
  """

  def __init__(self, uses: list[Use], device: str, training=True, dtype=None):
    self._uses = uses
    torch.manual_seed(0)
    self._functions = [each.build() for each in uses]
    modules = [f for f in self._functions if isinstance(f, torch.nn.Module)]
    self._module = torch.nn.ModuleList(modules).train(training)
    self._module.to(device=device, dtype=dtype)
    self._inputs = _moved([(each.args, each.kwargs) for each in uses], device, dtype)

  @property
  def classes(self) -> set[type]:
    """Classes of the modules and of modules inside them."""
    return {type(module) for module in self._module.modules()}

  @property
  def names(self) -> list[str]:
    """Descriptions of the uses, in their order."""
    return [
      str(f) if isinstance(f, torch.nn.Module) else f.__name__ for f in self._functions
    ]

  def values(self) -> list:
    """Return a list of results for each use, and all buffers after the calls."""
    called = zip(self._functions, self._inputs)
    results = [function(*args, **kwargs) for function, (args, kwargs) in called]
    return [*results, list(self._module.buffers())]

  def gradients(self) -> list:
    """Return `values`, and gradients of weighted results by inputs and parameters."""
    results = self.values()
    outputs = [t for t in tensors_of(results) if t.requires_grad]
    leaves = [t for t in tensors_of(self._inputs) if t.requires_grad]
    leaves += [p for p in self._module.parameters() if p.requires_grad]
    weights = [_weights(output) for output in outputs]
    return [*results, *torch.autograd.grad(outputs, leaves, weights, allow_unused=True)]

  def jitted(self, call: str) -> list:
    """Return `values` or `gradients`, compiled as one program."""
    given, spec = pytree.tree_flatten(self._inputs)

    def run(*tensors):
      rest = iter(tensors)
      filled = [next(rest) if isinstance(v, torch.Tensor) else v for v in given]
      self._inputs = pytree.tree_unflatten(filled, spec)
      return getattr(self, call)()

    torch.manual_seed(0)
    return jax_jit(run)(*tensors_of(given))


def _weights(output: torch.Tensor) -> torch.Tensor:
  """Return fixed numbers from 0.25 to 1, which half precision represents."""
  numbers = (torch.arange(output.numel()) * 7 % 13 + 4) / 16
  return numbers.to(output.dtype).reshape(output.shape).to(output.device)
