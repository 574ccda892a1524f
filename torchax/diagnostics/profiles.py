"""`torchax.profile`: a trace of JAX's profiler, and the time of each module."""

import contextlib
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import jax

from torchax.devices import streams
from torchax.diagnostics import traces

_LONGEST = 20


class Seconds(NamedTuple):
  """Time of a module's operations, added up over threads and devices.

  Attributes:
    forward: seconds of everything except gradients.
    backward: seconds of gradients.
  """

  forward: float = 0.0
  backward: float = 0.0


class Profile:
  """Trace of a block of code, the result of `torchax.profile`.

  `str()` gives a table of the modules that took longest.

  Attributes:
    directory: directory for TensorBoard.
    path: file for Perfetto; None until the block has ended.
  """

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    self.path: pathlib.Path | None = None

  def by_module(self, depth: int | None = None) -> dict[str, Seconds]:
    """Return the time of each module in compiled programs, the longest first.

    An operation counts for the innermost module. XLA may fuse operations of several
    modules; the result counts for one of them.

    Args:
      depth: number of parts of a path, such as 2 for "layers.0"; deeper modules are
        added to it. All parts if None.

    Returns:
      Path of the module -> its time. Operations outside of modules have the name of
      their program.

    Raises:
      RuntimeError: the block has not ended.

    >>> import tempfile
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2)).to("jax")
    >>> jitted = torchax.interop.jax_jit(model)
    >>> with torchax.profile(tempfile.mkdtemp()) as profile:
    ...   y = jitted(torch.ones(3, 2, device="jax"))
    >>> "0" in profile.by_module()
    True
    """
    if self.path is None:
      raise RuntimeError(
        "Profile.by_module expects a trace that has ended, but got a running one. Call "
        "it after the `with` block."
      )
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for file in self.path.parent.glob("*.xplane.pb"):
      for operation in traces.operations(file):
        module = shorten(operation.module, depth)
        sums[module][operation.is_backward] += operation.seconds
    longest = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return {module: Seconds(*seconds) for module, seconds in longest}

  def __str__(self) -> str:
    modules = self.by_module()
    total = sum(map(sum, modules.values())) or 1.0
    lines = [f"{'module':40} {'forward':>10} {'backward':>10} {'share':>6}"]
    for module, seconds in list(modules.items())[:_LONGEST]:
      forward, backward = [f"{1e3 * each:.2f} ms" for each in seconds]
      share = f"{sum(seconds) / total:.0%}"
      lines.append(f"{module:40} {forward:>10} {backward:>10} {share:>6}")
    return "\n".join(lines)


def shorten(path: str, depth: int | None) -> str:
  """Return the first parts of a module's path; all of them if `depth` is None."""
  return ".".join(path.split(".")[:depth])


@contextlib.contextmanager
def profile(directory: str | os.PathLike, python: bool = False) -> Iterator[Profile]:
  """Write a trace of the block, with the names of modules in compiled programs.

  Perfetto (https://ui.perfetto.dev) opens the file `Profile.path`, TensorBoard with
  xprof the directory. Run the block once before: else the trace shows compilation.

  Args:
    directory: directory for the trace; created if it is missing. A second trace is
      written beside the first.
    python: also record calls of Python functions, which slows the block.

  Yields:
    A `Profile`; it has the trace when the block has ended.

  Raises:
    NotADirectoryError: the directory is a file.
    RuntimeError: another trace is running.

  >>> import tempfile
  >>> with torchax.profile(tempfile.mkdtemp()) as profile:
  ...   y = torch.ones(2, device="jax") + 1
  >>> profile.path.name.endswith(".trace.json.gz")
  True
  """
  found = Profile(pathlib.Path(directory))
  if found.directory.exists() and not found.directory.is_dir():
    raise NotADirectoryError(
      f"profile expects a directory, but got the file {directory}. Name a directory "
      "for the trace; it is created if it is missing."
    )
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = int(python)
  try:
    jax.profiler.start_trace(found.directory, profiler_options=options)
  except RuntimeError as error:
    raise RuntimeError(
      f"profile could not start: {error} End the trace that is running, or call "
      "`torchax.profile` once around all of the code."
    ) from error
  try:
    yield found
  finally:
    streams.synchronize()  # arrays that the block has started to compute
    jax.profiler.stop_trace()
    written = found.directory.glob("plugins/profile/*")
    found.path = traces.add_names(max(written, key=lambda run: run.stat().st_mtime_ns))
