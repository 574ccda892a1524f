"""Examples: each runs and prints the results that its docstring promises."""

import os
import re
import subprocess
import sys

import pytest
from distributed import worlds
from source_tree import ROOT

pytestmark = pytest.mark.programs

EXAMPLES = ROOT / "examples"


def _run(name: str, *flags: str, **environment: str) -> str:
  result = subprocess.run(
    [sys.executable, EXAMPLES / name, *flags],
    capture_output=True,
    text=True,
    env={**os.environ, **environment},
  )
  assert result.returncode == 0, result.stderr[-3000:]
  return result.stdout


def test_train_digits_reaches_97_percent_and_repeats_itself(tmp_path):
  picture = tmp_path / "curves.png"
  output = _run("train_digits.py", f"--picture={picture}")
  accuracy = float(re.search(r"test accuracy ([\d.]+) after", output)[1])
  assert accuracy >= 0.97
  assert "equal losses, bit for bit: True" in output
  assert "different losses: True" in output
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_digits_runs_eagerly(tmp_path):
  output = _run(
    "train_digits.py",
    "--mode=eager",
    "--epochs=1",
    "--replay=3",
    f"--picture={tmp_path / 'curves.png'}",
  )
  assert "equal losses, bit for bit: True" in output


def test_train_sharded_has_the_losses_of_one_device():
  output = _run("train_sharded.py")
  differences = re.findall(r"largest difference to one device: (\S+)", output)
  assert len(differences) == 2 and all(float(d) < 1e-5 for d in differences)
  parts = re.findall(r"weight \(32, 16\): each device holds (.*)", output)
  assert parts == ["(4, 16)", "(16, 16)"]
  first, last = re.search(r"one device: loss (\S+), then (\S+)", output).groups()
  assert float(last) < float(first) - 0.5


def test_200_concurrent_requests_are_answered_as_when_alone():
  output = _run("serve_requests.py")
  assert "200 requests at once" in output
  assert "equal answers: True" in output
  answers = re.findall(r"request with seed \d: '(.{24})'", output)
  assert len(set(answers)) == 3


def test_a_block_in_parts_on_eight_devices_trains_as_on_one():
  output = _run(
    "tensor_parallel.py",
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
    JAX_PLATFORMS="cpu",
  )
  assert "{'all-reduce': 2, 'all-gather': 0, 'reduce-scatter': 0," in output
  assert "equal up to rounding: True" in output


def test_ring_attention_equals_attention_and_gathers_nothing():
  output = _run("ring_attention.py")
  differences = re.findall(r"one device: (\S+) (\S+) (\S+) (\S+)$", output, re.M)
  assert len(differences) == 2  # causal, and not
  # Differences of the output and of three gradients: magnitude 1, float32.
  assert all(float(d) < 5e-6 for row in differences for d in row)
  # Two in the forward loop (keys, values), four in the backward loop (their gradients
  # too), and two after it, which return the gradients to their devices.
  assert output.count("collectives: {'collective-permute': 8}") == 2
  assert output.count("output on each device: (2, 2, 128, 16)") == 2
  needs = r"(?:one device|each of eight) needs (\d+) bytes"
  memory = [int(size) for size in re.findall(needs, output)]
  assert len(memory) == 4 and all(
    30 * ring < dense for dense, ring in zip(memory[::2], memory[1::2], strict=True)
  )
  assert float(re.search(r"of the losses: (\S+)", output)[1]) < 1e-5
  losses = re.search(r"losses of eight devices: (.*)", output)[1].split()
  assert float(losses[-1]) < float(losses[0]) - 0.5


def test_pipeline_has_gradients_and_losses_of_the_plain_model():
  output = _run("pipeline.py")
  assert "weights (4, 128, 32): each device holds (1, 128, 32)" in output
  # One in the forward loop, one in the backward loop; a broadcast of the result.
  assert "{'collective-permute': 2, 'all-reduce': 1}" in output
  assert "works in 8 of 11 ticks: a bubble of 27%" in output
  difference = re.search(r"relative difference of the gradients: (\S+)", output)[1]
  assert float(difference) < 1e-5
  assert float(re.search(r"of the losses: (\S+)", output)[1]) < 1e-5
  losses = re.search(r"losses of the pipeline: (.*)", output)[1].split()
  assert float(losses[-1]) < float(losses[0]) - 1


def _losses_in_processes(*flags: str) -> list[str]:
  """Run the example in two processes; return the loss of each step."""
  result = worlds.launch(2, EXAMPLES / "train_in_processes.py", *flags, devices=2)
  assert result.returncode == 0, result.stdout[-3000:]
  return re.findall(r"\[default0\]:(step \d+ loss \S+)", result.stdout)


def test_training_in_processes_goes_on_as_if_it_had_not_ended(tmp_path):
  whole = _losses_in_processes("--steps=6")
  assert len(whole) == 6
  saved = f"--checkpoints={tmp_path / 'run'}"
  first = _losses_in_processes("--steps=6", saved, "--until=3")
  assert first + _losses_in_processes("--steps=6", saved) == whole


def test_trace_finds_the_slow_layer_and_keeps_the_losses(tmp_path):
  picture = tmp_path / "profiling.svg"
  output = _run(
    "find_slow_layer.py", "--length=64", "--steps=2", f"--picture={picture}"
  )
  slow, fast = output.split("a bias for each distance")
  assert re.search(r"share\n\d\.attention\.bias\.network\.", slow)
  slow_ms, fast_ms = (
    sum(map(float, re.findall(r"bias\.network\.1 +([\d.]+) ms", table)))
    for table in (slow, fast)
  )
  assert fast_ms < slow_ms / 2
  slow_loss, fast_loss = map(float, re.findall(r"then (\S+)", output))
  assert slow_loss == pytest.approx(fast_loss, abs=1e-5)
  assert "<svg" in picture.read_text()
