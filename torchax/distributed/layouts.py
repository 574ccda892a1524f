"""Sharding of models over a mesh: `Mesh` and its sharders.

A sharder maps the name and shape of a parameter or buffer to a `PartitionSpec`: which
dimensions are split over which mesh axes. `SingleAxisSharder` derives it from the size,
as FSDP does; `ShardingRules` looks it up by name and by module. `Mesh` applies it to a
model, while constructing a model, or while loading safetensors files.
"""

import contextlib
import fnmatch
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchax.compat import jax_compat
from torchax.core import explicit_axes, mappings
from torchax.core.error_messages import require_eager
from torchax.devices import placement
from torchax.dispatch.transfer import shard_gradient_like
from torchax.environment import default_env, env_on
from torchax.errors import ShardingError
from torchax.integrations import safetensors
from torchax.tensor import Tensor, new_tensor

_REPLICATED = PartitionSpec()


class HasShape(Protocol):
  """Argument of a sharder: a tensor, or any object with a shape."""

  @property
  def shape(self) -> Sequence[int]: ...


Sharder = Callable[[str, Any], PartitionSpec]
"""`(name, shapedtype) -> PartitionSpec`."""


def _shard_first_multiple_of(
  axis_name: str, shape: Sequence[int], multiple_of: int
) -> PartitionSpec:
  """Return the spec that shards the first dimension divisible by an axis.

  Args:
    axis_name: mesh axis to shard over.
    shape: shape of the tensor.
    multiple_of: size of that axis.

  Returns:
    One entry per dimension; all are None if no dimension is divisible.

  >>> _shard_first_multiple_of("x", (10, 20, 30), 4)
  PartitionSpec(None, 'x', None)
  """
  entries: list[str | None] = [None] * len(shape)
  for dim, size in enumerate(shape):
    if size % multiple_of == 0:
      entries[dim] = axis_name
      break
  return PartitionSpec(*entries)


class SingleAxisSharder:
  """Sharder that splits the first divisible dimension over one axis, as FSDP does.

  Args:
    axis_name: name of the mesh axis.
    axis_size: number of devices along the axis.
    replicate_unshardable: replicate a tensor with no divisible dimension; by default
      such a tensor raises.

  >>> sharder = SingleAxisSharder("fsdp", 4)
  >>> sharder("weight", torch.empty(3, 8))
  PartitionSpec(None, 'fsdp')
  """

  def __init__(
    self, axis_name: str, axis_size: int, replicate_unshardable: bool = False
  ):
    self.axis_name = axis_name
    self.axis_size = axis_size
    self.replicate_unshardable = replicate_unshardable

  def __call__(self, name: str, shapedtype: HasShape) -> PartitionSpec:
    """Return the spec that shards the first dimension divisible by the axis.

    Args:
      name: name of the tensor, for the error message.
      shapedtype: tensor, array, or any other object with a shape.

    Raises:
      UnshardableError: no dimension is divisible, and `replicate_unshardable` is False.
        It is both an `AssertionError` and a `ShardingError`.
    """
    shape = tuple(shapedtype.shape)
    spec = _shard_first_multiple_of(self.axis_name, shape, self.axis_size)
    if not self.replicate_unshardable and self.axis_name not in spec:
      raise UnshardableError(
        f"{name} of shape {list(shape)} has no dimension that is a multiple of "
        f"{self.axis_size}, the size of the mesh's axis {self.axis_name!r}. Pass a "
        "sharder with `replicate_unshardable=True` to have it whole on each device."
      )
    return spec


class UnshardableError(ShardingError, AssertionError):
  """Error for a tensor with no dimension divisible by the size of an axis."""


class ShardingRules:
  """Sharder that looks specs up by module and by name.

  The first rule that matches decides. Rules by module come first.

  Args:
    by_name: pairs of a pattern and a spec. Patterns are shell-style (`fnmatch`) and
      match the whole name: `"*.q_proj.weight"`, `"layers.[0-3].*"`. A spec is a
      `PartitionSpec` or a tuple of its entries.
    by_module: maps a module class, or one module of the model, to specs by the name of
      the module's own parameter.
    otherwise: sharder or spec of tensors that no rule matches; replicated by default.

  >>> rules = ShardingRules([("*.up.weight", ("model", None))])
  >>> rules("layers.0.up.weight", torch.empty(8, 2))
  PartitionSpec('model', None)
  """

  def __init__(
    self,
    by_name: Iterable[tuple[str, PartitionSpec | tuple]] = (),
    by_module: Mapping[Any, Mapping[str, PartitionSpec | tuple]] | None = None,
    otherwise: Sharder | PartitionSpec = _REPLICATED,
  ):
    self._by_name = [(pattern, _spec(spec)) for pattern, spec in by_name]
    self._by_module = {
      key: {name: _spec(spec) for name, spec in specs.items()}
      for key, specs in (by_module or {}).items()
    }
    self._otherwise = otherwise
    self._model: torch.nn.Module | None = None

  def of(self, model: torch.nn.Module) -> "ShardingRules":
    """Return the same rules, bound to the model whose modules `by_module` matches.

    Args:
      model: the model; not changed.

    >>> rules = ShardingRules(by_module={torch.nn.Linear: {"weight": ("x", None)}})
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> rules.of(model)("0.weight", torch.empty(2, 2))
    PartitionSpec('x', None)
    """
    rules = ShardingRules(self._by_name, self._by_module, self._otherwise)
    rules._model = model
    return rules

  def __call__(self, name: str, shapedtype: HasShape) -> PartitionSpec:
    """Return the spec of a parameter or buffer.

    Args:
      name: qualified name of the tensor.
      shapedtype: tensor, array, or any other object with a shape.
    """
    modules_spec = self._spec_by_module(name)
    if modules_spec is not None:
      return modules_spec
    for pattern, spec in self._by_name:
      if fnmatch.fnmatchcase(name, pattern):
        return spec
    if callable(self._otherwise):
      return self._otherwise(name, shapedtype)
    return self._otherwise

  def _spec_by_module(self, name: str) -> PartitionSpec | None:
    if not self._by_module or self._model is None:
      return None
    path, _, own = name.rpartition(".")
    module = self._model.get_submodule(path)
    for key, specs in self._by_module.items():
      is_match = isinstance(module, key) if isinstance(key, type) else module is key
      if is_match and own in specs:
        return specs[own]
    return None


def _spec(spec) -> PartitionSpec:
  if isinstance(spec, PartitionSpec):
    return spec
  if isinstance(spec, tuple):
    return PartitionSpec(*spec)
  raise ShardingError(
    "A rule expects a PartitionSpec, or a tuple of an axis name or None for each "
    f"dimension, but got {spec!r}. A spec of one part is written ('x',)."
  )


class _Slot(NamedTuple):
  """Parameter or buffer with its full name, its module and its name in the module."""

  name: str
  module: torch.nn.Module
  own: str
  tensor: torch.Tensor


class _Entered(threading.local):
  """Contexts of a mesh that the current thread has entered, innermost last."""

  def __init__(self):
    self.scopes: list[contextlib.AbstractContextManager] = []


class Mesh:
  """Device mesh with a sharder, which lays out the tensors of a model.

  As a context manager it sets the mesh of the environment, which
  `torchax.train.mark_sharding` uses for a bare `PartitionSpec`. It does not call
  `jax.set_mesh`, which would create all arrays on the mesh, the random state included.

  Args:
    jax_mesh: a `jax.sharding.Mesh` with automatic or explicit axes.
    sharder: `(name, shapedtype) -> PartitionSpec`. By default a `SingleAxisSharder` for
      a mesh of one axis, and none for a mesh of several axes.

  Attributes:
    jax_mesh: JAX's mesh.

  >>> mesh = Mesh(jax.make_mesh((1,), ("fsdp",)))
  >>> model = mesh.shard_model(torch.nn.Linear(4, 2))
  >>> model.weight.jax().sharding.spec
  PartitionSpec('fsdp', None)
  """

  def __init__(self, jax_mesh: jax.sharding.Mesh, sharder: Sharder | None = None):
    if not isinstance(jax_mesh, jax.sharding.Mesh):
      raise TypeError(
        "Mesh expects a jax.sharding.Mesh, as `jax.make_mesh` makes, but got "
        f"{type(jax_mesh).__name__}."
      )
    self.jax_mesh = jax_mesh
    if sharder is None and len(jax_mesh.axis_names) == 1:
      (name,) = jax_mesh.axis_names
      sharder = SingleAxisSharder(name, jax_mesh.shape[name])
    self._sharder = sharder
    self._entered = _Entered()

  @classmethod
  def fsdp_mesh(cls, axis_name: str = "fsdp") -> "Mesh":
    """Return a mesh of all devices along one axis that shards parameters.

    Args:
      axis_name: name of the axis.

    >>> Mesh.fsdp_mesh().jax_mesh.axis_names
    ('fsdp',)
    """
    count = jax.device_count()
    mesh = jax.make_mesh((count,), (axis_name,))
    return cls(mesh, SingleAxisSharder(axis_name, count))

  def __repr__(self) -> str:
    axes = ", ".join(f"{name!r}: {size}" for name, size in self.jax_mesh.shape.items())
    return f"Mesh({axes})"

  def __enter__(self) -> "Mesh":
    scope = env_on().override_property(mesh=self.jax_mesh)
    scope.__enter__()
    self._entered.scopes.append(scope)
    return self

  def __exit__(self, *error) -> None:
    self._entered.scopes.pop().__exit__(*error)

  def sharding(
    self,
    spec: PartitionSpec | tuple,
    shape: Sequence[int] | None = None,
    name: str = "A tensor",
  ) -> NamedSharding:
    """Return the `NamedSharding` of a spec on this mesh.

    Args:
      spec: a `PartitionSpec` or a tuple of its entries.
      shape: shape of the tensor; None checks the axis names only.
      name: name of the tensor, for error messages.

    Raises:
      ShardingError: the spec names an unknown axis or one axis twice, has more entries
        than the shape has dimensions, or splits a dimension that is not divisible.

    >>> mesh = Mesh(jax.make_mesh((1,), ("x",)))
    >>> mesh.sharding(("x", None), (4, 2)).spec
    PartitionSpec('x', None)
    """
    spec = _spec(spec)
    placement.require_valid_spec(spec, shape, self.jax_mesh, name)
    return NamedSharding(self.jax_mesh, spec)

  def shard(self, tensor: torch.Tensor, spec: PartitionSpec | tuple) -> Tensor:
    """Return a CPU or jax tensor sharded over the mesh.

    Args:
      tensor: tensor of any shape and dtype.
      spec: a `PartitionSpec` or a tuple of its entries.

    Raises:
      ShardingError: the spec does not fit; see `sharding`.

    >>> mesh = Mesh(jax.make_mesh((1,), ("x",)))
    >>> mesh.shard(torch.ones(4, 2), ("x",)).jax().sharding.spec
    PartitionSpec('x',)
    """
    return _shard(tensor, self.sharding(spec, tensor.shape))

  def shard_model(
    self, model: torch.nn.Module, override_sharder: Sharder | None = None
  ) -> torch.nn.Module:
    """Shard the parameters and buffers of a model over the mesh, one by one.

    Parameters on jax stay the same objects. Parameters on the CPU or on meta are
    replaced, as `Module.to` does; tied ones stay tied. A parameter on meta becomes
    zeros, sharded: initialize it afterwards, or load values into it. Gradients get the
    sharding of their parameter.

    Args:
      model: the model; changed in place.
      override_sharder: used instead of the mesh's sharder.

    Returns:
      The model.

    Raises:
      ShardingError: a spec does not fit. Nothing has changed.
      ValueError: there is no sharder.
      TracedStateError: called in a compiled function.

    >>> mesh = Mesh(jax.make_mesh((1,), ("x",)))
    >>> rules = ShardingRules([("*bias", ("x",))])
    >>> mesh.shard_model(torch.nn.Linear(4, 2), rules).bias.device.type
    'jax'
    """
    require_eager("`Mesh.shard_model`")
    slots = list(_slots(model))
    shardings = self._shardings(model, slots, override_sharder)
    placed: dict[int, torch.Tensor] = {}
    for (_, module, own, tensor), sharding in zip(slots, shardings):
      if id(tensor) not in placed:
        placed[id(tensor)] = _put(tensor, sharding)
      if placed[id(tensor)] is not tensor:
        _assign(module, own, placed[id(tensor)])
    return model

  def initialize_model_sharded(
    self,
    model_class: Callable[..., torch.nn.Module],
    init_args: tuple,
    init_kwargs: dict[str, Any] | None = None,
    override_sharder: Sharder | None = None,
  ) -> torch.nn.Module:
    """Construct a model on the mesh; no device holds more than its part of a tensor.

    Each tensor is created sharded, then moved to the sharder's layout. The values equal
    those on one device: the model draws from the same stream in the same order.

    Args:
      model_class: a module class, or a function that returns a module.
      init_args: tuple of its arguments.
      init_kwargs: dict of its keyword arguments.
      override_sharder: used instead of the mesh's sharder.

    Returns:
      The module, on jax.

    Raises:
      ShardingError: a spec does not fit.
      ValueError: there is no sharder.
      TracedStateError: called in a compiled function.

    >>> mesh = Mesh(jax.make_mesh((1,), ("fsdp",)))
    >>> mesh.initialize_model_sharded(torch.nn.Linear, (4, 2)).weight.shape
    torch.Size([2, 4])
    """
    require_eager("`Mesh.initialize_model_sharded`")
    self._resolve_sharder(override_sharder)
    with contextlib.ExitStack() as scopes:
      scopes.enter_context(default_env())
      scopes.enter_context(torch.device("jax"))
      scopes.enter_context(explicit_axes.no_mesh())
      scopes.enter_context(placement.using_layout(self._provisional_sharding))
      model = model_class(*init_args, **(init_kwargs or {}))
    return self.shard_model(model, override_sharder)

  def load_safetensors(
    self,
    model: torch.nn.Module,
    *paths: str | os.PathLike,
    override_sharder: Sharder | None = None,
  ) -> torch.nn.Module:
    """Load safetensors files into a model, sharded over the mesh.

    One device's part of one tensor is read at a time, so loading needs the memory of
    one part in addition to the model. The model may be on meta.

    Args:
      model: the model; its parameters and buffers are replaced.
      *paths: the files; together they hold each tensor of `model.state_dict()`.
      override_sharder: used instead of the mesh's sharder.

    Returns:
      The model.

    Raises:
      KeyError: the files lack a tensor of the model.
      ShardingError: a tensor in a file has another shape than the model's, or a spec
        does not fit. Nothing has changed.
      ValueError: there is no sharder.
      TracedStateError: called in a compiled function.

    >>> import os, tempfile
    >>> from safetensors.torch import save_model
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_model(torch.nn.Linear(4, 2), path)
    >>> model = torch.nn.Linear(4, 2, device="meta")
    >>> mesh = Mesh(jax.make_mesh((1,), ("fsdp",)))
    >>> mesh.load_safetensors(model, path).weight.device
    device(type='jax', index=0)
    """
    require_eager("`Mesh.load_safetensors`")
    slots = list(_slots(model, persistent_only=True))
    shardings = self._shardings(model, slots, override_sharder)
    wanted = dict(zip([slot.name for slot in slots], shardings))
    shapes = {slot.name: tuple(slot.tensor.shape) for slot in slots}
    aliases: dict[int, list[str]] = {}
    for slot in slots:
      aliases.setdefault(id(slot.tensor), []).append(slot.name)
    sources = _sources(safetensors.shapes(paths), shapes, aliases)
    placed: dict[int, torch.Tensor] = {}
    for name, module, own, tensor in slots:
      if id(tensor) not in placed:
        path, stored = sources[id(tensor)]
        dtype = mappings.t2j_dtype(tensor.dtype)
        array = safetensors.load_array(path, stored, wanted[name], dtype)
        loaded = new_tensor(array, default_env())
        placed[id(tensor)] = _replacement(tensor, loaded)
      _assign(module, own, placed[id(tensor)])
    return model

  def _resolve_sharder(self, override) -> Sharder:
    sharder = override if override is not None else self._sharder
    if sharder is None:
      axes = tuple(self.jax_mesh.axis_names)
      raise ValueError(
        f"A mesh of the axes {axes} has no sharder: it is not known which of them "
        "parameters are divided among. Pass one to `Mesh`, or as `override_sharder=`: "
        "`ShardingRules([...])` or `SingleAxisSharder(axis, size)`."
      )
    return sharder

  def _shardings(self, model, slots, override) -> list[NamedSharding]:
    sharder = self._resolve_sharder(override)
    if isinstance(sharder, ShardingRules):
      sharder = sharder.of(model)
    shardings = []
    for slot in slots:
      spec = sharder(slot.name, slot.tensor)
      shardings.append(self.sharding(spec, slot.tensor.shape, slot.name))
    return shardings

  def _provisional_sharding(self, shape: tuple) -> NamedSharding | None:
    """Return a provisional sharding for a tensor created before its name is known."""
    mesh = explicit_axes.auto_mesh(self.jax_mesh)
    for dim, size in enumerate(shape):
      if size and size % mesh.size == 0:
        entries = [None] * dim + [tuple(mesh.axis_names)]
        return NamedSharding(mesh, PartitionSpec(*entries))
    for dim, size in enumerate(shape):
      for axis, count in mesh.shape.items():
        if size and count > 1 and size % count == 0:
          return NamedSharding(mesh, PartitionSpec(*[None] * dim, axis))
    return None


def _slots(model: torch.nn.Module, persistent_only=False) -> Iterable[_Slot]:
  """Yield each parameter and buffer, once per name."""
  for path, module in model.named_modules():
    tensors = [*module._parameters.items(), *module._buffers.items()]
    for own, tensor in tensors:
      if tensor is None:
        continue
      if persistent_only and own in module._non_persistent_buffers_set:
        continue
      yield _Slot(f"{path}.{own}" if path else own, module, own, tensor)


def _put(tensor: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
  """Move a parameter or buffer to the mesh; on jax it stays the same object."""
  if isinstance(tensor, Tensor):
    if not tensor.jax().sharding.is_equivalent_to(sharding, tensor.dim()):
      with torch.no_grad():
        tensor.shard_(sharding)
    shard_gradient_like(tensor)
    return tensor
  return _replacement(tensor, _shard(tensor.detach(), sharding))


def _shard(tensor: torch.Tensor, sharding: NamedSharding) -> Tensor:
  if isinstance(tensor, Tensor):
    array = jax.device_put(tensor.jax(), sharding)
  elif tensor.is_meta:
    dtype = mappings.t2j_dtype(tensor.dtype)
    array = jax.numpy.zeros(tuple(tensor.shape), dtype, device=sharding)
  elif jax_compat.is_staging():  # a constant of the compiled function
    array = jax.device_put(mappings.t2j(tensor), sharding)
  else:
    array = mappings.t2j(tensor, sharding=sharding)
  return new_tensor(array, default_env())


def _replacement(tensor: torch.Tensor, moved: Tensor) -> torch.Tensor:
  """Wrap `moved` in a `Parameter` if `tensor`, which it replaces, is one."""
  if not isinstance(tensor, torch.nn.Parameter):
    return moved
  parameter = torch.nn.Parameter(moved, tensor.requires_grad)
  shard_gradient_like(parameter)
  return parameter


def _assign(module: torch.nn.Module, own: str, tensor: torch.Tensor) -> None:
  tensors = module._parameters if own in module._parameters else module._buffers
  tensors[own] = tensor


def _sources(stored: Mapping, shapes: Mapping, aliases: Mapping) -> dict:
  """Map the id of each tensor of a model to its file and its name in the file."""
  sources, missing = {}, []
  for identity, names in aliases.items():
    stored_name = next((name for name in names if name in stored), None)
    if stored_name is None:
      missing.append(names[0])
      continue
    path, shape = stored[stored_name]
    if shape != shapes[stored_name]:
      raise ShardingError(
        f"{stored_name} of shape {list(shapes[stored_name])} has the shape "
        f"{list(shape)} in {os.fspath(path)}: the file is of another model."
      )
    sources[identity] = (path, stored_name)
  if missing:
    raise KeyError(
      f"The files lack {len(missing)} tensors of the model: {', '.join(missing[:5])}"
      f"{', …' if len(missing) > 5 else ''}."
    )
  return sources


__all__ = ["Mesh", "ShardingRules", "SingleAxisSharder", "UnshardableError"]
