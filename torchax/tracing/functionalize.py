"""A torch function as a pure JAX function, with everything it touches as operands.

`Traced` is what `jax_jit`, `jax_value_and_grad` and `gradient_checkpoint` transform:

  pure(rng, captured, *args, **kwargs) -> ((out, effects), advance)

`rng` carries the random stream (`torchax/rng/carry.py`), `captured` the tensors that
the function closes over, `effects` the changes it made in place: to arguments, to
captured tensors and to the `.grad` of captured leaves. `settle` applies them.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax
import torch
from torch.autograd.graph import saved_tensors_hooks

from torchax import _jax_compat, _torch_compat, amp
from torchax.core.host_numbers import Expression
from torchax.core.storage import Boundary, Cell, Rebindings, Storage, active
from torchax.core.view_steps import WHOLE
from torchax.dispatch import host_operations
from torchax.environment import default_env
from torchax.errors import MutationError
from torchax.ops import mappings
from torchax.rng import Carried, is_typed_key
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  host_randomness,
  optimizers,
  static_values,
)
from torchax.tracing.autograd_bridge import Tape
from torchax.tracing.conversions import arrays_of
from torchax.tracing.guards import Guards
from torchax.tracing.module_attributes import Attributes, is_born_in
from torchax.tracing.names import name_of, place_of
from torchax.view import View

_TENSORS = frozenset({Tensor, View})
# What torch says of an argument, which is a leaf in the trace.
_OF_LEAF = "leaf Variable that requires grad"


class _Lent(threading.local):
  """The captured tensors whose arrays this thread took as operands last."""

  tensors: ClassVar[list] = []


def _unhooked():
  """Keeps what is traced from hooks of the caller: a checkpoint around the call."""
  if _torch_compat.has_saved_tensors_hooks():
    return saved_tensors_hooks(_itself, _itself)
  return contextlib.nullcontext()


def _itself(tensor):
  return tensor


def _is_tensor(value) -> bool:
  return isinstance(value, torch.Tensor)


@jax.tree_util.register_static
class Situation:
  """What a trace depends on besides values. Interned, so that a call compares quickly.

  Attributes:
    same: for each argument leaf that repeats an earlier one's tensor, the two indices.
    overlapping: indices of argument leaves whose storage another view shares.
    has_grad: for each captured leaf, whether it has a gradient.
    extra: anything the wrapper adds, such as the training flags of a module.
    wants_grad: None where torch records no gradient; else for each argument leaf and
      then for each captured tensor whether it needs one.
    no_grad: called under `torch.no_grad`.
    default_dtype: torch's, which decides what integers and factories give.
    autocast: the dtype of the autocast around the call, or None.
    edition: how often the captured tensors have come to lie otherwise in memory, or
      were replaced by others.
    guards: the differences from what the function decided by at first (`Guards`).
  """

  __slots__ = (
    *("same", "overlapping", "has_grad", "extra", "wants_grad", "no_grad"),
    *("default_dtype", "autocast", "edition", "guards"),
  )
  _known: ClassVar[dict] = {}

  @classmethod
  def of(
    cls,
    same=(),
    overlapping=(),
    has_grad=(),
    extra=None,
    wants_grad=None,
    no_grad=False,
    default_dtype=torch.float32,
    autocast=None,
    edition=0,
    guards=(),
  ) -> "Situation":
    """The situation with these attributes; always the same object."""
    attributes = (same, overlapping, has_grad, extra, wants_grad, no_grad)
    attributes += (default_dtype, autocast, edition, guards)
    known = cls._known.get(attributes)
    if known is None:
      known = cls._known[attributes] = cls()
      for name, value in zip(cls.__slots__, attributes):
        setattr(known, name, value)
    return known


_ORDINARY = ((), (), (), None, None, False, torch.float32, None, 0, ())
ORDINARY = Situation.of()
"""No argument repeats another one, and nothing else matters."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Effects:
  """What a traced function changed in place; which is static, the numbers are not.

  Attributes:
    arguments: indices of argument leaves.
    storages: of outer tensors.
    holders: for each of these, the captured tensor whose storage it was in the trace,
      or None; for the storage of a captured leaf's gradient, the leaf.
    leaves: outer leaves whose `.grad` was set.
    cleared: outer leaves whose `.grad` became None.
    arrays: the new numbers of the first three, in order; then those of arguments whose
      memory has grown.
    tape: what torch's autograd needs to go back through the call, or None.
    reshapes: (index of an argument leaf, (operation, arguments), …) of changes of shape
      in place, to be done again with the caller's tensor.
    grown: indices of the argument leaves whose memory has grown.
    of_gradients: for each of `holders`, whether it is the leaf of a gradient.
  """

  arguments: tuple[int, ...]
  storages: tuple[Storage, ...]
  holders: tuple[Tensor | None, ...]
  leaves: tuple[Tensor, ...]
  cleared: tuple[Tensor, ...]
  arrays: list[jax.Array]
  tape: Tape | None = None
  reshapes: tuple = ()
  grown: tuple[int, ...] = ()
  of_gradients: tuple[bool, ...] = ()

  def tree_flatten(self):
    objects = (*self.storages, *self.holders, *self.leaves, *self.cleared)
    static = tuple(map(_Identity, objects))
    counts = (len(self.storages), len(self.leaves))
    shapes = (self.reshapes, self.grown, self.of_gradients)
    return (self.arrays, self.tape), (self.arguments, static, counts, shapes)

  @classmethod
  def tree_unflatten(cls, static, children):
    arguments, identities, (n_storages, n_leaves), shapes = static
    objects = tuple([identity.value for identity in identities])
    start = 2 * n_storages
    middle = start + n_leaves
    return cls(
      arguments,
      objects[:n_storages],
      objects[n_storages:start],
      objects[start:middle],
      objects[middle:],
      *children,
      *shapes,
    )


class _Identity:
  """Hashes and compares an object by what it is, not by what it holds."""

  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __hash__(self):
    return id(self.value)

  def __eq__(self, other):
    return type(other) is _Identity and self.value is other.value


_array_of_storage = operator.attrgetter("array")


class Traced:
  """A torch function whose operands include all that it reads and draws.

  Args:
    function: the torch function.
    lifts: make closed-over tensors operands (for functions that are cached, as under
      `jax.jit`); else JAX closes over their values.
    captured: tensors known to be closed over; others are found while tracing. Those
      of modules that it names are taken for captured in the first trace.
    records: let torch's autograd go back through a call, by a `Tape`.
  """

  def __init__(
    self, function: Callable, lifts: bool, captured=(), records: bool = False
  ):
    self.function = function
    self.lifts = lifts
    self.records = records
    self.guards = Guards(name_of(function))
    # Numbers of the host that are operands of a call.
    self.numbers: tuple[Expression, ...] = ()
    self.takes_numbers = False
    self._last_numbers: tuple = ((), ())
    self.place = place_of(function)
    owner = getattr(function, "__self__", function)
    is_of_module = isinstance(owner, torch.nn.Module)
    self._owner = owner if is_of_module else None
    # Never changed in place: other threads may be using it.
    self.captured: list[Tensor] = list(captured)
    self._lent = _Lent()
    # Captured leaf -> place of its captured gradient.
    self._gradients: dict[Tensor, int] = {}
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
    self.pure = Carried(self._pure)
    self.pure.__name__ = name_of(function)
    self.__name__ = self.pure.__name__
    self._note_captured()

  # On the host -----------------------------------------------------------------------

  def captured_arrays(self) -> tuple[jax.Array, ...]:
    """The operands for the closed-over tensors."""
    guards = self.guards
    is_other = guards.members_edition() != self._members_edition
    if is_other or guards.optimizers and guards.has_other_state():
      self._start_anew()
    if self._may_guess:
      self._guess()
    if self._rebindings != Rebindings.count:
      self._follow_rebindings()
    self._lent.tensors = self.captured
    if not self.captured:
      return ()
    if self._gradients:
      self._follow_gradients()
    if self._has_traced:
      self._drop_dead()
    self._lent.tensors = captured = self.captured
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
    self.captured = []
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
        held = (part._parameters, part._buffers, vars(part))
        for value in itertools.chain.from_iterable(map(dict.values, held)):
          if type(value) is Tensor:
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
      if _is_trained(t) and t.grad is not None and id(t.grad) in places
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
    elif operands is before and _jax_compat.is_top_level():
      operands = tuple(map(jax.numpy.asarray, values))
    self._last_numbers = (values, operands)
    return operands

  def situation(self, leaves, extra=None) -> Situation | None:
    """The static part of a call with these argument leaves; None if ordinary."""
    has_grad = ()
    if self._touches_grad:
      trained = [tensor for tensor in self.captured if _is_trained(tensor)]
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
    attributes += (self.guards.key(),)
    return None if attributes == _ORDINARY else Situation.of(*attributes)

  def _wants_grad(self, leaves) -> tuple[bool, ...] | None:
    """Which operands torch would record a gradient for; None for none at all."""
    if not self.records:
      return None
    with _torch_compat.without_function_modes():
      flags = [type(x) in _TENSORS and x.requires_grad for x in leaves]
      flags += [tensor.requires_grad for tensor in self.captured]
    return tuple(flags) if True in flags else None

  def settle(self, leaves: list, effects: Effects | None) -> None:
    """Applies what the function changed in place to the caller's tensors."""
    if effects is None:
      return
    arrays = iter(effects.arrays)
    on_host = []
    for place in effects.arguments:
      leaf, array = leaves[place], next(arrays)
      if isinstance(leaf, Tensor):
        leaf.replace_jax(array)
      elif isinstance(leaf, torch.Tensor):
        on_host.append((leaf, array))
      # else an array, whose holder cannot see the change
    if on_host:
      _write_to_host(on_host)
    for storage, holder, is_gradient in zip(
      effects.storages, effects.holders, effects.of_gradients
    ):
      found = holder.grad if is_gradient else holder
      (storage if found is None else found._storage).write(next(arrays))
    for tensor in effects.leaves:
      tensor.grad = new_tensor(next(arrays), tensor._env)
    for tensor in effects.cleared:
      tensor.grad = None
    for place, *steps in effects.reshapes:
      if isinstance(leaves[place], Tensor):
        with torch.no_grad():
          for op, args in steps:
            op(leaves[place], *args)
    for place in effects.grown:
      if isinstance(leaves[place], Tensor):
        leaves[place].replace_jax(next(arrays))

  # In the trace ----------------------------------------------------------------------

  def _pure(self, operands, *args, **kwargs):
    captured, situation, *numbers = operands
    situation = situation or ORDINARY
    env = default_env()
    records = situation.wants_grad is not None
    boundary = Boundary(
      self.records and torch.is_grad_enabled(), self.__name__, guards=self.guards
    )
    # Another thread may have found more tensors since the operands were taken.
    lent = self._lent.tensors[: len(captured)]
    grads = {id(t): t.grad for t in lent if _is_trained(t)}
    attributes = Attributes()
    for module in reachable_modules(self.function):
      self.guards.note_module(module)
    if self._owner is not None:
      attributes.note(self._owner)
    watching = self.guards.watching(attributes.note)
    if self.takes_numbers:
      boundary.numbers = dict(zip(self.numbers, numbers))
      boundary.missing = []
    with env.renewed(), boundary.enter(), _unhooked(), watching:
      for tensor, array in zip(lent, captured):
        boundary.lend(tensor._storage, array, tensor)
      inputs, treedef = jax.tree.flatten((args, kwargs))
      inner = self._wrap(inputs, situation)
      born = [value._storage if isinstance(value, Tensor) else None for value in inner]
      args, kwargs = static_values.shown(jax.tree.unflatten(treedef, inner))
      try:
        with on_host(self.__name__, self.place):
          out = self.function(*args, **kwargs)
        out = static_values.hidden_results(out, self.__name__)
        arrays = arrays_of(out)
        attributes.write_back(boundary, self.__name__)
        effects = self._effects(boundary, inner, born, situation, grads, lent)
        if records:
          effects = self._with_tape(effects, out, inner, situation, boundary)
        self._require_plain(boundary)
      except BaseException as error:
        attributes.undo_traced(boundary)
        optimizers.undo_state(boundary)
        # A parameter that is a leaf outside as well keeps torch's own words.
        is_given = records and any(situation.wants_grad[: len(inputs)])
        if is_given and _OF_LEAF in str(error):
          self._refuse_followed(error)
        raise
      finally:
        self._drop_traced_grads(boundary, grads)
    self._require_operands(boundary, lent)
    return arrays, effects

  def _wrap(self, inputs: list, situation: Situation) -> list:
    same, wants_grad = dict(situation.same), situation.wants_grad
    inner: list = []
    for place, value in enumerate(inputs):
      if place in same:
        inner.append(inner[same[place]])
      elif isinstance(value, jax.Array) and not is_typed_key(value):
        tensor = new_tensor(value, default_env())
        needs_grad = wants_grad is not None and wants_grad[place]
        inner.append(tensor.requires_grad_() if needs_grad else tensor)
      else:
        inner.append(value)
    return inner

  def _with_tape(self, effects, out, inner, situation, boundary) -> Effects | None:
    wanted = {
      place: value
      for place, value in enumerate(inner)
      if isinstance(value, Tensor) and value.is_leaf and value.requires_grad
    }
    for place, _ in situation.same:
      wanted.pop(place, None)
    self._require_followed(effects, inner, boundary)
    outputs = jax.tree.leaves(out, is_leaf=_is_tensor)
    tape = autograd_bridge.record(outputs, wanted, list(boundary.roots.values()))
    if tape is None:
      return effects
    effects = effects or Effects((), (), (), (), (), [])
    return dataclasses.replace(effects, tape=tape)

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

  def _require_followed(self, effects, inner, boundary) -> None:
    """Raises MutationError where a change in place would lose a gradient."""
    changed = [inner[place] for place in effects.arguments] if effects else []
    if any(tensor.grad_fn is not None for tensor in changed):
      self._refuse_followed()

  def _refuse_followed(self, error: BaseException | None = None) -> None:
    raise MutationError(
      f"{self.__name__} changes an argument in place in a way that needs a gradient. "
      "Return the new value instead, so that autograd can follow it."
    ) from error

  def _effects(self, boundary, inner, born, situation, grads, lent) -> Effects | None:
    repeats = {place for place, _ in situation.same}
    reshapes = tuple(
      (place, *boundary.reshapes[id(value)][1])
      for place, value in enumerate(inner)
      if id(value) in boundary.reshapes and place not in repeats
    )
    reshaped = {place for place, *_ in reshapes}
    changed = tuple(
      place
      for place, (value, storage) in enumerate(zip(inner, born))
      if storage is not None
      and place not in repeats
      and (storage.version or value._storage is not storage or place in reshaped)
    )
    if set(changed) & set(situation.overlapping):
      raise MutationError(
        f"{self.__name__} changes an argument in place whose memory another argument "
        "shares as a different view. Pass the base and take the views inside."
      )
    leaves = self._leaves(boundary)
    updated = [t for t in leaves if is_born_in(t.grad, boundary)]
    cleared = [t for t in leaves if t.grad is None and grads.get(id(t)) is not None]
    if updated or cleared or any(t.grad is not None for t in leaves):
      self._touches_grad = True
    cells = boundary.written()
    if not (changed or cells or updated or cleared):
      return None
    arrays = [
      born[place].array
      if inner[place]._storage is born[place] or place in reshaped
      else self._rebound(inner[place], born[place])
      for place in changed
    ]
    arrays += [cell.array for cell in cells]
    arrays += [tensor.grad.jax() for tensor in updated]
    grown = tuple(p for p in reshaped if inner[p]._storage is not born[p])
    arrays += [inner[place].jax() for place in grown]
    storages = tuple(cell.storage for cell in cells)
    holders = {id(tensor._storage): tensor for tensor in lent}
    gradients = {
      id(grads[id(leaf)]._storage): leaf
      for leaf in self._gradients
      if isinstance(grads.get(id(leaf)), Tensor)
    }
    keys = [id(storage) for storage in storages]
    return Effects(
      changed,
      storages,
      tuple([gradients.get(key, holders.get(key)) for key in keys]),
      tuple(updated),
      tuple(cleared),
      arrays,
      reshapes=reshapes,
      grown=grown,
      of_gradients=tuple([key in gradients for key in keys]),
    )

  def _rebound(self, tensor: Tensor, storage: Storage) -> jax.Array:
    """The numbers of an argument that took another memory (`x.data = …`, `set_`)."""
    array = tensor.jax()
    if array.shape != storage.array.shape or array.dtype != storage.array.dtype:
      raise MutationError(
        f"{self.__name__} gives an argument of shape {storage.array.shape} the memory "
        f"of a tensor of shape {array.shape} (`.data = …` or `set_`), which the "
        "caller's tensor cannot follow. Return the new tensor instead."
      )
    return array

  def _leaves(self, boundary: Boundary) -> list[Tensor]:
    tensors = (cell.tensor for cell in boundary.cells.values())
    return [t for t in tensors if t is not None and _is_trained(t)]

  def _drop_traced_grads(self, boundary: Boundary, grads: dict) -> None:
    """The trace has set `.grad` of real leaves; they get back what they had."""
    for tensor in self._leaves(boundary):
      before = grads.get(id(tensor))
      was_cleared = tensor.grad is None and before is not None
      if was_cleared or is_born_in(tensor.grad, boundary):
        tensor.grad = before

  def _require_operands(self, boundary: Boundary, lent: list[Tensor]) -> None:
    """Has the function traced again where it has read what is no operand yet."""
    if not self.lifts:
      return
    known = {id(t._storage) for t in lent}
    is_complete = not boundary.missing
    if self._has_guessed:
      is_complete = self._keep_touched(boundary, lent) and is_complete
    if not is_complete:
      self.numbers = (*self.numbers, *boundary.missing)
    if boundary.cells.keys() - known:
      is_complete = False
      env = default_env()
      roots = {id(t._storage): t for t in (boundary.roots or {}).values()}
      known |= {id(t._storage) for t in self.captured}
      new = [cell for key, cell in boundary.cells.items() if key not in known]
      self.captured = self.captured + [
        _tensor_of(cell, env, roots.get(id(cell.storage))) for cell in new
      ]
      self._note_captured()
    if not is_complete:
      self.pure.miss()

  def _keep_touched(self, boundary: Boundary, lent: list[Tensor]) -> bool:
    """Lets go of what was captured by a wrong guess; False where there is any.

    A module's own method keeps all tensors of the module.
    """
    self._has_guessed = False
    if self._owner is not None:
      return True
    cells = boundary.cells
    touched = [t for t in lent if cells[id(t._storage)].is_touched]
    is_right = len(touched) == len(lent)
    if not is_right:
      self.captured = touched
      self._note_captured()
    return is_right


def _write_to_host(changes: list[tuple[torch.Tensor, jax.Array]]) -> None:
  """Changes 0-d tensors on the CPU, such as an optimizer's count of its steps."""
  with torch.no_grad():
    for tensor, array in changes:
      tensor.copy_(mappings.j2t(array))


def _tensor_of(cell: Cell, env, root: Tensor | None) -> Tensor:
  """The tensor that read the storage, or one for a storage that was only written."""
  found = cell.tensor if cell.tensor is not None else root
  if found is not None and found._chain is WHOLE:
    return found
  tensor = new_tensor(cell.storage.array, env)
  tensor._storage = cell.storage
  return tensor


def _is_trained(tensor: Tensor) -> bool:
  """True for leaves that autograd gives a `.grad`; others warn when asked for it."""
  return tensor.requires_grad and tensor.is_leaf


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
  with host_operations.following_arrays(), refused:
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


def repeated(leaves: list) -> tuple[tuple, tuple]:
  """Which argument leaves are the same tensor, and which overlap otherwise."""
  first: dict[int, int] = {}
  same, overlapping = [], []
  for place, leaf in enumerate(leaves):
    if not isinstance(leaf, Tensor):
      continue
    earlier = first.setdefault(id(leaf._storage), place)
    if earlier == place:
      continue
    first_leaf = leaves[earlier]
    # A tensor and its `detach()` are two: only one of them takes part in gradients.
    is_same = leaf is first_leaf or not (leaf.requires_grad or first_leaf.requires_grad)
    if first_leaf._chain is leaf._chain and is_same:
      same.append((place, earlier))
    else:
      overlapping += [earlier, place]
  return tuple(same), tuple(overlapping)
