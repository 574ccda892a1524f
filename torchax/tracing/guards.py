"""Guards: what a traced function decides by, except the values of its operands.

A trace adds what it reads on the host: attributes of the modules that it runs, tensors
on the CPU and numpy arrays that it closes over, numbers of optimizers by which Python
has decided. Before each call they are compared with what they were; the differences
are a part of the key that a program is compiled for. So a call after a change is
retraced, and after the change is undone the old program is used again.
"""

import contextlib
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.static_values import in_words, key_of
from torchax.core.storage import Storage
from torchax.errors import MutationError
from torchax.tensor import Tensor
from torchax.tracing.modules import Members, Values, is_same, writes

# Stop guarding on a value once the function itself has changed it in this many traces.
MOST_CHANGES = 8
# Tensors and arrays of more bytes are not compared byte by byte.
MOST_BYTES = 1 << 14
MOST_BYTES_OF_ARRAY = 1 << 20


class ModuleGuards:
  """Guards on what the modules of a function hold, and on what its traces change there.

  Args:
    name: of the function, for messages.
  """

  def __init__(self, name: str = "A function"):
    self.name = name
    # Tensors and submodules; what is captured is found again when one is replaced.
    self.members = Members()
    self._values: dict[int, tuple[int, Values]] = {}
    self._numbers = itertools.count()
    self._seen = (-1, -1)
    self._differences: tuple = ()
    self._containers: list[tuple] = []
    # (number of the module, name) -> how many traces have changed it.
    self._changes: dict[tuple[int, str], int] = {}

  def __bool__(self) -> bool:
    return bool(self._values)

  def __iter__(self) -> Iterator[tuple[str, Values]]:
    """The modules, with their paths."""
    return _named([values for _, values in self._values.values()])

  def key(self) -> tuple:
    """Return the differences from what the modules held when they were added."""
    seen = (writes.count, torch_compat.count_of_hooks())
    if seen != self._seen or not all(map(is_same, self._containers)):
      self._look()
      self._seen = seen
    return self._differences

  def _look(self) -> None:
    differences: list[tuple] = []
    self._containers = []
    ignored = {place for place, n in self._changes.items() if n >= MOST_CHANGES}
    for number, values in self._values.values():
      values.look()
      self._containers += values.containers
      differences += [
        (number, name, key)
        for name, key in values.changed()
        if (number, name) not in ignored
      ]
    self._differences = tuple(differences)

  # In a trace -------------------------------------------------------------------------

  def add(self, module: torch.nn.Module) -> bool:
    """Add the attributes of a module and of its submodules; False if they are known."""
    known = self._values.get(id(module))
    if known is not None and known[1].module is module:
      return False
    for part in module.modules():
      known = self._values.get(id(part))
      if known is None or known[1].module is not part:
        values = Values(part)
        self._values[id(part)] = (next(self._numbers), values)
        self.members.add(part)
        self._containers += values.containers
    if self._seen[0] < 0:
      self._seen = (writes.count, torch_compat.count_of_hooks())
    return True

  def end_trace(self) -> None:
    """Count what the function has changed itself, while it was traced."""
    for number, values in self._values.values():
      before = values.now
      values.look()
      if values.now is before or values.now == before:
        continue
      for name in {**before, **values.now}:
        if before.get(name) != values.now.get(name):
          self._count_change(number, values.kind, name)
    self.members.record()  # what the function itself replaces is a part of its trace
    self._seen = (-2, -2)  # looked at again before the next call

  def _count_change(self, number: int, kind: str, name: str) -> None:
    changes = self._changes.get((number, name), 0) + 1
    self._changes[number, name] = changes
    if changes == MOST_CHANGES:
      warnings.warn(
        f"{self.name} changes {kind}.{name} each time it is traced, so it would be "
        "compiled for ever. From now on the compiled function does not follow it: a "
        "number that changes with every call has to be a tensor.",
        stacklevel=2,
      )


class Guards:
  """Guards of one function.

  Args:
    name: of the function, for messages.

  Attributes:
    is_empty: there are no guards, as for a function of its arguments alone.
    modules: guards on modules.
    optimizers: those of which a step was traced.
    edition: how often something that was guarded on has gone, so that what was
      compiled is of no use.
  """

  def __init__(self, name: str = "A function"):
    self.name = name
    self.is_empty = True
    self.modules = ModuleGuards(name)
    self.optimizers: list = []
    self.edition = 0
    self._host: dict[int, _OnHost] = {}
    self._count = 0
    # Compiled functions that this one has called, and how they were when it was traced.
    self._inner: dict[int, tuple[weakref.ref, Hashable]] = {}
    # Host numbers by which Python has decided, and what they were.
    self._decisions: dict[Any, Hashable] = {}

  # Before a call ----------------------------------------------------------------------

  def key(self) -> tuple:
    """Return the differences from the first traces; () where nothing has changed."""
    if self.is_empty:
      return ()
    key: tuple = ()
    if self.modules:
      key = self.modules.key()
    if self._host:
      key += self._of_host()
    if self._decisions:
      key += tuple(
        [
          (number, value)
          for number, (decision, first) in enumerate(self._decisions.items())
          if (value := _now(decision)) != first
        ]
      )
    if self._inner:
      key += self._of_inner()
    return (self.edition, *key) if self.edition else key

  def _of_host(self) -> tuple:
    gone = [key for key, value in self._host.items() if value.is_gone]
    if gone:
      for key in gone:
        del self._host[key]
      self.edition += 1
    with torch_compat.without_function_modes():
      return tuple(
        [
          (value.number, now)
          for value in self._host.values()
          if (now := value.look()) != value.first
        ]
      )

  def _of_inner(self) -> tuple:
    found = []
    for number, (reference, first) in list(self._inner.items()):
      inner = reference()
      if inner is None:
        del self._inner[number]
        self.edition += 1
      elif (now := inner.key()) != first:
        found.append((number, now))
    return tuple(found)

  # In a trace -------------------------------------------------------------------------

  def guard_on_module(self, module: torch.nn.Module) -> None:
    """Adds the attributes of a module and of its submodules."""
    if self.modules.add(module):
      self.is_empty = False

  def guard_on_host(self, value) -> None:
    """Adds a tensor on the CPU or a numpy array."""
    known = self._host.get(id(value))
    if known is None or known.is_gone:
      self.is_empty = False
      self._count += 1
      self._host[id(value)] = _OnHost(value, self._count, self.name)

  def guard_on_function(self, inner: "Guards") -> None:
    """Adds what a compiled function depends on that was called in the trace."""
    if inner is not self and id(inner) not in self._inner:
      self.is_empty = False
      self._inner[id(inner)] = (weakref.ref(inner), inner.key())

  def guard_on_number(self, decision) -> None:
    """Adds a number of the host by which Python has decided.

    Args:
      decision: tells what it is by `now()`, and in messages by `describe()`.
    """
    self.is_empty = False
    self._decisions.setdefault(decision, _now(decision))

  def guard_on_optimizer(self, optimizer) -> None:
    """Adds an optimizer that a step was traced of (`optimizers.Watched`)."""
    if optimizer not in self._decisions:
      self.is_empty = False
      self._decisions[optimizer] = optimizer.now()
      optimizer.update_state()
      self.optimizers.append(optimizer)

  def update_states(self) -> bool:
    """Look at the tensors of optimizers; True where one has others than before."""
    return any([optimizer.update_state() for optimizer in self.optimizers])

  def follow_attributes(self, storages: Iterable[Storage]) -> None:
    """Follows the plain attributes of modules whose tensors have these storages.

    Args:
      storages: of tensors that a trace has captured, or changes.
    """
    keys = set(map(id, storages))
    self.modules.members.follow(
      lambda tensor: isinstance(tensor, Tensor) and id(tensor._storage) in keys
    )

  def members_edition(self) -> int:
    """Count how often a tensor or submodule of a module was found replaced."""
    edition = self.modules.members.look()
    if self._inner:
      for reference, _ in self._inner.values():
        inner = reference()
        edition += 0 if inner is None else inner.members_edition()
    return edition

  def described(self) -> dict[str, str]:
    """Describe attributes, host tensors and decisions as they are, by name."""
    found: dict[str, str] = {}
    for name, values in self.modules:
      for attribute, text in values.describe():
        found[f"{name}.{attribute}"] = text
    for value in self._host.values():
      if not value.is_gone:
        found[f"{value} (number {value.number})"] = value.describe()
    for decision in self._decisions:
      found[str(decision)] = decision.describe()
    for reference, _ in self._inner.values():
      inner = reference()
      if inner is not None:
        found |= {f"{inner.name}: {k}": v for k, v in inner.described().items()}
    return found

  @contextlib.contextmanager
  def watching(self, met: Callable) -> Iterator[None]:
    """Guard on every module that this thread runs inside the block.

    Args:
      met: is also called with each of them, before it runs.
    """
    thread = threading.get_ident()

    def hook(module, args):
      if threading.get_ident() == thread:
        self.guard_on_module(module)
        met(module)

    handle = register_module_forward_pre_hook(hook)
    try:
      yield
    finally:
      handle.remove()
      self.modules.end_trace()
      for value in list(self._host.values()):
        value.require_followed()


def _named(found: list[Values]) -> Iterator[tuple[str, Values]]:
  """Modules with their paths, which begin with the class of the outermost one."""
  names: dict[int, str] = {}
  modules = [values.module for values in found]
  inner = {id(m) for module in modules if module for m in [*module.modules()][1:]}
  roots = [m for m in modules if m is not None and id(m) not in inner]
  for root in roots:
    for path, part in root.named_modules(prefix=type(root).__name__):
      names.setdefault(id(part), path)
  for values, module in zip(found, modules):
    if module is not None:
      yield names.get(id(module), values.kind), values


def _now(decision) -> Hashable:
  value = decision.now()
  return value if type(value) is tuple else key_of(value)


class _OnHost:
  """A tensor on the CPU, or a numpy array, that a function closes over."""

  def __init__(self, value, number: int, name: str):
    self.number = number
    self._name = name
    self._is_tensor = isinstance(value, torch.Tensor)
    while not self._is_tensor and isinstance(value.base, np.ndarray):
      value = value.base  # each call may make another slice of an array
    self._reference = weakref.ref(value)
    self._shape, self._nbytes = value.shape, value.nbytes
    self._memory: np.ndarray | None = None
    with torch_compat.without_function_modes():
      if self._is_tensor:
        self._memory = _memory_of(value)
      self.first = self.look()

  @property
  def is_gone(self) -> bool:
    """True if it was collected, so that it cannot change."""
    return self._reference() is None

  def look(self) -> Hashable:
    """Return a key of its numbers."""
    value = self._reference()
    if value is None:
      return None
    if not self._is_tensor:
      return value.tobytes() if self._nbytes <= MOST_BYTES_OF_ARRAY else None
    if self._memory is None or self._nbytes > MOST_BYTES:
      return value.data_ptr(), value._version
    if value.data_ptr() != self._memory.ctypes.data:  # `tensor.data = …`
      self._memory = _memory_of(value)
    return None if self._memory is None else self._memory.tobytes()

  def describe(self) -> str:
    """Its numbers, or those of them that tell it from another one."""
    value = self._reference()
    if value is None or self._nbytes > MOST_BYTES:
      return f"number {hash(self.look())}"
    with torch_compat.without_function_modes():
      return in_words(value.tolist())

  def __str__(self) -> str:
    kind = "a CPU tensor" if self._is_tensor else "a numpy array"
    return f"{kind} of shape {list(self._shape)}"

  def require_followed(self) -> None:
    """Raises MutationError for an array that is too large to be compared."""
    if self._is_tensor or self._nbytes <= MOST_BYTES_OF_ARRAY or self.is_gone:
      return
    raise MutationError(
      f"{self._name} closes over a numpy array of shape {list(self._shape)}, whose "
      "numbers would be those of the first call for ever. Pass it as an argument, or "
      'make a jax tensor of it outside: `torch.tensor(array).to("jax")`.'
    )


def _memory_of(tensor: torch.Tensor) -> np.ndarray | None:
  """The memory of a tensor as a numpy array; None where it has no plain memory."""
  if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
    return None
  if tensor.numel() and not tensor.untyped_storage().nbytes():  # it was freed
    return None
  with torch_compat.without_modes():
    plain = tensor.detach()
    try:
      return mappings.host_array(plain)
    except TypeError:  # a dtype that numpy lacks
      return None
