"""Models over several devices: how their tensors are laid out on a mesh.

A sharder says for each parameter and buffer, by its name and shape, which of its
dimensions are divided among which axes of the mesh. `SingleAxisSharder` finds that from
the size, as FSDP does; `ShardingRules` has it written down, by name and by module.
`Mesh` applies it: to a model, to one that is yet to be made, and to one whose numbers
are in files.
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
from torchax.core.explanations import require_eager
from torchax.devices import placement
from torchax.dispatch.transfer import keep_gradient_beside
from torchax.environment import default_env, env_on
from torchax.errors import ShardingError
from torchax.integrations import safetensors
from torchax.tensor import Tensor, new_tensor

_REPLICATED = PartitionSpec()


class HasShape(Protocol):
  """What a sharder is told of a tensor: a tensor itself, or a shape and a dtype."""

  @property
  def shape(self) -> Sequence[int]: ...


Sharder = Callable[[str, Any], PartitionSpec]
"""`(name, shapedtype) -> PartitionSpec`."""


def _shard_first_multiple_of(
  axis_name: str, shape: Sequence[int], multiple_of: int
) -> PartitionSpec:
  """The spec that divides the first dimension that is a multiple of a number.

  Args:
    axis_name: of the mesh, among which it is divided.
    shape: of a tensor.
    multiple_of: the size of that axis.

  Returns:
    A part for each dimension; all of them None where no dimension is a multiple.

  >>> _shard_first_multiple_of("x", (10, 20, 30), 4)
  PartitionSpec(None, 'x', None)
  """
  parts: list[str | None] = [None] * len(shape)
  for place, size in enumerate(shape):
    if size % multiple_of == 0:
      parts[place] = axis_name
      break
  return PartitionSpec(*parts)


class SingleAxisSharder:
  """A sharder that finds from the size what to divide, as FSDP does.

  Args:
    axis_name: of the mesh.
    axis_size: how many devices the axis has.
    replicate_unshardable: a tensor of which no dimension divides is on each device as
      a whole; otherwise it is an error.
  """

  def __init__(self, axis_name, axis_size, replicate_unshardable=False):
    self.axis_name = axis_name
    self.axis_size = axis_size
    self.replicate_unshardable = replicate_unshardable

  def __call__(self, name: str, shapedtype: HasShape) -> PartitionSpec:
    """The spec that divides the first dimension that is a multiple of the axis.

    Raises:
      AssertionError: there is none, and `replicate_unshardable` is False. It is a
        `ShardingError` too.
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
  """A tensor of which no dimension divides among the devices of an axis."""


class ShardingRules:
  """A sharder whose specs are written down, by name and by module.

  The first rule that fits decides. Rules by module come first.

  Args:
    by_name: pairs of a pattern and a spec. Patterns are those of files, of the whole
      name: `"*.q_proj.weight"`, `"layers.[0-3].*"`. A spec is a `PartitionSpec`, or a
      tuple of its parts.
    by_module: for a class of modules, or for one module of the model, specs by the
      name of the parameter in it.
    otherwise: the sharder, or the spec, of what no rule fits; replicated by default.

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
    """The same rules for a model, whose modules those by module are about."""
    rules = ShardingRules(self._by_name, self._by_module, self._otherwise)
    rules._model = model
    return rules

  def __call__(self, name: str, shapedtype: HasShape) -> PartitionSpec:
    """The spec of a parameter or buffer."""
    found = self._of_module(name)
    if found is not None:
      return found
    for pattern, spec in self._by_name:
      if fnmatch.fnmatchcase(name, pattern):
        return spec
    if callable(self._otherwise):
      return self._otherwise(name, shapedtype)
    return self._otherwise

  def _of_module(self, name: str) -> PartitionSpec | None:
    if not self._by_module or self._model is None:
      return None
    path, _, own = name.rpartition(".")
    module = self._model.get_submodule(path)
    for key, specs in self._by_module.items():
      is_meant = isinstance(module, key) if isinstance(key, type) else module is key
      if is_meant and own in specs:
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


class _Place(NamedTuple):
  """A name of a parameter or buffer, and where it is in the model."""

  name: str
  module: torch.nn.Module
  own: str
  tensor: torch.Tensor


class _Entered(threading.local):
  """The blocks of a mesh that a thread is in, innermost last."""

  def __init__(self):
    self.scopes: list[contextlib.AbstractContextManager] = []


class Mesh:
  """A mesh of devices with a rule of how the tensors of a model are laid out on it.

  As a context it is the mesh of the environment, which `torchax.train.mark_sharding`
  takes where it is given a bare `PartitionSpec`. It is not that of `jax.set_mesh`,
  which would have all arrays made on it, the random state among them.

  Args:
    jax_mesh: a `jax.sharding.Mesh`, of automatic or explicit axes.
    sharder: `(name, shapedtype) -> PartitionSpec`. By default that of a mesh of one
      axis is a `SingleAxisSharder` of it; a mesh of several axes has none.

  Attributes:
    jax_mesh: the mesh.
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
    """A mesh of all devices along one axis, among which parameters are divided."""
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
    name="A tensor",
  ) -> NamedSharding:
    """The `NamedSharding` of a spec on this mesh.

    Args:
      spec: a `PartitionSpec`, or a tuple of its parts.
      shape: of the tensor; None checks the names of the axes alone.
      name: of the tensor, for errors.

    Raises:
      ShardingError: the spec names an axis that the mesh lacks, or one twice, has more
        parts than the shape has dimensions, or divides one that is no multiple.
    """
    spec = _spec(spec)
    placement.require_fitting(spec, shape, self.jax_mesh, name)
    return NamedSharding(self.jax_mesh, spec)

  def shard(self, tensor: torch.Tensor, spec: PartitionSpec | tuple) -> Tensor:
    """A tensor of the CPU or of jax laid out on the mesh; each device gets its part.

    Raises:
      ShardingError: the spec does not fit; see `sharding`.
    """
    return _laid_out(tensor, self.sharding(spec, tensor.shape))

  def shard_model(self, model: torch.nn.Module, override_sharder=None):
    """Lays the parameters and buffers of a model out on the mesh, one by one.

    Parameters stay the objects that they are where they are on jax already; others,
    on the CPU or on meta, are replaced, as `Module.to` does, and those that were one
    stay one. A parameter on meta has zeros then, in parts: initialise it afterwards,
    or load numbers into it. The gradient of a parameter lies where the parameter does.

    Args:
      model: is changed.
      override_sharder: used instead of that of the mesh.

    Returns:
      The model.

    Raises:
      ShardingError: a spec does not fit. Nothing has changed.
      ValueError: there is no sharder.
      TracedStateError: in a compiled function.
    """
    require_eager("`Mesh.shard_model`")
    places = list(_places(model))
    shardings = self._shardings(model, places, override_sharder)
    done: dict[int, torch.Tensor] = {}
    for (_, module, own, tensor), sharding in zip(places, shardings):
      if id(tensor) not in done:
        done[id(tensor)] = _put(tensor, sharding)
      if done[id(tensor)] is not tensor:
        _assign(module, own, done[id(tensor)])
    return model

  def initialize_model_sharded(
    self, model_class, init_args, init_kwargs=None, override_sharder=None
  ):
    """Makes a model on the mesh; no device holds more than its part of a large tensor.

    Tensors are made one after the other, each in parts, and then laid out as the
    sharder says. The numbers are those that the model has on one device: it draws from
    the same stream, in the same order.

    Args:
      model_class: a class of modules, or a function that returns a module.
      init_args: a tuple of its arguments.
      init_kwargs: a dict of its keyword arguments.
      override_sharder: used instead of that of the mesh.

    Returns:
      The module, on jax.

    Raises:
      ShardingError: a spec does not fit.
      ValueError: there is no sharder.
      TracedStateError: in a compiled function.
    """
    require_eager("`Mesh.initialize_model_sharded`")
    self._chosen(override_sharder)
    with contextlib.ExitStack() as scopes:
      scopes.enter_context(default_env())
      scopes.enter_context(torch.device("jax"))
      scopes.enter_context(explicit_axes.no_mesh())
      scopes.enter_context(placement.laid_out(self._evenly))
      model = model_class(*init_args, **(init_kwargs or {}))
    return self.shard_model(model, override_sharder)

  def load_safetensors(self, model: torch.nn.Module, *paths, override_sharder=None):
    """Gives a model the numbers of safetensors files, laid out on the mesh.

    Of each tensor a device's part alone is read, so that the memory that loading takes
    beside the model is that of one part. The model may be on meta.

    Args:
      model: is changed: its parameters and buffers are replaced.
      *paths: of the files; together they have each tensor of `model.state_dict()`.
      override_sharder: used instead of that of the mesh.

    Returns:
      The model.

    Raises:
      KeyError: the files lack a tensor of the model.
      ShardingError: a tensor has another shape than the model's, or a spec does not
        fit. Nothing has changed.
      ValueError: there is no sharder.
      TracedStateError: in a compiled function.
    """
    require_eager("`Mesh.load_safetensors`")
    places = list(_places(model, persistent_only=True))
    shardings = self._shardings(model, places, override_sharder)
    wanted = dict(zip([place.name for place in places], shardings))
    shapes = {place.name: tuple(place.tensor.shape) for place in places}
    aliases: dict[int, list[str]] = {}
    for place in places:
      aliases.setdefault(id(place.tensor), []).append(place.name)
    sources = _sources(safetensors.shapes(paths), shapes, aliases)
    done: dict[int, torch.Tensor] = {}
    for name, module, own, tensor in places:
      if id(tensor) not in done:
        path, stored = sources[id(tensor)]
        dtype = mappings.t2j_dtype(tensor.dtype)
        array = safetensors.load_array(path, stored, wanted[name], dtype)
        loaded = new_tensor(array, default_env())
        done[id(tensor)] = _as_before(tensor, loaded)
      _assign(module, own, done[id(tensor)])
    return model

  def _chosen(self, override) -> Sharder:
    sharder = override if override is not None else self._sharder
    if sharder is None:
      axes = tuple(self.jax_mesh.axis_names)
      raise ValueError(
        f"A mesh of the axes {axes} has no sharder: it is not known which of them "
        "parameters are divided among. Pass one to `Mesh`, or as `override_sharder=`: "
        "`ShardingRules([...])` or `SingleAxisSharder(axis, size)`."
      )
    return sharder

  def _shardings(self, model, places, override) -> list[NamedSharding]:
    sharder = self._chosen(override)
    if isinstance(sharder, ShardingRules):
      sharder = sharder.of(model)
    found = []
    for place in places:
      spec = sharder(place.name, place.tensor)
      found.append(self.sharding(spec, place.tensor.shape, place.name))
    return found

  def _evenly(self, shape: tuple) -> NamedSharding | None:
    """Where a tensor of a model that is being made lies until its name is known."""
    mesh = explicit_axes.auto_mesh(self.jax_mesh)
    for place, size in enumerate(shape):
      if size and size % mesh.size == 0:
        parts = [None] * place + [tuple(mesh.axis_names)]
        return NamedSharding(mesh, PartitionSpec(*parts))
    for place, size in enumerate(shape):
      for axis, count in mesh.shape.items():
        if size and count > 1 and size % count == 0:
          return NamedSharding(mesh, PartitionSpec(*[None] * place, axis))
    return None


def _places(model: torch.nn.Module, persistent_only=False) -> Iterable[_Place]:
  """Each name of each parameter and buffer; one that has two comes twice."""
  for path, module in model.named_modules():
    found = [*module._parameters.items(), *module._buffers.items()]
    for own, tensor in found:
      if tensor is None:
        continue
      if persistent_only and own in module._non_persistent_buffers_set:
        continue
      yield _Place(f"{path}.{own}" if path else own, module, own, tensor)


def _put(tensor: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
  """A parameter or buffer on the mesh: the same object if it is on jax."""
  if isinstance(tensor, Tensor):
    if not tensor.jax().sharding.is_equivalent_to(sharding, tensor.dim()):
      with torch.no_grad():
        tensor.shard_(sharding)
    keep_gradient_beside(tensor)
    return tensor
  return _as_before(tensor, _laid_out(tensor.detach(), sharding))


def _laid_out(tensor: torch.Tensor, sharding: NamedSharding) -> Tensor:
  if isinstance(tensor, Tensor):
    array = jax.device_put(tensor.jax(), sharding)
  elif tensor.is_meta:
    dtype = mappings.t2j_dtype(tensor.dtype)
    array = jax.numpy.zeros(tuple(tensor.shape), dtype, device=sharding)
  elif jax_compat.is_staging():  # a constant of the compiled function
    array = jax.device_put(mappings.t2j(tensor), sharding)
  else:
    array = mappings.t2j(tensor, place=sharding)
  return new_tensor(array, default_env())


def _as_before(tensor: torch.Tensor, moved: Tensor) -> torch.Tensor:
  """What takes the place of a parameter or buffer: a parameter of the same kind."""
  if not isinstance(tensor, torch.nn.Parameter):
    return moved
  parameter = torch.nn.Parameter(moved, tensor.requires_grad)
  keep_gradient_beside(parameter)
  return parameter


def _assign(module: torch.nn.Module, own: str, tensor: torch.Tensor) -> None:
  kept = module._parameters if own in module._parameters else module._buffers
  kept[own] = tensor


def _sources(stored: Mapping, shapes: Mapping, aliases: Mapping) -> dict:
  """For each tensor of a model, the file and the name under which it is stored."""
  found, missing = {}, []
  for identity, names in aliases.items():
    there = next((name for name in names if name in stored), None)
    if there is None:
      missing.append(names[0])
      continue
    path, shape = stored[there]
    if shape != shapes[there]:
      raise ShardingError(
        f"{there} of shape {list(shapes[there])} has the shape {list(shape)} in "
        f"{os.fspath(path)}: the file is of another model."
      )
    found[identity] = (path, there)
  if missing:
    raise KeyError(
      f"The files lack {len(missing)} tensors of the model: {', '.join(missing[:5])}"
      f"{', …' if len(missing) > 5 else ''}."
    )
  return found


__all__ = ["Mesh", "ShardingRules", "SingleAxisSharder", "UnshardableError"]
