"""`Transformed`: common part of loops, branches, `jax_vmap` and `jax_shard_map`.

Each applies a JAX transformation to the pure form of torch functions:

  lower(call, rng, captured, args) -> (out, states, advance)

`call(branch, rng, captured, args)` runs the function with index `branch` in a trace and
returns a `Result`. Captured tensors are operands. Where torch records gradients, the
transformed function is recorded as one operation, which JAX differentiates.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from torchax.compat.user_code import name_of
from torchax.core import grad_mode
from torchax.core.partitions import is_tensor
from torchax.core.static_values import StaticValue
from torchax.core.storage import Storage
from torchax.dispatch import autograd
from torchax.errors import MutationError, RngError
from torchax.rng import Advance, NewOperands
from torchax.tensor import Tensor
from torchax.tracing import static_arguments
from torchax.tracing.conversions import arrays_of, tensors_of
from torchax.tracing.effects import (
  ClearGradient,
  Effects,
  SetGradient,
  WriteArgument,
  WriteStorage,
)
from torchax.tracing.gradients import gradient_of
from torchax.tracing.specialization import (
  Specialization,
  environments_of_call,
  with_environments,
)
from torchax.tracing.trace import Options, Traced


class Result(NamedTuple):
  """Results of one call of a function in a trace.

  Attributes:
    out: result of the function, a tree of arrays.
    states: new arrays of the captured tensors that change (`Transformed.changing`).
    advance: advance of the stream.
    arguments: new arrays of argument leaves changed in place, by index.
    assigned: new arrays of plain module attributes and optimizer state entries, by
      target (`Effects.targets`).
  """

  out: Any
  states: list[jax.Array]
  advance: Advance
  arguments: dict[int, jax.Array]
  assigned: dict[Any, jax.Array]


class Transformed:
  """Torch functions under a JAX transformation.

  Args:
    name: name of the transformation, for errors.
    functions: the torch functions; a branch is the index of one.
    lower: callback that applies the transformation; see the module's docstring.
    may_change: functions may change captured tensors in place.
    times: number of times that a call runs a function, to advance generators; None if
      unknown before it runs.
    assigns: `lower` returns the tensors assigned to plain attributes of modules.
  """

  def __init__(
    self,
    name: str,
    functions: Sequence[Callable],
    lower: Callable,
    may_change: bool = True,
    times: int | None = 1,
    assigns: bool = False,
  ):
    self.name = name
    self._functions = functions
    self._lower = lower
    self._may_change = may_change
    self.traced = Traced(self._run_branch, Options(True, True, assigns))
    self.traced.keyed.__name__ = self.traced.__name__ = name
    # Captured tensors that the functions change.
    self.changing: list[Storage] = []
    # Callbacks that add the operands found missing in the trace (`NewOperands`).
    self._needs: list[Callable] = []
    # Advance of the stream by one call, as found in earlier traces.
    self.known = Advance()
    self.times = times
    # Environments of the arguments, and of the last trace's results.
    self._of_call: tuple = ()
    self._of_results: tuple = ()

  def _run_branch(self, branch: int, *args):
    return self._functions[branch](*args)

  def __call__(self, args: tuple):
    """Apply the transformation to a tuple of trees of tensors, the `args` of `lower`.

    Raises:
      RngError: a function draws from a generator an unknown number of times, or seeds
        its stream while a gradient is recorded.
      MutationError: a function changes a tensor that it may not change.
    """
    boxed = static_arguments.box(args)
    leaves, treedef = jax.tree.flatten(boxed, is_leaf=is_tensor)
    arrays = arrays_of(leaves)
    self._of_call = environments_of_call(leaves)

    def run(rng):
      if self.times is None and self.traced.keyed.generators:
        raise RngError(
          f"{self.name} draws with a torch.Generator in a loop whose length is not "
          "known before it runs. Use `scan` or `fori_loop` with numbers for bounds, or "
          "draw from the environment's stream."
        )
      self._needs = []
      result = self._run(rng, leaves, arrays, treedef)
      if self._needs:  # JAX has finished its trace
        raise NewOperands(self._needs)
      return result

    out, states = self.traced.keyed.run(
      run, lambda: 1 if self.times is None else self.times
    )
    for storage, array in zip(self.changing, states):
      storage.write(array.jax() if isinstance(array, Tensor) else array)
    out = grad_mode.stop_gradients(out)
    if self._of_results:
      out = with_environments(out, self._of_results)
    return tensors_of(out)

  def _run(self, rng, leaves, arrays, treedef):
    captures = self.traced.captures
    captured, _ = captures.operands(self.traced.guards)
    operands = [*captured, *arrays]
    tensors = [*map(self._with_gradient, captures.tensors), *leaves]
    count = len(captured)
    # Pass only tensors that require a gradient: torch saves the inputs, and forbids
    # in-place changes of saved tensors.
    indices = [n for n, t in enumerate(tensors) if is_tensor(t) and t.requires_grad]
    if not (indices and torch.is_grad_enabled()):
      out, states, advance = self._apply(rng, captured, arrays, treedef)
      return (out, states), advance
    advances: list[Advance | None] = []

    def on_arrays(*needed):
      values = list(operands)
      for index, array in zip(indices, needed):
        values[index] = array
      captured, arrays = tuple(values[:count]), values[count:]
      # torch turns off recording inside an autograd function; here it counts as on.
      with grad_mode.fresh_grad_mode():
        out, states, advance = self._apply(rng, captured, arrays, treedef)
      advances.append(advance)
      return out, states

    function = autograd.ArrayFunction(on_arrays, saves_residuals=True, compiled=False)
    result = autograd.call(function, [tensors[index] for index in indices])
    advance = advances[-1]
    if advance is not None and advance.seedings:
      raise RngError(
        f"{self.name} seeds its random stream while a gradient is recorded. Seed "
        "outside of it, or draw in `rng_scope(key)`."
      )
    return result, advance

  def _with_gradient(self, tensor: Tensor) -> Tensor:
    """Make a captured tensor depend on the leaves that are views of it."""
    leaves = self.traced.captures.view_leaves.get(id(tensor._storage))
    if leaves is None or tensor.requires_grad or not torch.is_grad_enabled():
      return tensor

    def written(whole, *parts):
      for leaf, part in zip(leaves, parts):
        whole = leaf._chain.write(whole, part)
      return whole

    function = autograd.ArrayFunction(written, compiled=False)
    return autograd.call(function, [tensor, *leaves])

  def _apply(self, rng, captured, arrays, treedef):
    args = jax.tree.unflatten(treedef, arrays)
    return self._lower(self._call, rng, captured, args)

  def _call(self, branch: int, rng, captured, args) -> Result:
    self.traced.__name__ = f"{name_of(self._functions[branch])} (in {self.name})"
    environments = self._of_call
    if environments:  # a branch of `switch` does not receive the first argument
      on, *of_leaves = environments
      count = len(jax.tree.leaves(args))
      environments = (on, *of_leaves[len(of_leaves) - count :])
    key = self.traced.captures.key
    specialization = Specialization(captures=key, environments=environments).interned()
    operands = (captured, specialization)
    (out, effects), advance, needs = self.traced.trace(
      rng, operands, StaticValue(branch), *args
    )
    self._needs += needs
    effects = Effects() if effects is None else effects
    self._of_results = effects.environments
    advance = Advance() if advance is None else advance
    states = self._states(effects, captured)
    changed = {c.index: array for c, array in effects.of_kind(WriteArgument)}
    assigned = dict(zip(effects.targets, effects.assigned))
    return Result(out, states, advance, changed, assigned)

  def _states(self, effects: Effects, captured) -> list[jax.Array]:
    cleared = [change.leaf.value for change, _ in effects.of_kind(ClearGradient)]
    has_cleared = any(gradient_of(leaf) is not None for leaf in cleared)
    if effects.of_kind(SetGradient) or has_cleared:
      raise MutationError(
        f"A function in {self.name} calls `backward`, or clears gradients: `.grad` of "
        "a tensor outside cannot change there. Use `torch.autograd.grad` and return "
        "the gradients, or jit the step and loop in Python."
      )
    written = {c.storage.value: array for c, array in effects.of_kind(WriteStorage)}
    if written and not self._may_change:
      raise MutationError(
        f"A function in {self.name} changes {len(written)} tensor(s) that are not its "
        "arguments, to other numbers in each of its calls. Return them instead."
      )
    new = [storage for storage in written if storage not in self.changing]
    if new:
      self._needs.append(functools.partial(self._add_changing, new))
    return [
      written.get(storage, array)
      for storage, array in zip(self.changing, self.states_of(captured))
    ]

  def _add_changing(self, storages: list[Storage]) -> None:
    self.changing += [s for s in storages if s not in self.changing]

  def with_states(self, captured, states) -> tuple:
    """Return the captured arrays with new arrays for the changing tensors."""
    captured = list(captured)
    for index, state in zip(self._changing_indices(), states):
      captured[index] = state
    return tuple(captured)

  def states_of(self, captured) -> list[jax.Array]:
    """Return the captured arrays of the changing tensors."""
    return [captured[index] for index in self._changing_indices()]

  def _changing_indices(self) -> list[int]:
    storages = [tensor._storage for tensor in self.traced.captures.tensors]
    return [storages.index(storage) for storage in self.changing]

  def require_known(self, advance: Advance) -> None:
    """Request a retrace if the advance of a call differs from `known`."""
    found = advance.without_log()
    if found != self.known:
      self._needs.append(functools.partial(setattr, self, "known", found))
