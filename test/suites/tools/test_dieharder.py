"""Reports of `make test-dieharder`, from the output of dieharder.

One test needs the program itself; in the others a script replaces it.
"""

import itertools
import shutil

import numpy as np
import pytest
from scipy import stats
from source_tree import ROOT

from tools import dieharder, dieharder_report, rng_stream, tables
from tools.dieharder import FAILED, PASSED, WEAK, Row, Test
from tools.dieharder_report import ATTEMPTS, GROWTH, TESTS, Run

starts_programs = pytest.mark.programs

# dieharder 3.31.1: -g 205 -S 4 -d 16 -t 2000 -p 3 -D 98808 -c ,
OUTPUT = """\
diehard_craps,0,2000,3,0.94648672,PASSED
#=============================================================================#
#                          Values of test p-values                            #
#=============================================================================#
,0.11238869,
,0.26353451,
,0.47964256,
#=============================================================================#

diehard_craps,0,2000,3,0.99942647,WEAK
#=============================================================================#
#                          Values of test p-values                            #
#=============================================================================#
,0.43952814,
,0.57569495,
,0.59911575,
#=============================================================================#

"""
CRAPS = Test(16, "diehard_craps", 2_000, 3, results=2)


# The program's output ----------------------------------------------------------------


def test_each_result_is_read_with_the_p_values_that_it_is_of():
  first, second = dieharder.read(OUTPUT, CRAPS)
  assert (first.name, first.ntuple, first.p) == ("diehard_craps", 0, 0.94648672)
  assert first.values == (0.11238869, 0.26353451, 0.47964256)
  assert [first.assessment, second.assessment] == [PASSED, WEAK]


def _cut(lines: int) -> str:
  return "".join(OUTPUT.splitlines(keepends=True)[:lines])


@pytest.mark.parametrize(
  "text, message",
  [
    ("", "Expected 2 results of diehard_craps, but got 0"),
    (_cut(9), "Expected 2 results of diehard_craps, but got 1"),
    (_cut(15), "ended early"),
    (OUTPUT.replace(",2000,", ",200000,"), "does not take this size"),
    (OUTPUT.replace("diehard_craps", "diehard_runs"), "'diehard_runs'"),
    (
      OUTPUT.replace("0.94648672", "nan"),
      "dieharder wrote 'diehard_craps,0,2000,3,nan",
    ),
    (OUTPUT.replace("PASSED", "GOOD"), "is it another version"),
    (OUTPUT.replace(",0.26353451,", ",-nan,"), "dieharder wrote ',-nan,'"),
    (",0.5,\n" + OUTPUT, "dieharder wrote ',0.5,'"),
  ],
)
def test_output_that_is_cut_off_or_unknown_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    dieharder.read(text, CRAPS)


def test_the_exact_p_value_is_that_of_the_values():
  values = (0.53148523, 0.60367462)
  row = Row("diehard_craps", 0, 1.0, FAILED, values)
  # Results that dieharder computes from them, as the page describes.
  places = np.arange(1, 3) / 3
  assert stats.kstwo.sf(np.abs(values - places).max(), 2) == row.p
  assert row.exact == stats.kstest(values, "uniform").pvalue < 0.5
  assert Row("dab_dct", 256, 0.9, PASSED, (0.9,)).exact == 0.9


# Runs --------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
  """Put a shell script in dieharder's place."""

  def put(script: str):
    path = tmp_path / "dieharder"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(path))

  return put


def _endless():
  return itertools.repeat(np.arange(1 << 14, dtype="<u4"))


@starts_programs
def test_run_passes_arguments_and_as_many_words_as_are_read(stand_in, tmp_path):
  (tmp_path / "output").write_text(OUTPUT)
  stand_in(
    f'echo "$*" > {tmp_path}/arguments; head -c 100000 > {tmp_path}/words\n'
    f"cat {tmp_path}/output"
  )
  rows, size = dieharder.run(CRAPS, _endless())
  assert rows == dieharder.read(OUTPUT, CRAPS)
  arguments = (tmp_path / "arguments").read_text()
  assert arguments.startswith("-g 200 -d 16 -t 2000 -p 3 ")
  expected = np.concatenate([next(_endless())] * 2).tobytes()[:100000]
  assert (tmp_path / "words").read_bytes() == expected
  assert 100000 <= size <= 100000 + (2 << 16)


@starts_programs
@pytest.mark.parametrize(
  "script, message",
  [
    ("exit 3", "exit status 3"),
    ("kill -SEGV $$", "exit status -11"),
    ("cat > /dev/null; echo '# Error: EOF' >&2", "needs more words than it was given"),
  ],
)
def test_a_run_that_fails_is_an_error(stand_in, script, message):
  stand_in(script)
  blocks = itertools.islice(_endless(), 4)
  with pytest.raises(RuntimeError, match=message):
    dieharder.run(CRAPS, blocks)


@starts_programs
def test_a_run_without_results_is_an_error(stand_in):
  stand_in("head -c 64 > /dev/null")
  with pytest.raises(ValueError, match="Expected 2 results"):
    dieharder.run(CRAPS, _endless())


@starts_programs
def test_the_version_is_asked_for(stand_in):
  stand_in("echo '#   dieharder version 3.31.1 Copyright   #'")
  assert dieharder.version() == "3.31.1"
  stand_in("echo hello")
  with pytest.raises(ValueError, match="but got 'hello"):
    dieharder.version()


def _page(folder):
  path = folder / "page.md"
  path.write_text(f"{tables.begin('dieharder_report')}\n{tables.END}\n")
  return path


def test_without_dieharder_the_program_says_how_to_get_it(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  page = _page(tmp_path)
  before = page.read_text()
  with pytest.raises(SystemExit, match="apt-get install dieharder"):
    dieharder_report.main([str(page)])
  assert page.read_text() == before
  with pytest.raises(FileNotFoundError, match="dieharder on the PATH"):
    dieharder.run(CRAPS, _endless())


@starts_programs
@pytest.mark.skipif(
  shutil.which("dieharder") is None,
  reason="dieharder, a program outside of Python, is not installed",
)
def test_a_small_test_of_dieharder_itself_runs():
  test = Test(100, "sts_monobit", 1_000, 20)
  row, again = (dieharder.run(test, rng_stream.dump("seeds"))[0][0] for _ in range(2))
  assert row == again  # the words are equal, so a line can be repeated
  assert row.assessment == PASSED
  assert row.p > row.exact > 1e-3
  words = itertools.repeat(next(rng_stream.dump("seeds")) & np.uint32(0xFFFFFF0F))
  (spoilt,) = dieharder.run(test, words)[0]
  assert spoilt.assessment == FAILED


# List of tests -----------------------------------------------------------------------


def test_list_omits_tests_that_dieharder_warns_of():
  numbers = {test.number for test in TESTS}
  assert numbers.isdisjoint({5, 6, 7, 14, 204})
  assert len({test.arguments for test in TESTS}) == len(TESTS)


def test_first_runs_have_seeds_of_their_own_and_so_have_repeats():
  stride, last = dieharder_report.STRIDE, dieharder_report.STRIDE - 1
  starts = [dieharder_report.seed_of(i, 0, last) for i in range(len(TESTS))]
  assert (np.diff(sorted(starts)) >= stride).all()
  for i, attempt in itertools.product(range(len(TESTS)), range(1, ATTEMPTS)):
    start = dieharder_report.seed_of(i, attempt, last)
    assert start + GROWTH * stride <= 1 << 32
    for before in range(attempt):
      other = dieharder_report.seed_of(i, before, last)
      assert other >= start + GROWTH * stride or other + GROWTH * stride <= start


def test_a_repeat_has_more_p_values_or_a_larger_sample():
  assert CRAPS.grown(4).arguments == ("-d", "16", "-t", "2000", "-p", "12")
  grown = Test(208, "dab_filltree2", 500, 1, ntuple=0).grown(4)
  assert grown.arguments == ("-d", "208", "-n", "0", "-t", "2000", "-p", "1")


# Failures ----------------------------------------------------------------------------


def _run(*assessments: str, p: float = 0.5) -> Run:
  rows = [Row("diehard_craps", 0, p, said, (p,)) for said in assessments]
  return Run(CRAPS, 7, rows, 1 << 30)


def _repeated(*runs: Run) -> list[Run]:
  return dieharder_report.repeat(lambda attempt: runs[attempt])


@pytest.mark.parametrize(
  "runs, expected",
  [
    ([(PASSED, PASSED)], []),
    ([(WEAK, PASSED), (PASSED, PASSED)], []),
    ([(WEAK, PASSED), (PASSED, WEAK)], []),
    ([(WEAK, PASSED), (WEAK, PASSED), (PASSED, WEAK)], []),
    ([(PASSED, WEAK)] * 3, ["diehard_craps 0 was weak in all runs"]),
    ([(PASSED, FAILED)], ["diehard_craps 0 failed"]),
    ([(WEAK, FAILED)], ["diehard_craps 0 failed"]),
    ([(WEAK, PASSED), (PASSED, FAILED)], ["diehard_craps 0 failed"]),
  ],
)
def test_weak_result_is_rerun_and_failed_result_is_not(runs, expected):
  runs = [_run(*said) for said in runs]
  # An unexpected run would be one too many.
  assert _repeated(*runs) == runs
  found = {"counter": [runs]}
  assert dieharder_report.failures(found) == [f"counter: {line}" for line in expected]


def test_p_values_must_look_uniform_together():
  def tests(values):
    return {"counter": [[_run(PASSED, PASSED, p=p)] for p in values]}

  assert not dieharder_report.failures(tests(np.linspace(0.01, 0.99, 30)))
  (line,) = dieharder_report.failures(tests(np.linspace(0.5, 0.99, 30)))
  assert "not uniform" in line


# The page ----------------------------------------------------------------------------


def _rendered(found) -> str:
  return dieharder_report.render(found, seed=5, version="3.31.1", seconds=120)


def test_the_page_has_every_result_of_every_run():
  weak = [_run(WEAK, PASSED, p=0.997), _run(PASSED, PASSED, p=0.25)]
  page = _rendered({"counter": [weak], "seeds": [[_run(PASSED, PASSED)]]})
  row = "| diehard_craps | 0 | `-d 16 -t 2000 -p 3` | 7 |"
  weak_cell = "0.99700000 · 0.99700000 **WEAK**"
  assert f"{row} {weak_cell} | 0.5000 · 0.5000 |" in page
  assert f"{row} 0.9970 · 0.9970 | 0.5000 · 0.5000 |" in page
  again = "| counter | diehard_craps | 0 | `-d 16 -t 2000 -p 3` | 7 | 1 |"
  assert f"{again} {weak_cell} | 0.2500 · 0.2500 |" in page
  assert f"{again} 0.9970 · 0.9970 | 0.2500 · 0.2500 |" in page
  assert "| counter | 1 | 2 | 1 | 1 | 0 |" in page
  assert "| all | 2 | 4 | 3 | 1 | 0 |" in page
  assert "| repeats | 1 | 2 | 2 | 0 | 0 |" in page
  assert "| read | counter 2.0 GiB, seeds 1.0 GiB |" in page
  assert page.endswith("Nothing has failed.")


def test_page_names_failed_tests():
  page = _rendered({"counter": [[_run(PASSED, FAILED, p=0.5)]]})
  assert "**FAILED**" in page and "nothing was run again" in page
  assert page.endswith("Failures:\n\n- counter: diehard_craps 0 failed")


@pytest.mark.parametrize("said, status", [(PASSED, 0), (FAILED, 1)])
def test_the_program_writes_the_page_and_tells_of_failures(
  tmp_path, monkeypatch, capsys, said, status
):
  values = iter(np.linspace(0.01, 0.99, len(rng_stream.MODES)))
  monkeypatch.setattr(dieharder, "version", lambda: "3.31.1")
  monkeypatch.setattr(dieharder_report, "TESTS", (CRAPS,))
  monkeypatch.setattr(
    dieharder, "run", lambda test, words: (_run(PASSED, said, p=next(values)).rows, 64)
  )
  page = _page(tmp_path)
  assert dieharder_report.main([str(page), "--seed", "3"]) == status
  written = tables.read_table(page.read_text(), "dieharder_report")
  assert f"| all | 4 | 8 | {8 - 4 * status} | 0 | {4 * status} |" in written
  assert "| seed of the report | 3 |" in written
  assert "counter diehard_craps 0: 0.0100" in capsys.readouterr().out


def test_report_rejects_bad_seed_and_page_without_markers(
  tmp_path, monkeypatch, capsys
):
  with pytest.raises(SystemExit):
    dieharder_report.main([str(_page(tmp_path)), "--seed", str(1 << 26)])
  assert "Expected a seed in [0, 67108864), but got 67108864" in capsys.readouterr().err
  monkeypatch.setattr(dieharder, "version", lambda: "3.31.1")
  (tmp_path / "other.md").write_text("# dieharder\n")
  with pytest.raises(ValueError, match="needs the lines"):
    dieharder_report.main([str(tmp_path / "other.md")])


def test_dieharder_page_lists_all_tests_and_no_failure():
  page = (ROOT / "docs" / "dieharder.md").read_text(encoding="utf-8")
  table = tables.read_table(page, "dieharder_report")
  for index, test in enumerate(TESTS):
    command, seed = " ".join(test.arguments), dieharder_report.seed_of(index, 0)
    assert table.count(f"`{command}` | {seed} | ") == test.results
  results = sum(test.results for test in TESTS)
  modes = len(rng_stream.MODES)
  assert f"| all | {modes * len(TESTS)} | {modes * results} | " in table
  assert table.endswith("Nothing has failed.")
