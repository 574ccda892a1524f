"""Shardings for the arrays of a checkpoint: as saved, or like a given state."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax.checkpoint.structure import ON_HOST, Reader, restore_sharding
from torchax.devices import placement
from torchax.errors import UnsupportedDtypeError
from torchax.tensor import Tensor


def array_nodes(node):
  """Yield the nodes of a structure that describe arrays."""
  if isinstance(node, dict):
    if "shape" in node:
      yield node
    for child in node.values():
      yield from array_nodes(child)
  elif isinstance(node, list):
    for child in node:
      yield from array_nodes(child)


def require_x64_if_needed(nodes, directory) -> None:
  """Raise if JAX would silently truncate 64-bit arrays to 32 bits."""
  if jax.config.read("jax_enable_x64"):
    return
  for node in nodes:
    dtype = jnp.dtype(node["dtype"])
    if node["type"] not in ON_HOST and jax.dtypes.canonicalize_dtype(dtype) != dtype:
      raise UnsupportedDtypeError(
        f"{directory} holds JAX arrays of {dtype}, but JAX's x64 mode is off. Call "
        '`jax.config.update("jax_enable_x64", True)` before loading it.'
      )


def target_of(nodes, requested: dict[int, Any]) -> dict:
  """Return Orbax's restore target: array name -> shape, dtype and sharding.

  Args:
    nodes: array nodes of the structure.
    requested: requested shardings, by the id of the node.
  """
  is_single_process = jax.process_count() == 1
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  target = {}
  for node in nodes:
    if "name" not in node or node["name"] in target:
      continue
    shape, dtype = node["shape"], jnp.dtype(node["dtype"])
    sharding = None
    if node["type"] not in ON_HOST:
      sharding = requested.get(id(node)) or restore_sharding(node.get("layout"))
      if sharding is None and is_single_process:
        sharding = first
    # Arrays that each process has for itself are read into host memory.
    target[node["name"]] = (
      np.empty(shape, dtype)
      if sharding is None
      else jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    )
  return target


def shardings_like(state, like, directory) -> dict[int, Any]:
  """Return the shardings of the tensors in `like`, by the id of their node.

  Args:
    state: root node of the checkpoint's state.
    like: state, or part of one, that the checkpoint must match; or None.
    directory: directory of the checkpoint, for messages.

  Raises:
    ValueError: the checkpoint lacks a part of `like`, or its shape differs.
  """
  return dict(_Comparison(directory).pairs(state, like, "state"))


class _Comparison:
  """Recursive comparison of a checkpoint with the state that it must match."""

  def __init__(self, directory):
    self.directory = directory

  def pairs(self, node, like, where: str) -> Iterator[tuple[int, Any]]:
    if like is None or not isinstance(node, dict):
      return
    if "shape" in node:
      yield from self._of_array(node, like, where)
    elif node["type"] in ("dict", "ordered dict") and isinstance(like, dict):
      reader = Reader({})
      entries = {reader.value(key): entry for key, entry in node["items"]}
      for key, part in like.items():
        if key not in entries:
          raise self._error(where, f"no {key!r}", f"{key!r} among {list(entries)}")
        yield from self.pairs(entries[key], part, f"{where}[{key!r}]")
    elif "items" in node and isinstance(like, list | tuple):
      if len(node["items"]) != len(like):
        found, expected = f"{len(node['items'])} entries", str(len(like))
        raise self._error(where, found, expected)
      for index, (entry, part) in enumerate(zip(node["items"], like)):
        yield from self.pairs(entry, part, f"{where}[{index}]")

  def _of_array(self, node, like, where: str) -> Iterator[tuple[int, Any]]:
    array = like.jax() if isinstance(like, Tensor) else like
    if not hasattr(array, "shape"):
      found = f"an array of shape {node['shape']}"
      raise self._error(where, found, f"a {type(like).__name__}")
    if list(array.shape) != node["shape"]:
      raise self._error(where, f"shape {node['shape']}", f"{list(array.shape)}")
    if isinstance(array, jax.Array):
      sharding = placement.committed_sharding(array)
    else:
      sharding = getattr(array, "sharding", None)  # of a jax.ShapeDtypeStruct
    if sharding is not None:
      yield id(node), sharding

  def _error(self, where: str, found: str, expected: str) -> ValueError:
    return ValueError(
      f"{self.directory} is not like the state it is loaded for: {where} has {found} "
      f"in the checkpoint, but expected was {expected}. Load it into the model that it "
      "was saved from, or leave that part out of `like`."
    )
