"""Arithmetic of the benchmarks; `make bench` measures the times."""

import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from benchmarks import host, tables, timing


def test_ratio_is_ours_over_baseline_and_is_compared_to_the_goal():
  row = timing.Row("case", "plain JAX", ours_us=30.0, baseline_us=10.0, goal=3)
  assert row.ratio == 3.0
  assert row.reached
  assert not timing.Row("case", "plain JAX", 30.1, 10.0, 3).reached
  assert timing.Row("case", "plain JAX", 99.0, 1.0, None).reached


def test_a_slower_function_has_the_larger_time(monkeypatch):
  monkeypatch.setattr(timing, "SECONDS_PER_REPEAT", 0.001)

  def sleep(milliseconds):
    time.sleep(milliseconds / 1000)
    return jnp.zeros(())

  row = timing.compare("case", lambda: sleep(40), lambda: sleep(10), goal=None)
  assert row.ours_us > 40_000
  assert 1.5 < row.ratio < 6


@pytest.mark.parametrize("value", [3, None, "text"])
def test_waiting_for_something_that_is_no_array_is_harmless(value):
  assert timing.arrays(value) == value


def test_the_table_of_a_device_has_a_line_for_each_row():
  rows = [timing.Row("a step", "plain JAX", 30.0, 10.0, None)]
  lines = tables.table(rows).splitlines()
  assert "torch" in lines[0] and "JAX" in lines[0]
  assert lines[-1] == "| a step | 30.0 | plain JAX | 10.0 | 3.00 |"


def test_programs_for_cuda_run_without_torchax():
  """In a process with torchax torch runs no backward pass on CUDA."""
  code = "import sys, benchmarks.programs; sys.exit('torchax' in sys.modules)"
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.programs
def test_programs_on_the_cpu_are_timed_with_and_without_torchax(monkeypatch):
  monkeypatch.setattr(host, "ROUNDS", 1)
  rows = host.rows()
  assert [row.name for row in rows] == [f"on the CPU: {name}" for name in host.GOALS]
  assert all(row.ours_us > 0 and row.baseline_us > 0 for row in rows)
