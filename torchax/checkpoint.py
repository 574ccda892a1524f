"""Checkpoints: a training state as a directory, written and read by Orbax.

  path/<step>/structure   JSON: the containers, the numbers, and where each array goes
  path/<step>/arrays      the arrays, by readable names (Orbax's standard format)

A step is written under a temporary name and gets its own when it is complete, so a
process that dies while it saves leaves the earlier steps and nothing else. Nothing is
pickled: reading a checkpoint runs no code of it. Orbax is an optional dependency; its
`CheckpointManager` reads the same layout.

Of several processes all save and load together. Each writes what its devices have of an
array of all; what each has for itself, such as the random state, is compared and
written once.
"""

import collections
import contextlib
import json
import operator
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax import rng
from torchax.compat import extras, jax_compat
from torchax.core import mappings
from torchax.core.explanations import require_eager
from torchax.core.tracebacks import ending_at_the_user
from torchax.devices import placement
from torchax.distributed.processes.agreement import require_equal
from torchax.environment import default_env
from torchax.errors import TracedStateError, UnsupportedDtypeError
from torchax.saving import layouts
from torchax.saving.state_files import load_state
from torchax.tensor import Tensor, new_tensor

_FORMAT = 1
_STRUCTURE, _ARRAYS = "structure", "arrays"
_PLAIN = (type(None), bool, int, float, str)


@ending_at_the_user
def save_checkpoint(
  state: dict[str, Any], path: str | os.PathLike, step: int, *, background: bool = False
) -> None:
  """Writes a state to `path/<step>`, where `load_checkpoint` finds it.

  A state is made of dicts (of any keys), lists, tuples, named tuples, numbers, strings,
  bytes, None, dtypes, jax and CPU tensors, arrays of JAX and numpy, random keys, and
  `RngState`. So are the `state_dict()` of modules and optimizers, `env.rng.state`,
  `torch.jax.get_rng_state()` and `torch.Generator.get_state()`.

  Of several processes all call it, with equal states, but for what each has of tensors
  of all; the directory is one that all of them see.

  Args:
    state: what to save. Sharded arrays are saved from the devices that hold them.
    path: a directory for the checkpoints of a run; made if it is missing. Local, or
      what `etils.epath` knows, such as `gs://`.
    step: a number >= 0 that names the checkpoint.
    background: returns as soon as the state has been copied, and writes the copy while
      the program goes on. `finish_saving`, the next save, a load and the end of the
      process wait for it; an error comes with the first of them.

  Raises:
    ProcessError: the states of processes differ, or one does not come to save.
    FileExistsError: the step was saved before; it stays as it is.
    TypeError: a value that is none of the above; nothing is written.
    TracedStateError: inside a compiled function, where tensors have no values.
    ImportError: Orbax is not installed.

  >>> import tempfile
  >>> run = tempfile.mkdtemp()
  >>> save_checkpoint({"rng": rng.RngState.from_seed(0), "losses": [0.5]}, run, 10)
  >>> load_checkpoint(run)
  {'rng': RngState(threefry2x32, key=0:0, count=0), 'losses': [0.5]}
  """
  ocp, epath = _orbax()
  if not isinstance(state, dict):
    raise TypeError(
      "save_checkpoint expects a dict, such as {'model': model.state_dict()}, but got "
      f"{type(state).__name__}."
    )
  if isinstance(step, bool) or operator.index(step) < 0:
    raise ValueError(f"A step is an int >= 0, but got {step!r}.")
  place = _absolute(path, epath) / str(operator.index(step))
  if place.exists():
    raise FileExistsError(
      f"{place} exists, and a checkpoint is never overwritten. Save under another "
      "step, or remove that directory first."
    )
  finish_saving()
  writer = _Writer(background)
  structure = {"format": _FORMAT, "state": writer.node(state, "state", ())}
  _require_equal_states(state, structure, writer.local, place)
  items = {_STRUCTURE: ocp.args.JsonSave(structure)}
  if writer.arrays:  # Orbax refuses an empty item
    items[_ARRAYS] = ocp.args.StandardSave(writer.arrays)
  kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
  with contextlib.ExitStack() as until_saved:
    checkpointer = until_saved.enter_context(kind(ocp.CompositeCheckpointHandler()))
    checkpointer.save(place, args=ocp.args.Composite(**items))
    if background:
      until_saved.pop_all()
      _Background.checkpointer = checkpointer


class _Background:
  """What writes a checkpoint while the program goes on."""

  checkpointer: Any = None


def finish_saving() -> None:
  """Waits for the checkpoint that is being written in the background, if there is one.

  Raises:
    Exception: what went wrong in the background; that checkpoint is not there.

  >>> finish_saving()  # nothing is being written
  """
  checkpointer, _Background.checkpointer = _Background.checkpointer, None
  if checkpointer is not None:
    with checkpointer:
      checkpointer.wait_until_finished()


# In which the slowest process comes to save, or to load.
_TOGETHER_SECONDS = 300


def _require_equal_states(state, structure, local: dict[str, int], place) -> None:
  """Raises in every process where the states to be saved differ."""
  if jax.process_count() == 1:
    return
  sums = {
    f"state[{key!r}]": zlib.crc32(json.dumps(node, sort_keys=True).encode())
    for key, node in zip(state, structure["state"]["items"])
  }
  for where, checksum in local.items():
    top = next(key for key in sums if where.startswith(key))
    sums[top] = zlib.crc32(checksum.to_bytes(4), sums[top])
  text = ", ".join(f"{top} {checksum:08x}" for top, checksum in sums.items())
  what = f"what is saved to {place}, as checksums"
  require_equal(what, text, _TOGETHER_SECONDS, shown=text)


@ending_at_the_user
def load_checkpoint(
  path: str | os.PathLike, like: dict[str, Any] | None = None
) -> dict[str, Any]:
  """Reads what `save_checkpoint` has written.

  Everything comes back as what it was, bit for bit: jax tensors on jax, CPU tensors on
  the CPU, arrays as arrays. Parameters come back as plain tensors, for
  `load_state_dict`. Sharded arrays come back sharded where there are as many devices,
  in one process or in several; else on the default device, or, of several processes, on
  all devices of all. Of several processes all call it.

  Args:
    path: a directory of checkpoints, of which the latest step is read; or the directory
      of one step, such as `"run/300"`. Or a file of `torch.save`, which is read with
      `weights_only=True` and whose tensors come to jax. Arrays of numpy and JAX and
      named tuples of imported modules (the states of optax) are allowed in it.
    like: a state whose tensors say where those of the checkpoint go and which shapes
      they have: {"model": model.state_dict()} of a sharded model. It may leave out
      parts. Nothing of it changes.

  Returns:
    The state. A named tuple is of its own class if the program has imported that, else
    of one with the same name and fields.

  Raises:
    UnpicklingError, RuntimeError, EOFError: torch's own, for a file that torch.save has
      not written, or not as a whole, or with objects that need code to be loaded.
    FileNotFoundError: no such directory, or no complete checkpoint in it.
    ValueError: a checkpoint that another program has written, or a newer torchax; a
      damaged one; one that is not `like` the given state. Nothing of it is returned.
    ProcessError: processes load different checkpoints, or one does not come.
    UnsupportedDtypeError: 64-bit arrays of JAX, whose x64 mode is off now.
    TracedStateError: a directory, in a compiled function.
    ImportError: Orbax is not installed.
  """
  if os.path.isfile(path):
    return load_state(path)
  require_eager("`load_checkpoint`")
  finish_saving()
  ocp, epath = _orbax()
  place = _step_directory(_absolute(path, epath), ocp)
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:

    def read(**items):
      return checkpointer.restore(place, args=ocp.args.Composite(**items))

    with _damage_named(place):
      structure = read(structure=ocp.args.JsonRestore()).structure
    _require_format(structure, place)
    nodes = list(_array_nodes(structure["state"]))
    _require_width(nodes, place)
    wanted = {} if like is None else dict(_Likeness(place).pairs(structure, like))
    what = "the checkpoint that is loaded"
    require_equal(what, [str(place), structure], _TOGETHER_SECONDS, shown=str(place))
    arrays = {}
    if any("name" in node for node in nodes):
      target = _target(nodes, wanted)
      with _damage_named(place):
        arrays = read(arrays=ocp.args.StandardRestore(target)).arrays
  with _damage_named(place):
    return _Reader(arrays).value(structure["state"])


def _require_format(structure, place) -> None:
  """Raises where this version does not know how to read a structure."""
  found = structure.get("format") if isinstance(structure, dict) else None
  if type(found) is int and found > _FORMAT:
    raise ValueError(
      f"{place} was written by a newer torchax, in format {found}; this one reads "
      f"format {_FORMAT}. Update torchax to load it."
    )
  if found != _FORMAT:
    raise ValueError(
      f"{place} holds no state of `save_checkpoint`: expected format {_FORMAT}, but "
      f"got {found!r}. Read it with orbax.checkpoint."
    )


_DAMAGE = (ValueError, KeyError, FileNotFoundError)


@contextlib.contextmanager
def _damage_named(place) -> Iterator[None]:
  """What readers raise for files that are cut off or missing, as one error."""
  try:
    yield
  except Exception as error:
    # Orbax raises `Exception` itself where an array's file is cut off.
    if type(error) is not Exception and not isinstance(error, _DAMAGE):
      raise
    raise ValueError(
      f"{place} is damaged: a part of it is cut off, changed or missing. Load an "
      "earlier step, or a copy of this one."
    ) from error


def _orbax():
  epath = extras.load("etils.epath", "A checkpoint")
  return extras.load("orbax.checkpoint", "A checkpoint"), epath


def _absolute(path, epath):
  """The path as Orbax wants it; a URL is absolute already."""
  path = os.fspath(path)
  return epath.Path(path if "://" in path else os.path.abspath(path))


def _step_directory(path, ocp):
  """The directory of one step: the path itself, or the latest step below it."""
  if (path / _STRUCTURE).exists():
    return path
  steps = ocp.utils.checkpoint_steps(path) if path.exists() else []
  if not steps:
    what = "it holds none" if path.exists() else "no such path"
    raise FileNotFoundError(f"There is no complete checkpoint in {path}: {what}.")
  latest = path / str(max(steps))
  if not (latest / _STRUCTURE).exists():
    raise ValueError(
      f"{latest} was not written by `save_checkpoint`: it has no item {_STRUCTURE!r}. "
      "Read it with orbax.checkpoint."
    )
  return latest


# Trees of tensors and trees of arrays ------------------------------------------------


def _to_jax(pytree) -> Any:
  """Jax tensors in a tree as JAX arrays, CPU tensors as numpy arrays.

  A CPU tensor keeps its 64 bits, whatever JAX's x64 switch says.
  """
  is_leaf = lambda value: isinstance(value, torch.Tensor)  # noqa: E731
  return jax.tree.map(_array_of, pytree, is_leaf=is_leaf)


def _to_torch(pytree) -> Any:
  """JAX arrays in a tree as jax tensors, numpy arrays as CPU tensors."""
  return jax.tree.map(_tensor_of, pytree)


def _array_of(value):
  if isinstance(value, Tensor):
    return value.jax()
  if isinstance(value, torch.Tensor):
    mappings.check_torch_tensor(value)
    return mappings.host_array(value.detach().cpu().resolve_conj().resolve_neg())
  return value


def _tensor_of(value):
  if rng.is_typed_key(value):
    return value
  if isinstance(value, jax.Array):
    return new_tensor(value, default_env())
  return mappings.j2t(value, False) if isinstance(value, np.ndarray) else value


# Structure ---------------------------------------------------------------------------


def _array_kind(value) -> str | None:
  """How a value with numbers in an array is to come back; None for other values."""
  if isinstance(value, Tensor):
    return "jax tensor"
  if isinstance(value, torch.Tensor):
    return "CPU tensor"
  if isinstance(value, jax.Array):
    return "keys" if rng.is_typed_key(value) else "jax array"
  if isinstance(value, np.ndarray):
    return "numpy array"
  return "numpy scalar" if isinstance(value, np.generic) else None


def _is_named_tuple(value) -> bool:
  return isinstance(value, tuple) and hasattr(value, "_fields")


class _Writer:
  """Turns a state into JSON; its arrays are put aside by name."""

  def __init__(self, copies: bool):
    self.arrays: dict[str, Any] = {}
    # Checksums of what this process has for itself, where other processes have it too.
    self.local: dict[str, int] = {}
    self._copies = copies
    # Tied weights are one array, which is saved once.
    self._names: dict[int, str] = {}
    self._kept: list[Any] = []  # so that no other array gets an id of these
    # The containers that a value is in, by their identity.
    self._around: dict[int, str] = {}

  @contextlib.contextmanager
  def _inside(self, container, where: str) -> Iterator[None]:
    """Raises ValueError for a container that holds itself."""
    if id(container) in self._around:
      raise ValueError(
        f"{where} is {self._around[id(container)]} itself, and a checkpoint holds no "
        "state that contains itself. Leave the reference out."
      )
    self._around[id(container)] = where
    yield
    del self._around[id(container)]

  def node(self, value, where: str, path: tuple[str, ...]):
    """The JSON of a value; `where` names it in errors, `path` its arrays."""
    kind = type(value)
    if kind in _PLAIN:
      return value
    if kind in (dict, collections.OrderedDict):
      with self._inside(value, where):
        return self._dict(value, where, path)
    if kind in (list, tuple, torch.Size) or _is_named_tuple(value):
      with self._inside(value, where):
        return self._sequence(value, where, path)
    if isinstance(value, rng.RngState):
      state = self.node(value.state_dict(), where, path)
      return {"type": "rng state", "state": state}
    as_array = _array_kind(value)
    if as_array is not None:
      return self._array(value, as_array, where, path)
    if kind is torch.dtype:
      return {"type": "dtype", "name": str(value).removeprefix("torch.")}
    if kind is complex:
      return {"type": "complex", "parts": [value.real, value.imag]}
    if kind is bytes:
      return {"type": "bytes", "hex": value.hex()}
    raise TypeError(
      f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint "
      "does not hold. Save a module or an optimizer as its `.state_dict()`, a "
      "torch.Generator as its `.get_state()`, a stream as its `.state`, and another "
      "object as a dict of its fields."
    )

  def _dict(self, value, where, path):
    items = [
      [
        self.node(key, f"the key {key!r} of {where}", path),
        self.node(entry, f"{where}[{key!r}]", (*path, str(key))),
      ]
      for key, entry in value.items()
    ]
    if type(value) is dict:
      return {"type": "dict", "items": items}
    # A module's state_dict keeps the versions of its layers in this attribute.
    metadata = self.node(getattr(value, "_metadata", None), where, path)
    return {"type": "ordered dict", "items": items, "metadata": metadata}

  def _sequence(self, value, where, path):
    items = [
      self.node(entry, f"{where}[{place}]", (*path, str(place)))
      for place, entry in enumerate(value)
    ]
    if _is_named_tuple(value):
      cls = type(value)
      name = f"{cls.__module__}:{cls.__qualname__}"
      fields = list(cls._fields)
      return {"type": "named tuple", "name": name, "fields": fields, "items": items}
    return {"type": type(value).__name__, "items": items}

  def _array(self, value, kind, where, path):
    node = {"type": kind}
    array = _to_jax(value)
    if isinstance(array, jax.core.Tracer):
      raise TracedStateError(
        f"{where} is being traced and has no value yet. Save outside of the compiled "
        "function."
      )
    if kind == "keys":
      node["impl"] = str(jax.random.key_impl(array))
      array = jax.random.key_data(array)
    if array.dtype.kind in "OSUMm" or array.dtype.names:
      raise TypeError(
        f"{where} is a numpy array of dtype {array.dtype}; a checkpoint holds arrays "
        "of numbers. Save strings as a list."
      )
    node |= {"shape": list(array.shape), "dtype": str(array.dtype)}
    if isinstance(array, jax.Array) and (layout := layouts.described(array)):
      node["layout"] = layout
    if array.size:  # Orbax saves no empty arrays
      if jax.process_count() > 1:
        array = self._of_all(array, where)
      node["name"] = self._put(array, "/".join(path))
    return node

  def _of_all(self, array, where: str):
    """An array of all processes, or numbers that each of them has."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
      return array
    values = np.asarray(array)
    self.local[where] = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data)
    self._kept.append(array)
    return values

  def _put(self, array, name: str) -> str:
    known = self._names.get(id(array))
    if known is not None:
      return known
    free, number = name, 1
    while free in self.arrays:  # the keys 1 and "1" have one name
      free, number = f"{name}~{number}", number + 1
    # Numpy scalars are no arrays to Orbax.
    saved = np.asarray(array) if isinstance(array, np.generic) else array
    if self._copies:  # its memory may be another's before it is written
      saved = jnp.copy(saved) if isinstance(saved, jax.Array) else np.array(saved)
    self.arrays[free] = saved
    self._names[id(array)] = free
    self._kept.append(array)
    return free


_ON_HOST = ("CPU tensor", "numpy array", "numpy scalar")
_ON_JAX = ("jax tensor", "jax array", "keys")


def _array_nodes(node):
  """The nodes of a structure that stand for arrays."""
  if isinstance(node, dict):
    if "shape" in node:
      yield node
    for child in node.values():
      yield from _array_nodes(child)
  elif isinstance(node, list):
    for child in node:
      yield from _array_nodes(child)


def _require_width(nodes, place) -> None:
  """Raises where JAX would cut 64-bit numbers to 32 without a word."""
  if jax.config.read("jax_enable_x64"):
    return
  for node in nodes:
    dtype = jnp.dtype(node["dtype"])
    if node["type"] not in _ON_HOST and jax.dtypes.canonicalize_dtype(dtype) != dtype:
      raise UnsupportedDtypeError(
        f"{place} holds JAX arrays of {dtype}, but JAX's x64 mode is off. Call "
        '`jax.config.update("jax_enable_x64", True)` before loading it.'
      )


def _target(nodes, wanted: dict[int, Any]) -> dict:
  """Where each array goes.

  Args:
    nodes: of the structure.
    wanted: shardings that were asked for, by the identity of the node.
  """
  alone = jax.process_count() == 1
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  target = {}
  for node in nodes:
    if "name" not in node or node["name"] in target:
      continue
    shape, dtype = node["shape"], jnp.dtype(node["dtype"])
    place = None
    if node["type"] not in _ON_HOST:
      place = wanted.get(id(node)) or layouts.restored(node.get("layout"))
      if place is None and alone:
        place = first
    # What each process has for itself is read as numbers of the host.
    target[node["name"]] = (
      np.empty(shape, dtype)
      if place is None
      else jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    )
  return target


class _Likeness:
  """Goes through a checkpoint and the state that it has to be like, side by side.

  Args:
    place: the checkpoint, for messages.
  """

  def __init__(self, place):
    self.place = place

  def pairs(self, structure, like) -> Iterator[tuple[int, Any]]:
    """The identities of array nodes, and the shardings that they are to have."""
    yield from self._of(structure["state"], like, "state")

  def _of(self, node, like, where: str) -> Iterator[tuple[int, Any]]:
    if like is None or not isinstance(node, dict):
      return
    if "shape" in node:
      yield from self._of_array(node, like, where)
    elif node["type"] in ("dict", "ordered dict") and isinstance(like, dict):
      reader = _Reader({})
      held = {reader.value(key): entry for key, entry in node["items"]}
      for key, part in like.items():
        if key not in held:
          raise self._error(where, f"no {key!r}", f"{key!r} among {list(held)}")
        yield from self._of(held[key], part, f"{where}[{key!r}]")
    elif "items" in node and isinstance(like, list | tuple):
      if len(node["items"]) != len(like):
        found, expected = f"{len(node['items'])} entries", str(len(like))
        raise self._error(where, found, expected)
      for number, (entry, part) in enumerate(zip(node["items"], like)):
        yield from self._of(entry, part, f"{where}[{number}]")

  def _of_array(self, node, like, where: str) -> Iterator[tuple[int, Any]]:
    array = like.jax() if isinstance(like, Tensor) else like
    if not hasattr(array, "shape"):
      found = f"an array of shape {node['shape']}"
      raise self._error(where, found, f"a {type(like).__name__}")
    if list(array.shape) != node["shape"]:
      raise self._error(where, f"shape {node['shape']}", f"{list(array.shape)}")
    if isinstance(array, jax.Array):
      sharding = placement.place_of(array)
    else:
      sharding = getattr(array, "sharding", None)  # of a jax.ShapeDtypeStruct
    if sharding is not None:
      yield id(node), sharding

  def _error(self, where: str, found: str, expected: str) -> ValueError:
    return ValueError(
      f"{self.place} is not like the state it is loaded for: {where} has {found} in "
      f"the checkpoint, but expected was {expected}. Load it into the model that it "
      "was saved from, or leave that part out of `like`."
    )


class _Reader:
  """Turns the JSON of a state into the state."""

  def __init__(self, arrays: dict[str, Any]):
    self.arrays = arrays

  def value(self, node):
    """The value that `_Writer.node` described."""
    if not isinstance(node, dict):
      return node
    kind = node["type"]
    if kind in _CONTAINERS:
      return _CONTAINERS[kind](self, node)
    return self._array(node)

  def _dict(self, node):
    return {self.value(key): self.value(entry) for key, entry in node["items"]}

  def _ordered_dict(self, node):
    found = collections.OrderedDict(self._dict(node))
    metadata = self.value(node["metadata"])
    if metadata is not None:
      found._metadata = metadata
    return found

  def _items(self, node):
    return [self.value(entry) for entry in node["items"]]

  def _named_tuple(self, node):
    cls = _named_tuple_class(node["name"], tuple(node["fields"]))
    return cls._make(self._items(node))

  def _rng_state(self, node):
    return rng.RngState.from_state_dict(self.value(node["state"]))

  def _array(self, node):
    kind = node["type"]
    if kind not in _ON_HOST and kind not in _ON_JAX:
      raise ValueError(f"A state has no values of type {kind!r}.")
    if "name" in node:
      array = self.arrays[node["name"]]
    else:
      array = np.empty(node["shape"], jnp.dtype(node["dtype"]))
    if kind in _ON_JAX:
      array = jnp.asarray(array)
      if "layout" not in node and not placement.is_spread(array):
        array = jax_compat.uncommitted(array)
    if kind == "keys":
      return _keys(array, node["impl"])
    if kind.endswith("tensor"):
      return _to_torch(array)
    return array[()] if kind == "numpy scalar" else array


_CONTAINERS = {
  "dict": _Reader._dict,
  "ordered dict": _Reader._ordered_dict,
  "list": _Reader._items,
  "tuple": lambda reader, node: tuple(reader._items(node)),
  "Size": lambda reader, node: torch.Size(reader._items(node)),
  "named tuple": _Reader._named_tuple,
  "rng state": _Reader._rng_state,
  "dtype": lambda reader, node: getattr(torch, node["name"]),
  "complex": lambda reader, node: complex(*node["parts"]),
  "bytes": lambda reader, node: bytes.fromhex(node["hex"]),
}


def _named_tuple_class(name: str, fields: tuple[str, ...]) -> type:
  """The class of that name among the modules that are imported, or a new one."""
  module, _, qualified = name.partition(":")
  found: Any = sys.modules.get(module)
  for part in qualified.split("."):
    found = getattr(found, part, None)
  is_tuple = isinstance(found, type) and issubclass(found, tuple)
  if is_tuple and getattr(found, "_fields", None) == fields:
    return found
  return collections.namedtuple(qualified.rpartition(".")[2], fields)


def _keys(words: jax.Array, impl: str) -> jax.Array:
  """Typed keys of any shape from their key data."""
  shape = words.shape[:-1]
  rows = words.reshape(-1, words.shape[-1])
  return jax.vmap(lambda row: rng.as_key(row, impl))(rows).reshape(shape)
