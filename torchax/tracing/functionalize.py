"""A torch function as a pure JAX function, with everything it touches as operands.

`Traced` is what `jax_jit`, `jax_value_and_grad` and `gradient_checkpoint` transform:

  pure(rng, captured, *args, **kwargs) -> ((out, effects), advance)

`rng` carries the random stream (`rng/keyed_function.py`), `captured` the tensors that
the function closes over, `effects` the changes it made in place: to arguments, to
captured tensors and to the `.grad` of captured leaves. `settle` applies them.
"""

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax
import torch
from torch.autograd.graph import saved_tensors_hooks

from torchax import amp
from torchax.compat import jax_compat, torch_compat
from torchax.core.boundary import Boundary, Shadow
from torchax.core.chains import WHOLE
from torchax.core.host_numbers import Expression
from torchax.core.storage import Rebindings, Storage, active
from torchax.dispatch import host_operations
from torchax.environment import default_env
from torchax.errors import MutationError
from torchax.rng import KeyedFunction, is_typed_key
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  environments,
  forms,
  host_randomness,
  optimizer_state,
  optimizers,
  static_arguments,
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
from torchax.tracing.module_attributes import Attributes
from torchax.tracing.names import name_of, place_of
from torchax.tracing.specialization import (
  ORDINARY,
  ORDINARY_ATTRIBUTES,
  Specialization,
  is_trained,
  repeated,
)
from torchax.view import View

_TENSORS = frozenset({Tensor, View})
# What torch says of an argument, which is a leaf in the trace.
_OF_LEAF = "leaf Variable that requires grad"


class _Taken(threading.local):
  """The captured tensors whose arrays this thread took as operands last."""

  tensors: ClassVar[list] = []


def _unhooked():
  """Keeps what is traced from hooks of the caller: a checkpoint around the call."""
  if torch_compat.has_saved_tensors_hooks():
    return saved_tensors_hooks(_itself, _itself)
  return contextlib.nullcontext()


def _itself(tensor):
  return tensor


def _is_tensor(value) -> bool:
  return isinstance(value, torch.Tensor)


_array_of_storage = operator.attrgetter("array")
_requires_grad = operator.attrgetter("requires_grad")


class Traced:
  """A torch function whose operands include all that it reads and draws.

  Args:
    function: the torch function.
    lifts: make closed-over tensors operands (for functions that are cached, as under
      `jax.jit`); else JAX closes over their values.
    captured: tensors known to be closed over; others are found while tracing. Those
      of modules that it names are taken for captured in the first trace.
    records: let torch's autograd go back through a call, by a `Tape`.
    hands_out: tensors that are assigned to plain attributes of modules are results.
  """

  def __init__(
    self,
    function: Callable,
    lifts: bool,
    captured=(),
    records: bool = False,
    hands_out: bool = False,
  ):
    self.function = function
    self.lifts = lifts
    self.records = records
    self.hands_out = hands_out
    self.guards = Guards(name_of(function))
    self.history = History(name_of(function))
    # Numbers of the host that are operands of a call.
    self.numbers: tuple[Expression, ...] = ()
    self.takes_numbers = False
    self._last_numbers: tuple = ((), ())
    # Attributes of the last call's specialization, and the object.
    self._last: tuple = (None, None)
    self.place = place_of(function)
    owner = getattr(function, "__self__", function)
    is_of_module = isinstance(owner, torch.nn.Module)
    self._owner = owner if is_of_module else None
    # Never changed in place: other threads may be using it.
    self.captured: list[Tensor] = list(captured)
    self._taken = _Taken()
    # Captured leaf -> place of its captured gradient.
    self._gradients: dict[Tensor, int] = {}
    # Leaves that are views, such as `nn.Parameter(x[0])`, by the identity of what they
    # are views of, which is captured and has no gradient itself.
    self.view_leaves: dict[int, list[Tensor]] = {}
    self._has_traced = False
    self._storages: list[Storage] = []
    self._rebindings = -1
    # How the captured tensors lie in their storages, and how often that has changed.
    self._layout: tuple = ()
    self._edition = 0
    self._members_edition = 0
    # The captured tensors are a guess, which the first trace confirms.
    self._has_guessed = False
    self._may_guess = lifts and not captured
    # Whether a trace has met a gradient of a captured leaf, which may come and go.
    self._touches_grad = False
    self.pure = KeyedFunction(self._pure)
    self.pure.__name__ = name_of(function)
    self.__name__ = self.pure.__name__
    self._note_captured()

  # On the host -----------------------------------------------------------------------

  def captured_arrays(self) -> tuple[jax.Array, ...]:
    """The operands for the closed-over tensors."""
    guards = self.guards
    if not guards.is_empty:
      is_other = guards.members_edition() != self._members_edition
      if is_other or guards.optimizers and guards.has_other_state():
        self._start_anew()
    if self._may_guess:
      self._guess()
    if self._rebindings != Rebindings.count:
      self._follow_rebindings()
    self._taken.tensors = self.captured
    if not self.captured:
      return ()
    if self._gradients:
      self._follow_gradients()
    if self._has_traced:
      self._drop_dead()
    self._taken.tensors = captured = self.captured
    if active.boundary is None:
      storages = self._storages
      if len(storages) == len(captured):
        return tuple(map(_array_of_storage, storages))
    return tuple([tensor._storage.read(tensor) for tensor in captured])

  def _start_anew(self) -> None:
    """Another tensor has taken a place in the module: what is captured is found again.

    The edition keeps away what was compiled for the tensors that were captured before.
    """
    self._members_edition = self.guards.members_edition()
    self.captured, self.view_leaves = [], {}
    self._edition += 1
    self._may_guess = self.lifts
    self._note_captured()

  def _guess(self) -> None:
    """Takes the tensors of the modules that the function names for captured ones."""
    self._may_guess = False
    if self.captured or active.boundary is not None:
      return  # in another function's trace all that it reads is captured there too
    found: dict[int, Tensor] = {}
    for module in reachable_modules(self.function):
      for part in module.modules():
        tables = (part._parameters, part._buffers, vars(part))
        for value in itertools.chain.from_iterable(map(dict.values, tables)):
          if type(value) is Tensor and (value.is_leaf or not value.requires_grad):
            found.setdefault(id(value._storage), value)
    self.captured = list(found.values())
    self._has_guessed = bool(found)
    self._note_captured()

  def _follow_rebindings(self) -> None:
    """A captured tensor may have other memory by now, or be on another device."""
    if not all(isinstance(tensor, Tensor) for tensor in self.captured):
      self.captured = [t for t in self.captured if isinstance(t, Tensor)]
      self._edition += 1
    before = self._layout
    self._note_captured()
    if self._layout != before:
      self._edition += 1

  def _follow_gradients(self) -> None:
    """A captured `.grad` may be another tensor by now, or be gone."""
    captured = list(self.captured)
    for leaf, place in self._gradients.items():
      captured[place] = leaf.grad
    if any(map(operator.is_not, captured, self.captured)):
      self.captured = [tensor for tensor in captured if tensor is not None]
      self._note_captured()

  def _drop_dead(self) -> None:
    """Tensors of an outer trace that has ended are no operands any more."""
    self.captured = [
      t
      for t in self.captured
      if t._storage.birth is None or not t._storage.birth.closed
    ]
    self._note_captured()

  def _note_captured(self) -> None:
    """Derives what a call has to look at from the captured tensors."""
    self._rebindings = Rebindings.count
    self._storages = [tensor._storage for tensor in self.captured]
    first = {id(storage): n for n, storage in enumerate(self._storages)}
    places = [first[id(storage)] for storage in self._storages]
    self._layout = ([tensor._chain for tensor in self.captured], places)
    self._has_traced = any(t._storage.birth is not None for t in self.captured)
    places = {id(tensor): place for place, tensor in enumerate(self.captured)}
    self._gradients = {
      t: places[id(t.grad)]
      for t in self.captured
      if is_trained(t) and t.grad is not None and id(t.grad) in places
    }

  def number_operands(self) -> tuple:
    """The operands for the numbers of the host."""
    if active.boundary is not None:
      return tuple(map(active.boundary.number, self.numbers))
    values = tuple([number.now() for number in self.numbers])
    before, operands = self._last_numbers
    # A number that stays is an array from its second call on, which costs less.
    if before != values or 0.0 in values:
      operands = values
    elif operands is before and jax_compat.is_top_level():
      operands = tuple(map(jax.numpy.asarray, values))
    self._last_numbers = (values, operands)
    return operands

  def specialization(self, leaves, extra=None) -> Specialization | None:
    """The static part of a call with these argument leaves; None if ordinary."""
    has_grad = ()
    if self._touches_grad:
      trained = [tensor for tensor in self.captured if is_trained(tensor)]
      has_grad = tuple([tensor.grad is not None for tensor in trained])
    no_grad = not torch.is_grad_enabled()
    wants_grad = None if no_grad else self._wants_grad(leaves)
    same, overlapping = repeated(leaves) if len(leaves) > 1 else ((), ())
    if same and not self.lifts:
      # Each argument has a gradient of its own, so they stay apart; then none of them
      # may be changed in place.
      overlapping += tuple([place for pair in same for place in pair])
      same = ()
    attributes = (same, overlapping, has_grad, extra, wants_grad, no_grad)
    attributes += (torch.get_default_dtype(), amp.dtype_in_force(), self._edition)
    attributes += (self.guards.key(), environments.of_call(leaves))
    if attributes == ORDINARY_ATTRIBUTES:
      return None
    if attributes != self._last[0]:
      self._last = (attributes, Specialization.of(*attributes))
    return self._last[1]

  def _wants_grad(self, leaves) -> tuple[bool, ...] | None:
    """Which operands torch would record a gradient for; None for none at all."""
    if not self.records:
      return None
    with torch_compat.without_function_modes():
      flags = [type(x) in _TENSORS and x.requires_grad for x in leaves]
      flags += map(_requires_grad, self.captured)
      for views in self.view_leaves.values():
        flags += map(_requires_grad, views)
    return tuple(flags) if True in flags else None

  # In the trace ----------------------------------------------------------------------

  def _pure(self, operands, *args, **kwargs):
    captured, specialization, *numbers = operands
    specialization = specialization or ORDINARY
    records = specialization.wants_grad is not None
    boundary = Boundary(
      self.records and torch.is_grad_enabled(), self.__name__, guards=self.guards
    )
    # Another thread may have found more tensors since the operands were taken.
    tensors = self._taken.tensors[: len(captured)]
    grads = {id(t): t.grad for t in tensors if is_trained(t)}
    lifted = Lifted(tensors, grads, tuple(self._gradients))
    boundary.attributes = attributes = Attributes()
    for module in reachable_modules(self.function):
      self.guards.note_module(module)
    if self._owner is not None:
      attributes.note(self._owner)
    watching = self.guards.watching(attributes.note)
    if self.takes_numbers:
      boundary.numbers = dict(zip(self.numbers, numbers))
      boundary.missing = []
    steps = optimizers.tracing_steps
    with host_operations.watching(), boundary.enter(), _unhooked(), watching, steps:
      for tensor, array in zip(tensors, captured):
        boundary.lift(tensor._storage, array, tensor)
      inputs, treedef = jax.tree.flatten((args, kwargs))
      inner = self._wrap(inputs, specialization)
      born = [value._storage if isinstance(value, Tensor) else None for value in inner]
      args, kwargs = static_arguments.shown(jax.tree.unflatten(treedef, inner))
      try:
        with on_host(self.__name__, self.place):
          out = self.function(*args, **kwargs)
        out = static_arguments.hidden_results(out, self.__name__)
        arrays = arrays_of(out)
        assigned = [
          *attributes.settle(boundary, self.__name__, self.hands_out),
          *optimizer_state.settle(boundary, self.hands_out),
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
        optimizer_state.undo(boundary, has_failed=True)
        # A parameter that is a leaf outside as well keeps torch's own words.
        is_given = records and any(specialization.wants_grad[: len(inputs)])
        if is_given and _OF_LEAF in str(error):
          self._refuse_followed(error)
        raise
      finally:
        drop_traced_grads(boundary, lifted)
    self._require_operands(boundary, tensors)
    if self.lifts:
      self.guards.follow_attributes(
        [*self._storages, *(shadow.storage for shadow in boundary.written())]
      )
    return arrays, effects.or_none()

  def note_trace(self, operands, args: tuple, kwargs: dict) -> None:
    """Keeps what a finished trace was made for, to tell why there is another one."""
    _, specialization, *_ = operands
    form, _ = forms.form_of(self, specialization or ORDINARY, args, kwargs)
    self.history.note(form)

  def _wrap(self, inputs: list, specialization: Specialization) -> list:
    same, wants_grad = dict(specialization.same), specialization.wants_grad
    envs = specialization.environments[1:] or itertools.repeat(default_env())
    inner: list = []
    for place, (value, env) in enumerate(zip(inputs, envs)):
      if place in same:
        inner.append(inner[same[place]])
      elif isinstance(value, jax.Array) and not is_typed_key(value):
        tensor = new_tensor(value, env)
        needs_grad = wants_grad is not None and wants_grad[place]
        inner.append(tensor.requires_grad_() if needs_grad else tensor)
      else:
        inner.append(value)
    return inner

  def _tape(
    self, effects: Effects, outputs, inner, specialization, boundary
  ) -> autograd_bridge.Tape | None:
    wanted = {
      place: value
      for place, value in enumerate(inner)
      if isinstance(value, Tensor) and value.is_leaf and value.requires_grad
    }
    for place, _ in specialization.same:
      wanted.pop(place, None)
    self._require_followed(effects, inner)
    tape = autograd_bridge.record(outputs, wanted, list(boundary.roots.values()))
    if tape is not None:
      tape.program.assigned = effects.targets
    return tape

  def _require_plain(self, boundary: Boundary) -> None:
    """Raises MutationError where an outer tensor has become part of a traced graph."""
    joined = [t for t in boundary.plain.values() if t.grad_fn is not None]
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
      self._touches_grad = True

  def _require_operands(self, boundary: Boundary, lifted: list[Tensor]) -> None:
    """Has the function traced again where it has read what is no operand yet."""
    if not self.lifts:
      return
    known = {id(t._storage) for t in lifted}
    is_complete = not boundary.missing
    if self._has_guessed:
      is_complete = self._keep_touched(boundary, lifted) and is_complete
    if not is_complete:
      self.numbers = (*self.numbers, *boundary.missing)
    if boundary.shadows.keys() - known:
      is_complete = False
      env = default_env()
      roots = {id(t._storage): t for t in (boundary.roots or {}).values()}
      known |= {id(t._storage) for t in self.captured}
      for leaf in (boundary.roots or {}).values():
        if leaf.is_leaf and leaf._chain is not WHOLE:
          self.view_leaves.setdefault(id(leaf._storage), []).append(leaf)
      new = [shadow for key, shadow in boundary.shadows.items() if key not in known]
      self.captured = self.captured + [
        _tensor_of(shadow, env, roots.get(id(shadow.storage))) for shadow in new
      ]
      self._note_captured()
    if not is_complete:
      self.pure.retrace()

  def _keep_touched(self, boundary: Boundary, lifted: list[Tensor]) -> bool:
    """Lets go of what was captured by a wrong guess; False where there is any.

    A module's own method keeps all tensors of the module.
    """
    self._has_guessed = False
    if self._owner is not None:
      return True
    shadows = boundary.shadows
    touched = [t for t in lifted if shadows[id(t._storage)].is_touched]
    is_right = len(touched) == len(lifted)
    if not is_right:
      self.captured = touched
      self._note_captured()
    return is_right


def _tensor_of(shadow: Shadow, env, root: Tensor | None) -> Tensor:
  """The tensor that read the storage, or one for a storage that was only written."""
  found = shadow.tensor if shadow.tensor is not None else root
  if found is not None and found._chain is WHOLE:
    return found
  tensor = new_tensor(shadow.storage.array, env)
  tensor._storage = shadow.storage
  return tensor


@contextlib.contextmanager
def on_host(name: str, place: tuple[str, int] | None) -> Iterator[None]:
  """Refuses draws of Python's and numpy's generators, and follows arrays of numpy.

  Args:
    name, place: of the function, for messages.
  """
  if active.boundary.parent is not None:
    yield
    return
  refused = host_randomness.refused(name, place)
  with host_operations.following_arrays, refused:
    yield


def reachable_modules(function) -> list[torch.nn.Module]:
  """The modules that a function names: its own, and those that it closes over."""
  found: list = []
  while isinstance(function, functools.partial):
    found += [*function.args, *function.keywords.values()]
    function = function.func
  found += [function, getattr(function, "__self__", None)]
  code = getattr(function, "__code__", None)
  if code is not None:
    names = function.__globals__
    found += [names[name] for name in code.co_names if name in names]
    found += function.__defaults__ or ()
    for cell in function.__closure__ or ():
      with contextlib.suppress(ValueError):  # a name that has no value yet
        found.append(cell.cell_contents)
  return [value for value in found if isinstance(value, torch.nn.Module)]
