"""`init_process_group("jax")` in one process, and in two of two devices each.

The laws of two processes are in `process_group_cases.py`, which runs once.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import many_devices
import pytest
from distributed import process_group_cases

_PROGRAM = pathlib.Path(process_group_cases.__file__)

pytestmark = pytest.mark.programs


def _free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def _start(rank: int, path: pathlib.Path, coordinator: str) -> subprocess.Popen:
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, many_devices.PLACES)),
    "RANK": str(rank),
    "WORLD_SIZE": "2",
    "COORDINATOR": coordinator,
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
  }
  return subprocess.Popen(
    [sys.executable, str(_PROGRAM), str(path)],
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> list[dict[str, str]]:
  """Return, for each process, law -> traceback, or "" if the law holds."""
  folder = tmp_path_factory.mktemp("processes")
  paths = [folder / f"{rank}.json" for rank in range(2)]
  coordinator = f"127.0.0.1:{_free_port()}"
  processes = [_start(rank, path, coordinator) for rank, path in enumerate(paths)]
  try:
    errors = [process.communicate(timeout=240)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, error in zip(processes, errors, strict=True):
    assert process.returncode == 0, error[-4000:]
  return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("law", process_group_cases.CASES)
def test_in_two_processes(failures, law):
  assert [found[law] for found in failures] == ["", ""], "\n".join(
    found[law] for found in failures
  )


# Name -> (program of one process, its output).
PROGRAMS = {
  "alone": (
    """
dist.init_process_group("jax")
print(dist.get_rank(), dist.get_world_size(), dist.get_backend())
x = torch.tensor([1.0, 2.0]).to("jax")
dist.all_reduce(x)
dist.barrier()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to("jax"))
model(x).sum().backward()
print(x.tolist(), model.module.weight.grad.tolist())
dist.destroy_process_group()
print(dist.is_initialized())
""",
    "0 1 jax\n[1.0, 2.0] [[1.0, 2.0]]\nFalse\n",
  ),
  "twice": (
    """
dist.init_process_group("jax")
try:
  dist.init_process_group("jax")
except ValueError as error:
  print(error)
""",
    "trying to initialize the default process group twice!\n",
  ),
  "another world": (
    """
from torchax.errors import CollectiveError
for options in ({"world_size": 2}, {"rank": 1}):
  try:
    dist.init_process_group("jax", **options)
  except CollectiveError as error:
    print(error.text)
import os
os.environ["WORLD_SIZE"] = "2"
try:
  dist.init_process_group("jax")
except CollectiveError as error:
  print(error.text.partition('.')[0])
try:
  dist.init_process_group("cpu:gloo,jax:jax")
except CollectiveError as error:
  print(error.text)
print(dist.is_initialized())
""",
    "init_process_group was given world_size=2, but JAX says 1: a rank on jax is a "
    "process, which drives all of its devices. Leave it out.\n"
    "init_process_group was given rank=1, but JAX says 0: a rank on jax is a process, "
    "which drives all of its devices. Leave it out.\n"
    "A launcher has started 2 processes (WORLD_SIZE), but JAX has 1\n"
    'Expected init_process_group("jax"), which takes CPU tensors too, but got '
    "'cpu:gloo,jax:jax'.\nFalse\n",
  ),
  "ddp without a group": (
    """
try:
  torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to("jax"))
except RuntimeError as error:
  print(error)
""",
    "DistributedDataParallel needs a process group. Write "
    '`torch.distributed.init_process_group("jax")` first.\n',
  ),
}

# torch's own behaviour, before and after a group on jax.
GLOO = """
import os, inspect
os.environ.pop("WORLD_SIZE", None)
def use(**options):
  dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
  x = torch.ones(2)
  dist.all_reduce(x)
  mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
  from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros
  placed = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
  local = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
  made = zeros(2, device_mesh=mesh)
  model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
  model(x).sum().backward()
  print(dist.get_backend(), type(placed).__name__, local, made, mesh, type(model))
  print(dist.Backend.default_device_backend_map, inspect.signature(distribute_tensor))
  print(inspect.signature(dist.init_process_group), mesh.get_group().group_name)
  dist.destroy_process_group()
"""
AFTER_JAX = """
dist.init_process_group("jax")
dist.init_device_mesh("jax", (1,))
dist.destroy_process_group()
"""


def _output(program: str, imports: str = "torchax") -> str:
  start = f"import {imports}\nimport torch\nimport torch.distributed as dist\n"
  # A program that hangs reports where.
  start += "import faulthandler\nfaulthandler.dump_traceback_later(100, exit=True)\n"
  result = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", start + program],
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  assert result.returncode == 0, result.stderr[-3000:]
  return result.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name):
  program, printed = PROGRAMS[name]
  assert _output(program) == printed


@pytest.mark.parametrize("before", ["", AFTER_JAX], ids=["only imported", "after jax"])
def test_other_backends_are_as_without_torchax(before):
  use = GLOO + 'use(backend="gloo")\nuse()\n'
  assert _output(before + use) == _output(use, imports="torch")


OF_A_LAUNCHER = """
import sys
import torch, torchax
import torch.distributed as dist
dist.init_process_group("jax")
total = torch.ones(2, device="jax") * (dist.get_rank() + 1)
dist.all_reduce(total)
line = f"{dist.get_rank()} of {dist.get_world_size()} {total.tolist()}\\n"
# In one piece: torchrun's processes, and Gloo in them, write to one pipe.
sys.stdout.write(line)
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_a_group_connects_the_processes_of_torchrun(tmp_path):
  script = tmp_path / "program.py"
  script.write_text(OF_A_LAUNCHER)
  torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
  result = subprocess.run(
    [sys.executable, "-m", *torchrun, str(script)],
    capture_output=True,
    text=True,
    check=False,
    timeout=240,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  assert result.returncode == 0, result.stderr[-3000:]
  for rank in range(2):
    assert f"{rank} of 2 [3.0, 3.0]" in result.stdout
