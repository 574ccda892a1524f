"""`python -m torchax.launch -n 2 script.py`: one program in several processes.

The processes run on this host. They find one another by variables of the environment,
torchrun's own and JAX's coordinator, which `torchax.processes.initialize()` reads. What
they write comes out line by line, with the rank in front. Where one of them fails it is
named, and the others are stopped; no process outlives this program.

The exit status is 0 where all ended well; else that of the process that failed first,
128 + the signal for one that a signal ended.
"""

import argparse
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

_LOCAL = "127.0.0.1"
_DEVICES = "--xla_force_host_platform_device_count"
_COLLECTIVES = "--xla_cpu_collective_timeout_seconds"
_POLL_SECONDS = 0.05
# What is still in the pipes of processes that have ended.
_LAST_WORDS_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Reads the numbers of groups of processes. If the pipe ends without a last word, this
# program was ended by force, and they are ended too.
_GUARD = """
import os, signal, sys
lines = sys.stdin.read().split()
for group in () if "done" in lines else map(int, lines):
  try:
    os.killpg(group, signal.SIGKILL)
  except OSError:
    pass
"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Starts the processes and waits for them.

  Args:
    arguments: of the command line; by default those of this process.

  Returns:
    The exit status.
  """
  options = _parser().parse_args(arguments)
  if not options.module and not pathlib.Path(options.script).is_file():
    _parser().error(
      f"there is no file {options.script}; a module is started by: -m "
      f"{options.script.removesuffix('.py').replace('/', '.')}"
    )
  program = ["-m", options.script] if options.module else [options.script]
  command = [sys.executable, "-u", *program, *options.args]
  return _Group(options, command).run()


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m torchax.launch",
    description="Runs a program in several processes of this host that are one world "
    "to JAX: `torchax.processes.initialize()` connects them.",
  )
  add = parser.add_argument
  add("-n", "--processes", type=_count, default=1, metavar="N", help="how many")
  add(
    "--devices-per-process",
    type=_count,
    metavar="D",
    help="lets each process have D devices of the host, and no accelerator",
  )
  add(
    "--grace",
    type=float,
    default=5.0,
    metavar="SECONDS",
    help="between the request to stop and the end by force (default: 5)",
  )
  add(
    "--collective-timeout",
    type=int,
    default=600,
    metavar="SECONDS",
    help="the longest that devices of hosts wait for the others of a collective, in "
    "which the slowest process may be compiling (default: 600; 0 leaves it to XLA)",
  )
  add("-m", "--module", action="store_true", help="the program is a module, no file")
  add("script", help="the program")
  add("args", nargs=argparse.REMAINDER, help="what the program is given")
  return parser


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"expected a number from 1 on, but got {text!r}")
  return int(text)


def _free_ports(count: int) -> list[int]:
  """Ports of this host that nobody listens on."""
  held = [socket.socket() for _ in range(count)]
  try:
    for found in held:
      found.bind((_LOCAL, 0))
    return [found.getsockname()[1] for found in held]
  finally:
    for found in held:
      found.close()


def _environments(options: argparse.Namespace) -> list[dict[str, str]]:
  """The variables of each process."""
  count = options.processes
  for_torch, for_jax = _free_ports(2)
  shared = {
    **os.environ,
    "WORLD_SIZE": str(count),
    "LOCAL_WORLD_SIZE": str(count),
    "MASTER_ADDR": _LOCAL,
    "MASTER_PORT": str(for_torch),
    "JAX_COORDINATOR_ADDRESS": f"{_LOCAL}:{for_jax}",
    # By default the coordinator would listen to the network.
    "JAX_COORDINATOR_BIND_ADDRESS": f"{_LOCAL}:{for_jax}",
  }
  flags = os.environ.get("XLA_FLAGS", "")
  if options.collective_timeout > 0 and _COLLECTIVES not in flags:
    flags += f" {_COLLECTIVES}={options.collective_timeout}"
  if options.devices_per_process is not None:
    flags = re.sub(rf"{_DEVICES}=\d+", "", flags)
    flags += f" {_DEVICES}={options.devices_per_process}"
    shared["JAX_PLATFORMS"] = "cpu"
    shared.pop("JAX_NUM_CPU_DEVICES", None)
  shared["XLA_FLAGS"] = flags.strip()
  ranks = map(str, range(count))
  return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


class _Group:
  """The processes of one run.

  Args:
    options: of the command line.
    command: what each process runs.
  """

  def __init__(self, options: argparse.Namespace, command: list[str]):
    self.options, self.command = options, command
    self.processes: list[subprocess.Popen[bytes]] = []
    self.readers: list[threading.Thread] = []
    self.writing = threading.Lock()
    self.signals: list[int] = []
    self.guard: subprocess.Popen[bytes] | None = None

  def run(self) -> int:
    """Starts all, waits for all, and leaves none behind."""
    before = {number: signal.signal(number, self._note) for number in _SIGNALS}
    self.guard = guard = subprocess.Popen(
      [sys.executable, "-I", "-S", "-c", _GUARD],
      stdin=subprocess.PIPE,
      start_new_session=True,
    )
    try:
      self._start()
      return self._wait()
    finally:
      self._kill(signal.SIGKILL)
      for process in self.processes:
        process.wait()
      guard.communicate(b"done\n")
      deadline = time.monotonic() + _LAST_WORDS_SECONDS
      for reader in self.readers:
        reader.join(max(0.0, deadline - time.monotonic()))
      for number, handler in before.items():
        signal.signal(number, handler)

  def _tell_guard(self, text: str) -> None:
    assert self.guard is not None and self.guard.stdin is not None
    self.guard.stdin.write(f"{text}\n".encode())
    self.guard.stdin.flush()

  def _note(self, number: int, frame: FrameType | None) -> None:
    self.signals.append(number)

  def _start(self) -> None:
    for environment in _environments(self.options):
      process = subprocess.Popen(
        self.command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
      )
      self.processes.append(process)
      self._tell_guard(str(process.pid))
    for rank, process in enumerate(self.processes):
      for source, target in (
        (process.stdout, sys.stdout),
        (process.stderr, sys.stderr),
      ):
        arguments = (rank, source, target)
        reader = threading.Thread(target=self._forward, args=arguments, daemon=True)
        reader.start()
        self.readers.append(reader)

  def _forward(self, rank: int, source: IO[bytes], target: IO[str]) -> None:
    for line in source:
      text = line.decode(errors="replace").rstrip("\n")
      self._write(target, f"[{rank}] {text}\n")

  def _write(self, target: IO[str], text: str) -> None:
    with self.writing:
      target.write(text)
      target.flush()

  def _say(self, text: str) -> None:
    self._write(sys.stderr, f"[launch] {text}\n")

  def _wait(self) -> int:
    while not self.signals:
      statuses = [process.poll() for process in self.processes]
      failed = [rank for rank, status in enumerate(statuses) if status]
      if failed:
        return self._stop_after(failed)
      if None not in statuses:
        return 0
      time.sleep(_POLL_SECONDS)
    self._say(f"{signal.Signals(self.signals[0]).name} came; all processes are stopped")
    self._stop(self.signals[0])
    return 128 + self.signals[0]

  def _stop_after(self, failed: list[int]) -> int:
    statuses = {rank: self.processes[rank].returncode for rank in failed}
    for rank, status in statuses.items():
      pid = self.processes[rank].pid
      self._say(f"process {rank} (pid {pid}) {_ending(status)}")
    running = [r for r, process in enumerate(self.processes) if process.poll() is None]
    if running:
      name = "process" if len(running) == 1 else "processes"
      named = ", ".join(map(str, running))
      self._say(f"{name} {named} still ran, and will be stopped")
    self._stop(signal.SIGTERM)
    first = statuses[failed[0]]
    return first if first > 0 else 128 - first

  def _stop(self, number: int) -> None:
    """Asks all processes to end; by force after the grace, or a second signal."""
    before = len(self.signals)
    self._kill(number)
    deadline = time.monotonic() + self.options.grace
    while time.monotonic() < deadline and len(self.signals) == before:
      if all(process.poll() is not None for process in self.processes):
        return
      time.sleep(_POLL_SECONDS)

  def _kill(self, number: int) -> None:
    """A signal to all processes, and to the processes that they have started."""
    for process in self.processes:
      try:
        os.killpg(process.pid, number)
      except (ProcessLookupError, PermissionError):
        continue  # nobody is left in the group


def _ending(status: int) -> str:
  """How a process ended, in words."""
  if status > 0:
    return f"failed with exit code {status}"
  text = f"was ended by {signal.Signals(-status).name}"
  if -status == signal.SIGABRT:
    text += (
      ": JAX does so where another process does not answer; its last lines name it"
    )
  return text


if __name__ == "__main__":
  sys.exit(main())
