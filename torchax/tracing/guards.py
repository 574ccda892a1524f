"""Guards: host values that the Python code of a traced function depends on.

A trace adds a guard for each value that it reads on the host: attributes of the modules
that it runs, CPU tensors and numpy arrays in its closure, and optimizer settings that
Python branches on. Each call compares them with their first values. The differences are
part of the cache key, so a call after a change is retraced, and undoing the change
finds the old program again.

Each `Traced` (`trace.py`) has one `Guards`; `modules.py` compares the modules.
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
from torchax.compat.torch_compat.active_functions import UNSEEN
from torchax.core import mappings
from torchax.core.static_values import describe_value, key_of
from torchax.core.storage import Storage
from torchax.errors import MutationError
from torchax.tensor import Tensor
from torchax.tracing.modules import Members, Values, changed_names, is_same, writes

# Stop guarding on a value after the traced function has changed it in this many traces.
MOST_CHANGES = 8
# Larger values (in bytes) are not compared byte by byte: CPU tensors, numpy arrays.
MOST_BYTES = 1 << 14
MOST_BYTES_OF_ARRAY = 1 << 20


class ModuleGuards:
  """Guards on the attributes of the modules that a function runs."""

  def __init__(self, name: str = "A function"):
    self.name = name
    # Tensors and submodules; replacing one makes `Captures` find its tensors again.
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
    """Yield the path and the values of each module."""
    return _with_paths([values for _, values in self._values.values()])

  def key(self) -> tuple:
    """Return the differences from the values when the modules were added."""
    seen = (writes.count, torch_compat.count_of_hooks())
    if seen != self._seen or not all(map(is_same, self._containers)):
      self._look()
      self._seen = seen
    return self._differences

  def _look(self) -> None:
    differences: list[tuple] = []
    self._containers = []
    ignored = {key for key, n in self._changes.items() if n >= MOST_CHANGES}
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
    """Add the attributes of a module and its submodules; return False if known."""
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
    """Count the attributes that the function itself has changed during the trace."""
    for number, values in self._values.values():
      before = values.now
      values.look()
      for name in changed_names(before, values.now):
        self._count_change(number, values.kind, name)
    self.members.record()  # replacements by the function itself are part of its trace
    self._seen = (-2, -2)  # differs from any count, so the next call compares all

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
    name: name of the function, for messages.

  Attributes:
    is_empty: there are no guards; the function depends on its arguments alone.
    modules: guards on modules.
    optimizers: optimizers with a traced step.
    edition: number of times that guarded objects were found collected; the programs
      compiled with them are of no use then.
    count: number of CPU values that were guarded on so far.
  """

  def __init__(self, name: str = "A function"):
    self.name = name
    self.is_empty = True
    self.modules = ModuleGuards(name)
    self.optimizers: list = []
    self.edition = 0
    self._host: dict[int, _HostValue] = {}
    self.count = 0
    # Guards of the compiled functions called in a trace, and their keys at that time.
    self._inner: dict[int, tuple[weakref.ref, Hashable]] = {}
    # Host numbers that Python branches on, and their values in the first trace.
    self._decisions: dict[Any, Hashable] = {}

  # Before a call ----------------------------------------------------------------------

  def key(self) -> tuple:
    """Return the differences from the first traces; () if there are none."""
    if self.is_empty:
      return ()
    key: tuple = ()
    if self.modules:
      key = self.modules.key()
    if self._host:
      key += self._host_changes()
    if self._decisions:
      key += tuple(
        [
          (number, value)
          for number, (decision, first) in enumerate(self._decisions.items())
          if (value := _key_of_decision(decision)) != first
        ]
      )
    if self._inner:
      key += self._inner_changes()
    return (self.edition, *key) if self.edition else key

  def _host_changes(self) -> tuple:
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

  def _inner_changes(self) -> tuple:
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
    """Guard on the attributes of a module and of its submodules.

    A graph that torch captured as the body of a loop is constant.
    """
    if not hasattr(type(module), UNSEEN) and self.modules.add(module):
      self.is_empty = False

  def guard_on_host(self, value) -> None:
    """Guard on a CPU tensor or a numpy array."""
    known = self._host.get(id(value))
    if known is None or known.is_gone:
      self.is_empty = False
      self.count += 1
      self._host[id(value)] = _HostValue(value, self.count, self.name)

  def forget_temporaries(self, known: int) -> None:
    """Drop the guards on CPU values that lived only during a trace; call it at the end.

    They are constants of the program, like the numbers that Python computes.

    Args:
      known: `count` before the trace.
    """
    for key, value in list(self._host.items()):
      if value.number > known and value.is_gone:
        del self._host[key]

  def guard_on_function(self, inner: "Guards") -> None:
    """Guard on the guards of a compiled function that was called in the trace."""
    known = self._inner.get(id(inner))
    is_known = known is not None and known[0]() is inner  # numbers are used again
    if inner is not self and not is_known:
      self.is_empty = False
      self._inner[id(inner)] = (weakref.ref(inner), inner.key())

  def guard_on_number(self, decision) -> None:
    """Guard on a host number that Python branches on.

    `decision.now()` returns the number, `decision.describe()` its text for messages.
    """
    self.is_empty = False
    self._decisions.setdefault(decision, _key_of_decision(decision))

  def guard_on_optimizer(self, optimizer) -> None:
    """Guard on an optimizer with a traced step (`optimizers.OptimizerGuard`)."""
    if optimizer not in self._decisions:
      self.is_empty = False
      self._decisions[optimizer] = optimizer.now()
      optimizer.update_state()
      self.optimizers.append(optimizer)

  def update_states(self) -> bool:
    """Refresh the state tensors of optimizers; return True if some were replaced."""
    return any([optimizer.update_state() for optimizer in self.optimizers])

  def follow_attributes(self, storages: Iterable[Storage]) -> None:
    """Guard on the plain module attributes whose tensors have these storages."""
    keys = set(map(id, storages))
    self.modules.members.follow(
      lambda tensor: isinstance(tensor, Tensor) and id(tensor._storage) in keys
    )

  def members_edition(self) -> int:
    """Return how often a tensor or submodule of a module was found replaced."""
    edition = self.modules.members.look()
    if self._inner:
      for reference, _ in self._inner.values():
        inner = reference()
        edition += 0 if inner is None else inner.members_edition()
    return edition

  def describe(self) -> dict[str, str]:
    """Return the current attributes, host tensors and decisions as text, by name."""
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
        found |= {f"{inner.name}: {k}": v for k, v in inner.describe().items()}
    return found

  @contextlib.contextmanager
  def watching(self, on_module: Callable) -> Iterator[None]:
    """Guard on every module that this thread runs inside the block.

    Args:
      on_module: callback; receives each of these modules before it runs.

    Raises:
      MutationError: the block closes over a numpy array too large to compare.
    """
    thread = threading.get_ident()

    def hook(module, args):
      # torch captures the body of a loop: first with its own tracer, then with fakes.
      if torch.compiler.is_dynamo_compiling() or torch_compat.is_tracing():
        return
      if threading.get_ident() == thread:
        self.guard_on_module(module)
        on_module(module)

    handle = register_module_forward_pre_hook(hook)
    try:
      yield
    finally:
      handle.remove()
      self.modules.end_trace()
      for value in list(self._host.values()):
        value.require_comparable()


def _with_paths(found: list[Values]) -> Iterator[tuple[str, Values]]:
  """Yield modules with their paths, which begin with the outermost module's class."""
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


def _key_of_decision(decision) -> Hashable:
  value = decision.now()
  return value if type(value) is tuple else key_of(value)


class _HostValue:
  """CPU tensor or numpy array that a function closes over."""

  def __init__(self, value, number: int, name: str):
    self.number = number
    self._name = name
    self._is_tensor = isinstance(value, torch.Tensor)
    while not self._is_tensor and isinstance(value.base, np.ndarray):
      value = value.base  # each call may create a new slice of the same array
    self._reference = weakref.ref(value)
    self._shape, self._nbytes = value.shape, value.nbytes
    self._memory: np.ndarray | None = None
    with torch_compat.without_function_modes():
      if self._is_tensor:
        self._memory = _memory_of(value)
      self.first = self.look()

  @property
  def is_gone(self) -> bool:
    return self._reference() is None

  def look(self) -> Hashable:
    """Return a key of its current contents."""
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
    """Return its values as text; a hash of its key if it is large."""
    value = self._reference()
    if value is None or self._nbytes > MOST_BYTES:
      return f"number {hash(self.look())}"
    with torch_compat.without_function_modes():
      return describe_value(value.tolist())

  def __str__(self) -> str:
    kind = "a CPU tensor" if self._is_tensor else "a numpy array"
    return f"{kind} of shape {list(self._shape)}"

  def require_comparable(self) -> None:
    """Raise MutationError for an array that is too large to compare."""
    if self._is_tensor or self._nbytes <= MOST_BYTES_OF_ARRAY or self.is_gone:
      return
    raise MutationError(
      f"{self._name} closes over a numpy array of shape {list(self._shape)}, whose "
      "numbers would be those of the first call for ever. Pass it as an argument, or "
      'make a jax tensor of it outside: `torch.tensor(array).to("jax")`.'
    )


def _memory_of(tensor: torch.Tensor) -> np.ndarray | None:
  """Return the memory of a tensor as a numpy array; None if it has no plain memory."""
  if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
    return None
  if tensor.numel() and not tensor.untyped_storage().nbytes():  # freed memory
    return None
  with torch_compat.without_modes():
    plain = tensor.detach()
    try:
      return mappings.host_array(plain)
    except TypeError:  # a dtype that numpy lacks
      return None
