"""`fully_shard` on jax: parameters are sharded, and XLA gathers them where used.

torch gathers a module's parameters before its forward pass and frees them afterwards.
Here a parameter keeps its global shape and gets a sharding. XLA decides when to gather
it and how to reduce-scatter its gradient.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.core.error_messages import require_eager
from torchax.dispatch.transfer import shard_gradient_like
from torchax.distributed import meshes, mixed_precision, module_placement, placements
from torchax.distributed.mixed_precision import Precision
from torchax.errors import CollectiveError
from torchax.tensor import Tensor


def fully_shard(
  original: Callable,
  module,
  *,
  mesh=None,
  shard_placement_fn=None,
  mp_policy=None,
  offload_policy=None,
  ignored_params=None,
  **options,
):
  """Implement `fully_shard`: shard each parameter along its first divisible dimension.

  A parameter with no divisible dimension is replicated. The last dimension of the mesh
  shards; a dimension before it replicates (HSDP). Parameters on meta become zeros,
  sharded. `reshard_after_forward` is ignored. The modules become `FSDPModule`s.

  Raises:
    CollectiveError: an offload policy is given, or a placement of `shard_placement_fn`
      does not fit. Nothing has changed.
    TracedStateError: called in a compiled function.
  """
  modules = module if isinstance(module, list | tuple) else [module]
  if mesh is None and any(map(module_placement.is_on_jax, modules)):
    shape = (jax.device_count(),)
    mesh = dist.init_device_mesh(meshes.DEVICE, shape, mesh_dim_names=("fsdp",))
  if not meshes.is_on_jax(mesh):
    given = {
      "mesh": mesh,
      "shard_placement_fn": shard_placement_fn,
      "mp_policy": mp_policy,
      "offload_policy": offload_policy,
      "ignored_params": ignored_params,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return original(module, **given, **options)
  require_eager("`fully_shard`")
  _refuse_offloading(offload_policy)
  if mp_policy is not None:
    mixed_precision.require_known(mp_policy)
  ignored = {id(parameter) for parameter in ignored_params or ()}
  _place_parameters(modules, mesh, ignored, shard_placement_fn)
  precision = _precision(modules, ignored, mp_policy)
  for part in modules:
    part.__dict__[_SETTINGS] = Settings(mesh.size(), precision)
    part.__class__ = class_of(type(part))
  return module


def _place_parameters(
  modules, mesh: DeviceMesh, ignored: set[int], choose: Callable | None
) -> None:
  """Shard the parameters of modules over a mesh, except the ignored ones."""
  parameters = {id(p): p for part in modules for p in part.parameters()}
  planned = {
    key: _sharding(parameter, mesh, choose)
    for key, parameter in parameters.items()
    if key not in ignored
  }
  for inner in dict.fromkeys(inner for part in modules for inner in part.modules()):
    module_placement.move(inner, lambda tensor: planned.get(id(tensor)))
  for key, sharding in planned.items():
    parameter = parameters[key]
    array = placements.put(parameter.jax(), sharding, from_first=True)
    parameter.replace_jax(array)
    shard_gradient_like(parameter)


def _precision(roots, ignored: set[int], policy):
  """Return the compute dtypes of the modules; None if the policy changes none."""
  if policy is None or (policy.param_dtype is None and policy.output_dtype is None):
    return None
  slots = {
    (part, name): None
    for root in roots
    for part in _without_sharded(root)
    for name, parameter in part.named_parameters(recurse=False)
    if parameter.is_floating_point() and id(parameter) not in ignored
  }
  return mixed_precision.Precision(roots, list(slots), policy)


def _without_sharded(module: torch.nn.Module):
  """Yield a module and its descendants, without subtrees of `fully_shard`ed modules."""
  yield module
  for child in module.children():
    if not is_sharded(child):
      yield from _without_sharded(child)


def _refuse_offloading(offload_policy) -> None:
  if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
    raise CollectiveError(
      f"fully_shard on jax expects no offload_policy, but got {offload_policy}. Leave "
      "it out: the parameters stay on the devices."
    )


def _sharding(parameter, mesh: DeviceMesh, choose: Callable | None):
  """Return the target sharding: the current one, split along the last mesh axis too."""
  array = parameter.jax() if isinstance(parameter, Tensor) else None
  current = () if array is None else placements.placements_of(array, mesh)
  if array is not None and current and current[-1].is_shard():
    return array.sharding  # from fully_shard of an inner module
  others = (placements.replicate(),) * (mesh.ndim - 1)

  def along(last):
    return placements.sharding_of(mesh, (*others, last), parameter.shape, array)

  chosen = choose(parameter) if choose is not None else None
  if chosen is not None:
    return along(chosen)
  for dim in range(parameter.dim()):
    try:
      return along(placements.shard(dim))
    except CollectiveError:  # the dimension does not divide
      continue
  return along(placements.replicate())


# Modules ------------------------------------------------------------------------------
# torch's methods of `FSDPModule` control when parameters are gathered and freed, and
# when gradients are reduced. Here XLA decides, and a parameter always has its global
# shape. Most methods do nothing; those that would change results raise.

SCHEDULE = (
  "reshard",
  "reset_iter_state",
  "set_allocate_memory_from_process_group_for_comm",
  "set_force_sum_reduction_for_comms",
  "set_is_last_backward",
  "set_post_optim_event",
  "set_reduce_scatter_max_input_buffers",
  "set_reduce_scatter_unused_params",
  "set_requires_all_reduce",
  "set_requires_gradient_sync",
  "set_reshard_after_backward",
  "set_reshard_after_forward",
  "set_separate_reduce_scatter_group",
  "set_symm_mem_for_comm",
  "set_unshard_in_backward",
)
"""Methods that change when data is sent or kept, and no results.

With gradient accumulation, each backward pass adds gradients of the whole batch.
"""

_COMMUNICATION = "XLA communicates by itself"
_REASONS = {
  "set_custom_all_gather": _COMMUNICATION,
  "set_custom_reduce_scatter": _COMMUNICATION,
  "set_all_reduce_hook": f"{_COMMUNICATION}; a gradient that is complete is seen by "
  "`parameter.register_post_accumulate_grad_hook(hook)`",
}

_SETTINGS = "_fully_sharded"


class Settings:
  """Settings of `fully_shard` for a module.

  Attributes:
    devices: number of devices that share the batch.
    precision: compute dtypes of the module; None for those of its parameters.
  """

  def __init__(self, devices: int, precision: Precision | None):
    self.devices, self.precision = devices, precision


class Handle:
  """Result of `unshard(async_op=True)`."""

  def wait(self) -> None:
    """Return at once: nothing is pending."""


class FullySharded:
  """Methods of an `FSDPModule` on jax."""

  def unshard(self, async_op: bool = False) -> Handle | None:
    """Do nothing: parameters always have their global shape."""
    return Handle() if async_op else None

  def set_modules_to_forward_prefetch(self, modules) -> None:
    """Check the modules only: XLA decides when to gather.

    Raises:
      ValueError: `fully_shard` was not applied to a module (torch's error).
    """
    _require_sharded(modules)

  def set_modules_to_backward_prefetch(self, modules) -> None:
    """Check the modules only, as `set_modules_to_forward_prefetch` does."""
    _require_sharded(modules)

  def set_gradient_divide_factor(self, factor: float) -> None:
    """Check the factor only: gradients follow from the loss as written.

    Args:
      factor: 1, if the loss is divided by the size of the whole batch; or the number
        of devices, for the mean of their means. Both give the same result here.

    Raises:
      CollectiveError: any other factor.
    """
    devices = settings_of(self).devices
    if factor not in (1, devices):
      raise CollectiveError(
        f"fully_shard on jax expects a divide factor of 1, or {devices} (the devices "
        f"of the batch), but got {factor}. Divide the loss instead."
      )

  def set_reduce_scatter_divide_factor(self, factor: float) -> None:
    """Alias of `set_gradient_divide_factor`, torch's former name."""
    self.set_gradient_divide_factor(factor)

  def __reduce_ex__(self, protocol):
    state = self.__getstate__()  # type: ignore[attr-defined]
    return _Making(original_of(type(self))), (), state


class _Making:
  """Constructor of empty modules for `copy.deepcopy`.

  Pickling raises: a pickle would lose the shardings of the parameters.

  Args:
    original: class of the module before `fully_shard`.
  """

  def __init__(self, original: type):
    self.original = original

  def __call__(self) -> Any:
    return object.__new__(class_of(self.original))

  def __reduce__(self):
    raise module_placement.not_pickled(self.original.__name__, "fully_shard")


def is_sharded(module) -> bool:
  """Return True if `fully_shard` was applied to the module, on jax."""
  return isinstance(module, FullySharded)


def settings_of(module: Any) -> Settings:
  """Return the settings of `fully_shard` for a module."""
  return module.__dict__[_SETTINGS]


def original_of(cls: type) -> type:
  """Return the class that a module had before `fully_shard`."""
  return cls._original  # type: ignore[attr-defined]


def _require_sharded(modules: Iterable) -> None:
  for module in modules:
    if not is_sharded(module):
      raise ValueError(
        "Expects modules that fully_shard was applied to, but got "
        f"{type(module).__name__}."
      )


@functools.cache
def class_of(original: type) -> type:
  """Return the fully sharded subclass of a module class; one per class."""
  base: Any = torch_compat.function_of("torch.distributed.fsdp.FSDPModule")
  methods = {}
  for name, function in vars(base).items():
    if name.startswith("_") or not callable(function) or hasattr(FullySharded, name):
      continue
    method = _no_op if name in SCHEDULE else _raising
    methods[name] = functools.wraps(function)(method(function))
  return torch_compat.class_of_module(original, FullySharded, base, methods)


def _no_op(function: Callable) -> Callable:
  signature = inspect.signature(function)

  def method(*args, **kwargs) -> None:
    signature.bind(*args, **kwargs)  # raises for arguments that torch does not take

  return method


def _raising(function: Callable) -> Callable:
  name = function.__name__
  reason = _REASONS.get(name, "it has no counterpart")

  def method(*args, **kwargs):
    raise CollectiveError(f"A module on jax has no `{name}`: {reason}.")

  return method


def register_forward_method(original: Callable, module, method_name: str) -> None:
  """Implement `register_fsdp_forward_method`: apply the forward pass's precision.

  Raises:
    ValueError: the module has no such method (torch's error).
  """
  if not is_sharded(module):
    original(module, method_name)
    return
  method = getattr(module, method_name, None)
  if method is None:
    kind = original_of(type(module))
    raise ValueError(f"{kind} does not have a method {method_name}")
  precision = settings_of(module).precision
  if precision is None:
    return

  @functools.wraps(method)
  def wrapped(*args, **kwargs):
    return precision.call_with_precision(module, method, args, kwargs)

  setattr(module, method_name, wrapped)


def share_context(original: Callable, modules) -> None:
  """Implement `share_comm_ctx`: check only, there are no streams to share."""
  if not any(map(is_sharded, modules)):
    original(modules)
    return
  _require_sharded(modules)


# Replacements of torch's functions ----------------------------------------------------


def refuse_first_version(original: Callable, self, module, *args, **kwargs) -> None:
  """Raise for `FullyShardedDataParallel` of a jax module: it flattens parameters.

  Raises:
    CollectiveError: the module is on jax.
  """
  if isinstance(module, torch.nn.Module) and module_placement.is_on_jax(module):
    raise CollectiveError(
      "FullyShardedDataParallel joins parameters to flat ones, for which jax has no "
      "use. Write `torch.distributed.fsdp.fully_shard(module, mesh="
      'init_device_mesh("jax", (jax.device_count(),)))`.'
    )
  original(self, module, *args, **kwargs)


def register() -> None:
  """Replace torch's functions."""
  package = "torch.distributed.fsdp"
  route = torch_compat.reroute
  route(torch_compat.function_of(f"{package}.fully_shard"), fully_shard)
  for name, instead in (
    ("register_fsdp_forward_method", register_forward_method),
    ("share_comm_ctx", share_context),
  ):
    route(torch_compat.function_of(f"{package}.{name}"), instead)
  first: Any = torch_compat.function_of(f"{package}.FullyShardedDataParallel")
  torch_compat.reroute_method(first, "__init__", refuse_first_version)
