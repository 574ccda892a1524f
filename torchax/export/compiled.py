"""Functions and methods compiled through `torch.export`, for `torchax.compile`."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchax import amp
from torchax.compat import torch_compat
from torchax.core.partitions import Partition
from torchax.core.programs import ProgramCache
from torchax.core.static_values import StaticValue
from torchax.core.tracebacks import ending_at_the_user
from torchax.environment import default_env
from torchax.errors import MixedDeviceError
from torchax.export import exported_program_to_jax
from torchax.interop import call_jax, jax_jit
from torchax.interop.module import extract_all_buffers
from torchax.tensor import Tensor
from torchax.tracing.guards import Guards
from torchax.tracing.module_attributes import Attributes
from torchax.tracing.module_members import Members, called, tensors_in
from torchax.tracing.module_values import OF_TORCH
from torchax.tracing.names import name_of
from torchax.tracing.static_arguments import require_constant

# Of one function or method.
MOST_PROGRAMS = 128


class ExportedFunction:
  """A function or method, exported on its first call for each form of the arguments.

  Arguments that are no tensors are constants of the program.

  Args:
    function: of jax tensors and constants, in trees.
    owner: the module that it is a method of, or the function.
    jit_kwargs: of `jax.jit`.
  """

  def __init__(self, function: Callable, owner, jit_kwargs: dict[str, Any]):
    owner = owner if isinstance(owner, torch.nn.Module) else None
    method_of = getattr(function, "__self__", None)
    if owner is None and isinstance(method_of, torch.nn.Module):
      owner = method_of
    self._function, self._kwargs = function, jit_kwargs
    self._module = None if owner is None else _Watched(owner)
    self._by_form: ProgramCache[tuple, _Compiled] = ProgramCache(MOST_PROGRAMS)
    functools.update_wrapper(self, function, updated=())

  @ending_at_the_user
  def __call__(self, *args, **kwargs):
    """Runs the program for these arguments.

    Raises:
      TypeError: an argument is neither a tensor nor hashable, or the function closes
        over tensors.
      MixedDeviceError: a tensor is not on jax.
      MutationError: the function changes an argument whose memory another one shares.
    """
    arguments = _Arguments(args, kwargs)
    module = self._module
    if module is not None and module.was_replaced():
      self._by_form.clear()
    form = (arguments.form, *self._specialization())
    compiled = self._by_form.get(form)
    if compiled is None:
      compiled = self._by_form[form] = self._compiled(arguments)
    return compiled(arguments.tensors)

  def _specialization(self) -> tuple:
    return (
      () if self._module is None else self._module.specialization(),
      torch.is_grad_enabled(),
      torch.get_default_dtype(),
      amp.dtype_in_force(),
    )

  def _compiled(self, arguments: "_Arguments") -> "_Compiled":
    owner = None if self._module is None else self._module.module
    plain = [] if owner is None else self._module.plain
    function = self._function
    name = getattr(function, "__name__", type(function).__name__)
    wrapped = _Called(owner, name, function, arguments, plain)
    # What autocast casts becomes a part of the program where the program is made
    # functional, so all of it is done in the caller's context.
    try:
      faked = _faked(wrapped, arguments.tensors)
      exported = torch.export.export(*faked, strict=False)
    except Exception as error:
      _explain(error, function, owner)
      raise
    names, states, program = exported_program_to_jax(exported, export_raw=True)
    program.leave_out("owner")
    return _Compiled(self._module, wrapped, names, states, program, self._kwargs)


class _Arguments:
  """The arguments of a call: tensors, each of them once, and constants.

  Attributes:
    tensors: in the order of their first places.
    form: hashable; the structure, the constants, and shapes and dtypes of the tensors.
  """

  def __init__(self, args: tuple, kwargs: dict):
    parts = Partition((args, kwargs), of_torch=True)
    for leaf in parts.leaves:
      _require_constant(leaf)
    self.tensors: list[torch.Tensor] = []
    # For each leaf that is a tensor its place among the tensors.
    self._places: list[int] = []
    first: dict[int, int] = {}
    forms = []
    for leaf in parts.dynamic:
      _require_on_jax(leaf)
      place = first.setdefault(id(leaf), len(self.tensors))
      if place == len(self.tensors):
        self.tensors.append(leaf)
      self._places.append(place)
      forms.append((place, tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
    self._parts = parts.without_arrays()
    self.form = (parts.key, tuple(forms))

  def filled(self, tensors: Sequence) -> tuple[tuple, dict]:
    """The arguments with other tensors in the places of these ones."""
    return self._parts.filled([tensors[place] for place in self._places])

  def without_tensors(self) -> "_Arguments":
    """The structure and the constants alone, to be kept."""
    kept = copy.copy(self)
    kept.tensors = []
    return kept


def _require_on_jax(tensor: torch.Tensor) -> None:
  if not isinstance(tensor, Tensor):
    raise MixedDeviceError(
      f"An argument is a tensor of shape {list(tensor.shape)} on {tensor.device}, but "
      'compiled functions take jax tensors. Call `.to("jax")` first.'
    )


def _require_constant(leaf) -> None:
  if isinstance(leaf, torch.Generator):
    raise TypeError(
      "A torch.Generator cannot be an argument of an exported program, whose draws are "
      'those of the environment. Use the mode "jax", or seed with torch.manual_seed.'
    )
  try:
    StaticValue(leaf)
  except TypeError:
    raise TypeError(
      'The mode "export" takes tensors and constants that can be hashed, but got '
      f"{type(leaf).__name__}. Make it a tensor, or a container that torch's pytrees "
      "know."
    ) from None


class _Watched:
  """A module, and whether it is still the one that was exported.

  Attributes:
    module: the module.
    tensors: its parameters, buffers and plain tensor attributes by name.
    plain: (path of a module, name) of the plain tensor attributes, each tensor once.
  """

  def __init__(self, module: torch.nn.Module):
    self.module = module
    self._members, self._guards = Members(module), Guards(type(module).__name__)
    self._versions: dict[tuple, int] = {}
    self.look()

  def look(self) -> None:
    """Takes note of what the module holds now."""
    self._guards.note_module(self.module)
    self.tensors = _tensors_by_name(self.module)
    self._members.note()
    plain = [
      (path, name, value)
      for path, module in self.module.named_modules()
      for name, value in vars(module).items()
      if isinstance(value, torch.Tensor)
    ]
    self._plain = tuple(
      [(vars(self.module.get_submodule(path)), name, v) for path, name, v in plain]
    )
    params, buffers = self.module.named_parameters(), self.module.named_buffers()
    once = {id(tensor) for _, tensor in (*params, *buffers)}
    self.plain = [
      (path, name)
      for path, name, value in plain
      if id(value) not in once and not once.add(id(value))
    ]
    self._values = list(self.tensors.values())
    self._dtypes = [tensor.dtype for tensor in self._values]
    shapes = [(n, tuple(t.shape), t.requires_grad) for n, t in self.tensors.items()]
    form = (tuple(shapes), tuple(self._dtypes))
    self._version = self._versions.setdefault(form, len(self._versions))

  def was_replaced(self) -> bool:
    """True if a tensor or a part is another one than it was."""
    same = not self._members.have_changed() and all(map(_is_same, self._plain))
    same = same and self._dtypes == [tensor.dtype for tensor in self._values]
    if not same:
      self.look()
    return not same

  def specialization(self) -> tuple:
    """What Python may decide by: attributes and hooks, and shapes of its tensors."""
    return (self._version, self._guards.key())


def _joined(path: str, name: str) -> str:
  return f"{path}.{name}" if path else name


def _is_same(entry) -> bool:
  attributes, name, value = entry
  return attributes.get(name) is value


def _tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
  params, buffers = extract_all_buffers(module)
  return {**params, **buffers}


@dataclasses.dataclass
class _Results:
  """What the exported function returned, besides the numbers of its tensors.

  Attributes:
    parts: its structure and constants.
    has_grad: for each tensor, in order, whether it needs a gradient.
    assigned: (path of a module, name of its attribute) for each value that the function
      assigned to one; these are the last ones of the tensors.
  """

  parts: Partition = dataclasses.field(default_factory=lambda: Partition(()))
  has_grad: list[bool] = dataclasses.field(default_factory=list)
  assigned: list[tuple[str, str]] = dataclasses.field(default_factory=list)

  def __deepcopy__(self, memo):
    return self  # a copy of the module is traced, which fills this in

  def emptied(self, out, name: str) -> list[torch.Tensor]:
    """The tensors of a result; the rest is kept here.

    Raises:
      TypeError: a leaf that is neither a tensor nor a constant.
    """
    parts = Partition(out, of_torch=True)
    for leaf in parts.leaves:
      require_constant(leaf, name)
    self.parts = parts.without_arrays()
    return parts.dynamic

  def filled(self, tensors: list):
    """The result with these tensors."""
    return self.parts.filled(tensors)


class _Called(torch.nn.Module):
  """What is exported: a function of tensors, with the module that it belongs to.

  It takes the plain tensor attributes of the module before the other tensors. It
  returns the tensors of the function's result, and then the values that the function
  assigned to attributes of the module.

  Attributes:
    owner: the module, or None.
    plain: see `_Watched`.
    results: filled in by a call.
  """

  def __init__(self, owner, name: str, function, arguments: _Arguments, plain: list):
    super().__init__()
    self.owner, self.plain = owner, plain
    self._name, self._function = name, function
    self._arguments = arguments.without_tensors()
    self.results = _Results()

  @property
  def name(self) -> str:
    """The name of the function, or of the module's class, for messages."""
    return self._name if self.owner is None else type(self.owner).__name__

  def forward(self, *tensors):
    args, kwargs = self._arguments.filled(tensors[len(self.plain) :])
    kept = self.results
    if self.owner is None:
      found = kept.emptied(self._function(*args, **kwargs), self.name)
    else:
      for attribute, tensor in zip(self.plain, tensors):
        self._set_plain(*attribute, tensor)
      attributes = Attributes()
      attributes.note(self.owner)
      out = called(self.owner, self._name)(*args, **kwargs)
      found = kept.emptied(out, self.name)
      assignments = list(attributes.assigned())
      for assignment in assignments:
        assignment.undo()
      self.without_plain()
      paths = {id(module): path for path, module in self.owner.named_modules()}
      kept.assigned = [(paths[id(a.module)], a.name) for a in assignments]
      found += [assignment.value for assignment in assignments]
    kept.has_grad = [tensor.requires_grad for tensor in found]
    return tuple(found)

  def _set_plain(self, path: str, name: str, tensor: torch.Tensor) -> None:
    vars(self.owner.get_submodule(path))[name] = tensor

  def without_plain(self) -> None:
    """Takes the plain tensor attributes away, which `torch.export` would fix."""
    for path, name in self.plain:
      del vars(self.owner.get_submodule(path))[name]


def _faked(wrapped: _Called, tensors: list) -> tuple:
  """A copy of the module, and arguments, with fake tensors in place of jax tensors."""
  mode = torch_compat.fake_mode_for_export()
  memo: dict[int, Any] = {}
  known = _tensors_by_name(wrapped)
  for tensor in (*tensors, *known.values()):
    if isinstance(tensor, Tensor) and id(tensor) not in memo:
      memo[id(tensor)] = _fake(tensor, mode)
  plain = [known[_joined("owner", _joined(*place))] for place in wrapped.plain]
  inputs = plain + tensors
  copied = copy.deepcopy(wrapped, memo)
  copied.without_plain()
  return copied, tuple(memo[id(tensor)] for tensor in inputs)


def _fake(tensor: Tensor, mode) -> torch.Tensor:
  fake = torch_compat.fake_tensor(mode, tensor._shell, tensor.device)
  if isinstance(tensor, torch.nn.Parameter):
    return torch.nn.Parameter(fake, tensor.requires_grad)
  return fake.requires_grad_() if tensor.requires_grad else fake


def _explain(error: Exception, function, owner) -> None:
  """Raises TypeError where an export failed for tensors that it does not find."""
  if owner is not None:
    for path, module in owner.named_modules():
      for name, value in vars(module).items():
        if name not in OF_TORCH and any(True for _ in tensors_in(value)):
          _refuse_container(_joined(path, name), value, error)
    return
  if not _closes_over_tensors(function):
    return
  raise TypeError(
    f"{name_of(function)} closes over jax tensors, or a module of them, which are no "
    "part of an exported program. Compile the module, or pass the tensors as "
    'arguments; the mode "jax" takes such functions as they are.'
  ) from error


def _refuse_container(name: str, value, error: Exception) -> None:
  if isinstance(value, torch.Tensor):
    return
  raise TypeError(
    f"The module's attribute `{name}` is a {type(value).__name__} with tensors in it, "
    "which torch.export does not see. Register them as buffers, or hold them in an "
    'nn.ParameterList; the mode "jax" takes the module as it is.'
  ) from error


def _closes_over_tensors(function) -> bool:
  code = getattr(function, "__code__", None)
  if code is None:
    return False
  cells = getattr(function, "__closure__", None) or ()
  names = function.__globals__
  values = [names[name] for name in code.co_names if name in names]
  values += [cell.cell_contents for cell in cells]
  return any(isinstance(value, Tensor | torch.nn.Module) for value in values)


class _Compiled:
  """An exported program on the tensors that the module has now.

  Args:
    module: the module, or None.
    wrapped: what was exported.
    names, states: of the program; constants of it are no tensors of the module.
    program: the program.
    jit_kwargs: of `jax.jit`.
  """

  def __init__(self, module, wrapped: _Called, names, states, program, jit_kwargs):
    self._module, self._results = module, wrapped.results
    self._names, self._program = names, program
    self._assigned = tuple(wrapped.results.assigned)
    assigned = {_joined(*place) for place in self._assigned}
    known = {} if module is None else module.tensors
    env = default_env()
    self._states: list = []
    self._plain = [_joined(*place) for place in wrapped.plain]
    # What the function assigns is another tensor in each call, so it is an argument.
    self._moving: list[str] = []
    for name, state in zip(names, states):
      name = name.removeprefix("owner.")
      if name in assigned:
        self._moving.append(name)
        self._states.append(None)
      else:
        self._states.append(known[name] if name in known else env.to_xla(state))

    def run(moving, *inputs):
      return self._run(moving, inputs)

    run.__name__ = wrapped.name
    self._jitted = jax_jit(run, jit_kwargs)

  def __call__(self, tensors: list):
    known = {} if self._module is None else self._module.tensors
    moving = [known[name] for name in self._moving]
    plain = [known[name] for name in self._plain]
    found = self._jitted(moving, *plain, *tensors)
    if self._assigned:
      values = found[-len(self._assigned) :]
      for (path, name), value in zip(self._assigned, values, strict=True):
        setattr(self._module.module.get_submodule(path), name, value)
      self._module.look()
    return self._results.filled(found)

  def _run(self, moving, inputs) -> list[torch.Tensor]:
    """The program on tensors, which it changes in place."""
    remaining = iter(moving)
    states = [next(remaining) if tensor is None else tensor for tensor in self._states]

    def pure(states, inputs):
      return self._program.with_updates(states, inputs)

    outputs, updates = call_jax(pure, states, tuple(inputs))
    with torch.no_grad():
      for name, tensor in zip(self._names, states):
        if name in updates:
          tensor.copy_(updates.pop(name))
      for name, tensor in zip(self._program.input_names, inputs):
        if name in updates:
          tensor.copy_(updates[name])
    # JAX's derivative is that of the whole program, so all of its results have one.
    has_grad = self._results.has_grad
    return [
      tensor if has_one else tensor.detach()
      for tensor, has_one in zip(outputs, has_grad, strict=True)
    ]
