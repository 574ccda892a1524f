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

Start at `save_checkpoint`; `structure.py` turns a state into JSON and back,
`targets.py` says where its arrays go.
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
from torchax.core.explanations import require_eager
from torchax.core.tracebacks import ending_at_the_user
from torchax.distributed.processes.agreement import require_equal
from torchax.saving.state_files import load_state

_FORMAT = 1
_STRUCTURE, _ARRAYS = "structure", "arrays"


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
  place = _new_step(_absolute(path, epath), step)
  finish_saving()
  writer = Writer(background)
  structure = {"format": _FORMAT, "state": writer.node(state, "state", ())}
  _require_equal_states(state, structure, writer.local, place)
  _write(ocp, structure, writer.arrays, place, background)


def _new_step(path, step: int):
  """The directory of a step that is to be saved."""
  if isinstance(step, bool) or operator.index(step) < 0:
    raise ValueError(f"A step is an int >= 0, but got {step!r}.")
  place = path / str(operator.index(step))
  if place.exists():
    raise FileExistsError(
      f"{place} exists, and a checkpoint is never overwritten. Save under another "
      "step, or remove that directory first."
    )
  return place


def _write(ocp, structure, arrays: dict, place, background: bool) -> None:
  items = {_STRUCTURE: ocp.args.JsonSave(structure)}
  if arrays:  # Orbax refuses an empty item
    items[_ARRAYS] = ocp.args.StandardSave(arrays)
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
  return _read(ocp, _step_directory(_absolute(path, epath), ocp), like)


def _read(ocp, place, like) -> dict[str, Any]:
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:

    def read(**items):
      return checkpointer.restore(place, args=ocp.args.Composite(**items))

    with _damage_named(place):
      structure = read(structure=ocp.args.JsonRestore()).structure
    _require_format(structure, place)
    nodes = list(targets.array_nodes(structure["state"]))
    targets.require_width(nodes, place)
    wanted = targets.shardings_like(structure["state"], like, place)
    what = "the checkpoint that is loaded"
    require_equal(what, [str(place), structure], _TOGETHER_SECONDS, shown=str(place))
    arrays = {}
    if any("name" in node for node in nodes):
      target = targets.target_of(nodes, wanted)
      with _damage_named(place):
        arrays = read(arrays=ocp.args.StandardRestore(target)).arrays
  with _damage_named(place):
    return Reader(arrays).value(structure["state"])


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
