"""Operations on CPU tensors inside a function that is being traced.

They run once, while the function is traced. Each CPU tensor they read becomes a guard
(`Boundary.guard_on_host`), so a change of it causes a retrace. Draws, and writes to
tensors that outlive the trace, cannot be replayed and raise. `tracing/trace.py` enters
the contexts `guarding_on_reads` and `following_arrays`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from torchax.compat import torch_compat, user_code
from torchax.compat.patches import WhileNeeded, patch
from torchax.core.boundary import Boundary
from torchax.core.storage import active
from torchax.core.tracebacks import hide
from torchax.dispatch import counting_tensors
from torchax.dispatch.operands import tensors_in
from torchax.errors import MutationError, TracedDrawError
from torchax.registry.names import aten
from torchax.registry.schema import schema_of
from torchax.tensor import Tensor

# torch passes tensors that it has just created from Python numbers through these.
_FRESH = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})


def run(boundary: Boundary, func, args, kwargs):
  """Run an operation without jax tensors in a trace; guard on the tensors it reads.

  Raises:
    TracedDrawError: the operation draws on the CPU.
    MutationError: it writes to a tensor created outside the trace.
  """
  if torch_compat.is_tracing():
    return func(*args, **kwargs)
  tensors = _plain_tensors((args, kwargs))
  if any(tensor.device.type != "cpu" for tensor in tensors):
    return func(*args, **kwargs)
  if torch.Tag.nondeterministic_seeded in func.tags and _is_on_cpu(tensors, kwargs):
    raise TracedDrawError(draw_message(f"`{func}` on the CPU", user_code.line()))
  if func._schema.is_mutable:
    _require_own(boundary, func, args, kwargs)
  if func not in _FRESH:
    for tensor in tensors:
      boundary.guard_on_host(tensor)
  return _made(boundary, func(*args, **kwargs))


def _made(boundary: Boundary, result):
  """Record the CPU tensors in a result as made by the function; return the result."""
  for tensor in _plain_tensors(result):
    boundary.made.setdefault(id(tensor), tensor)
  return result


def draw_message(what: str, line: tuple[str, int] | None) -> str:
  """Return the error message for a draw on the host.

  Args:
    what: subject of the message, such as "`aten.rand` on the CPU".
    line: file and line of the draw.
  """
  where = f" ({line[0]}:{line[1]})" if line else ""
  return (
    f"{what} draws random numbers while a function is compiled, so it would have the "
    f"same numbers for ever{where}. Draw on the device, which gives new numbers in "
    'each call: `torch.rand(…, device="jax")`; or draw before the call and pass the '
    "numbers as arguments."
  )


def _is_on_cpu(tensors, kwargs) -> bool:
  if tensors:
    return True
  device = kwargs.get("device")
  if device is None:
    device = torch.get_default_device()
  return torch.device(device).type == "cpu"


def _require_own(boundary: Boundary, func, args, kwargs) -> None:
  schema = schema_of(func)
  values = {**dict(zip(schema.names, args)), **kwargs}
  for name in schema.written:
    for tensor in _plain_tensors(values.get(name)):
      if id(tensor) not in boundary.made:
        raise MutationError(
          f"`{func}` changes a tensor of shape {list(tensor.shape)} on the CPU, which "
          "was made outside of the function being compiled. That would happen while it "
          'is compiled and never again. Move the tensor to jax: `.to("jax")`.'
        )


def require_no_gradient(tensors) -> None:
  """Raise NotImplementedError if a wrapper subclass among tensors needs a gradient."""
  for tensor in tensors:
    if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
      raise NotImplementedError(
        f"A compiled function cannot differentiate a {type(tensor).__name__}, a "
        "wrapper subclass with its own `__torch_dispatch__`. Call "
        "`requires_grad_(False)` on it, or run the function eagerly."
      )


def _returns_tensors(func) -> bool:
  """Return False for queries of sizes and layouts.

  C++ makes them before it records the history of a wrapper. An error there would end
  the process.
  """
  return any("Tensor" in str(result.type) for result in func._schema.returns)


def _plain_tensors(values) -> list[torch.Tensor]:
  return [tensor for tensor in tensors_in(values) if not isinstance(tensor, Tensor)]


class _Functions(TorchFunctionMode):
  """Mode that guards on CPU tensors whose values Python reads without an operation."""

  def __torch_function__(self, func, types, args=(), kwargs=None):
    kwargs, boundary = kwargs or {}, active.boundary
    numbers = {} if boundary is None else boundary.host_numbers
    if numbers and counting_tensors.are_among(numbers, args, kwargs):
      return counting_tensors.call(numbers, func, args, kwargs)
    if func in _READS:
      guard_on_read(args[0] if args else kwargs.get("data", kwargs.get("obj")))
    return func(*args, **kwargs)


class _Operations(torch_compat.DispatchMode):
  """Mode that sends operations without jax tensors to `run` during a trace."""

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    kwargs, boundary = kwargs or {}, active.boundary
    if boundary is None or isinstance(func, torch_compat.HigherOrderOperator):
      return func(*args, **kwargs)
    if torch_compat.with_parts(types, Tensor) and _returns_tensors(func):
      require_no_gradient(_plain_tensors((args, kwargs)))
    if any(issubclass(cls, Tensor) for cls in types):
      result = func(*args, **kwargs)
      return _made(boundary, result) if "device" in kwargs else result
    try:
      return run(boundary, func, args, kwargs)
    except Exception as error:
      hide(error)
      raise


@contextlib.contextmanager
def guarding_on_reads() -> Iterator[None]:
  """Guard on the CPU tensors that operations read inside this context."""
  with _Functions(), _Operations():
    yield


def _follow_arrays() -> Callable[[], None]:
  """Patch `torch.from_numpy`, which is not an operation, to guard on its arrays."""
  original = torch.from_numpy

  @functools.wraps(original)
  def from_numpy(ndarray):
    guard_on_read(ndarray)
    tensor = original(ndarray)
    if active.boundary is not None:
      active.boundary.made[id(tensor)] = tensor
    return tensor

  reason = "arrays of numpy that a function reads while it is traced"
  return patch(torch, "from_numpy", from_numpy, reason).undo


following_arrays = WhileNeeded(_follow_arrays)
"""Context of a trace: numpy arrays that become tensors inside it are guards."""


def guard_on_read(value) -> None:
  """Guard on a CPU tensor or numpy array that a trace reads."""
  boundary = active.boundary
  if boundary is None or isinstance(value, Tensor):
    return
  if isinstance(value, torch.Tensor | np.ndarray) and not torch_compat.is_tracing():
    boundary.guard_on_host(value)


# Functions that read values without an operation that a dispatch mode sees.
_READS = frozenset(
  {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
  }
)
