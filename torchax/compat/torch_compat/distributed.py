"""torch.distributed: its functions ask torchax first; groups that are axes of meshes.

The import replaces what starts a process group and what makes a mesh. The rest waits
for the first mesh on jax. By then a program has imported `distribute_tensor` by its
name, so `reroute` changes the function itself.
"""

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.backend import BACKEND

_GROUPS = "process groups of torch.distributed that are axes of a mesh on jax"

is_available = torch.distributed.is_available

_register_group = private.find(
  "torch._C._distributed_c10d._register_process_group", _GROUPS
)
_resolve_group = private.find(
  "torch._C._distributed_c10d._resolve_process_group", _GROUPS
)
_world = private.find("torch.distributed.distributed_c10d._world", _GROUPS)
_meshes = private.find("torch.distributed.device_mesh._mesh_resources", _GROUPS)
_STAGER = "torch.distributed.checkpoint._state_dict_stager.StateDictStager"
_offload_tensor = private.Later(
  f"{_STAGER}._offload_tensor",
  "torch.distributed.checkpoint.async_save of tensors on jax",
  instead=None,
)
_distribute_tensors = private.Later(
  "torch.distributed._state_dict_utils._distribute_tensors",
  "state dicts that the first process has, for models on a mesh on jax",
  instead=None,
)


def _trampoline(*args, _route, **kwargs):
  return _route(*args, **kwargs)


def reroute(function: Callable, instead: Callable) -> None:
  """Has a function of torch's run `instead(original, *args, **kwargs)`, for good.

  The object stays the same, so that it does not matter who has imported it when.

  Args:
    function: with its decorators, or without; it closes over nothing.
    instead: calls `original(*args, **kwargs)` where it has nothing of its own to do.
  """
  inner: Any = inspect.unwrap(function)
  if inner.__code__.co_name == _trampoline.__name__ or inner.__closure__:
    return
  original = types.FunctionType(
    inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__
  )
  original.__kwdefaults__ = inner.__kwdefaults__
  original.__doc__, original.__module__ = inner.__doc__, inner.__module__
  route = {"_route": functools.partial(instead, original)}
  for name, value in (
    ("__signature__", inspect.signature(inner)),
    ("__kwdefaults__", route),
    ("__defaults__", None),
    ("__code__", _trampoline.__code__),
  ):
    patch(inner, name, value, _GROUPS)


def replace_function(path: str, instead: Callable) -> None:
  """Has a function of torch's, by the names of its modules, run `instead(original, …)`.

  Args:
    path: dotted name; the module that defines the function has it by the same name.
    instead: calls `original(*args, **kwargs)` where it has nothing of its own to do.
  """
  original = function_of(path)

  @functools.wraps(original)
  def function(*args, **kwargs):
    return instead(original, *args, **kwargs)

  module, _, name = path.rpartition(".")
  for owner in dict.fromkeys((module, original.__module__)):
    patch(importlib.import_module(owner), name, function, _GROUPS)


def reroute_method(cls: type, name: str, instead: Callable) -> None:
  """The same for a method; `instead` takes (original, self, …), if it is not static."""
  known = inspect.getattr_static(cls, name)
  is_static = isinstance(known, staticmethod)
  original = known.__func__ if is_static else known
  if hasattr(original, "_torchax_original"):
    return

  @functools.wraps(original)
  def method(*args, **kwargs):
    return instead(original, *args, **kwargs)

  method._torchax_original = original  # type: ignore[attr-defined]
  patch(cls, name, staticmethod(method) if is_static else method, _GROUPS)


def function_of(path: str) -> Callable:
  """A function of torch's whose module is imported when it is needed."""
  module, _, name = path.rpartition(".")
  return getattr(importlib.import_module(module), name)


def class_of_module(original: type, methods: type, base: type, more: dict) -> type:
  """A class of modules that acts as `original` and is a `base` of torch.distributed's.

  Args:
    original: the class of a module.
    methods: come before those of `base`.
    base: a class that changes what modules are, such as `FSDPModule`.
    more: further members.
  """

  def make(cls, *args, **kwargs):
    # As torch's: `type(container)(layers)`, which slices are, is of the original class.
    return original(*args, **kwargs)

  members = {
    "__new__": make,
    "__module__": original.__module__,
    "__doc__": original.__doc__,
    "_original": original,
    "_apply": original._apply,  # type: ignore[attr-defined]
  }
  name = f"{base.__name__.removesuffix('Module')}{original.__name__}"
  return type(name, (methods, base, original), {**members, **more})


def register_group_backend(name: str, make: Callable) -> None:
  """Adds a backend for process groups that is taken where it is asked for by name.

  Args:
    name: of the backend.
    make: (store, rank, size, timeout) -> a process group.
  """
  backends: Any = torch.distributed.Backend
  if name in backends.backend_list:
    return
  backends.register_backend(name, make, devices=["cpu", name])
  # Else a group without a backend by name would try to start this one too.
  if backends.default_device_backend_map.get(name) == name:
    del backends.default_device_backend_map[name]


def leave_default_backend_alone() -> None:
  """Has `init_process_group()` without a backend choose the one that it would choose.

  It asks for the accelerator, which is jax once torchax is imported.
  """

  def choose(original, self, backend):
    accelerator = torch.accelerator.current_accelerator()
    is_ours = accelerator is not None and accelerator.type == BACKEND
    if is_ours and str(backend) == "undefined":
      device = "cuda" if torch.cuda.is_available() else "cpu"
      known: Any = torch.distributed.Backend
      backend = f"{device}:{known.default_device_backend_map[device]}"
    original(self, backend)

  reroute_method(torch.distributed.distributed_c10d.BackendConfig, "__init__", choose)


def group_by_name(name: str):
  """The process group of this name, or None."""
  try:
    return _resolve_group(name)
  except RuntimeError:
    return None


def enter_group(group, ranks: dict[int, int]) -> None:
  """Has torch find a process group by its name.

  Args:
    group: the process group, of a class of ours; no other one has its name.
    ranks: place in the group by global rank.
  """
  _register_group(group.group_name, group)
  _world.pg_group_ranks[group] = ranks
  _world.pg_map[group] = (group.getBackendName(), None)


def name_of_group(group) -> str:
  """The name that torch knows a group by; empty before it does."""
  return _world.pg_names.get(group, "")


_HOOKS_OF_PLANS = (
  ("PrepareModuleInput", "_prepare_input_fn"),
  ("PrepareModuleInput", "_prepare_input_kwarg_fn"),
  ("PrepareModuleOutput", "_prepare_out_fn"),
)


def enter_meshes_of_plans(is_meant: Callable) -> None:
  """Has the hooks of plans that place inputs and outputs run in their mesh's block.

  Args:
    is_meant: (mesh) -> whether it is one that has to be known there.
  """

  def inside(original, self, *args):
    mesh = args[-1]
    with mesh if is_meant(mesh) else contextlib.nullcontext():
      return original(self, *args)

  for style, name in _HOOKS_OF_PLANS:
    cls: Any = function_of(f"torch.distributed.tensor.parallel.{style}")
    if hasattr(cls, name):
      reroute_method(cls, name, inside)


def enter_full_states(instead: Callable) -> None:
  """Has `instead` put full tensors, which each process has, into a state dict.

  It is the last step of `set_model_state_dict` and `set_optimizer_state_dict` with
  `broadcast_from_rank0`, where torch takes from each the part of its one device.

  Args:
    instead: (original, state, keys, *rest); state[key] is a pair of what the model has
      and of a full tensor.
  """
  function = _distribute_tensors()
  if function is not None:
    reroute(function, instead)


def enter_staging(instead: Callable) -> None:
  """Has `instead` copy what `torch.distributed.checkpoint.async_save` is to write.

  Args:
    instead: (original, stager, tensor, memo, …) -> the copy, which it enters in `memo`.
  """
  if _offload_tensor() is not None:
    reroute_method(private.walk(_STAGER), "_offload_tensor", instead)


def current_mesh():
  """The mesh whose `with` block this is, or None."""
  stack = _meshes.mesh_stack
  return stack[-1] if stack else None


def root_of(mesh):
  """The mesh that this one is a part of; itself if it is whole."""
  return mesh._get_root_mesh()


def options_of_mesh(
  original: Callable, kwargs: dict, rank: int
) -> tuple[dict, Any | None]:
  """What a mesh on jax is made with: no communicator of torch, and a known rank.

  Returns:
    The arguments, and the mesh that it is a part of.
  """
  root = kwargs.get("_root_mesh")
  options = {**kwargs, "_init_backend": False, "_rank": rank}
  known = inspect.signature(original).parameters
  return {name: value for name, value in options.items() if name in known}, root


def names_of_groups(mesh) -> list[str]:
  """The names of the groups of a mesh's dimensions, also of those that are no more."""
  return mesh._dim_group_names


def set_groups_of_mesh(mesh, root, groups: dict) -> None:
  """Gives a mesh the process groups of its dimensions, by name.

  Args:
    mesh: whole, or a part.
    root: the one that it is a part of; itself if it is whole.
    groups: one for each dimension.
  """
  mesh._dim_group_names = list(groups)
  if hasattr(root, "_pg_registry"):  # from torch 2.12 on
    root._pg_registry.update(groups)
