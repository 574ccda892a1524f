"""A torch function as a pure JAX function, with everything it touches as operands.

`Traced` is what `jax_jit`, `jax_value_and_grad` and `gradient_checkpoint` transform:

  traced(rng, operands, *args, **kwargs) -> ((out, effects), advance)

`rng` carries the random streams (`rng/keyed_function.py`). `operands` are the arrays of
the tensors that the function closes over (`captures.py`), what the trace is for
(`specialization.py`), and numbers of the host. `effects` are the changes in place: to
arguments, to captured tensors and to the `.grad` of captured leaves (`effects.py`).
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import torch
from torch.autograd.graph import saved_tensors_hooks

from torchax import amp
from torchax.compat import torch_compat
from torchax.core.boundary import Boundary
from torchax.core.storage import active
from torchax.dispatch import host_operations
from torchax.environment import default_env
from torchax.errors import MutationError
from torchax.rng import KeyedFunction, NewOperands, is_typed_key
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  environments,
  host_randomness,
  optimizer_state,
  optimizers,
  program_keys,
  static_arguments,
)
from torchax.tracing.captures import (
  Captures,
  Numbers,
  module_of,
  reachable_modules,
)
from torchax.tracing.conversions import arrays_of
from torchax.tracing.effects import (
  Effects,
  Lifted,
  WriteArgument,
  collect,
  drop_traced_grads,
  trained_leaves,
)
from torchax.tracing.guards import Guards
from torchax.tracing.history import History
from torchax.tracing.modules import Attributes
from torchax.tracing.names import location_of, name_of
from torchax.tracing.specialization import (
  ORDINARY,
  ORDINARY_ATTRIBUTES,
  CaptureKey,
  Specialization,
  is_trained,
  repeated,
)
from torchax.view import View

_TENSORS = frozenset({Tensor, View})
# What torch says of an argument, which is a leaf in the trace.
_OF_LEAF = "leaf Variable that requires grad"


def _unhooked():
  """Keeps what is traced from hooks of the caller: a checkpoint around the call."""
  if torch_compat.has_saved_tensors_hooks():
    return saved_tensors_hooks(_itself, _itself)
  return contextlib.nullcontext()


def _itself(tensor):
  return tensor


def _is_tensor(value) -> bool:
  return isinstance(value, torch.Tensor)


_requires_grad = operator.attrgetter("requires_grad")


class Options(NamedTuple):
  """Operands and results of a traced function.

  Attributes:
    lifts: closed-over tensors are operands (for functions that are cached, as under
      `jax.jit`); else JAX closes over their values.
    records: torch's autograd can go back through a call, by a `Tape`.
    hands_out: tensors that are assigned to plain attributes of modules are results.
    takes_numbers: numbers of the host are operands.
  """

  lifts: bool = False
  records: bool = False
  hands_out: bool = False
  takes_numbers: bool = False


class Traced:
  """A torch function whose operands include all that it reads and draws.

  Args:
    function: the torch function.
    options: what it takes and gives.
    captured: tensors known to be closed over; others are found while tracing.

  Attributes:
    captures: the tensors that it closes over.
    numbers: numbers of the host that are operands.
    guards: what it decides by.
    history: what its traces were made for.
    pure: the function with its random streams; keeps them, and repeats traces.
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
    self.pure = KeyedFunction(self._run)
    self.pure.__name__ = self.__name__
    # Attributes of the last call's specialization, and the object.
    self._last: tuple = (None, None)

  # On the host -----------------------------------------------------------------------

  def operands(self, leaves: list, extra=None) -> tuple:
    """Return the operands of a call: captured arrays, the specialization, numbers.

    Args:
      leaves: of the arguments.
      extra: static, and part of what the function is compiled for.
    """
    captured, key = self.captures.operands(self.guards)
    specialization = self.specialization(leaves, extra, key)
    if self.numbers.expressions:
      return (captured, specialization, *self.numbers.operands())
    return captured, specialization

  def specialization(
    self, leaves: list, extra=None, captures: CaptureKey | None = None
  ) -> Specialization | None:
    """Return the static part of a call with these argument leaves; None if ordinary."""
    has_grad = self.captures.has_gradients() if self.captures.touches_grad else ()
    no_grad = not torch.is_grad_enabled()
    wants_grad = None if no_grad else self._wants_grad(leaves)
    same, overlapping = repeated(leaves) if len(leaves) > 1 else ((), ())
    if same and not self.options.lifts:
      # Each argument has a gradient of its own, so they stay apart; then none of them
      # may be changed in place.
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
      environments.of_call(leaves),
    )
    if attributes == ORDINARY_ATTRIBUTES:
      return None
    if attributes != self._last[0]:
      self._last = (attributes, Specialization(*attributes).interned())
    return self._last[1]

  def _wants_grad(self, leaves) -> tuple[bool, ...] | None:
    """Return for each operand whether torch records its gradient; None if for none."""
    if not self.options.records:
      return None
    with torch_compat.without_function_modes():
      flags = [type(x) in _TENSORS and x.requires_grad for x in leaves]
      flags += map(_requires_grad, self.captures.tensors)
      for views in self.captures.view_leaves.values():
        flags += map(_requires_grad, views)
    return tuple(flags) if True in flags else None

  # In the trace ----------------------------------------------------------------------

  def trace(self, rng, operands: tuple, *args, **kwargs) -> tuple:
    """Run the function in the JAX trace in progress.

    Args:
      rng: operands for its random streams.
      operands: those of `operands`.
      *args, **kwargs: arrays and static values.

    Returns:
      `(out, effects)`; how far its streams move; and what it has met that has no
      operand yet, as functions that make one. If there are any, the trace is no good.
    """
    needs: list[Callable] = []
    result, advance, met = self.pure.attempt(rng, needs, operands, *args, **kwargs)
    return result, advance, [*needs, *met]

  def __call__(self, rng, operands: tuple, *args, **kwargs):
    """Return `((out, effects), advance)` of a trace that is complete.

    Raises:
      NewOperands: it is not.
    """
    result, advance, needs = self.trace(rng, operands, *args, **kwargs)
    if needs:
      raise NewOperands(needs)
    return result, advance

  def _run(self, needs: list[Callable], operands: tuple, *args, **kwargs):
    captured, specialization, *numbers = operands
    specialization = specialization or ORDINARY
    options, captures = self.options, self.captures
    records = specialization.wants_grad is not None
    boundary = Boundary(
      options.records and torch.is_grad_enabled(), self.__name__, guards=self.guards
    )
    key = specialization.captures
    tensors = [] if key is None else key.tensors[: len(captured)]
    grads = {id(t): t.grad for t in tensors if is_trained(t)}
    lifted = Lifted(tensors, grads, tuple(captures.gradients))
    boundary.attributes = attributes = Attributes()
    for module in reachable_modules(self.function):
      self.guards.guard_on_module(module)
    owner = module_of(self.function)
    if owner is not None:
      attributes.record(owner)
    watching = self.guards.watching(attributes.record)
    if options.takes_numbers:
      boundary.numbers = dict(zip(self.numbers.expressions, numbers))
    steps = optimizers.tracing_steps
    with host_operations.watching(), boundary.enter(), _unhooked(), watching, steps:
      for tensor, array in zip(tensors, captured):
        boundary.lift(tensor._storage, array, tensor)
      inputs, treedef = jax.tree.flatten((args, kwargs))
      inner = self._wrap(inputs, specialization)
      born = [value._storage if isinstance(value, Tensor) else None for value in inner]
      args, kwargs = static_arguments.unbox(jax.tree.unflatten(treedef, inner))
      try:
        with on_host(self.__name__, self.location):
          out = self.function(*args, **kwargs)
        out = static_arguments.box_results(out, self.__name__)
        arrays = arrays_of(out)
        assigned = [
          *attributes.take_out(boundary, self.__name__, options.hands_out),
          *optimizer_state.take_out(boundary, attributes.states, options.hands_out),
        ]
        self._note_gradients(boundary, lifted)
        changes = collect(self.__name__, boundary, inner, born, specialization, lifted)
        effects = Effects.of(changes, assigned)
        effects.environments = environments.of_results(out)
        if records:
          outputs = jax.tree.leaves(out, is_leaf=_is_tensor)
          outputs += [value for _, value in assigned]
          effects.tape = self._tape(effects, outputs, inner, specialization, boundary)
        self._require_plain(boundary)
      except BaseException as error:
        attributes.undo_traced(boundary)
        optimizer_state.undo(attributes.states, has_failed=True)
        # A parameter that is a leaf outside as well keeps torch's own words.
        is_given = any((specialization.wants_grad or ())[: len(inputs)])
        if is_given and _OF_LEAF in str(error):
          self._refuse_followed(error)
        raise
      finally:
        drop_traced_grads(boundary, lifted)
    if options.lifts:
      needs += self._needs(boundary, tensors)
      self.guards.follow_attributes(
        [*captures.storages, *(shadow.storage for shadow in boundary.written())]
      )
    return arrays, effects.or_none()

  def note_trace(self, operands, args: tuple, kwargs: dict) -> None:
    """Keeps what a finished trace was made for, to tell why there is another one."""
    _, specialization, *_ = operands
    key, _ = program_keys.key_of_call(self, specialization or ORDINARY, args, kwargs)
    self.history.record(key)

  def _wrap(self, inputs: list, specialization: Specialization) -> list:
    same, wants_grad = dict(specialization.same), specialization.wants_grad
    envs = specialization.environments[1:] or itertools.repeat(default_env())
    inner: list = []
    for index, (value, env) in enumerate(zip(inputs, envs)):
      if index in same:
        inner.append(inner[same[index]])
      elif isinstance(value, jax.Array) and not is_typed_key(value):
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
    self._require_followed(effects, inner)
    tape = autograd_bridge.record(outputs, wanted, list(boundary.roots.values()))
    if tape is not None:
      tape.program.assigned = effects.targets
    return tape

  def _require_plain(self, boundary: Boundary) -> None:
    """Raises MutationError where an outer tensor has become part of a traced graph."""
    written = [t for shadow in boundary.written() for t in shadow.writers]
    joined = [t for t in written if t.grad_fn is not None]
    for tensor in joined:
      if not tensor._is_view():
        tensor.detach_()
    if joined:
      raise MutationError(
        f"{self.__name__} changes a tensor of shape {list(joined[0].shape)}, which it "
        "closes over, in place in a way that needs a gradient. Write to it under "
        "`torch.no_grad()`, or return the new value instead."
      )

  def _require_followed(self, effects: Effects, inner) -> None:
    """Raises MutationError where a change in place would lose a gradient."""
    changed = [inner[change.index] for change, _ in effects.of_kind(WriteArgument)]
    if any(tensor.grad_fn is not None for tensor in changed):
      self._refuse_followed()

  def _refuse_followed(self, error: BaseException | None = None) -> None:
    raise MutationError(
      f"{self.__name__} changes an argument in place in a way that needs a gradient. "
      "Return the new value instead, so that autograd can follow it."
    ) from error

  def _note_gradients(self, boundary: Boundary, lifted: Lifted) -> None:
    leaves = trained_leaves(boundary)
    if any(t.grad is not None or lifted.grads.get(id(t)) is not None for t in leaves):
      self.captures.touches_grad = True

  def _needs(self, boundary: Boundary, lifted: list[Tensor]) -> list[Callable]:
    """Return what makes operands of all that the function has read without one."""
    captures = self.captures
    needs: list[Callable] = []
    wrong = captures.wrong_guesses(boundary, lifted)
    if wrong:
      needs.append(functools.partial(captures.drop, wrong))
    numbers = [n for n in boundary.numbers or () if n not in self.numbers.expressions]
    if numbers:
      needs.append(functools.partial(self.numbers.add, numbers))
    missing = captures.missing(boundary, lifted)
    if missing:
      roots = list((boundary.roots or {}).values())
      needs.append(functools.partial(captures.add, missing, roots))
    return needs


@contextlib.contextmanager
def on_host(name: str, location: tuple[str, int] | None) -> Iterator[None]:
  """Refuses draws of Python's and numpy's generators, and follows arrays of numpy.

  Args:
    name, location: of the function, for messages.
  """
  if active.boundary.parent is not None:
    yield
    return
  refused = host_randomness.refused(name, location)
  with host_operations.following_arrays, refused:
    yield
