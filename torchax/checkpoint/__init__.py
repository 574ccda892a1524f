"""Checkpoints: training states as directories, written and read by Orbax.

  path/<step>/structure   JSON: containers, numbers, and a description of each array
  path/<step>/arrays      arrays by readable names (Orbax's standard format)

A step is written under a temporary name and renamed when complete, so a process that
dies while saving leaves only the earlier steps. Nothing is pickled: reading a
checkpoint runs no code from it. Orbax is an optional dependency; its
`CheckpointManager` reads the same layout.

Several processes save and load together. Each writes its own shards of global arrays.
Values that every process has, such as the random state, are compared and written once.

Start at `save_checkpoint`; `structure.py` converts a state to JSON and back,
`targets.py` chooses the sharding of each array on load.
"""

import contextlib
import json
import operator
import os
import zlib
from collections.abc import Iterator
from typing import Any

import jax

from torchax.checkpoint import targets
from torchax.checkpoint.structure import Reader, Writer
from torchax.compat import extras
from torchax.core.error_messages import require_eager
from torchax.core.tracebacks import hide_library_frames
from torchax.distributed.processes.agreement import require_equal
from torchax.saving.torch_files import load_state

_FORMAT = 1
_STRUCTURE, _ARRAYS = "structure", "arrays"


@hide_library_frames
def save_checkpoint(
  state: dict[str, Any], path: str | os.PathLike, step: int, *, background: bool = False
) -> None:
  """Write a state to `path/<step>`, for `load_checkpoint`.

  A state consists of dicts (with any keys), lists, tuples, named tuples, numbers,
  strings, bytes, None, dtypes, jax and CPU tensors, arrays of JAX and numpy, random
  keys and `RngState`. That covers the `state_dict()` of modules and optimizers,
  `env.rng.state`, `torch.jax.get_rng_state()` and `torch.Generator.get_state()`.

  With several processes, all must call it with equal states; only their shards of
  global tensors differ. All must see the same directory.

  Args:
    state: the state. Sharded arrays are saved from the devices that hold them.
    path: directory for the checkpoints of a run; created if missing. A local path, or
      one that `etils.epath` supports, such as `gs://`.
    step: an int >= 0 that names the checkpoint.
    background: return once the state is copied, and write the copy in the background.
      `finish_saving`, the next save, a load and the end of the process wait for it; the
      first of them raises its error.

  Raises:
    ProcessError: the states of the processes differ, or a process does not save.
    FileExistsError: the step exists; it is unchanged.
    TypeError: a value of another type; nothing is written.
    TracedStateError: inside a compiled function, where tensors have no values.
    ImportError: Orbax is not installed.

  >>> import tempfile
  >>> from torchax import rng
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
  directory = _new_step(_absolute(path, epath), step)
  finish_saving()
  writer = Writer(background)
  structure = {"format": _FORMAT, "state": writer.node(state, "state", ())}
  _require_equal_states(state, structure, writer.local, directory)
  _write(ocp, structure, writer.arrays, directory, background)


def _new_step(path, step: int):
  """Return the directory for a new step; raise if the step exists."""
  if isinstance(step, bool) or operator.index(step) < 0:
    raise ValueError(f"save_checkpoint expects an int step >= 0, but got {step!r}.")
  directory = path / str(operator.index(step))
  if directory.exists():
    raise FileExistsError(
      f"{directory} exists, and a checkpoint is never overwritten. Save under another "
      "step, or remove that directory first."
    )
  return directory


def _write(ocp, structure, arrays: dict, directory, background: bool) -> None:
  items = {_STRUCTURE: ocp.args.JsonSave(structure)}
  if arrays:  # Orbax refuses an empty item
    items[_ARRAYS] = ocp.args.StandardSave(arrays)
  kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
  with contextlib.ExitStack() as until_saved:
    checkpointer = until_saved.enter_context(kind(ocp.CompositeCheckpointHandler()))
    checkpointer.save(directory, args=ocp.args.Composite(**items))
    if background:
      until_saved.pop_all()
      _Background.checkpointer = checkpointer


class _Background:
  """Orbax checkpointer that is writing in the background, or None."""

  checkpointer: Any = None


def finish_saving() -> None:
  """Wait for the checkpoint that is being written in the background, if any.

  Raises:
    Exception: the error of the background write; that checkpoint does not exist.

  >>> finish_saving()  # nothing is being written
  """
  checkpointer, _Background.checkpointer = _Background.checkpointer, None
  if checkpointer is not None:
    with checkpointer:
      checkpointer.wait_until_finished()


# Timeout for the slowest process to start saving or loading.
_TIMEOUT_SECONDS = 300


def _require_equal_states(state, structure, local: dict[str, int], directory) -> None:
  """Raise in every process if the states to be saved differ."""
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
  what = f"what is saved to {directory}, as checksums"
  require_equal(what, text, _TIMEOUT_SECONDS, shown=text)


@hide_library_frames
def load_checkpoint(
  path: str | os.PathLike, like: dict[str, Any] | None = None
) -> dict[str, Any]:
  """Read a checkpoint of `save_checkpoint`, or a file of `torch.save`.

  Values are restored bit for bit with their type: jax tensors on jax, CPU tensors on
  the CPU, arrays as arrays. Parameters become plain tensors, for `load_state_dict`.
  Sharded arrays keep their sharding if there are enough devices, in one process or in
  several. Otherwise they go to the default device; with several processes, they are
  replicated over all devices. With several processes, all must call it.

  Args:
    path: a directory of checkpoints, whose latest step is read; or the directory of one
      step, such as `"run/300"`. Or a file of `torch.save`: it is read with
      `weights_only=True`, and its tensors go to jax. The file may hold arrays of numpy
      and JAX, and named tuples of imported modules (such as optax states).
    like: a state whose tensors give the shardings and expected shapes, such as
      {"model": model.state_dict()} of a sharded model. It may leave out parts; it is
      not changed.

  Returns:
    The state. A named tuple has its own class if the program has imported it, else a
    new class with the same name and fields.

  Raises:
    UnpicklingError, RuntimeError, EOFError: torch's errors for a file that torch.save
      did not write, that is incomplete, or whose objects need code to load.
    FileNotFoundError: the directory does not exist or holds no complete checkpoint.
    ValueError: the checkpoint comes from another program or a newer torchax, is
      damaged, or does not match `like`.
    ProcessError: processes load different checkpoints, or a process does not load.
    UnsupportedDtypeError: the checkpoint holds 64-bit JAX arrays, and x64 is off.
    TracedStateError: loading a directory inside a compiled function.
    ImportError: Orbax is not installed.

  >>> import os, tempfile
  >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
  >>> torch.save({"weight": torch.ones(2)}, path)
  >>> load_checkpoint(path)
  {'weight': tensor([1., 1.], device='jax:0')}
  """
  if os.path.isfile(path):
    return load_state(path)
  require_eager("`load_checkpoint`")
  finish_saving()
  ocp, epath = _orbax()
  return _read(ocp, _step_directory(_absolute(path, epath), ocp), like)


def _read(ocp, directory, like) -> dict[str, Any]:
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:

    def read(**items):
      return checkpointer.restore(directory, args=ocp.args.Composite(**items))

    with _as_damaged(directory):
      structure = read(structure=ocp.args.JsonRestore()).structure
    _require_format(structure, directory)
    nodes = list(targets.array_nodes(structure["state"]))
    targets.require_x64_if_needed(nodes, directory)
    requested = targets.shardings_like(structure["state"], like, directory)
    what, shown = "the checkpoint that is loaded", str(directory)
    require_equal(what, [shown, structure], _TIMEOUT_SECONDS, shown=shown)
    arrays = {}
    if any("name" in node for node in nodes):
      target = targets.target_of(nodes, requested)
      with _as_damaged(directory):
        arrays = read(arrays=ocp.args.StandardRestore(target)).arrays
  with _as_damaged(directory):
    return Reader(arrays).value(structure["state"])


def _require_format(structure, directory) -> None:
  """Raise if this version cannot read the format of a structure."""
  stored_format = structure.get("format") if isinstance(structure, dict) else None
  if type(stored_format) is int and stored_format > _FORMAT:
    raise ValueError(
      f"{directory} was written by a newer torchax, in format {stored_format}; this "
      f"one reads format {_FORMAT}. Update torchax to load it."
    )
  if stored_format != _FORMAT:
    raise ValueError(
      f"{directory} holds no state of `save_checkpoint`: expected format {_FORMAT}, "
      f"but got {stored_format!r}. Read it with orbax.checkpoint."
    )


_DAMAGE_ERRORS = (ValueError, KeyError, FileNotFoundError)


@contextlib.contextmanager
def _as_damaged(directory) -> Iterator[None]:
  """Raise one ValueError for the errors of truncated or missing files."""
  try:
    yield
  except Exception as error:
    # Orbax raises a bare `Exception` if an array's file is truncated.
    if type(error) is not Exception and not isinstance(error, _DAMAGE_ERRORS):
      raise
    raise ValueError(
      f"{directory} is damaged: a part of it is cut off, changed or missing. Load an "
      "earlier step, or a copy of this one."
    ) from error


def _orbax():
  epath = extras.load("etils.epath", "A checkpoint")
  return extras.load("orbax.checkpoint", "A checkpoint"), epath


def _absolute(path, epath):
  """Return an absolute path, as Orbax requires; URLs are absolute already."""
  path = os.fspath(path)
  return epath.Path(path if "://" in path else os.path.abspath(path))


def _step_directory(path, ocp):
  """Return the directory of one step: the path itself, or its latest step."""
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
