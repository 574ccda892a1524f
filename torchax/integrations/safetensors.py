"""Loading of safetensors files onto jax: `load_file(path, device="jax")`.

The library has a fixed list of device names, in Rust. A file for jax is therefore
opened for the CPU, and its tensors are moved one by one as they are read. Saving needs
no adapter: the library takes the storages of tensors and copies them to the CPU.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from torchax.compat.patches import patch
from torchax.core import mappings
from torchax.devices import placement


def _read_slice(stored, index) -> torch.Tensor:
  """Read a slice of a tensor, from a file that is open for the CPU.

  A `with torch.device(…)` block would make safetensors create it elsewhere, such as on
  meta.
  """
  with torch.device("cpu"):
    return stored[index]


class _SliceReader:
  """Tensor of a file that is read in slices onto a jax device."""

  def __init__(self, on_cpu, device):
    self._on_cpu, self._device = on_cpu, device

  def __getitem__(self, index) -> torch.Tensor:
    return _read_slice(self._on_cpu, index).to(self._device)

  def __getattr__(self, name: str):
    return getattr(self._on_cpu, name)


class _File:
  """Open file that returns its tensors on a jax device."""

  def __init__(self, on_cpu, device):
    self._on_cpu, self._device = on_cpu, device

  def get_tensor(self, name: str) -> torch.Tensor:
    return self._on_cpu.get_tensor(name).to(self._device)

  def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    names = self._on_cpu.keys() if names is None else names
    return {name: self.get_tensor(name) for name in names}

  def get_slice(self, name: str) -> _SliceReader:
    return _SliceReader(self._on_cpu.get_slice(name), self._device)

  def __enter__(self):
    self._on_cpu.__enter__()
    return self

  def __exit__(self, *error) -> None:
    self._on_cpu.__exit__(*error)

  def __getattr__(self, name: str):
    return getattr(self._on_cpu, name)


def shapes(paths: Iterable) -> dict[str, tuple[Any, tuple[int, ...]]]:
  """Map the name of each tensor in the files to the path of its file and its shape.

  Raises:
    ValueError: two files have a tensor of the same name.
  """
  from safetensors import safe_open

  entries: dict[str, tuple[Any, tuple[int, ...]]] = {}
  for path in paths:
    with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
      for name in file.keys():  # noqa: SIM118 - it is no dict
        if name in entries:
          raise ValueError(f"{name} is in two files, {entries[name][0]} and {path}.")
        entries[name] = (path, tuple(file.get_slice(name).get_shape()))
  return entries


def load_array(path, name: str, sharding: Sharding, dtype=None) -> jax.Array:
  """Load a tensor of a file as a sharded array.

  The host reads and holds the part of one device at a time.

  Args:
    path: path of the file.
    name: name of the tensor.
    sharding: sharding of the array.
    dtype: dtype of the array; None for the dtype in the file.
  """
  from safetensors import safe_open

  with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape())

    def read(index: tuple) -> np.ndarray:
      part = _read_slice(stored, index) if shape else file.get_tensor(name)
      array_dtype = dtype or mappings.t2j_dtype(part.dtype)
      return np.asarray(mappings.host_array(part.contiguous()), array_dtype)

    return placement.from_shards(shape, sharding, read)


def register(is_jax: Callable[[str], bool]) -> None:
  """Enable loading onto jax in safetensors, if it is installed.

  Args:
    is_jax: returns True if a location, such as "jax:0" or "cuda", means jax.
  """
  try:
    import safetensors.torch
  except ImportError:
    return
  original = safetensors.safe_open

  def safe_open(filename, framework, device="cpu", **options):
    """Implement `safetensors.safe_open`, also for a jax device."""
    name = str(device)
    if not name.startswith(("jax", "cuda")) or not is_jax(name):
      return original(filename, framework=framework, device=device, **options)
    if os.path.isdir(filename):
      raise IsADirectoryError(
        errno.EISDIR, "safetensors expects a file, but got a directory", str(filename)
      )
    try:
      on_cpu = original(filename, framework=framework, device="cpu", **options)
    except safetensors.SafetensorError as error:
      raise safetensors.SafetensorError(
        f"safetensors expects a whole file of its format, but {filename} is damaged, "
        f"or of another kind ({error}). Nothing was loaded. Copy or download it again; "
        "one that is whole may need a newer safetensors."
      ) from error
    return _File(on_cpu, placement.torch_device(torch.device(device).index))

  # Libraries imported earlier hold the function in their own modules.
  for module in list(sys.modules.values()):
    if getattr(module, "__dict__", {}).get("safe_open") is original:
      patch(module, "safe_open", safe_open, "safetensors files that load onto jax")
