"""Connection of the processes of a run, and shutdown of all of them if one fails.

The launcher provides the address of the coordinator: `torchrun`, or a cluster that JAX
detects (Slurm, Open MPI, Kubernetes, Cloud TPU).
"""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch

from torchax.compat import jax_compat
from torchax.core.tracebacks import hide_library_frames
from torchax.errors import ProcessError

HEARTBEAT_SECONDS = 40
"""Time after which a process that does not answer counts as dead."""
SHUTDOWN_SECONDS = 60
"""Longest wait of a process at its end for the others to end."""
START_SECONDS = 300
"""Longest wait of a process at its start for the others to connect."""
COLLECTIVE_SECONDS = 600
"""Longest wait for the others in a collective between CPUs; the slowest may compile."""

# A process that ends earlier than others by more than this prints a line.
_EARLY_SECONDS = 5

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_COLLECTIVES = "--xla_cpu_collective_timeout_seconds"
# Coordinator hosts that only processes of this host can reach, and their address.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
_INTERRUPTED = 130  # the exit code of shells: 128 + SIGINT


class World(NamedTuple):
  """Position of this process among the processes of a run.

  Attributes:
    coordinator: "host:port" where process 0 listens.
    size: number of processes.
    rank: rank of this process, from 0.
    local_rank: rank of this process on its host.
    local_count: number of processes on this host.
  """

  coordinator: str
  size: int
  rank: int
  local_rank: int
  local_count: int


@hide_library_frames
def initialize(
  *,
  local_device_ids: Sequence[int] | None = None,
  heartbeat_timeout: int = HEARTBEAT_SECONDS,
  shutdown_timeout: int = SHUTDOWN_SECONDS,
  start_timeout: int = START_SECONDS,
) -> None:
  """Connect this process with the others of its run; call it first in a program.

  The rank comes from the environment variables of `torchrun`, else from a cluster that
  `jax.distributed.initialize` detects. A process started by itself stays alone.
  Afterwards `jax.devices()` lists the devices of all processes. The page Scaling
  describes what happens when a process fails.

  Args:
    local_device_ids: GPUs of this host for this process. By default, if the host runs
      several processes, the GPU of its local rank; else all GPUs.
    heartbeat_timeout: in seconds; see `HEARTBEAT_SECONDS`.
    shutdown_timeout: in seconds; how long processes that end first wait for the last.
      If one process works alone for longer at the end, call `barrier` in all
      processes after that work.
    start_timeout: in seconds; how long processes wait for one another to connect.

  Raises:
    RuntimeError: called twice, or after JAX has initialized its devices.
    ProcessError: environment variables contradict each other or are missing, or the
      other processes do not connect.

  >>> initialize()  # in a process that is alone
  """
  if jax.distributed.is_initialized():
    raise RuntimeError(
      f"The processes are connected: this one is {jax.process_index()} of "
      f"{jax.process_count()}. `initialize` is called once in each process; remove the "
      "second call, or that of jax.distributed.initialize."
    )
  world = world_of(os.environ)
  if world is not None and world.size == 1:
    return
  _require_no_device_in_use()
  timeouts: dict[str, Any] = {
    "heartbeat_timeout_seconds": heartbeat_timeout,
    "shutdown_timeout_seconds": shutdown_timeout,
    "initialization_timeout": start_timeout,
  }
  if world is not None:
    _connect(world, local_device_ids, timeouts)
  elif not _connect_by_jax(local_device_ids, timeouts):
    return
  if _count() > 1:
    _exit_at_once_after_errors()


def _require_no_device_in_use() -> None:
  if jax_compat.has_started():
    raise RuntimeError(
      "`torchax.processes.initialize()` has to come before anything that uses a device "
      "of JAX: before the first tensor on jax, `jax.devices()` and `torch.jax."
      "device_count()`. Make it the first line after the imports."
    )


def _count() -> int:
  """Return the number of processes; initializes JAX's devices."""
  try:
    return jax.process_count()
  except RuntimeError as error:
    if not jax_compat.is_about_name_of_host(error):
      raise
    raise ProcessError(
      f"The name of this host, {socket.gethostname()!r}, does not resolve to an "
      "address, at which the CPUs of processes find one another. Add it to /etc/hosts, "
      "or give the host a name that resolves. For processes of one host, "
      "`torchrun --standalone --local-addr=127.0.0.1` needs no name."
    ) from error


def _connect(world: World, local_device_ids, timeouts: dict[str, Any]) -> None:
  xla_flags = os.environ.get("XLA_FLAGS", "")
  if _COLLECTIVES not in xla_flags:
    own = f"{_COLLECTIVES}={COLLECTIVE_SECONDS}"
    os.environ["XLA_FLAGS"] = f"{xla_flags} {own}".strip()
  if local_device_ids is None and world.local_count > 1:
    local_device_ids = [world.local_rank]
  host = world.coordinator.rpartition(":")[0]
  try:
    jax.distributed.initialize(
      coordinator_address=world.coordinator,
      # By default the coordinator listens on all network interfaces.
      coordinator_bind_address=world.coordinator if host in _LOOPBACK else None,
      num_processes=world.size,
      process_id=world.rank,
      local_device_ids=local_device_ids,
      cluster_detection_method="deactivate",
      **timeouts,
    )
  except jax.errors.JaxRuntimeError as error:
    raise ProcessError(
      f"Process {world.rank} of {world.size} did not find the others at "
      f"{world.coordinator} within {timeouts['initialization_timeout']} s. Is process "
      "0 alive, can this host reach that address, and were all processes started? "
      f"JAX says: {error}"
    ) from error
  if host in _LOOPBACK:
    jax_compat.join_cpus_at(_LOOPBACK[host])


def _connect_by_jax(local_device_ids, timeouts: dict[str, Any]) -> bool:
  """Connect by JAX's cluster detection; return False for a process that is alone."""
  try:
    jax.distributed.initialize(local_device_ids=local_device_ids, **timeouts)
  except ValueError as error:
    if jax_compat.is_about_missing_cluster(error):
      return False
    raise
  return True


def world_of(variables: Mapping[str, str]) -> World | None:
  """Return the world that a launcher set in the environment; None without a launcher.

  Args:
    variables: environment variables.

  Raises:
    ProcessError: variables are missing, not numbers, or inconsistent.
  """
  if "RANK" not in variables and "WORLD_SIZE" not in variables:
    return None
  count, rank = _number("WORLD_SIZE", variables), _number("RANK", variables)
  if not 0 <= rank < count:
    raise ProcessError(
      f"Expected a RANK from 0 to WORLD_SIZE - 1, but got RANK={rank} and WORLD_SIZE="
      f"{count}. Start the processes by torchrun, which sets both."
    )
  local_rank = _number("LOCAL_RANK", variables) if "LOCAL_RANK" in variables else 0
  local_count = 1
  if "LOCAL_WORLD_SIZE" in variables:
    local_count = _number("LOCAL_WORLD_SIZE", variables)
  coordinator = variables.get(_ADDRESS) or ""
  if not coordinator and count > 1:
    coordinator = _coordinator(variables, rank)
  return World(coordinator, count, rank, local_rank, local_count)


def _number(name: str, variables: Mapping[str, str]) -> int:
  text = variables.get(name, "")
  if not text.isdecimal():
    found = f"{name}={text}" if name in variables else "it is missing"
    raise ProcessError(
      f"The variable {name} of the environment has to be a number, but {found}. Start "
      "the processes by torchrun, which sets it; or remove RANK and WORLD_SIZE for a "
      "process that is alone."
    )
  return int(text)


def _coordinator(variables: Mapping[str, str], rank: int) -> str:
  """Return "host:port" of JAX's coordinator, on the host of process 0."""
  host, port = variables.get("MASTER_ADDR"), _number("MASTER_PORT", variables)
  if not host:
    raise ProcessError(
      "MASTER_ADDR, the host of process 0, is missing in the environment. Start the "
      "processes by torchrun, or set JAX_COORDINATOR_ADDRESS to its host and a port."
    )
  if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
    return f"{host}:{port}"
  # torchrun itself listens at that port; its store passes on the port of process 0.
  store = torch.distributed.TCPStore(host, port, is_master=False)
  key = f"torchax/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}/coordinator"
  if rank == 0:
    with socket.socket() as probe:
      probe.bind(("", 0))
      store.set(key, str(probe.getsockname()[1]))
  return f"{host}:{int(store.get(key))}"


class _ExitCode:
  """Exit code of this process after an error; None without one."""

  code: int | None = None


def _exit_at_once_after_errors() -> None:
  """Make a process that raises exit without waiting for the others.

  JAX waits at exit until all processes exit, and the others may wait for this one in a
  collective. Functions registered with `atexit` later still run, before this one.
  """
  report = sys.excepthook

  def report_and_record(kind, error, traceback):
    _ExitCode.code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
    report(kind, error, traceback)
    sys.stderr.write(
      f"Process {jax.process_index()} of {jax.process_count()} ends with this error.\n"
    )

  sys.excepthook = report_and_record
  atexit.register(_exit)


def _exit() -> None:
  if _ExitCode.code is None:
    _wait_for_the_others()
    return
  logging.shutdown()
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(_ExitCode.code)


def _wait_for_the_others() -> None:
  """Print a line if this process ends long before others; JAX then waits for them."""
  client = jax_compat.coordination_client()
  if client is None:  # the program has shut JAX's client down
    return
  try:
    client.wait_at_barrier("torchax/end", _EARLY_SECONDS * 1000)
  except jax.errors.JaxRuntimeError:
    sys.stderr.write(
      f"Process {jax.process_index()} of {jax.process_count()} is at its end, and "
      "waits for others that are not.\n"
    )
    sys.stderr.flush()
