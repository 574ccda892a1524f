"""Programs in several processes, which end with the test that starts them."""

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
SECONDS = 400  # for slow machines


@functools.cache
def _cache() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory()


def environment(devices: int | None = None) -> dict[str, str]:
  """Return the variables of a program, which finds the library and these files."""
  of_others = ("XLA_FLAGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
  kept = {name: v for name, v in os.environ.items() if name not in of_others}
  kept |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}", "JAX_PLATFORMS": "cpu"}
  # All runs share a compilation cache, so each program compiles once per kind of world.
  kept |= {"JAX_COMPILATION_CACHE_DIR": _cache().name}
  kept |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
  if devices is not None:
    kept["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  return kept


@contextlib.contextmanager
def started(*command, **options) -> Iterator[subprocess.Popen]:
  """Start a process; end its whole process group with the block."""
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
  """Run a program to its end; `stdout` of the result has its output."""
  with started(*command, **options) as process:
    output, _ = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, output)


# The rank precedes the output of each process: "[default1]:".
TORCHRUN = (
  *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
  *("--local-addr=127.0.0.1", "--tee=3"),
)


def launch(processes: int, *program, devices: int | None = None, prefix=()):
  """Run a program in several processes on this host, as on several hosts."""
  command = (*prefix, *TORCHRUN, f"--nproc-per-node={processes}", *program)
  return run(*command, env=environment(devices))


def alone(devices: int, *program):
  """Run a program in one process with this number of devices."""
  return run(sys.executable, *program, env=environment(devices))
