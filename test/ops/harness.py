"""Harness of operator tests, which compare jax tensors with CPU torch.

A `Case` has a torch callable and CPU inputs. `check` runs it on CPU, and on jax tensors
eagerly, in inference mode and under `jax_jit`. It compares values and dtypes and, with
`grad=True`, the gradients of every floating-point input by `torch.autograd.grad`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import torch
from opinfo.agreement import is_as_good, widened
from torch.utils import _pytree as pytree

import torchax
from torchax.interop import jax_jit

# JAX without x64 narrows these dtypes; only values are compared.
_NARROWED = {
  torch.int64: torch.int32,
  torch.float64: torch.float32,
  torch.complex128: torch.complex64,
}
# With x64 (`make test-x64`) every dtype equals torch's.
NARROWED = {} if jax.config.jax_enable_x64 else _NARROWED
# torch promotes to these dtypes; JAX has no half-precision complex numbers.
HALF_COMPLEX = {torch.complex32, getattr(torch, "bcomplex32", torch.complex32)}
TOLERANCE = {
  torch.float16: (1e-3, 1e-3),
  torch.bfloat16: (1.6e-2, 1e-2),
  torch.float32: (1.3e-6, 1e-5),
  torch.complex64: (1.3e-6, 1e-5),
  torch.float64: (1e-7, 1e-7),
  torch.complex128: (1e-7, 1e-7),
}

# Ways to run a function of tensors.
WAYS = {
  "eager": lambda f: f,
  "jit": jax_jit,
  "compile": lambda f: torch.compile(f, backend="jax", fullgraph=True),
}


@dataclasses.dataclass
class Case:
  """One row. `rtol`, `atol` replace the dtype's tolerance and then need a `why`."""

  function: Callable
  args: tuple
  kwargs: dict[str, Any]
  grad: bool
  jit: bool
  rtol: float | None
  atol: float | None
  why: str
  name: str

  def __init__(
    self,
    function,
    *args,
    grad=False,
    jit=True,
    rtol=None,
    atol=None,
    why="",
    name="",
    **kwargs,
  ):
    if (rtol is not None or atol is not None or not jit) and not why:
      raise ValueError("A tolerance of its own, or jit=False, needs a reason in `why`.")
    self.function, self.args, self.kwargs = function, args, kwargs
    self.grad, self.jit, self.rtol, self.atol, self.why = grad, jit, rtol, atol, why
    self.name = name or getattr(function, "__name__", str(function))

  def __str__(self):
    shapes = "-".join(
      "x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else "_"
      for a in self.args
    )
    return f"{self.name}-{shapes}"


def floats(*shape, dtype=torch.float32, seed=0, low=-1.0, high=1.0) -> torch.Tensor:
  """Return reproducible floats in [low, high) on the CPU."""
  generator = torch.Generator().manual_seed(seed)
  values = torch.rand(shape, generator=generator) * (high - low) + low
  return values.to(dtype)


def ints(*shape, low=0, high=10, dtype=torch.int64, seed=0) -> torch.Tensor:
  """Return reproducible integers in [low, high) on the CPU."""
  generator = torch.Generator().manual_seed(seed)
  return torch.randint(low, high, shape, generator=generator).to(dtype)


def _is_differentiable(value) -> bool:
  return isinstance(value, torch.Tensor) and value.is_floating_point()


def _copies(tree, device, requires_grad):
  def copy(value):
    if not isinstance(value, torch.Tensor):
      return value
    moved = value.detach().clone().to(device)
    return moved.requires_grad_(requires_grad and _is_differentiable(value))

  return pytree.tree_map(copy, tree)


def _compare(case: Case, actual, expected, what: str, exact: Callable):
  """Assert that two trees agree.

  Half-precision numbers that differ by more than the tolerance must be as close to
  `exact()`, the leaves of the same tree in double precision, as those of CPU torch.
  """
  actual_leaves, actual_spec = pytree.tree_flatten(actual)
  expected_leaves, expected_spec = pytree.tree_flatten(expected)
  assert len(actual_leaves) == len(expected_leaves), (what, actual_spec, expected_spec)
  for place, (have, want) in enumerate(zip(actual_leaves, expected_leaves)):
    if not isinstance(want, torch.Tensor):
      assert have == want, (what, have, want)
      continue
    want = want.detach().resolve_conj().resolve_neg()
    want = want.to(NARROWED.get(want.dtype, want.dtype))
    rtol, atol = TOLERANCE.get(want.dtype, (0, 0))
    if want.is_floating_point() or want.is_complex():
      rtol = rtol if case.rtol is None else case.rtol
      atol = atol if case.atol is None else case.atol
    try:
      torch.testing.assert_close(
        have.detach().cpu(),
        want,
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda message: f"{case} ({what}): {message}",
      )
    except AssertionError:
      is_half = want.dtype in (torch.float16, torch.bfloat16)
      if not is_half or have.dtype != want.dtype or have.shape != want.shape:
        raise
      if not is_as_good(have.detach().cpu(), want, exact()[place].detach()):
        raise


def _exactly(case: Case, gradient: bool = False) -> Callable:
  """Return the leaves of the result, or of the gradients, in float64 on the CPU."""

  def compute():
    args, kwargs = _copies(widened((case.args, case.kwargs)), "cpu", gradient)
    output = case.function(*args, **kwargs)
    if gradient:
      leaves = [t for t in pytree.tree_leaves((args, kwargs)) if _is_differentiable(t)]
      output = _gradients(output, leaves, case.args[0].dtype)
    return pytree.tree_leaves(output)

  return compute


def _gradients(output, inputs, weighed_in=None):
  """Return gradients of a fixed weighting of all floating-point outputs.

  The weights are rounded to the outputs' dtype, or to `weighed_in`.
  """
  outputs = [
    o
    for o in pytree.tree_leaves(output)
    if isinstance(o, torch.Tensor) and o.requires_grad
  ]
  weights = [
    floats(*o.shape, seed=7 + i).to(weighed_in or o.dtype).to(o.dtype).to(o.device)
    for i, o in enumerate(outputs)
  ]
  return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


def check(case: Case):
  """Assert that the results of the case on jax equal those on the CPU.

  The environment is off during comparisons: torch crashes when it compares the lazily
  zero tensors of some gradients under a dispatch mode.
  """
  with torchax.default_env():
    cpu_args, cpu_kwargs = _copies((case.args, case.kwargs), "cpu", case.grad)
    expected = case.function(*cpu_args, **cpu_kwargs)
    args, kwargs = _copies((case.args, case.kwargs), "jax", case.grad)
    actual = case.function(*args, **kwargs)
  _compare(case, actual, expected, "eager", _exactly(case))
  _check_inference_mode(case, expected)
  if case.grad:
    _check_gradients(case, expected, (cpu_args, cpu_kwargs))
  if case.jit:
    _check_jit(case, expected)


def _check_inference_mode(case: Case, expected):
  """Run in inference mode, where torch does not decompose composite operations."""
  with torchax.default_env(), torch.inference_mode():
    args, kwargs = _copies((case.args, case.kwargs), "jax", False)
    actual = case.function(*args, **kwargs)
  _compare(case, actual, expected, "inference mode", _exactly(case))


def _check_gradients(case: Case, expected, cpu_inputs):
  with torchax.default_env():
    # Fresh inputs, since the forward run above may have changed its own in place.
    args, kwargs = _copies((case.args, case.kwargs), "jax", True)
    output = case.function(*args, **kwargs)
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if _is_differentiable(t)]
    actual = _gradients(output, leaves)
  cpu_leaves = [t for t in pytree.tree_leaves(cpu_inputs) if _is_differentiable(t)]
  wanted = _gradients(expected, cpu_leaves)
  _compare(case, actual, wanted, "gradient", _exactly(case, gradient=True))


def _check_jit(case: Case, expected):
  args, kwargs = _copies((case.args, case.kwargs), "jax", False)
  leaves, spec = pytree.tree_flatten((args, kwargs))
  tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

  def run(*tensors):
    remaining = iter(tensors)
    rebuilt = [next(remaining) if isinstance(v, torch.Tensor) else v for v in leaves]
    inner_args, inner_kwargs = pytree.tree_unflatten(rebuilt, spec)
    return case.function(*inner_args, **inner_kwargs)

  with torchax.default_env():
    actual = jax_jit(run)(*tensors)
  _compare(case, actual, expected, "jit", _exactly(case))
