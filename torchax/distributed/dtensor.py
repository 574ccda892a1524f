"""torch's `DTensor` functions for meshes on jax: they annotate shardings.

Each function here replaces torch's if its mesh is on jax, and calls the original
otherwise. The plans of `parallelize_module` are torch's own code, which calls these.

A jax tensor has the methods of a `DTensor`. On a mesh, it is an instance of `DTensor`
to `isinstance`, but not of torch's class, which holds the local part of one rank.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.core.error_messages import require_eager
from torchax.core.storage import Escaped
from torchax.devices import placement as devices
from torchax.dispatch.transfer import shard_gradient_like
from torchax.distributed import meshes, module_placement, placements
from torchax.errors import CollectiveError
from torchax.ops import jc10d
from torchax.tensor import Tensor, also_instances_of, new_tensor

_TENSOR = "torch.distributed.tensor"


def _mesh_here(mesh: DeviceMesh | None) -> DeviceMesh | None:
  """Return the given mesh, else the one of the `with` block; None if not on jax."""
  mesh = mesh or torch_compat.current_mesh()
  return mesh if meshes.is_on_jax(mesh) else None


# Functions ----------------------------------------------------------------------------


def distribute_tensor(
  original: Callable, tensor, device_mesh=None, placements_=None, **options
):
  """Implement `distribute_tensor`: return the tensor on the mesh, as a leaf.

  A parameter on `meta` becomes zeros, sharded.

  Raises:
    RuntimeError: the tensor is not a leaf (torch's error).
    CollectiveError: the placements do not fit the tensor, or a tensor on `meta` is not
      a parameter.
  """
  placements_ = options.pop("placements", placements_)
  mesh = _mesh_here(device_mesh)
  if mesh is None:
    return original(tensor, device_mesh, placements_, **options)
  if not tensor.is_leaf:
    raise RuntimeError(
      "`distribute_tensor` expects leaf tensors, but got one that autograd has "
      "recorded. Use `DTensor.from_local(tensor, mesh, placements)` inside of a model."
    )
  if not isinstance(tensor, torch.nn.Parameter):
    _require_numbers(tensor, "distribute_tensor")
  from_first = options.get("src_data_rank", 0) is not None
  placed = placements.place(tensor.detach(), mesh, placements_, from_first)
  placed.requires_grad_(tensor.requires_grad)
  shard_gradient_like(placed)
  return placed


def _require_numbers(tensor: torch.Tensor, function: str) -> None:
  if tensor.is_meta:
    raise CollectiveError(
      f"`{function}` was given a tensor on the meta device, which has no numbers. Make "
      'it with `device="cpu"` or `device="jax"`; a parameter on meta, which is to be '
      "initialized, `distribute_tensor` takes."
    )


def from_local(
  original: Callable, local_tensor, device_mesh=None, placements_=None, **options
):
  """Implement `DTensor.from_local`; `local_tensor` is the whole tensor.

  Raises:
    CollectiveError: `shape` differs from the tensor's, or the tensor is on `meta`.
  """
  placements_ = options.pop("placements", placements_)
  mesh = _mesh_here(device_mesh)
  if mesh is None:
    return original(local_tensor, device_mesh, placements_, **options)
  _require_numbers(local_tensor, "DTensor.from_local")
  shape = options.get("shape")
  if shape is not None and tuple(shape) != tuple(local_tensor.shape):
    raise CollectiveError(
      "`DTensor.from_local` on jax expects the whole tensor, since one process "
      f"drives all devices, but got the shape {tuple(local_tensor.shape)} for one of "
      f"{tuple(shape)}."
    )
  return placements.place(local_tensor, mesh, placements_)


def distribute_module(
  original: Callable,
  module: torch.nn.Module,
  device_mesh=None,
  partition_fn=None,
  input_fn=None,
  output_fn=None,
) -> torch.nn.Module:
  """Implement `distribute_module`: put parameters and buffers on the mesh.

  Parameters that `partition_fn` does not distribute are replicated, in place.

  Raises:
    RuntimeError: the module has been distributed before (torch's error).
    TracedStateError: called in a compiled function.
  """
  mesh = _mesh_here(device_mesh)
  if mesh is None:
    return original(module, device_mesh, partition_fn, input_fn, output_fn)
  # A module loaded from a file is on no mesh, and can be distributed again.
  was_applied = getattr(module, "_distribute_module_applied", False)
  if was_applied and any(getattr(p, "placements", ()) for p in module.parameters()):
    raise RuntimeError(
      "distribute_module should only be called once on a module, but it has already "
      "been called on this module!"
    )
  require_eager("`distribute_module`")
  for name, part in module.named_modules():
    if partition_fn is not None:
      partition_fn(name, part, mesh)
    module_placement.replicate(part, mesh)
  if input_fn is not None:
    module.register_forward_pre_hook(_Hook(input_fn, mesh))
  if output_fn is not None:
    module.register_forward_hook(_Hook(output_fn, mesh))
  module._distribute_module_applied = True  # type: ignore[assignment]
  return module


class _Hook:
  """Hook that calls a function before or after a forward pass, inside its mesh.

  torch's plans ask results of operations for their placements without passing a mesh.
  Copies of the module share the hook; it cannot be pickled.

  Args:
    function: takes (values, mesh) or (module, values, mesh).
    mesh: the mesh given to `distribute_module`.
  """

  def __init__(self, function: Callable, mesh: DeviceMesh):
    self.function, self.mesh = function, mesh
    self.takes_module = len(inspect.signature(function).parameters) != 2

  def __call__(self, module, *values):
    arguments = (module, values[-1]) if self.takes_module else (values[-1],)
    with self.mesh:
      return self.function(*arguments, self.mesh)

  def __deepcopy__(self, memo):
    return self

  def __reduce__(self):
    raise module_placement.not_pickled(
      "A module", "distribute_module` or `parallelize_module"
    )


def make_filled(original: Callable, init_op, size, device_mesh=None, **options):
  """Implement the factories of `torch.distributed.tensor`: `zeros`, `rand`, …."""
  mesh = _mesh_here(device_mesh)
  if mesh is None:
    return original(init_op, size, device_mesh, **options)
  where = options.pop("placements", None)
  requires_grad = options.pop("requires_grad", False)
  options = {name: value for name, value in options.items() if value is not None}
  fill = (options.pop("fill_value"),) if "fill_value" in options else ()
  options.pop("layout", None)
  with torch.no_grad():
    made = init_op(torch.Size(size), *fill, device=meshes.DEVICE, **options)
    return placements.place(made, mesh, where).requires_grad_(requires_grad)


def permute_tensor(original: Callable, tensor, src_dst, group, tag: str = ""):
  """Implement `permute_tensor` for all members: member i sends to `src_dst[i]`."""
  if not isinstance(tensor, Tensor):
    return original(tensor, src_dst, group, tag)
  return _Permute.apply(tensor, tuple(src_dst), _group_name(group))


def _group_name(group) -> str:
  if isinstance(group, tuple):
    mesh, dim = group
    return torch_compat.names_of_groups(mesh)[dim]
  if isinstance(group, DeviceMesh):
    return group.get_group().group_name
  return getattr(group, "group_name", group)


class _Permute(torch.autograd.Function):
  """Permutation of tensors among members; gradients take the inverse."""

  @staticmethod
  def forward(ctx, tensor, destinations, group):
    ctx.back = tuple(sorted(range(len(destinations)), key=destinations.__getitem__))
    ctx.group = group
    array = jc10d.permute(tensor.jax(), destinations, group)
    return new_tensor(array, tensor._env)

  @staticmethod
  def backward(ctx, gradient):
    return _Permute.apply(gradient, ctx.back, ctx.group), None, None


# Methods of tensors -------------------------------------------------------------------


def _mesh_of(tensor: Tensor) -> DeviceMesh | None:
  """Return the mesh of a tensor: the `with` block's, its own, or its array's.

  The block's comes first: torch's plans run inside their submesh and ask for placements
  on it.
  """
  array = tensor.jax()
  current = _mesh_here(None)
  for mesh in (current, tensor.__dict__.get("_device_mesh")):
    if mesh is None:
      continue
    if devices.is_traced(array) or placements.placements_of(array, mesh):
      return mesh
  jax_mesh = getattr(getattr(array, "sharding", None), "mesh", None)
  return meshes.device_mesh_of(jax_mesh) or current


def is_distributed(tensor: Tensor) -> bool:
  """Return True if a tensor is on a `DeviceMesh`: a `DTensor` to `isinstance`.

  A view is not computed: its base's sharding answers. Under Dynamo the answer is False:
  Dynamo reads the fields of torch's DTensor class, which jax tensors lack. Fake tensors
  and tensors kept after their trace has ended are no DTensors either.
  """
  storage = getattr(tensor, "_storage", None)
  if storage is None or isinstance(storage, Escaped):
    return False
  array = storage.array
  if devices.is_traced(array):
    return bool(tensor.__dict__.get("_placements"))
  jax_mesh = getattr(getattr(array, "sharding", None), "mesh", None)
  is_on_mesh = jax_mesh is not None and meshes.device_mesh_of(jax_mesh) is not None
  return is_on_mesh and not torch.compiler.is_compiling()


def device_mesh(self: Tensor) -> DeviceMesh:
  """Return the `DeviceMesh` of the tensor.

  Args:
    self: a jax tensor on a mesh.

  Raises:
    AttributeError: the tensor is on no mesh.

  >>> mesh = torch.distributed.init_device_mesh("jax", (1,))
  >>> torch.ones(2, device="jax").redistribute(mesh).device_mesh == mesh
  True
  """
  mesh = _mesh_of(self)
  if mesh is None:
    raise AttributeError(
      "This tensor lies on no DeviceMesh. Place it: `distribute_tensor(tensor, "
      'init_device_mesh("jax", shape), placements)`.'
    )
  return mesh


def placements_on(self: Tensor) -> tuple:
  """Return the placements on `device_mesh`; () without a mesh or if XLA decides.

  >>> mesh = torch.distributed.init_device_mesh("jax", (1,))
  >>> torch.ones(2, device="jax").redistribute(mesh).placements
  (Replicate(),)
  """
  mesh = _mesh_of(self)
  if mesh is None:
    return ()
  array = self.jax()
  if not devices.is_traced(array):
    return placements.placements_of(array, mesh)
  is_own = self.__dict__.get("_device_mesh") == mesh
  return self.__dict__["_placements"] if is_own else ()


def redistribute(
  self: Tensor,
  device_mesh: DeviceMesh | None = None,
  placements_: Any = None,
  **options: Any,
) -> Tensor:
  """Return the tensor with other placements; autograd records it.

  Args:
    self: a jax tensor, on a mesh or not.
    device_mesh: the mesh; by default the tensor's own.
    placements_: torch's `placements=`, one per mesh dimension; `Replicate()` by
      default.
    **options: `async_op` is ignored; a communication dtype raises.

  Raises:
    AttributeError: the tensor is on no mesh, and no mesh is given.
    CollectiveError: a dtype was given, or the placements do not fit.

  >>> mesh = torch.distributed.init_device_mesh("jax", (1,))
  >>> x = torch.arange(4.0, device="jax")
  >>> x.redistribute(mesh, [torch.distributed.tensor.Shard(0)]).placements
  (Shard(dim=0),)
  """
  placements_ = options.pop("placements", placements_)
  options.pop("async_op", None)
  unsupported = {name: value for name, value in options.items() if value is not None}
  if unsupported:
    raise CollectiveError(
      f"`redistribute` on jax takes no {', '.join(unsupported)}: XLA communicates in "
      "the dtype of the tensor. Write `x.to(dtype).redistribute(mesh, placements)`."
    )
  mesh = device_mesh or self.device_mesh  # type: ignore[attr-defined]
  return placements.place(self, mesh, placements_)


def to_local(self: Tensor, *, grad_placements: Any = None) -> Tensor:
  """Return the tensor itself: the one process has all of it.

  Args:
    self: a jax tensor, on a mesh or not.
    grad_placements: ignored.

  >>> to_local(torch.ones(2, device="jax"))
  tensor([1., 1.], device='jax:0')
  """
  return self


def full_tensor(self: Tensor, *, grad_placements: Any = None) -> Tensor:
  """Return the tensor replicated on its mesh; the tensor itself if on no mesh.

  Args:
    self: a jax tensor, on a mesh or not.
    grad_placements: ignored.

  >>> mesh = torch.distributed.init_device_mesh("jax", (1,))
  >>> full_tensor(torch.ones(2, device="jax").redistribute(mesh))
  tensor([1., 1.], device='jax:0')
  """
  mesh = _mesh_of(self)
  if mesh is None:
    return self
  return placements.place(self, torch_compat.root_of(mesh), None)


def wrap_result(original: Callable, tensor):
  """Return a jax result of a functional collective as it is: XLA waits by itself."""
  return tensor if isinstance(tensor, Tensor) else original(tensor)


def register_collectives() -> None:
  """Replace torch's `permute_tensor`, which is for a single rank."""
  module = "torch.distributed._functional_collectives"
  torch_compat.replace_function(f"{module}.permute_tensor", permute_tensor)
  torch_compat.replace_function(f"{module}._maybe_wrap_tensor", wrap_result)


def register() -> None:
  """Replace torch's functions, and register jax tensors as instances of DTensor."""
  route = torch_compat.reroute
  for name, instead in (
    ("distribute_tensor", distribute_tensor),
    ("distribute_module", distribute_module),
    ("_api._dtensor_init_helper", make_filled),
  ):
    route(torch_compat.function_of(f"{_TENSOR}.{name}"), instead)
  kind: Any = torch_compat.function_of(f"{_TENSOR}.DTensor")
  torch_compat.reroute_method(kind, "from_local", from_local)
  torch_compat.enter_meshes_of_plans(meshes.is_on_jax)
  also_instances_of(kind, is_distributed)


METHODS = {
  "device_mesh": property(device_mesh),
  "placements": property(placements_on),
  "redistribute": redistribute,
  "to_local": to_local,
  "full_tensor": full_tensor,
}
