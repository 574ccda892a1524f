"""Plans of in-place operations: `x.add_(y)`, and foreach operations on lists.

The functional plan computes; its results are written to the arguments that the schema
marks as written. A foreach operation is one program with all tensors as operands and
results. If tensors of the lists share storage so that the order of writes matters, the
rows run one after the other, as in torch's CPU kernels.
"""

from typing import Any

import torch
from torch.autograd.graph import increment_version

from torchax.core import grad_mode, mappings
from torchax.core.chains import WHOLE
from torchax.core.recorder import ARRAYS
from torchax.devices import placement
from torchax.dispatch import torch_checks
from torchax.dispatch.explaining import EXPLAINED, raise_as_torch
from torchax.dispatch.operands import operand_of, use_moving_form
from torchax.dispatch.plans import Plan
from torchax.errors import MixedDeviceError, MutationError
from torchax.ops.list_checks import require_same_length
from torchax.registry.schema import schema_of
from torchax.tensor import Tensor


class InPlacePlan:
  """Plan that runs the functional plan and writes the results to the targets."""

  def __init__(self, op, functional: Plan):
    self.op = op
    self.name = str(op)
    self.functional = functional
    schema = schema_of(op)
    self.names = schema.names
    self.written = schema.written
    written = [a for a in op._schema.arguments if a.name in self.written]
    self.has_lists = any(str(argument.type) == "List[Tensor]" for argument in written)
    self.writes_lists = self.has_lists or len(written) > 1
    self.returns = bool(op._schema.returns)
    # Such results do not depend on the target's values, so JAX would not follow its
    # sharding.
    self.overwrites = functional.is_sampler or functional.operator.execution.overwrites

  def __call__(self, args, kwargs):
    targets = self._targets(args, kwargs) if self.writes_lists else [args[0]]
    for target in targets:
      require_writable(target, self.name)
    if self.writes_lists and self._order_matters(targets, args, kwargs):
      self._run_rows(args, kwargs)
    else:
      self._run(targets, args, kwargs)
    if self.has_lists:  # torch's C++ does this for single tensors only
      increment_version(targets)
    return args[0] if self.returns else None

  def _targets(self, args, kwargs) -> list[torch.Tensor]:
    """Return all written tensors, in the order of the functional plan's results."""
    targets: list[torch.Tensor] = []
    for value in self._written_arguments(args, kwargs):
      targets += [value] if isinstance(value, torch.Tensor) else value
    return targets

  def _written_arguments(self, args, kwargs) -> list:
    given = {**dict(zip(self.names, args)), **(kwargs or {})}
    return [given[name] for name in self.written]

  def _shardings(self, targets):
    """Return the shardings of the targets, or None if all are on single devices."""
    shardings = tuple(
      [placement.several_device_sharding(t._storage.operand) for t in targets]
    )
    if not any(shardings):
      return None
    return shardings if self.writes_lists else shardings[0]

  def _order_matters(self, targets, args, kwargs) -> bool:
    """Return True if a row reads or writes the storage that another row writes."""
    if isinstance(args[0], torch.Tensor) or len(args[0]) < 2:
      return False
    owners = {id(target._storage): target for target in targets}
    if len(owners) < len(targets):
      return True
    rows: dict[int, int] = {}
    for value in self._written_arguments(args, kwargs):
      if not isinstance(value, torch.Tensor):
        rows.update((id(t._storage), row) for row, t in enumerate(value))
    for value in (*args, *(kwargs or {}).values()):
      if isinstance(value, Tensor) and id(value._storage) in rows:
        return True
      if isinstance(value, list | tuple):
        for row, part in enumerate(value):
          if isinstance(part, Tensor) and rows.get(id(part._storage), row) != row:
            return True
    return False

  def _run_rows(self, args, kwargs) -> None:
    lists = [arg for arg in args if isinstance(arg, list | tuple) and len(arg)]
    require_same_length(lists)
    for row in range(len(args[0])):
      parts = [self._row(name, arg, row) for name, arg in zip(self.names, args)]
      self._run(self._targets(parts, kwargs), parts, kwargs)

  def _row(self, name: str, arg, row: int):
    # A tensor of scalars has one for each row, as a list of them does.
    if isinstance(arg, list | tuple) or name == "scalars":
      return arg[row : row + 1]
    return arg

  def _run(self, targets, args, kwargs) -> None:
    """Run one program for all targets. If it raises, no target has changed."""
    plan = self.functional
    operands, static_key = plan.flattener.flatten(args, kwargs)
    bases: list[Any] = []
    writes: list[tuple] = []
    for target in targets:
      # A target without view steps is replaced, so its base is not an operand.
      chain = target._chain
      base: list[Any] = [None]
      if chain is not WHOLE:
        base = [operand_of(target)]
        if chain.is_traced:
          _require_unrecorded(self.name, args)
        chain = use_moving_form(chain, base)
      bases += base
      writes.append((chain, mappings.t2j_dtype(target.dtype), tuple(target.shape)))
    if self.writes_lists:
      bases, write = [tuple(bases)], tuple(writes)
    else:
      (write,) = writes
    sharding = self._shardings(targets) if self.overwrites else None
    try:
      written = plan.run(args, kwargs, [*bases, *operands], static_key, write, sharding)
    except torch_checks.Refused:
      with plan.retry_unchecked(args, kwargs, static_key, write):
        return self._run(targets, args, kwargs)
    except EXPLAINED as error:
      raise_as_torch(error, self.op, args, kwargs, plan.operator)
      raise
    results = written if self.writes_lists else (written,)
    if type(results[0]) not in ARRAYS and grad_mode.is_stopped():
      olds = [target._storage.read() for target in targets]
      results = grad_mode.with_derivatives_of(olds, results)
    for target, array in zip(targets, results):
      storage = target._storage
      if self.overwrites:
        sharding = placement.committed_sharding(storage.operand)
        array = (
          array if sharding is None else placement.restore_sharding(array, sharding)
        )
      storage.write(array, target)


def require_writable(target: torch.Tensor, name: str) -> None:
  """Raise unless an in-place operation can write to the tensor.

  Raises:
    MixedDeviceError: the tensor is on another device.
    RuntimeError: elements of the tensor share memory; torch's error.
  """
  if not isinstance(target, Tensor):
    raise MixedDeviceError(
      f"{name} would write jax data to a tensor on {target.device}. "
      'Call `.cpu()` on the source, or move the destination with `.to("jax")`.'
    )
  if type(target) is Tensor or 0 not in target.stride() or not target.numel():
    return
  overlaps = any(
    stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape)
  )
  if overlaps and not name.startswith(("aten.fill_", "aten.zero_")):
    raise RuntimeError(
      "unsupported operation: more than one element of the written-to tensor refers "
      "to a single memory location. Please clone() the tensor before performing the "
      f"operation ({name})."
    )


def _require_unrecorded(name: str, args) -> None:
  """Raise if torch would record a gradient at a traced index."""
  if torch.is_grad_enabled() and any(
    isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
  ):
    raise MutationError(
      f"{name} changes `x[i]` with a traced index `i` in a way that needs a gradient, "
      "which torch cannot follow to x. Write `x[i] = …` instead."
    )


class ForeachCopyPlan:
  """Plan of `_foreach_copy_`: one program within jax, else a loop over the tensors."""

  def __init__(self, op, default, env):
    self.in_place = default()

  def __call__(self, args, kwargs):
    targets, sources = args[0], args[1]
    require_same_length((targets, sources))
    if all(isinstance(tensor, Tensor) for tensor in (*targets, *sources)):
      self.in_place(args, kwargs)
      return
    for target, source in zip(targets, sources):
      target.copy_(source)
