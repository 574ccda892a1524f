"""Bad inputs of every operator, made from good ones: shapes, dims, dtypes, indices.

Each mutation maps (args, kwargs) of a sample to another pair, or to None if it does not
apply. CPU torch decides which inputs are bad; `fault` describes mistakes of jax.
"""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree

BEYOND = 97

# Inputs with which CPU torch ends the process by a signal.
CRASHES = ("_segment_reduce.offsets",)


def _tensors(leaves) -> list[int]:
  return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _replacing(which: Callable, change: Callable) -> Callable:
  """Return a mutation of the leaf whose index `which(leaves)` returns."""

  def mutate(given):
    leaves, spec = pytree.tree_flatten(given)
    place = which(leaves)
    if place is None:
      return None
    changed = change(leaves[place])
    if changed is None:
      return None
    leaves[place] = changed
    return pytree.tree_unflatten(leaves, spec)

  return mutate


def _nth_tensor(n: int) -> Callable:
  def which(leaves):
    places = _tensors(leaves)
    return places[n] if len(places) > n else None

  return which


def _nth_integer(n: int) -> Callable:
  def which(leaves):
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is int]
    return places[n] if len(places) > n else None

  return which


def _index_tensor(leaves):
  places = [i for i in _tensors(leaves) if leaves[i].dtype is torch.int64]
  return next((i for i in places if i > 0), None)


def _longer(tensor):
  """Return three more elements along the last dimension."""
  if not tensor.dim():
    return tensor.new_ones(3)
  tail = tensor.new_ones((*tensor.shape[:-1], 3))
  return torch.cat([tensor, tail], -1)


def _of_dtype(dtype) -> Callable:
  return lambda tensor: None if tensor.dtype is dtype else tensor.to(dtype)


def _with_number(number) -> Callable:
  def change(tensor):
    if not tensor.numel():
      return None
    changed = tensor.clone()
    changed.reshape(-1)[-1:] = number
    return changed

  return change


MUTATIONS: dict[str, Callable] = {
  "first tensor longer": _replacing(_nth_tensor(0), _longer),
  "second tensor longer": _replacing(_nth_tensor(1), _longer),
  "third tensor longer": _replacing(_nth_tensor(2), _longer),
  "first tensor without dimensions": _replacing(
    _nth_tensor(0), lambda t: t.new_ones(()) if t.dim() else None
  ),
  "first tensor empty": _replacing(_nth_tensor(0), lambda t: t.new_ones(0)),
  "one dimension more": _replacing(_nth_tensor(0), lambda t: t[None]),
  "first number beyond": _replacing(_nth_integer(0), lambda _: BEYOND),
  "first number below": _replacing(_nth_integer(0), lambda _: -BEYOND),
  "second number beyond": _replacing(_nth_integer(1), lambda _: BEYOND),
  "second number below": _replacing(_nth_integer(1), lambda _: -BEYOND),
  "index beyond": _replacing(_index_tensor, _with_number(BEYOND)),
  "index below": _replacing(_index_tensor, _with_number(-BEYOND)),
  "complex": _replacing(_nth_tensor(0), _of_dtype(torch.complex64)),
  "integers": _replacing(_nth_tensor(0), _of_dtype(torch.int64)),
  "bools": _replacing(_nth_tensor(0), _of_dtype(torch.bool)),
  "second of integers": _replacing(_nth_tensor(1), _of_dtype(torch.int64)),
}


def of(sample) -> Iterator[tuple[str, tuple]]:
  """Yield (name, (args, kwargs)) of each mutation that applies to a sample."""
  given = ((sample.input, *sample.args), sample.kwargs)
  for name, mutate in MUTATIONS.items():
    mutated = mutate(given)
    if mutated is not None:
      yield name, mutated


# Messages of CPU torch about a missing kernel for a dtype, or a pair of dtypes.
_NO_KERNEL = re.compile(
  "not implemented for '|expected scalar type|mixed dtype \\(CPU\\)|dtypes on CPU"
)

# Messages of JAX, XLA and Python that do not describe the mistake.
_SENSELESS = re.compile(
  "tuple index out of range|unsupported operand|Tracer|ShapedArray|maximum recursion"
  "|MLIR|XLA|stablehlo|INTERNAL|SmallVector|setStorage"
  "|Incompatible types for broadcasting"
  "|values to unpack|is out of bounds for array|reduce_window|must have rank at least"
  "|ncompatible shapes for broadcasting|dot_general|dimension_numbers|not inexact"
  "|does not accept dtype .* at position|bad_alloc|broadcast_in_dim|has no attribute"
)

# (operator, mutation) that jax accepts, or refuses with another class -> reason.
_NARROW = "without x64 torch.int64 is held in 32 bits, as torch.int32 is"
_NORMS = "torch's own error is of a C++ container; ours names the operation"
_CHUNKED = "on jax these are made of `mm` and `nll_loss`, whose errors they have"
_CHUNKED_ROWS = (
  "third tensor longer",
  "one dimension more",
  "index beyond",
  "index below",
  "complex",
  "integers",
  "bools",
)
_TWO = "the index is out of range too, which is looked at first"
_OF_NO_ROWS = (
  *("index_add", "index_copy", "index_fill"),
  *[f"index_reduce.{how}" for how in ("amax", "amin", "mean", "prod")],
)
EXCEPTIONS: dict[tuple[str, str], str] = {
  ("isin", "complex"): "JAX compares them",
  ("isin", "bools"): "JAX compares them",
  ("_unsafe_masked_index", "first tensor empty"): (
    "a RuntimeError of the decomposition that torch has for it"
  ),
  ("linalg.lu_solve", "second of integers"): _NARROW,
  ("lu_unpack", "second of integers"): _NARROW,
  ("_batch_norm_with_update", "first tensor empty"): _NORMS,
  ("nn.functional.ctc_loss", "first tensor without dimensions"): (
    "a RuntimeError that names the argument, as for other ranks"
  ),
  **{(name, "first tensor empty"): _TWO for name in _OF_NO_ROWS},
  ("index_select", "second tensor longer"): _TWO,
  **{
    (f"nn.functional.linear_cross_entropy.{kind}", row): _CHUNKED
    for kind in ("chunked", "chunked_none")
    for row in _CHUNKED_ROWS
  },
}

# Errors that torch raises for arguments.
_OF_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError)
SECONDS = 60


class NotInTime(BaseException):
  """Error of a call that has not ended; an `Exception` would count as a refusal."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
  """Raise NotInTime if the block takes more than `SECONDS`."""

  def late(*_):
    raise NotInTime(f"no result after {SECONDS} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(SECONDS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def is_of_kernels(error: Exception) -> bool:
  """Return True if CPU torch has refused a dtype that another device may have."""
  return _NO_KERNEL.search(str(error)) is not None


def fault(expected: Exception, found: Exception | None) -> str | None:
  """Describe the mistake in how jax has handled an input; return None if there is none.

  Args:
    expected: error that CPU torch has raised.
    found: result or error of jax.
  """
  if found is None:
    return None if is_of_kernels(expected) else "taken"
  is_senseless = _SENSELESS.search(str(expected)) is not None
  wanted: type | tuple = RuntimeError if is_of_kernels(expected) else type(expected)
  if not isinstance(found, _OF_ARGUMENTS if is_senseless else wanted):
    return "another class"
  words = str(found).split("\n")[0]
  return "senseless words" if _SENSELESS.search(words) and not is_senseless else None
