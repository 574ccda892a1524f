"""`Traced`: a torch function as a pure JAX function with all its state as operands.

`jax_jit`, `jax_value_and_grad` and `gradient_checkpoint` transform a `Traced`:

  traced(rng, operands, *args, **kwargs) -> ((out, effects), advance)

`rng` has the random streams (`rng/keyed_function.py`). `operands` are the arrays of
captured tensors (`captures.py`), the static part of the call (`specialization.py`), and
captured Python numbers. `effects` are the in-place changes of arguments, of captured
tensors and of the `.grad` of captured leaves (`effects.py`).
"""

import contextlib
import functools
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.lr_scheduler import LRScheduler

from torchax import amp
from torchax.compat import jax_compat, torch_compat
from torchax.compat.user_code import location_of, name_of
from torchax.core.boundary import Boundary, version_of
from torchax.core.partitions import is_tensor
from torchax.core.storage import active
from torchax.dispatch import host_operations
from torchax.environment import default_env
from torchax.errors import MutationError, TracedDrawError
from torchax.rng import KeyedFunction, NewOperands, is_typed_key
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  optimizer_state,
  optimizers,
  program_keys,
  static_arguments,
)
from torchax.tracing.captures import (
  Captures,
  Numbers,
  module_of,
  reachable,
)
from torchax.tracing.conversions import arrays_of
from torchax.tracing.effects import (
  Effects,
  WriteArgument,
  collect,
  drop_traced_grads,
  trained_leaves,
)
from torchax.tracing.first_trace import FirstTrace, Operands
from torchax.tracing.gradients import (
  LeafGradient,
  following_gradients,
  gradient_of,
  read_leaves,
  require_no_gradients,
)
from torchax.tracing.guards import Guards
from torchax.tracing.modules import Attributes, without_reads
from torchax.tracing.program_keys import History
from torchax.tracing.specialization import (
  ORDINARY,
  ORDINARY_ATTRIBUTES,
  CaptureKey,
  Specialization,
  copied_arguments,
  environments_of_call,
  environments_of_results,
  is_trained,
  memory_of,
)

# Part of torch's error for an in-place change of an argument that is a leaf.
_LEAF_ERROR = "leaf Variable that requires grad"


def _no_hooks():
  """Hide the caller's hooks on saved tensors, such as a checkpoint's, from a trace."""
  if torch_compat.has_saved_tensors_hooks():
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
  return contextlib.nullcontext()


_requires_grad = operator.attrgetter("requires_grad")


def _with_copies(inner: list, specialization: Specialization) -> tuple[list, list]:
  """Return the argument leaves for the function, the `copied` ones as copies.

  The second list has the storage, the chain and the version of each that is a tensor,
  or None.
  """
  given = list(inner)
  for index in specialization.copied:
    given[index] = inner[index].clone()
  for index, earlier in specialization.same if specialization.copied else ():
    given[index] = given[earlier]
  return given, [
    (v._storage, v._chain, version_of(v)) if isinstance(v, Tensor) else None
    for v in given
  ]


def _owner(tensor: torch.Tensor) -> torch.Tensor:
  """Return the base of a view, and any other tensor itself."""
  return tensor if tensor._base is None else tensor._base


class Options(NamedTuple):
  """Kinds of operands and results that a traced function has.

  Attributes:
    lifts: captured tensors are operands, as cached functions under `jax.jit` need;
      otherwise JAX closes over their values.
    records: torch's autograd can differentiate a call, by a `Tape`.
    assigns: tensors assigned to plain attributes of modules are results.
    lifts_numbers: Python numbers, such as learning rates, are operands.
    keeps_form: results have the function's form: dicts keep the order of their keys,
      which JAX would sort, and tensors a user's class.
  """

  lifts: bool = False
  records: bool = False
  assigns: bool = False
  lifts_numbers: bool = False
  keeps_form: bool = False


class Traced:
  """Torch function whose operands include every tensor and random stream it reads.

  Args:
    function: the torch function.
    options: kinds of operands and results.
    captured: tensors known to be captured; tracing finds the others.

  Attributes:
    captures: captured tensors.
    numbers: Python numbers that are operands.
    guards: guards of the function.
    history: keys of its traces.
    keyed: function of the random streams; keeps them, and repeats incomplete traces.
    location: file and line of the function.
  """

  def __init__(self, function: Callable, options: Options, captured=()):
    self.function = function
    self.options = options
    self.__name__ = name_of(function)
    self.location = location_of(function)
    self.captures = Captures(captured, function if options.lifts else None)
    self.numbers = Numbers()
    self.guards = Guards(self.__name__)
    self.history = History(self.__name__)
    self.keyed = KeyedFunction(self._run)
    self.keyed.__name__ = self.__name__
    # First trace to replay, now that its operands were added.
    self._first: FirstTrace | None = None
    # True while a trace is repeated because a module was imported in it.
    self._repeats_import = False
    # Arguments whose earlier `.grad` a trace reads: count of leaves, and index.
    self._read_gradients: set[tuple[int, int]] = set()
    # True once an in-place change of an argument has needed a gradient.
    self._copies_arguments = False
    # The last call's specialization: its attributes, and the interned object.
    self._last: tuple = (None, None)

  # On the host -----------------------------------------------------------------------

  def operands(self, leaves: list, extra=None) -> tuple:
    """Return the operands of a call: captured arrays, specialization, numbers.

    `extra` is a static value from the wrapper, a part of the cache key.

    Raises:
      MutationError: an argument has a gradient, which the function would read.
    """
    if self._read_gradients:
      require_no_gradients(leaves, self._read_gradients)
    captured, key = self.captures.operands(self.guards)
    specialization = self.specialization(leaves, extra, key)
    if self.numbers.expressions:
      return (captured, specialization, *self.numbers.operands())
    return captured, specialization

  def specialization(
    self, leaves: list, extra=None, captures: CaptureKey | None = None
  ) -> Specialization | None:
    """Return the static part of a call with these argument leaves; None if ordinary."""
    has_grad = self.captures.has_gradients() if self.captures.graded else ()
    no_grad = not torch.is_grad_enabled()
    wants_grad = None if no_grad else self._wants_grad(leaves)
    same, overlapping, layouts = memory_of(leaves)
    if same and not self.options.lifts:
      # Each argument needs its own gradient, so repeated tensors stay separate. As
      # overlapping ones they reject in-place changes.
      overlapping += tuple([index for pair in same for index in pair])
      same = ()
    attributes = (  # in the order of `Specialization`
      same,
      overlapping,
      has_grad,
      extra,
      wants_grad,
      no_grad,
      torch.get_default_dtype(),
      amp.dtype_in_force(),
      captures,
      self.guards.key(),
      environments_of_call(leaves),
      layouts,
      copied_arguments(leaves) if wants_grad and self._copies_arguments else (),
    )
    if attributes == ORDINARY_ATTRIBUTES:
      return None
    if attributes != self._last[0]:
      self._last = (attributes, Specialization(*attributes).interned())
    return self._last[1]

  def _wants_grad(self, leaves) -> tuple[bool, ...] | None:
    """Return one flag per operand: torch records its gradient. None if none is set."""
    if not self.options.records:
      return None
    with torch_compat.without_function_modes():
      flags = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
      flags += map(_requires_grad, self.captures.tensors)
      for views in self.captures.view_leaves.values():
        flags += map(_requires_grad, views)
    return tuple(flags) if True in flags else None

  # In the trace ----------------------------------------------------------------------

  def trace(self, rng, operands: tuple, *args, **kwargs) -> tuple:
    """Run the function in the JAX trace in progress.

    Args:
      rng: operands for the random streams.
      operands: result of `operands`.
      *args, **kwargs: arrays and static values.

    Returns:
      `(out, effects)`, the advance of the streams, and callbacks that add the operands
      found missing. If there are any callbacks, discard the trace, run them, retrace.
    """
    result, needs, _ = self._attempt(None, rng, operands, args, kwargs)
    return *result, needs

  def _attempt(
    self, stand_in: Callable | None, rng, operands: tuple, args: tuple, kwargs: dict
  ) -> tuple[tuple, list[Callable], bool]:
    """Return `(result, advance)`, callbacks, and if they add captured values only."""
    needs: list[Callable] = []
    result, advance, met = self.keyed.attempt(
      rng, needs, stand_in, operands, *args, **kwargs
    )
    is_replayable = not met and not self._repeats_import
    return (result, advance), [*needs, *met], is_replayable

  def __call__(self, rng, operands: tuple, *args, **kwargs):
    """Return `((out, effects), advance)` of a trace that has all its operands.

    Raises:
      NewOperands: an operand was missing; retrace after adding it.
    """
    first, self._first = self._first, None
    named = self._named(rng, operands, args, kwargs)
    if first is not None and first.applies_to(named):
      return first.replay(named)
    if self.options.lifts_numbers and not self.history.count:
      jax_trace = jax_compat.current_trace()
      if jax_trace is not None:
        return self._record_first(jax_trace, named, rng, operands, args, kwargs)
    result, advance, needs = self.trace(rng, operands, *args, **kwargs)
    if needs:
      raise NewOperands(needs)
    return result, advance

  def _record_first(self, jax_trace, named: Operands, *given):
    needs: list[Callable] = []
    is_replayable = True

    def run(stand_in):
      nonlocal needs, is_replayable
      result, needs, is_replayable = self._attempt(stand_in, *given)
      return result

    first = FirstTrace(run, named, jax_trace)
    if needs:
      self._first = first if is_replayable else None
      raise NewOperands(needs)
    return first.replay(named)

  def _named(self, rng, operands: tuple, args: tuple, kwargs: dict) -> Operands:
    captured, specialization, *numbers = operands
    specialization = specialization or ORDINARY
    key = specialization.captures
    tensors = [] if key is None else key.tensors
    arrays = {t._storage: array for t, array in zip(tensors, captured)}
    arrays |= zip(self.numbers.expressions, numbers)
    return Operands.of(rng, (args, kwargs), arrays, specialization)

  def _run(self, needs: list[Callable], stand_in, operands: tuple, *args, **kwargs):
    captured, specialization, *numbers = operands
    specialization = specialization or ORDINARY
    key = specialization.captures
    tensors = [] if key is None else key.tensors[: len(captured)]
    boundary = self._new_boundary(numbers)
    boundary.stand_in = stand_in
    known = self.guards.count
    boundary.gradients = {
      id(t): LeafGradient(t, gradient_of(t)) for t in tensors if is_trained(t)
    }
    with self._tracing(boundary):
      for tensor, array in zip(tensors, captured):
        boundary.lift(tensor._storage, array, tensor)
      inputs, treedef = jax.tree.flatten((args, kwargs))
      inner = self._wrap(inputs, specialization)
      boundary.argument_gradients = {
        id(value): LeafGradient(value)
        for value in inner
        if isinstance(value, Tensor) and value.requires_grad
      }
      given, born = _with_copies(inner, specialization)
      out = self._call(given, treedef, specialization, needs)
      arrays = arrays_of(out)
      assigned = boundary.attributes.extract(boundary, self.options.assigns)
      needs += self._follow_gradients(boundary)
      needs += self._follow_gradients_of_arguments(boundary, inner)
      missing = self.captures.missing(boundary, tensors) if self.options.lifts else []
      changes, recorded = collect(
        boundary, inner, given, born, specialization, [*tensors, *missing]
      )
      assigned += recorded
      effects = Effects.of(changes, assigned)
      effects.environments = environments_of_results(out)
      wants_grad = specialization.wants_grad is not None
      if wants_grad or (stand_in is not None and boundary.roots):
        outputs = jax.tree.leaves(out, is_leaf=is_tensor)
        outputs += [value for _, value in assigned]
        written = [given[c.index] for c, _ in effects.of_kind(WriteArgument)]
        if any(tensor.grad_fn is not None for tensor in written):
          needs.append(self._need_of_copies())
        else:
          effects.tape = self._tape(effects, outputs, inner, specialization, boundary)
      self._require_outside_graph(boundary)
    boundary.made.clear()
    self.guards.forget_temporaries(known)
    if self.options.lifts:
      needs += self._needs(boundary, tensors, missing)
      written = [shadow.storage for shadow in boundary.changed_shadows()]
      self.guards.follow_attributes([*self.captures.storages, *written])
    return arrays, effects.or_none()

  def _new_boundary(self, numbers: list) -> Boundary:
    """Return the boundary of a trace; look at the modules and optimizers it may use."""
    boundary = Boundary(
      self.options.records and torch.is_grad_enabled(),
      self.__name__,
      guards=self.guards,
    )
    boundary.attributes = Attributes()
    for value in reachable(self.function):
      if isinstance(value, torch.nn.Module):
        self.guards.guard_on_module(value)
      elif isinstance(value, torch.optim.Optimizer | LRScheduler):
        optimizer: Any = getattr(value, "optimizer", value)
        optimizer_state.record_groups(optimizer, boundary)
    owner = module_of(self.function)
    if owner is not None:
      boundary.attributes.record(owner)
    if self.options.lifts_numbers:
      boundary.numbers = dict(zip(self.numbers.expressions, numbers))
    return boundary

  @contextlib.contextmanager
  def _tracing(self, boundary: Boundary) -> Iterator[None]:
    """Trace inside the block; no traced value stays in modules and optimizers."""
    attributes = boundary.attributes
    with (
      host_operations.guarding_on_reads(),
      boundary.enter(),
      _no_hooks(),
      self.guards.watching(attributes.record),
      optimizers.tracing_steps,
      following_gradients,
      without_reads,
    ):
      try:
        yield
      except BaseException:
        attributes.undo(boundary)
        raise
      finally:
        drop_traced_grads(boundary)

  def _call(
    self, inner: list, treedef, specialization: Specialization, needs: list[Callable]
  ):
    """Call the function with the argument leaves; return its result, boxed."""
    args, kwargs = static_arguments.unbox(jax.tree.unflatten(treedef, inner))
    try:
      with self._on_host(needs):
        out = self.function(*args, **kwargs)
    except RuntimeError as error:
      # For a parameter, a leaf outside the trace too, torch's own error is right.
      is_given = any((specialization.wants_grad or ())[: len(inner)])
      # A nested compiled function raises a MutationError because of it.
      if is_given and _LEAF_ERROR in f"{error} {error.__cause__}":
        raise NewOperands([self._need_of_copies(error)]) from None
      raise
    except (AttributeError, TypeError) as error:
      if any(map(jax_compat.is_ref, inner)):
        error.add_note(
          f"An argument of {self.__name__} is a jax.Ref, which is no tensor. Read it "
          "by `torch_view(ref[...])`, and write it by `ref[...] = jax_view(tensor)`."
        )
      raise
    keeps_form = self.options.keeps_form
    return static_arguments.box_results(out, self.__name__, keeps_form)

  @contextlib.contextmanager
  def _on_host(self, needs: list[Callable]) -> Iterator[None]:
    """Refuse draws of Python's and numpy's generators; guard on numpy arrays.

    Such a draw would happen once, in the trace, and every call would reuse its number.
    Does nothing in a nested trace, since the outermost one covers it. A module may draw
    while it is imported: after an import the trace is repeated once, by an entry in
    `needs`.

    Raises:
      TracedDrawError: the block has drawn; the generator's state is restored.
    """
    if active.boundary.parent is not None:
      yield
      return
    python, numpy, modules = random.getstate(), np.random.get_state(), len(sys.modules)
    with host_operations.following_arrays:
      yield
    drawn = []
    if random.getstate() != python:
      random.setstate(python)
      drawn.append("Python's `random`")
    if not all(map(np.array_equal, np.random.get_state(), numpy)):
      np.random.set_state(numpy)
      drawn.append("`np.random`")
    is_repeated, self._repeats_import = self._repeats_import, False
    if drawn and len(sys.modules) > modules and not is_repeated:
      self._repeats_import = True
      needs.append(lambda: None)
    elif drawn:
      where = f"{drawn[0]} in {self.__name__}"
      raise TracedDrawError(host_operations.draw_message(where, self.location))

  def record_trace(self, operands, args: tuple, kwargs: dict) -> None:
    """Record the key of a finished trace, to explain the next one."""
    _, specialization, *_ = operands
    key, _ = program_keys.key_of_call(self, specialization or ORDINARY, args, kwargs)
    self.history.record(key)

  def _wrap(self, inputs: list, specialization: Specialization) -> list:
    same, wants_grad = dict(specialization.same), specialization.wants_grad
    layouts = dict(specialization.layouts)
    envs = specialization.environments[1:] or itertools.repeat(default_env())
    inner: list = []
    for index, (value, env) in enumerate(zip(inputs, envs)):
      if index in same:
        inner.append(inner[same[index]])
      elif isinstance(value, jax.Array) and not is_typed_key(value):
        layout = layouts.get(index)
        # A transformation over rows hands over arrays of fewer dimensions.
        if layout is not None and len(layout.order) == value.ndim:
          tensor = layout.tensor(value, env)
        else:
          tensor = new_tensor(value, env)
        needs_grad = wants_grad is not None and wants_grad[index]
        inner.append(tensor.requires_grad_() if needs_grad else tensor)
      else:
        inner.append(value)
    return inner

  def _tape(
    self, effects: Effects, outputs, inner, specialization, boundary
  ) -> autograd_bridge.Tape | None:
    wanted = {
      index: value
      for index, value in enumerate(inner)
      if isinstance(value, Tensor) and value.is_leaf and value.requires_grad
    }
    for index, _ in specialization.same:
      wanted.pop(index, None)
    return autograd_bridge.record(outputs, wanted, boundary, effects.targets)

  def _require_outside_graph(self, boundary: Boundary) -> None:
    """Raise MutationError if an in-place change joined an outer tensor to the graph."""
    written = [t for shadow in boundary.changed_shadows() for t in shadow.writers]
    # `grad_fn` raises for a written view that was made in no_grad mode; ask its base.
    joined = [t for t in written if _owner(t).grad_fn is not None]
    for tensor in joined:
      if not tensor._is_view():
        tensor.detach_()
    if joined:
      raise MutationError(
        f"{self.__name__} changes a tensor of shape {list(joined[0].shape)}, which it "
        "closes over, in place in a way that needs a gradient. Write to it under "
        "`torch.no_grad()`, or return the new value instead."
      )

  def _need_of_copies(self, error: BaseException | None = None) -> Callable:
    """Return a callback, like `_needs`, that lets torch record changes of arguments.

    Raises:
      MutationError: torch cannot record this one: the argument is a leaf, or it has got
        another shape or memory.
    """
    if self.options.assigns and not self._copies_arguments:
      return functools.partial(setattr, self, "_copies_arguments", True)
    raise MutationError(
      f"{self.__name__} changes an argument in place in a way that needs a gradient. "
      "Return the new value instead, so that autograd can follow it."
    ) from error

  def _follow_gradients(self, boundary: Boundary) -> list[Callable]:
    """Follow the `.grad` of the leaves that a trace reads.

    Returns callbacks, like `_needs`, if the cache key lacks gradients that are there.
    """
    read = read_leaves(boundary, trained_leaves(boundary))
    new = [leaf for leaf in read if id(leaf) not in self.captures.graded]
    follow = functools.partial(self.captures.add_graded, new)
    if any(boundary.gradients[id(leaf)].before is not None for leaf in new):
      return [follow]
    if new:
      follow()
    return []

  def _follow_gradients_of_arguments(self, boundary: Boundary, inner: list) -> list:
    """Return a callback, like `_needs`, if the trace reads more of the gradients."""
    gradients = boundary.argument_gradients.values()
    leaves = {id(each.leaf) for each in gradients if each.is_dropped is False}
    indices = [n for n, value in enumerate(inner) if id(value) in leaves]
    read = {(len(inner), index) for index in indices}
    is_known = read <= self._read_gradients
    return [] if is_known else [functools.partial(self._read_gradients.update, read)]

  def _needs(
    self, boundary: Boundary, lifted: list[Tensor], missing: list[Tensor]
  ) -> list[Callable]:
    """Return callbacks that add the operands found missing in a trace.

    One of them drops wrong guesses of captured tensors.
    """
    captures = self.captures
    needs: list[Callable] = []
    wrong = captures.wrong_guesses(boundary, lifted)
    if wrong:
      needs.append(functools.partial(captures.drop, wrong))
    numbers = [n for n in boundary.numbers or () if n not in self.numbers.expressions]
    if numbers:
      needs.append(functools.partial(self.numbers.add, numbers))
    missing = missing + captures.missing(boundary, [*lifted, *missing])
    if missing:
      roots = list((boundary.roots or {}).values())
      needs.append(functools.partial(captures.add, missing, roots))
    return needs
