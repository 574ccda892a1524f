"""Messages about time spent on compiling."""

import logging

import pytest
import torch
from faults.programs import run

import torchax
from torchax.diagnostics import compile_times


class _Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


def _times(programs: int, each: float, others: float) -> compile_times.CompileTimes:
  """Return a program that compiles this often, with other work after each."""
  clock = _Clock()
  times = compile_times.CompileTimes(clock)
  for n in range(programs):
    clock.now += each + others
    times.add(f"aten_{n % 7}", each, is_program=True)
  return times


def test_warns_once_if_a_program_mostly_compiles(caplog):
  with caplog.at_level(logging.WARNING, "torchax"):
    times = _times(200, each=0.25, others=0.125)
  assert times.has_spoken
  (record,) = caplog.records
  said = record.getMessage()
  for named in ("aten_0 (", "jax_jit", "JAX_COMPILATION_CACHE_DIR"):
    assert named in said
  assert said.startswith("torchax has compiled 50 programs in 12 of 19 s")


@pytest.mark.parametrize(
  ("programs", "each", "others"),
  [(200, 0.2, 0.3), (49, 1.0, 0.0), (90, 0.1, 0.0)],
  ids=["less than half", "few programs", "few seconds"],
)
def test_no_warning_below_the_thresholds(caplog, programs, each, others):
  with caplog.at_level(logging.WARNING, "torchax"):
    times = _times(programs, each, others)
  assert not times.has_spoken and not caplog.records
  assert times.seconds == pytest.approx(programs * each)


def test_listener_counts_only_new_compilations(monkeypatch):
  torch.ones(3, device="jax").cosh()  # there have been compilations
  (listener,) = compile_times._listeners
  monkeypatch.setattr(listener, "times", compile_times.CompileTimes())
  x = torch.ones(3, 17, 5, device="jax")
  with torchax.default_env():
    x.sinh()
    before = listener.times.programs
    x.sinh()
  assert listener.times.programs == before > 0
  assert "aten_sinh_default" in listener.times._by_name
  assert listener.times.seconds > 0


@pytest.fixture
def listener(monkeypatch):
  monkeypatch.setattr(compile_times, "LONG", 0.2)
  monkeypatch.setattr(compile_times.logs, "_on", {"compiles"})
  return compile_times._Listener()


def test_a_long_compilation_is_shown_while_it_runs(listener, caplog):
  with caplog.at_level(logging.INFO, "torchax"):
    listener(compile_times._LOWERED, 0.0, fun_name="jit(step)")
    (watch,) = listener._watches.values()
    watch.join(20)
    assert [r.getMessage() for r in caplog.records] == [
      "step: lowered 0 s ago, not compiled yet"
    ]
    listener(compile_times._COMPILED, 0.5, fun_name="jit(step)")
  assert caplog.records[-1].getMessage().startswith("step: compiled in ")


def test_a_short_one_is_not(listener, caplog):
  with caplog.at_level(logging.INFO, "torchax"):
    listener(compile_times._LOWERED, 0.0, fun_name="jit(step)")
    (watch,) = listener._watches.values()
    listener(compile_times._COMPILED, 0.0, fun_name="jit(step)")
    watch.join(20)
  assert not caplog.records


def test_nothing_is_watched_unless_it_is_asked_for(listener, monkeypatch):
  monkeypatch.setattr(compile_times.logs, "_on", set())
  listener(compile_times._LOWERED, 0.0, fun_name="jit(step)")
  assert not listener._watches


IMPORTED = """
import jax, torchax
from jax import monitoring
from torchax.diagnostics import compile_times
jax.jit(lambda x: x + 1)(1.0)
print(len(compile_times._listeners))
"""


@pytest.mark.programs
def test_an_import_alone_asks_nothing_of_jax():
  assert run(IMPORTED).split() == ["0"]
