"""`python -m torchax.launch`: starts processes, and leaves none behind."""

import os
import re
import shutil
import signal
import sys
import time

import pytest
from dist import worlds

from torchax import launch

pytestmark = pytest.mark.programs

# What a process does when it is started; "wait" is longer than any test.
PROGRAM = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def wait():
  child = subprocess.Popen(["sleep", "1000"])
  print("pids", os.getpid(), child.pid, flush=True)
  time.sleep(1000)
{body}
"""


@pytest.fixture
def program(tmp_path):
  """(statements) -> a file with them."""

  def write(body: str):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(body=body))
    return path

  return write


def _pids(output: str) -> list[int]:
  lines = re.findall(r"pids (\d+) (\d+)", output)
  return [int(pid) for line in lines for pid in line]


def _is_running(pid: int) -> bool:
  try:
    with open(f"/proc/{pid}/stat") as stat:
      return stat.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def _require_gone(pids: list[int]) -> None:
  assert pids
  deadline = time.monotonic() + 30
  while any(map(_is_running, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not [pid for pid in pids if _is_running(pid)]


def test_lines_come_with_their_rank_and_arguments_reach_the_program(program, capfd):
  path = program(
    "print('out', sys.argv[1:]); print('error', file=sys.stderr)\n"
    "print('no newline', end='')"
  )
  assert launch.main(["-n", "3", str(path), "-n", "7", "a b"]) == 0
  out, error = capfd.readouterr()
  for rank in range(3):
    mine = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
    assert mine == [f"[{rank}] out ['-n', '7', 'a b']", f"[{rank}] no newline"]
  assert sorted(error.splitlines()) == [f"[{rank}] error" for rank in range(3)]


def test_the_variables_are_those_of_torchrun_and_of_jax(program, capfd, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --a=b")
  names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR JAX_PLATFORMS"
  path = program(
    f"print(*[os.environ[name] for name in {names.split()}])\n"
    "print(os.environ['XLA_FLAGS'])\n"
    "print(os.environ['JAX_COORDINATOR_ADDRESS'], os.environ['MASTER_PORT'])"
  )
  assert launch.main(["-n", "2", "--devices-per-process", "4", str(path)]) == 0
  lines = capfd.readouterr().out.splitlines()
  for rank in "01":
    mine = [line[4:] for line in lines if line.startswith(f"[{rank}]")]
    assert mine[0] == f"{rank} {rank} 2 2 127.0.0.1 cpu"
    flags = mine[1].split()
    assert "--a=b" in flags
    assert [f for f in flags if "device_count" in f] == [
      "--xla_force_host_platform_device_count=4"
    ]
    assert re.fullmatch(r"127\.0\.0\.1:\d+ \d+", mine[2])
    assert mine[2].split(":")[1].split()[0] != mine[2].split()[1]


def test_a_module_is_started_by_its_name(capfd):
  assert launch.main(["-n", "1", "-m", "this"]) == 0
  assert "[0] Beautiful is better than ugly." in capfd.readouterr().out


@pytest.mark.parametrize(
  "end, said, status",
  [
    ("sys.exit(3)", "failed with exit code 3", 3),
    ("raise ValueError('no')", "failed with exit code 1", 1),
    ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 137),
    ("os.abort()", "was ended by SIGABRT", 134),
  ],
)
def test_one_that_fails_is_named_and_the_others_are_stopped(
  end, said, status, program, capfd
):
  path = program(f"if rank != '1': wait()\ntime.sleep(0.5)\n{end}")
  began = time.monotonic()
  assert launch.main(["-n", "3", str(path)]) == status
  assert time.monotonic() - began < 60
  out, error = capfd.readouterr()
  assert re.search(rf"\[launch\] process 1 \(pid \d+\) {said}", error)
  assert "processes 0, 2 still ran, and will be stopped" in error
  _require_gone(_pids(out))


def test_one_that_does_not_listen_is_ended_by_force(program, capfd):
  path = program(
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if rank == '0': wait()\ntime.sleep(0.5)\nsys.exit(5)"
  )
  assert launch.main(["-n", "2", "--grace", "0.5", str(path)]) == 5
  _require_gone(_pids(capfd.readouterr().out))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_stops_all(number, program):
  command = (sys.executable, "-m", "torchax.launch", "-n", "2", program("wait()"))
  with worlds.started(*command) as process:
    lines = [process.stdout.readline() for _ in range(2)]
    pids = _pids("".join(lines))
    assert len(pids) == 4 and all(map(_is_running, pids))
    os.kill(process.pid, number)
    process.wait(60)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected
    _require_gone(pids)


@pytest.mark.parametrize(
  "arguments, said",
  [
    (["-n", "0", __file__], "expected a number from 1 on, but got '0'"),
    (["-n", "two", __file__], "expected a number from 1 on, but got 'two'"),
    (["--devices-per-process", "-1", __file__], "a number from 1 on"),
    (["there/is/no.py"], "there is no file there/is/no.py"),
    ([], "the following arguments are required: script"),
  ],
)
def test_a_wrong_command_line_starts_nothing(arguments, said, capsys):
  with pytest.raises(SystemExit) as caught:
    launch.main(arguments)
  assert caught.value.code == 2
  assert said in capsys.readouterr().err


def _can_rename_the_host() -> bool:
  """True where a process may have a name of the host of its own."""
  known = shutil.which("unshare") and shutil.which("hostname")
  return bool(known) and worlds.run("unshare", "--uts", "true").returncode == 0


@pytest.mark.skipif(
  not _can_rename_the_host(), reason="needs the right to `unshare --uts`"
)
def test_a_host_whose_name_does_not_resolve_is_no_matter():
  program = (sys.executable, "-m", "torchax.launch", "-n", "2")
  ending = ("--devices-per-process", "4", worlds.HERE / "endings.py", "well")
  rename = 'hostname nobody-knows-this-name && exec "$@"'
  done = worlds.run("unshare", "--uts", "sh", "-c", rename, "sh", *program, *ending)
  assert done.returncode == 0, done.stdout[-4000:]
  assert done.stdout.count("the sum is 28.0") == 2


# With JAX between the processes ------------------------------------------------------


def _ending(way: str):
  return worlds.launch(2, worlds.HERE / "endings.py", way, devices=4)


@pytest.mark.parametrize(
  "way, status, said",
  [
    ("well", 0, ()),
    (
      "raise",
      1,
      ("[1] ValueError: of process 1", "[1] Process 1 of 2 ends with this error."),
    ),
    ("kill", 137, ("was ended by SIGKILL",)),
    # JAX's own words for one that does not answer, and what stops the others.
    ("stop", 134, ("stopped sending heartbeats", "process 1 still ran")),
    ("exit", None, ("[1] Process 1 of 2 is at its end, and waits for others",)),
  ],
)
def test_a_process_that_goes_is_noticed_within_a_minute(way, status, said):
  began = time.monotonic()
  done = _ending(way)
  assert done.stdout.count("the sum is 28.0") == 2, done.stdout
  assert (done.returncode == status) if status is not None else done.returncode
  for words in said:
    assert words in done.stdout
  assert time.monotonic() - began < 120  # a minute, and the time to start
