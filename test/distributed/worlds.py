"""Starts programs in several processes; none of them outlives its test."""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from source_tree import ROOT

HERE = pathlib.Path(__file__).parent
SECONDS = 400  # machines are slow


@functools.cache
def _cache() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory()


def environment(devices: int | None = None) -> dict[str, str]:
  """The variables of a program, which finds the library and these files."""
  of_others = ("XLA_FLAGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
  kept = {name: v for name, v in os.environ.items() if name not in of_others}
  kept |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}", "JAX_PLATFORMS": "cpu"}
  # Runs of one program in worlds of one kind compile it once.
  kept |= {"JAX_COMPILATION_CACHE_DIR": _cache().name}
  kept |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
  if devices is not None:
    kept["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  return kept


@contextlib.contextmanager
def started(*command, **options) -> Iterator[subprocess.Popen]:
  """A process whose whole group is ended with the block."""
  process = subprocess.Popen(
    [str(part) for part in command],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
    **{"env": environment(), **options},
  )
  try:
    with process:
      try:
        yield process
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
  finally:
    process.wait()


def run(*command, **options) -> subprocess.CompletedProcess:
  """Runs a program to its end; its output is in `stdout`."""
  with started(*command, **options) as process:
    output, _ = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, output)


# The output of each process has its rank in front: "[default1]:".
TORCHRUN = (
  *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
  *("--local-addr=127.0.0.1", "--tee=3"),
)


def launch(processes: int, *program, devices: int | None = None, prefix=()):
  """Runs a program in several processes, as a laptop rehearses several hosts."""
  command = (*prefix, *TORCHRUN, f"--nproc-per-node={processes}", *program)
  return run(*command, env=environment(devices))


def alone(devices: int, *program):
  """Runs a program in one process with so many devices."""
  return run(sys.executable, *program, env=environment(devices))
