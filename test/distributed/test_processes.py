"""Eight devices in two and in four processes: one world, as in one process.

The laws are in `in_processes.py`, which runs once in each world.
"""

import json
import os
import re
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from distributed import in_processes, worlds

from torchax import processes
from torchax.distributed.processes import communication_cost, start
from torchax.errors import ProcessError

WORLDS = {"2 x 4": (2, 4), "4 x 2": (4, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Return a folder with the checkpoint of one process."""
  pytest.importorskip("orbax.checkpoint", reason="the checkpoint extra is missing")
  folder = tmp_path_factory.mktemp("worlds")
  done = worlds.alone(8, worlds.HERE / "checkpoints.py", "save", folder / "of one")
  assert done.returncode == 0, done.stdout[-4000:]
  return folder


@pytest.fixture(scope="module", params=WORLDS)
def found(request, folder, tmp_path_factory) -> list[dict[str, str]]:
  """Return, for each process of a world, law -> traceback, or "" if the law holds."""
  count, devices = WORLDS[request.param]
  own = tmp_path_factory.mktemp("world")
  (own / "of one").symlink_to(folder / "of one")
  program = worlds.HERE / "in_processes.py"
  done = worlds.launch(count, program, own, devices=devices)
  assert done.returncode == 0, done.stdout[-4000:]
  (folder / f"of {count}").symlink_to(own / "of several")
  return [json.loads((own / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.programs
@pytest.mark.parametrize("law", in_processes.CASES)
def test_law_holds_in_several_processes(found, law):
  for rank, failures in enumerate(found):
    assert failures[law] == "", f"process {rank}: {failures[law]}"


@pytest.mark.programs
@pytest.mark.parametrize("devices", [1, 8])
def test_checkpoint_of_several_processes_loads_in_one(found, folder, devices):
  path = folder / f"of {len(found)}"
  done = worlds.alone(devices, worlds.HERE / "checkpoints.py", "load", path)
  assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.programs
def test_torchrun_starts_the_same_program():
  run = (sys.executable, "-m", "torch.distributed.run")
  command = (*run, "--standalone", "--nproc-per-node=2")
  program = (worlds.HERE / "endings.py", "well")
  done = worlds.run(*command, *program, env=worlds.environment(4))
  assert done.returncode == 0, done.stdout[-4000:]
  assert done.stdout.count("the sum is 28.0") == 2


# A single process --------------------------------------------------------------------

OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "7"}


@pytest.mark.parametrize(
  "variables, world",
  [
    ({}, None),
    (OF_TWO, start.World("host:7", 2, 1, 0, 1)),
    (
      OF_TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
      start.World("host:7", 2, 1, 1, 2),
    ),
    (OF_TWO | {"JAX_COORDINATOR_ADDRESS": "a:1"}, start.World("a:1", 2, 1, 0, 1)),
    ({"RANK": "0", "WORLD_SIZE": "1"}, start.World("", 1, 0, 0, 1)),
  ],
)
def test_world_is_read_from_the_environment(variables, world):
  assert start.world_of(variables) == world


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"RANK": None}, "RANK of the environment has to be a number, but it is missing"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE .* it is missing"),
    ({"RANK": "2"}, "got RANK=2 and WORLD_SIZE=2"),
    ({"RANK": "first"}, "RANK=first"),
    ({"MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR, the host of process 0, is missing"),
  ],
)
def test_inconsistent_environment_raises(changes, said):
  changed = {**OF_TWO, **changes}
  variables = {name: value for name, value in changed.items() if value is not None}
  with pytest.raises(ProcessError, match=said):
    start.world_of(variables)


def test_initialize_after_jax_has_started_raises(monkeypatch):
  torch.ones(1, device="jax")
  for name, value in OF_TWO.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(RuntimeError, match="has to come before anything that uses a dev"):
    processes.initialize()


def test_unresolvable_host_name_raises_with_advice(monkeypatch):
  def refuse():
    raise RuntimeError("enforce fail at external/gloo/gloo/transport/tcp/device.cc:99")

  monkeypatch.setattr(start.jax, "process_count", refuse)
  with pytest.raises(ProcessError, match=r"name of this host.*Add it to /etc/hosts"):
    start._count()


@pytest.mark.parametrize(
  "coordinator, address",
  [("127.0.0.1:7", "127.0.0.1"), ("localhost:7", "127.0.0.1"), ("host:7", None)],
)
def test_processes_of_one_host_join_at_its_own_address(
  coordinator, address, monkeypatch
):
  joined = []
  monkeypatch.setattr(start.jax_compat, "has_started", lambda: False)
  monkeypatch.setattr(start.jax_compat, "join_cpus_at", joined.append)
  monkeypatch.setattr(start.jax.distributed, "initialize", lambda **options: None)
  # The fixture restores it.
  monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
  for name, value in (OF_TWO | {"JAX_COORDINATOR_ADDRESS": coordinator}).items():
    monkeypatch.setenv(name, value)
  processes.initialize()
  assert joined == ([address] if address else [])


def test_single_process_needs_no_connection_and_passes_checks(monkeypatch):
  for name in OF_TWO:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("RANK", "0")
  monkeypatch.setenv("WORLD_SIZE", "1")
  assert processes.initialize() is None
  processes.barrier("of one")
  processes.require_equal("a value", object)
  t = torch.ones(2, device="jax")
  assert processes.gather([t, 1])[0] is t


# Batches -----------------------------------------------------------------------------


def test_epoch_visits_each_row_once_in_its_own_order():
  batches = list(processes.Batches(12, 4, seed=1, epochs=2))
  epochs = [sum(batches[:3], []), sum(batches[3:], [])]
  assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
  assert epochs[0] != epochs[1]
  assert batches == list(processes.Batches(12, 4, seed=1, epochs=2))
  assert batches != list(processes.Batches(12, 4, seed=2, epochs=2))


def test_batches_resume_at_the_step_number():
  batches = list(processes.Batches(10, 4, seed=1, epochs=3))
  for begin in range(7):
    rest = processes.Batches(10, 4, seed=1, start=begin, epochs=3)
    assert list(rest) == batches[begin:] and len(rest) == len(batches) - begin


def test_endless_batches_have_no_length():
  endless = processes.Batches(4, 2)
  assert len([rows for rows, _ in zip(endless, range(100))]) == 100
  with pytest.raises(TypeError, match="never end"):
    len(endless)


@pytest.mark.parametrize(
  "size, batch_size, options, said",
  [
    (4, 5, {}, "from 1 to 4 rows in a batch, but got 5"),
    (4, 0, {}, "but got 0"),
    (4, 2, {"start": -1}, "start=-1"),
    (4, 2, {"seed": -1}, "seed=-1"),
  ],
)
def test_impossible_batches_raise(size, batch_size, options, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    processes.Batches(size, batch_size, **options)


# Collectives -------------------------------------------------------------------------

PROGRAM = """
  %a = f32[8,4]{1,0} all-gather(%p), dimensions={0}, metadata={op_name="jit(f)/mul"}
  %b = (f32[], bf16[3]{0}, /*index=2*/pred[5]{0}) all-reduce(%x, %y, %z), to_apply=%add
  %c = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), dimensions={0}
  %d = f32[8]{0} all-gather-done(%c)
  %e = f32[8]{0} fusion(%all-gather.3), calls=%all-reduce-fusion
"""


def test_collectives_of_a_program_have_kind_bytes_and_source():
  found = communication_cost.collectives_of(PROGRAM)
  assert found == [
    ("all-gather", 128, "jit(f)/mul"),
    ("all-reduce", 4 + 6 + 5, ""),
    ("all-gather", 32, ""),
  ]
  assert processes.bytes_by_kind(found) == {"all-gather": 160, "all-reduce": 15}


def test_global_batch_narrows_dtypes_as_jax_does():
  mesh = in_processes.Mesh(np.array(in_processes.jax.devices()[:1]), ("data",))
  sharding = in_processes.NamedSharding(mesh, in_processes.PartitionSpec("data"))
  found = processes.global_batch(
    {
      "a": torch.tensor([1, 2]),
      "b": np.ones((2, 3), np.float32),
      "c": torch.ones(2).bfloat16(),
    },
    sharding,
  )
  assert found["a"].tolist() == [1, 2] and found["b"].shape == (2, 3)
  assert found["c"].dtype == torch.bfloat16
  with pytest.raises(OverflowError):
    processes.global_batch(torch.tensor([2**40]), sharding)


def test_chunks_that_do_not_divide_raise():
  mesh = in_processes.Mesh(np.array(in_processes.jax.devices()[:1]), ("data",))
  with pytest.raises(ValueError, match="'data' divide, but got 0"):
    processes.in_fixed_order(lambda w, x: x.mean(), mesh, "data", 0)
  mean = processes.in_fixed_order(lambda w, x: x.mean(), mesh, "data", 4)
  with pytest.raises(ValueError, match="4 chunks with equally many rows.* got 6"):
    mean({}, torch.ones(6, device="jax"))


@pytest.mark.parametrize(
  "flags, expected",
  [
    ("", ["--xla_cpu_collective_timeout_seconds=600"]),
    ("--a=b", ["--a=b", "--xla_cpu_collective_timeout_seconds=600"]),
    (
      "--xla_cpu_collective_timeout_seconds=7",
      ["--xla_cpu_collective_timeout_seconds=7"],
    ),
  ],
)
def test_connecting_bounds_collectives_between_cpus(flags, expected, monkeypatch):
  given = {}
  monkeypatch.setattr(start.jax.distributed, "initialize", given.update)
  monkeypatch.setattr(start.jax_compat, "join_cpus_at", lambda address: None)
  monkeypatch.setenv("XLA_FLAGS", flags)
  start._connect(start.World("127.0.0.1:7", 2, 1, 1, 2), None, {})
  assert os.environ["XLA_FLAGS"].split() == expected
  # The coordinator of a single host does not listen to the network.
  assert given["coordinator_bind_address"] == "127.0.0.1:7"
  assert given["local_device_ids"] == [1]


# Endings -----------------------------------------------------------------------------


def _end(way: str, prefix=()):
  return worlds.launch(2, worlds.HERE / "endings.py", way, devices=4, prefix=prefix)


@pytest.mark.programs
@pytest.mark.parametrize(
  "way, status, said",
  [
    ("well", 0, ()),
    (
      "raise",
      1,
      ("ValueError: of process 1", "Process 1 of 2 ends with this error."),
    ),
    ("kill", 1, ("Signal 9 (SIGKILL) received",)),
    # JAX's message about a process that does not answer, which stops the others.
    ("stop", 1, ("stopped sending heartbeats", "exitcode: -6")),
    ("exit", None, ("Process 1 of 2 is at its end, and waits for others",)),
  ],
)
def test_an_ending_process_is_noticed_within_a_minute(way, status, said):
  began = time.monotonic()
  done = _end(way)
  assert done.stdout.count("the sum is 28.0") == 2, done.stdout
  assert (done.returncode == status) if status is not None else done.returncode
  for words in said:
    assert words in done.stdout
  assert time.monotonic() - began < 120  # one minute, and the time to start


def _can_rename_the_host() -> bool:
  """Return True if a process may set the name of its host."""
  known = shutil.which("unshare") and shutil.which("hostname")
  return bool(known) and worlds.run("unshare", "--uts", "true").returncode == 0


@pytest.mark.programs
@pytest.mark.skipif(
  not _can_rename_the_host(), reason="needs the right to `unshare --uts`"
)
def test_processes_of_one_host_need_no_resolvable_name():
  rename = 'hostname nobody-knows-this-name && exec "$@"'
  done = _end("well", ("unshare", "--uts", "sh", "-c", rename, "sh"))
  assert done.returncode == 0, done.stdout[-4000:]
  assert done.stdout.count("the sum is 28.0") == 2
