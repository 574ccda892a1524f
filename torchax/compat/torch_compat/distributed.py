"""Patches of `torch.distributed` for meshes on jax and their process groups.

Importing torchax patches the functions that start a process group and create a mesh.
The other patches wait for the first mesh on jax. By then programs have imported
`distribute_tensor` by name, so `reroute` changes the function object itself. Used by
`torchax/distributed`.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchax.compat import patches, private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.device_backend import BACKEND

_GROUPS = "process groups of torch.distributed that are axes of a mesh on jax"

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
_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_unshard = private.Later(
  f"{_EXPERIMENTAL}._attention.context_parallel_unshard",
  "context_parallel_unshard of tensors on a mesh on jax",
  instead=None,
)


def reroute(function: Callable, instead: Callable) -> None:
  """Make a function run `instead(original, …)` permanently: see `patches.reroute`."""
  patches.reroute(function, instead, _GROUPS)


def replace_function(path: str, instead: Callable) -> None:
  """Replace a function in its modules by one that runs `instead(original, …)`.

  Args:
    path: dotted name; the defining module uses the same name.
    instead: calls `original(*args, **kwargs)` for calls that it does not handle.
  """
  original = function_of(path)

  @functools.wraps(original)
  def function(*args, **kwargs):
    return instead(original, *args, **kwargs)

  module, _, name = path.rpartition(".")
  for owner in dict.fromkeys((module, original.__module__)):
    patch(importlib.import_module(owner), name, function, _GROUPS)


def reroute_method(cls: type, name: str, instead: Callable) -> None:
  """Make a method run `instead(original, self, …)`, without `self` if it is static."""
  attribute = inspect.getattr_static(cls, name)
  is_static = isinstance(attribute, staticmethod)
  original = attribute.__func__ if is_static else attribute
  if hasattr(original, "_torchax_original"):
    return

  @functools.wraps(original)
  def method(*args, **kwargs):
    return instead(original, *args, **kwargs)

  method._torchax_original = original  # type: ignore[attr-defined]
  patch(cls, name, staticmethod(method) if is_static else method, _GROUPS)


def function_of(path: str) -> Callable:
  """Import the module of a function by its dotted name, and return the function."""
  module, _, name = path.rpartition(".")
  return getattr(importlib.import_module(module), name)


def class_of_module(original: type, methods: type, base: type, more: dict) -> type:
  """Create a subclass of a module class and of a mixin of torch.distributed.

  Args:
    original: class of a module.
    methods: class whose methods override those of `base`.
    base: mixin of torch.distributed, such as `FSDPModule`.
    more: further members.
  """

  def make(cls, *args, **kwargs):
    # As in torch: `type(container)(layers)`, used by slices, has the original class.
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
  """Register a backend for process groups that must be requested by name.

  Args:
    name: name of the backend.
    make: (store, rank, size, timeout) -> a process group.
  """
  backends: Any = torch.distributed.Backend
  if name in backends.backend_list:
    return
  backends.register_backend(name, make, devices=["cpu", name])
  # Otherwise a group without a named backend would try to start this one too.
  if backends.default_device_backend_map.get(name) == name:
    del backends.default_device_backend_map[name]


def leave_default_backend_alone() -> None:
  """Keep torch's default backend for `init_process_group()`.

  torch chooses by the current accelerator, which is jax once torchax is imported.
  """

  def choose(original, self, backend):
    accelerator = torch.accelerator.current_accelerator()
    is_ours = accelerator is not None and accelerator.type == BACKEND
    if is_ours and str(backend) == "undefined":
      device = "cuda" if torch.cuda.is_available() else "cpu"
      backend_class: Any = torch.distributed.Backend
      backend = f"{device}:{backend_class.default_device_backend_map[device]}"
    original(self, backend)

  reroute_method(torch.distributed.distributed_c10d.BackendConfig, "__init__", choose)


def group_by_name(name: str):
  """Return the process group of this name, or None."""
  try:
    return _resolve_group(name)
  except RuntimeError:
    return None


def enter_group(group, ranks: dict[int, int]) -> None:
  """Register a process group with torch by its name.

  Args:
    group: process group of torchax, with a unique name.
    ranks: rank in the group by global rank.
  """
  _register_group(group.group_name, group)
  _world.pg_group_ranks[group] = ranks
  _world.pg_map[group] = (group.getBackendName(), None)


def name_of_group(group) -> str:
  """Return torch's name of a group; empty if torch does not know it."""
  return _world.pg_names.get(group, "")


_HOOKS_OF_PLANS = (
  ("PrepareModuleInput", "_prepare_input_fn"),
  ("PrepareModuleInput", "_prepare_input_kwarg_fn"),
  ("PrepareModuleOutput", "_prepare_out_fn"),
)


def enter_meshes_of_plans(is_meant: Callable) -> None:
  """Run the input and output hooks of parallel plans inside `with mesh`.

  Args:
    is_meant: (mesh) -> True if the hooks need the mesh as context.
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
  """Make `instead` distribute the full tensors of a state dict.

  This is the last step of `set_model_state_dict` and `set_optimizer_state_dict` with
  `broadcast_from_rank0`. torch would take the shard of the one device of each process.

  Args:
    instead: (original, state, keys, *rest); `state[key]` is a pair of the model's
      tensor and the full tensor.
  """
  function = _distribute_tensors()
  if function is not None:
    reroute(function, instead)


def enter_context_parallel(block: Callable, unshard: Callable) -> None:
  """Make `context_parallel` and `context_parallel_unshard` run functions of ours.

  Args:
    block: (original, mesh, …) -> the generator of the context.
    unshard: (original, mesh, buffers, seq_dims, load_balancer) -> the buffers.
  """
  reroute(function_of(f"{_EXPERIMENTAL}.context_parallel"), block)
  if _unshard() is not None:
    reroute(_unshard(), unshard)


def enter_staging(instead: Callable) -> None:
  """Make `instead` copy tensors to the host for `async_save`.

  Args:
    instead: (original, stager, tensor, memo, …) -> the copy, also stored in `memo`.
  """
  if _offload_tensor() is not None:
    reroute_method(private.resolve(_STAGER), "_offload_tensor", instead)


def current_mesh():
  """Return the mesh of the innermost `with` block, or None."""
  stack = _meshes.mesh_stack
  return stack[-1] if stack else None


def root_of(mesh):
  """Return the root mesh of a submesh; of a root mesh, the mesh."""
  return mesh._get_root_mesh()


def options_of_mesh(
  original: Callable, kwargs: dict, rank: int
) -> tuple[dict, Any | None]:
  """Return arguments that create a mesh without a communicator, and its root mesh.

  Args:
    original: torch's constructor, which may lack some of the arguments.
    kwargs: arguments of the call.
    rank: rank of this process.
  """
  root = kwargs.get("_root_mesh")
  options = {**kwargs, "_init_backend": False, "_rank": rank}
  parameters = inspect.signature(original).parameters
  return {name: value for name, value in options.items() if name in parameters}, root


def names_of_groups(mesh) -> list[str]:
  """Return the group name of each mesh dimension, including destroyed groups."""
  return mesh._dim_group_names


def set_groups_of_mesh(mesh, root, groups: dict) -> None:
  """Set the process groups of a mesh's dimensions.

  Args:
    mesh: root mesh or submesh.
    root: root of the mesh.
    groups: process group of each dimension, by name.
  """
  mesh._dim_group_names = list(groups)
  if hasattr(root, "_pg_registry"):  # since torch 2.12
    root._pg_registry.update(groups)
