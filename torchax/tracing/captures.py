"""Captures: outer tensors and numbers that a traced function reads, as operands.

`trace.py` finds them while it traces the function. A trace that meets a new one is
discarded, and the function is retraced with an operand for it.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import torch

from torchax.core.boundary import Boundary, Shadow
from torchax.core.chains import WHOLE
from torchax.core.host_numbers import Expression
from torchax.core.storage import Rebindings, Storage, active
from torchax.dispatch.operands import number_array
from torchax.environment import default_env
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.gradients import gradient_of
from torchax.tracing.guards import Guards
from torchax.tracing.modules import is_alive
from torchax.tracing.specialization import CapturedTensors, CaptureKey

_array_of_storage = operator.attrgetter("array")

# States of `Captures._guess_state`.
_NONE, _DUE, _MADE = range(3)


class Captures:
  """Tensors that a function closes over.

  Args:
    tensors: tensors known to be captured.
    guess_from: function that refers to modules. Their tensors are captured before the
      first trace, which drops those it does not read. None for no guess.

  Attributes:
    tensors: captured tensors. Other threads may be using the list, so it is replaced
      and never changed in place.
    key: key of the tensors, a part of the cache key of programs.
    view_leaves: leaves that are views, such as `nn.Parameter(x[0])`, by the identity of
      their storage. The base is captured; only its views receive gradients.
    gradients: index of the captured `.grad` of each captured leaf that has one.
    graded: leaves whose `.grad` before a call matters to a trace (`gradients.py`), by
      identity.
    storages: storages of the tensors.
  """

  def __init__(
    self, tensors: Sequence[Tensor] = (), guess_from: Callable | None = None
  ):
    self.tensors = CapturedTensors(tensors)
    self.key = CaptureKey(0, self.tensors)
    self.view_leaves: dict[int, list[Tensor]] = {}
    self.gradients: dict[Tensor, int] = {}
    self.graded: dict[int, Tensor] = {}
    self._guess_from = guess_from
    # `_DUE`: guess before the next call. `_MADE`: the next trace checks the guess.
    self._guess_state = _DUE if guess_from is not None and not tensors else _NONE
    self.storages: list[Storage] = []
    # View chains and shared storages of the tensors; programs are compiled for them.
    self._layout: tuple = ()
    self._is_in_trace = False
    self._rebindings = -1
    self._members_edition = 0
    self._refresh()

  # Before a call ----------------------------------------------------------------------

  def operands(self, guards: Guards) -> tuple[tuple[jax.Array, ...], CaptureKey | None]:
    """Return the captured arrays for a call, and the key of their tensors."""
    if not guards.is_empty:
      edition = guards.members_edition()
      has_other_state = guards.update_states() if guards.optimizers else False
      if has_other_state or edition != self._members_edition:
        self._reset(edition)
    if self._guess_state == _DUE:
      self._guess()
    if self._rebindings != Rebindings.count:
      self._follow_rebindings()
    if self.gradients:
      self._follow_gradients()
    if self._is_in_trace:
      self._drop_dead()
    key, tensors, storages = self.key, self.tensors, self.storages
    if not tensors:
      return (), key if key.edition else None
    if active.boundary is None and len(storages) == len(tensors):
      return tuple(map(_array_of_storage, storages)), key
    return tuple([tensor._storage.read(tensor) for tensor in tensors]), key

  def has_gradients(self) -> tuple[int, ...]:
    """Return the indices of the leaves in `graded` that have a `.grad`."""
    return tuple([n for n, t in enumerate(self.graded.values()) if t.grad is not None])

  def _reset(self, edition: int) -> None:
    """Drop all captures after a tensor of a module or an optimizer was replaced."""
    self._members_edition = edition
    self.view_leaves, self.graded = {}, {}
    self._guess_state = _NONE if self._guess_from is None else _DUE
    self._replace([], is_other_edition=True)

  def _guess(self) -> None:
    """Capture the tensors of the modules that the function refers to."""
    self._guess_state = _NONE
    if self.tensors or active.boundary is not None:
      return  # inside another trace the outer function would capture the guess too
    found: dict[int, Tensor] = {}
    for module in reachable(self._guess_from):
      for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        tables: tuple[dict, ...] = (part._parameters, part._buffers, vars(part))
        for value in itertools.chain.from_iterable(map(dict.values, tables)):
          if isinstance(value, Tensor) and (value.is_leaf or not value.requires_grad):
            found.setdefault(id(value._storage), value)
    self._replace(list(found.values()))
    self._guess_state = _MADE if found else _NONE

  def _follow_rebindings(self) -> None:
    """Refresh tensors that may have new memory, or may be on another device."""
    tensors = [tensor for tensor in self.tensors if isinstance(tensor, Tensor)]
    before = self._layout
    if len(tensors) == len(self.tensors):
      self._refresh()
    if len(tensors) != len(self.tensors) or self._layout != before:
      self._replace(tensors, is_other_edition=True)

  def _follow_gradients(self) -> None:
    """Replace each captured `.grad` by the leaf's current one; drop it if None."""
    captured: list = list(self.tensors)
    for leaf, index in self.gradients.items():
      captured[index] = gradient_of(leaf)
    if any(map(operator.is_not, captured, self.tensors)):
      self.tensors = CapturedTensors([t for t in captured if t is not None])
      self.key.refer_to(self.tensors)
      if len(self.tensors) < len(captured):
        self._refresh()
      else:
        self._refresh_storages()

  def _drop_dead(self) -> None:
    """Drop tensors born in an outer trace that has ended."""
    alive = list(filter(is_alive, self.tensors))
    if len(alive) < len(self.tensors):
      self.graded = {key: t for key, t in self.graded.items() if is_alive(t)}
      self._replace(alive)

  def _replace(self, tensors: list[Tensor], is_other_edition: bool = False) -> None:
    """Set the captured tensors, with a new key for their programs."""
    self.tensors = CapturedTensors(tensors)
    self.key = CaptureKey(self.key.edition + is_other_edition, self.tensors)
    self._refresh()

  def _refresh(self) -> None:
    tensors = self.tensors
    self._rebindings = Rebindings.count
    self._refresh_storages()
    first = {id(storage): n for n, storage in enumerate(self.storages)}
    shared = [first[id(storage)] for storage in self.storages]
    self._layout = ([tensor._chain for tensor in tensors], shared)
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    self.gradients = {
      leaf: indices[id(gradient)]
      for leaf in self.graded.values()
      if id(leaf) in indices and id(gradient := gradient_of(leaf)) in indices
    }

  def _refresh_storages(self) -> None:
    self.storages = [tensor._storage for tensor in self.tensors]
    self._is_in_trace = any([s.birth is not None for s in self.storages])

  # After a trace ----------------------------------------------------------------------

  def wrong_guesses(self, boundary: Boundary, lifted: Sequence[Tensor]) -> list[Tensor]:
    """Return the guessed captures that the first trace has not touched.

    A module and its methods keep all tensors of the module.
    """
    state, self._guess_state = self._guess_state, _NONE
    if state != _MADE or module_of(self._guess_from) is not None:
      return []
    return [t for t in lifted if not boundary.shadows[id(t._storage)].is_touched]

  def add_graded(self, leaves: Sequence[Tensor]) -> None:
    """Follow the `.grad` of leaves."""
    self.graded = {**self.graded, **{id(leaf): leaf for leaf in leaves}}
    self._refresh()

  def drop(self, tensors: Sequence[Tensor]) -> None:
    dropped = set(map(id, tensors))
    self._replace([t for t in self.tensors if id(t) not in dropped])

  def missing(self, boundary: Boundary, lifted: Sequence[Tensor]) -> list[Tensor]:
    """Return one tensor per storage that a trace has met without an operand."""
    known = {id(t._storage) for t in lifted}
    if boundary.shadows.keys() <= known:
      return []
    roots = {id(t._storage): t for t in (boundary.roots or {}).values()}
    shadows = [shadow for key, shadow in boundary.shadows.items() if key not in known]
    env = default_env()
    return [_tensor_of(s, env, roots.get(id(s.storage))) for s in shadows]

  def add(self, tensors: Sequence[Tensor], roots: Sequence[Tensor] = ()) -> None:
    """Capture tensors that a trace has met; `roots` require a gradient."""
    for leaf in roots:
      if leaf.is_leaf and leaf._chain is not WHOLE:
        self.view_leaves.setdefault(id(leaf._storage), []).append(leaf)
    known = set(map(id, self.storages))
    new = [tensor for tensor in tensors if id(tensor._storage) not in known]
    self._replace(self.tensors + new)


def _tensor_of(shadow: Shadow, env, root: Tensor | None) -> Tensor:
  """Return the tensor that read the storage; a new one if it was only written."""
  found = shadow.tensor if shadow.tensor is not None else root
  if found is not None and found._chain is WHOLE:
    return found
  tensor = new_tensor(shadow.storage.array, env)
  tensor._storage = shadow.storage
  return tensor


def module_of(function) -> torch.nn.Module | None:
  """Return `function` if it is a module, or the module it is a method of, or None."""
  owner = getattr(function, "__self__", function)
  return owner if isinstance(owner, torch.nn.Module) else None


def reachable(function) -> list:
  """Return the objects that a function refers to.

  They are its owner, and those in its globals, defaults, closure and partial arguments.
  """
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
  return found


class Numbers:
  """Python numbers that are operands of a call.

  Attributes:
    expressions: expression that computes each number, in the order of the operands.
  """

  def __init__(self):
    self.expressions: tuple[Expression, ...] = ()

  def add(self, expressions: Sequence[Expression]) -> None:
    """Make operands of numbers that a trace has met."""
    new = [number for number in expressions if number not in self.expressions]
    self.expressions = (*self.expressions, *new)

  def operands(self) -> tuple:
    if active.boundary is not None:
      return tuple(map(active.boundary.number, self.expressions))
    return tuple([number_array(number.now()) for number in self.expressions])
