"""Gradients of compiled functions for torch's autograd.

While a function is traced with tensors that require a gradient, torch records its graph
as in eager mode. The backward pass of that graph is traced right after the forward
pass, as a second program. The compiled function returns the residuals that the second
program needs. So a compiled function has the gradients of the eager one, including
`no_grad`, `detach`, hooks and `autograd.Function`; its backward pass uses the dropout
masks of its forward pass; and one call of `backward` runs one compiled program.

`trace.py` calls `record` in a trace; `interop/jit.py` calls `attach` after a call. The
gradient itself is differentiated by running the function again (`RecordedCall`).
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from torchax import rng
from torchax.compat import jax_compat, torch_compat
from torchax.core import program_limit
from torchax.core.boundary import Boundary
from torchax.core.partitions import is_tensor
from torchax.core.program_limit import ProgramCache
from torchax.core.storage import Storage
from torchax.dispatch import autograd
from torchax.dispatch.batched_gradients import over_batches
from torchax.environment import default_env
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.specialization import ORDINARY

# Differentiable gradients that one program keeps, one per set of static arguments.
MOST_DIFFERENTIABLE = 16


@dataclasses.dataclass(eq=False)
class BackwardProgram:
  """Backward pass of a traced function, compiled when it first runs.

  Attributes:
    indices: indices of the output leaves that have a graph.
    leaves: indices of those that require a gradient without a graph: views that were
      created under `no_grad`.
    avals: shapes and dtypes of these output leaves.
    arguments: indices of the argument leaves that receive a gradient.
    roots: outer tensors that receive a gradient; those that are not leaves keep their
      graphs.
    assigned: targets (`effects.py`) whose tensors follow the result in the outputs.
    written: outer storages that the function writes.
    used: one flag per entry of `arguments`, then of `roots`: the outputs depend on it.
  """

  indices: tuple[int, ...]
  leaves: tuple[int, ...]
  avals: tuple
  arguments: tuple[int, ...]
  roots: tuple[Tensor, ...]
  assigned: tuple
  written: list[Storage]
  used: tuple[bool, ...] = ()

  def __post_init__(self):
    # Compiled gradients that are differentiable themselves, by static arguments.
    self.differentiable: ProgramCache = ProgramCache(MOST_DIFFERENTIABLE)
    self._jaxpr = None
    self._constants: list = []
    self._compiled: Callable = program_limit.jit(self._run, is_of_user=True)

  def run_by(self, compiled: Callable) -> None:
    """Run the backward pass by `compiled(residuals, cotangents)`."""
    self._compiled = compiled

  def jaxpr(self, residuals: Sequence) -> core.ClosedJaxpr:
    """Return the backward pass as a jaxpr of residuals and cotangents."""
    count = len(residuals)

    def run(*args):
      return self._run(args[:count], args[count:])

    return jax.jit(run).trace(*residuals, *self.avals).lojax.jaxpr

  def trace(self, backward: Callable) -> list:
    """Trace `backward(*cotangents)` and return its residuals.

    The residuals are tracers of the trace in progress.
    """
    closed = jax.make_jaxpr(backward)(*self.avals)
    self._jaxpr = jax_compat.without_constants(closed)
    is_residual = [isinstance(value, jax.core.Tracer) for value in closed.consts]
    residuals = [v for v, is_one in zip(closed.consts, is_residual) if is_one]
    self._constants = [
      None if is_one else v for v, is_one in zip(closed.consts, is_residual)
    ]
    return residuals

  def __call__(self, residuals, cotangents) -> list:
    """Return the gradients of the inputs marked in `used`."""
    return autograd.run_backward(self._compiled, residuals, cotangents)

  def gradients_of(self, out, leaves, gradients) -> tuple:
    """Return the gradients from torch's autograd, with a graph for higher derivatives.

    Args:
      out: result of the function.
      leaves: argument leaves of the function.
      gradients: cotangents of the output leaves in `indices`.
    """
    outputs = jax.tree.leaves(out, is_leaf=is_tensor)
    outputs += [target.get(leaves) for target in self.assigned]
    recorded = [outputs[index] for index in self.indices]
    wanted = [*[leaves[index] for index in self.arguments], *self.roots]
    return torch.autograd.grad(
      recorded, wanted, gradients, create_graph=True, allow_unused=True
    )

  def _run(self, residuals, cotangents):
    remaining = iter(residuals)
    values = [next(remaining) if v is None else v for v in self._constants]
    closed = core.ClosedJaxpr(self._jaxpr, values)
    return core.jaxpr_as_fun(closed)(*cotangents)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Tape:
  """Record of one call for its backward pass: static program and residual arrays.

  Attributes:
    sources: see `autograd.without_held`; empty if `residuals` has all of them.
  """

  program: BackwardProgram
  residuals: list
  sources: tuple[int | None, ...] = ()

  def without(self, held: Sequence) -> "Tape":
    """Return the tape of a trace without the residuals that the caller holds."""
    own, sources = autograd.without_held(self.residuals, held)
    is_shared = len(own) < len(sources)
    return Tape(self.program, own, sources) if is_shared else self

  def filled(self, held: Sequence) -> "Tape":
    """Return the tape of a call, which has `sources`, with all residuals."""
    found = autograd.with_held(self.residuals, self.sources, held)
    return Tape(self.program, found)

  def tree_flatten(self):
    return self.residuals, (self.program, self.sources)

  @classmethod
  def tree_unflatten(cls, static, residuals):
    program, sources = static
    return cls(program, list(residuals), sources)


def record(
  outputs: Sequence[Tensor],
  arguments: dict[int, Tensor],
  boundary: Boundary,
  assigned: tuple = (),
) -> Tape | None:
  """Trace the backward pass of the function that is being traced.

  Args:
    outputs: leaves of the function's result.
    arguments: traced argument leaves that require a gradient, by index.
    boundary: boundary of the trace.
    assigned: targets whose tensors are the last of the outputs.

  Returns:
    None if no output requires a gradient, or the function has freed its graph.
  """
  roots = tuple((boundary.roots or {}).values())
  wanted = [*arguments.values(), *roots]
  indices: list[int] = []
  leaves: list[int] = []
  for index, output in enumerate(outputs):
    if isinstance(output, Tensor) and output.requires_grad:
      (indices if _has_graph(output, wanted) else leaves).append(index)
  if not (indices or leaves) or not wanted:
    return None
  recorded = [outputs[index] for index in indices]
  avals = tuple(jax.ShapeDtypeStruct(t.shape, t.jax().dtype) for t in recorded)
  written = [shadow.storage for shadow in boundary.changed_shadows()]
  program = BackwardProgram(
    tuple(indices), tuple(leaves), avals, tuple(arguments), roots, assigned, written
  )
  env = default_env()

  def backward(*cotangents):
    with rng.using_enclosing():
      seeds = [new_tensor(cotangent, env) for cotangent in cotangents]
      gradients = _gradients(recorded, wanted, seeds)
    program.used = tuple(gradient is not None for gradient in gradients)
    return [gradient.jax() for gradient in gradients if gradient is not None]

  try:
    residuals = program.trace(backward)
  except RuntimeError as error:
    if "second time" in str(error):  # the function has called `backward`
      return None
    error.add_note(
      f"The result of `{boundary.name}` requires a gradient, so its backward pass is "
      "traced with it. If the result needs no gradient, return `result.detach()`."
    )
    raise
  return Tape(program, residuals)


def _has_graph(output: Tensor, wanted: Sequence[Tensor]) -> bool:
  """Return True for a tensor with a gradient that `backward` can start from.

  A view made under `no_grad` inherits `requires_grad` from its base, and has no graph.
  """
  return output.grad_fn is not None or any(output is tensor for tensor in wanted)


def _gradients(outputs, wanted, seeds) -> Sequence[Tensor | None]:
  """Return the gradients of `wanted`; additions to `.grad` in the backward count."""
  if not outputs:
    return [None] * len(wanted)
  leaves = [tensor for tensor in wanted if tensor.is_leaf]
  with autograd.without_gradients(leaves):
    found: Sequence[Tensor | None] = [None] * len(wanted)
    try:
      found = torch.autograd.grad(
        outputs, wanted, seeds, retain_graph=True, allow_unused=True
      )
    except RuntimeError as error:
      if "use_reentrant" not in str(error) or len(leaves) < len(wanted):
        raise
      # A reentrant checkpoint supports only `backward`.
      torch.autograd.backward(outputs, seeds)
    added = [autograd.gradient_of(t) if t.is_leaf else None for t in wanted]
  pairs = zip(found, added)
  return [b if a is None else a if b is None else a + b for a, b in pairs]


class _CompiledCall(torch_compat.OwnFunction):
  """Node of torch's graph for one call of a compiled function."""

  @staticmethod
  def forward(ctx, tape, arrays, differentiate, *inputs):
    ctx.program, env = tape.program, default_env()
    residuals, tensors = tape.residuals, None
    if torch_compat.has_saved_tensors_hooks():
      tensors = [new_tensor(v, env) for v in residuals if not rng.is_typed_key(v)]
      residuals = [v if rng.is_typed_key(v) else None for v in residuals]
    autograd.save(ctx, (residuals, differentiate), tensors)
    ctx.set_materialize_grads(False)
    return tuple([new_tensor(array, env) for array in arrays])

  @staticmethod
  @over_batches
  def backward(ctx, *gradients):
    (residuals, differentiate), tensors = autograd.load_saved(ctx)
    if tensors is not None:
      remaining = iter(tensors)
      residuals = [next(remaining).jax() if v is None else v for v in residuals]
    program, env = ctx.program, default_env()
    gradients = [
      new_tensor(jnp.zeros(aval.shape, aval.dtype), env)
      if gradient is None
      else gradient
      for gradient, aval in zip(gradients, program.avals)
    ]
    if torch.is_grad_enabled():  # `create_graph=True`: the gradient needs a graph
      return None, None, None, *differentiate(program, gradients)
    found = iter(program(residuals, [gradient.jax() for gradient in gradients]))
    results = [new_tensor(next(found), env) if used else None for used in program.used]
    return None, None, None, *results


def attach(tape: Tape, leaves: list, out, differentiate: Callable):
  """Record a call in torch's graph and return its result with recorded tensors.

  Args:
    tape: tape of the call.
    leaves: argument leaves of the call.
    out: result of the call, a tree of arrays.
    differentiate: `(program, gradients) -> gradients`, for higher derivatives.

  Returns:
    `out`, where each leaf that requires a gradient is a tensor that requires one.
  """
  program = tape.program
  inputs = [*[leaves[index] for index in program.arguments], *program.roots]
  outputs, treedef = jax.tree.flatten(out)
  arrays = [outputs[index] for index in program.indices]
  recorded = torch_compat.apply_function(
    _CompiledCall, tape, arrays, differentiate, *inputs
  )
  for index, tensor in zip(program.indices, recorded):
    outputs[index] = tensor
  for index in program.leaves:
    outputs[index] = new_tensor(outputs[index], default_env()).requires_grad_()
  return jax.tree.unflatten(treedef, outputs)


# Gradients of gradients --------------------------------------------------------------


def bases_of(leaves: list) -> list:
  """Return the array of each tensor's storage; None for other leaves."""
  return [leaf._storage.read() if isinstance(leaf, Tensor) else None for leaf in leaves]


class RecordedCall(NamedTuple):
  """Inputs of one call, to run the function again with a graph of its gradients.

  Attributes:
    leaves: argument leaves.
    bases: arrays of their storages when the function ran.
    args: arguments with arrays for tensors, (args, kwargs).
    operands: captured arrays, specialization and numbers (`Traced.operands`).
    tensors: captured tensors.
    rng: operands of the random streams.
    numbers: values of host numbers.
    alive: object to keep alive.
  """

  leaves: list
  bases: list
  args: tuple
  operands: tuple
  tensors: list[Tensor]
  rng: Any
  numbers: Any
  alive: Any

  @property
  def autocast(self) -> torch.dtype | None:
    """Dtype of the autocast around the call, or None."""
    return (self.operands[1] or ORDINARY).autocast

  def inputs(self, written: Container[Storage]) -> list:
    """Return the argument leaves, with the values of the call.

    Args:
      written: outer storages that the call itself has written.

    Raises:
      RuntimeError: a tensor that requires a gradient, or a captured one, has changed.
        As for torch's saved tensors, its values are lost.
    """
    for tensor, array in zip(self.tensors, self.operands[0]):
      if tensor._storage.read() is not array and tensor._storage not in written:
        raise _changed(tensor)
    inputs = list(self.leaves)
    arrays = jax.tree.leaves(self.args)
    for index, (leaf, base) in enumerate(zip(self.leaves, self.bases)):
      if base is not None and leaf._storage.read() is not base:
        if leaf.requires_grad:
          raise _changed(leaf)
        inputs[index] = new_tensor(arrays[index], leaf._env)
    return inputs


def _changed(tensor: Tensor) -> RuntimeError:
  return RuntimeError(
    f"A tensor of shape {list(tensor.shape)} has been modified by an inplace operation "
    "after a compiled function has used it, and the derivative of a gradient needs its "
    "old values. Clone it before."
  )
