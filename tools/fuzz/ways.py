"""Ways to run a program, and the observations of a run."""

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchax
from tools.fuzz.program import INPUTS, Program
from torchax import interop
from torchax.errors import Documented

SEED = 1


@dataclasses.dataclass(frozen=True)
class Way:
  """Way to run a function.

  Attributes:
    device: device of the inputs.
    wrap: function that converts the program to the function to call.
    source: `wrap(program)` as text, for scripts.
    nests: True if `jit` inside of the program compiles.
    mode: mode of eager operations.
    runs: number of runs; only the last is observed. The fused mode compiles the second.
  """

  device: str
  wrap: Callable
  source: str
  nests: bool = False
  mode: str = "strict"
  runs: int = 1


def _compile(backend: str) -> Callable:
  def wrap(function):
    torch.compiler.reset()
    return torch.compile(function, backend=backend)

  return wrap


WAYS = {
  "cpu": Way("cpu", lambda f: f, "program"),
  "eager": Way("jax", lambda f: f, "program", nests=True),
  "fused": Way("jax", lambda f: f, "program", nests=True, mode="fused", runs=3),
  "jit": Way("jax", interop.jax_jit, "interop.jax_jit(program)", nests=True),
  "compile": Way("cpu", _compile("jax"), 'torch.compile(program, backend="jax")'),
  "compile_on_jax": Way(
    "jax", _compile("jax"), 'torch.compile(program, backend="jax")'
  ),
  "aot_eager": Way(
    "cpu", _compile("aot_eager"), 'torch.compile(program, backend="aot_eager")'
  ),
}


# Texts of refusals that name a remedy; torch.compile shows some as text alone.
_REMEDIES = (
  "docs/errors.md#",
  "the shape of the result depends on the values",
  "return `result.detach()`",
)


@dataclasses.dataclass
class Outcome:
  """Observations of a run.

  Attributes:
    values: name -> results, inputs after the call, gradients, and the tensors that see
      writes to a tensor.
    error: error that was raised, or None.
    stage: stage of the run in which it was raised.
  """

  values: dict = dataclasses.field(default_factory=dict)
  error: Exception | None = None
  stage: str = "the call"

  @property
  def is_refusal(self) -> bool:
    """True if the error is one of ours that names a remedy."""
    error: BaseException | None = self.error
    while error is not None:
      text = "\n".join([str(error), *getattr(error, "__notes__", [])])
      if isinstance(error, Documented) or any(part in text for part in _REMEDIES):
        return True
      error = error.__cause__ or error.__context__
    return False

  @property
  def trace(self) -> str:
    """Traceback of the error."""
    return "".join(traceback.format_exception(self.error))


def _scan_of_torch(function, carry, xs):
  rows = []
  for x in xs.unbind():
    carry, row = function(carry, x)
    rows.append(row)
  return carry, torch.stack(rows)


def namespace(way: str) -> dict:
  """Return the names that a program may use in addition to its inputs."""
  nests = WAYS[way].nests
  return {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "jit": interop.jax_jit if nests else lambda function: function,
    "scan": interop.scan if nests else _scan_of_torch,
  }


def inputs_of(names: Sequence[str], device: str) -> list[torch.Tensor]:
  """Return new inputs on a device."""
  made = []
  for name in names:
    source, suffix = INPUTS[name]
    tensor = eval(source, {"torch": torch}).to(device)
    made.append(eval(f"tensor{suffix}", {"tensor": tensor}))
  return made


def _leaf_of(tensor: torch.Tensor) -> torch.Tensor:
  """Return the leaf of an input that is a leaf, or its product with a number."""
  if tensor.is_leaf:
    return tensor
  assert tensor.grad_fn is not None
  return tensor.grad_fn.next_functions[0][0].variable


def run(program: Program, way: str) -> Outcome:
  """Run a program one way, and observe its last run."""
  with torchax.eager_mode(WAYS[way].mode):
    return [_run(program, way) for _ in range(WAYS[way].runs)][-1]


def _run(program: Program, way: str) -> Outcome:
  chosen, variables = WAYS[way], namespace(way)
  outcome = Outcome()
  torch.manual_seed(SEED)
  inputs = inputs_of(program.inputs, chosen.device)
  leaves = dict(zip(program.inputs, map(_leaf_of, inputs)))
  try:
    exec(program.source, variables)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      results = chosen.wrap(variables["program"])(*inputs)
      _observe(outcome, program, inputs, leaves, results, chosen.device)
  except Exception as error:
    outcome.error = error
  return outcome


def _observe(outcome, program, inputs, leaves, results, device) -> None:
  names = [f"result {name}" for name in program.results]
  names += [f"input {name}" for name in program.inputs]
  tensors = dict(zip(names, [*results, *inputs]))
  values = outcome.values
  for name, tensor in tensors.items():
    values[name] = _numbers(tensor)
    values[f"{name} requires grad"] = tensor.requires_grad
  outcome.stage = "the backward pass"
  recorded = [_weighted(t) for t in tensors.values() if _is_recorded(t)]
  if recorded:
    loss = sum(recorded)
    loss.backward()
  for name, leaf in leaves.items():
    if leaf.grad is not None:
      values[f"gradient of {name}"] = _numbers(leaf.grad)
  if program.draws and device == "jax":
    values["next draw"] = _numbers(torch.rand(4, device="jax"))
  outcome.stage = "a write to a result"
  for name, tensor in tensors.items():
    values[f"sees writes to {name}"] = _seen(tensor, tensors)


def _is_recorded(tensor: torch.Tensor) -> bool:
  """Return True if autograd records the tensor.

  `requires_grad` is not enough: it is also true for views without a gradient.
  """
  if tensor.grad_fn is not None:
    return True
  return tensor.requires_grad and not tensor._is_view()


def _weighted(result: torch.Tensor) -> torch.Tensor:
  """Return a weighted sum of a result, whose weights differ between elements."""
  flat = result.reshape(-1)
  flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.float()
  weights = (torch.arange(flat.numel()) % 5 - 1.75).to(result.device)
  return (flat * weights).sum()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
  """Return a copy on the CPU, with 64-bit numbers narrowed to 32 bits as on jax."""
  copied = tensor.detach().cpu().resolve_conj().clone()
  narrow = {
    torch.int64: torch.int32, torch.float64: torch.float32,
    torch.complex128: torch.complex64,
  }  # fmt: skip
  return copied.to(narrow.get(copied.dtype, copied.dtype))


def _seen(tensor: torch.Tensor, tensors: dict) -> frozenset | None:
  """Write to a tensor; return the names of tensors that change, None if refused."""
  before = {name: _numbers(other) for name, other in tensors.items()}
  try:
    with torch.no_grad():
      flat = tensor.detach()
      flat.logical_not_() if flat.dtype is torch.bool else flat.add_(1)
  except RuntimeError:  # elements that share their memory
    return None
  return frozenset(
    name
    for name, other in tensors.items()
    if not torch.equal(_numbers(other).nan_to_num(), before[name].nan_to_num())
  )


def enable() -> None:
  """Make this process ready for jax tensors."""
  torchax.enable_globally()
