"""Ways to run a model, the rows of `WAYS`.

A way takes a model and inputs on the CPU, a function that finds the loss in the results
or None, and seeds. It does not change the model. It prepares a copy once, runs it once
for each seed, and returns all values on the CPU.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import torch
from ops.harness import NARROWED

import torchax
from torchax.interop import JittableModule, jax_jit

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Run:
  """Values that a model has computed, as CPU tensors by name.

  Attributes:
    results: results of the model.
    gradients: gradients of its parameters; None for parameters without one.
    buffers: buffers after the run.
    next_draw: next draw of the random stream.
  """

  results: Tensors
  gradients: dict[str, torch.Tensor | None]
  buffers: Tensors
  next_draw: torch.Tensor


Way = Callable[[torch.nn.Module, Tensors, Callable | None, Sequence[int]], list[Run]]


def _step(model: Callable, loss_of: Callable | None) -> Callable[[Tensors], Tensors]:
  """Run a forward pass and, if there is a loss, a backward pass."""

  def step(inputs: Tensors) -> Tensors:
    with torch.set_grad_enabled(loss_of is not None):
      results = model(**inputs)
      if loss_of is not None:
        loss_of(results).backward()
    found = {n: x for n, x in results.items() if isinstance(x, torch.Tensor)}
    return {name: value.detach() for name, value in found.items()}

  return step


def _runs(model, step: Callable, inputs: Tensors, seeds, draws_on: str) -> list[Run]:
  """Run a step that leaves gradients and buffers in the model, once for each seed.

  The step draws from the random stream of `draws_on`.
  """
  runs = []
  for seed in seeds:
    model.zero_grad()
    torch.manual_seed(seed)
    results = step(inputs)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    draw = torch.rand(2, device=draws_on)
    runs.append(Run(*map(_on_cpu, (results, gradients, buffers)), draw.cpu()))
  return runs


def _on_cpu(named: dict) -> dict:
  return {name: None if x is None else _as_on_jax(x) for name, x in named.items()}


def _as_on_jax(tensor: torch.Tensor) -> torch.Tensor:
  """Return a copy of a CPU tensor, as wide as on jax; the next run may change it."""
  dtype = NARROWED.get(tensor.dtype, tensor.dtype)
  return tensor.detach().cpu().to(dtype, copy=True)


def run_on_cpu(model, inputs, loss_of, seeds=(0,)) -> list[Run]:
  """Run a model with torch alone, the reference of all other ways."""
  twin = copy.deepcopy(model)
  return _runs(twin, _step(twin, loss_of), inputs, seeds, "cpu")


def _on_jax(wrap: Callable) -> Way:
  """Return a way to run on jax; `wrap` makes its step from the model and the loss."""

  def run(model, inputs, loss_of, seeds=(0,)) -> list[Run]:
    with torchax.default_env():
      twin = copy.deepcopy(model).to("jax")
      moved = {name: value.to("jax") for name, value in inputs.items()}
      return _runs(twin, wrap(twin, loss_of), moved, seeds, "jax")

  return run


def _jitted_step(model, loss_of):
  """Compile forward and backward pass as one program."""
  return jax_jit(_step(model, loss_of))


def _jittable_module(model, loss_of):
  """Compile the module; torch's autograd differentiates it from outside."""
  return _step(JittableModule(model), loss_of)


def _compiled(model, inputs, loss_of, seeds=(0,)) -> list[Run]:
  """Compile a model of CPU tensors with torch.compile; it draws from the jax stream."""
  twin = copy.deepcopy(model)
  step = _step(torch.compile(twin, backend="jax"), loss_of)
  with torchax.default_env():
    return _runs(twin, step, inputs, seeds, "jax")


WAYS: dict[str, Way] = {
  "eager": _on_jax(_step),
  "jit": _on_jax(_jitted_step),
  "module": _on_jax(_jittable_module),
  "compile": _compiled,
}
