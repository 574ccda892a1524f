"""Runs of `tools/port_upstream.py`: its page, ranges, dry runs, bad input and tests."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from source_tree import ROOT
from upstream_projects import (
  BASE,
  BY_HAND,
  CARRIED,
  IMPORTS,
  JATEN,
  JTORCH,
  PORTED,
  PROJECT,
  THEME,
  THERE,
  commit,
  contents,
  git,
  lowering,
  port,
  verdicts,
  write,
)

from tools import port_upstream


def test_a_commit_has_one_line_in_the_page(upstream, project):
  commit(upstream, {JATEN: BASE}, "Before")
  made = commit(upstream, {JATEN: BASE + lowering("glu_jvp")}, "A lowering | new")
  for _ in range(2):
    assert port(project, made, "--upstream", upstream) == 0
  page = (project / "docs/upstream.md").read_text()
  (row,) = [line for line in page.splitlines() if line.startswith(f"| {made[:10]}")]
  assert re.search(r"A lowering \\\| new \|.*\d{4}-\d\d-\d\d \|$", row)


def test_a_commit_that_was_carried_is_there_the_second_time(upstream, project, capsys):
  commit(upstream, {JATEN: BASE}, "Before")
  made = commit(upstream, {JATEN: BASE + lowering("glu_jvp")}, "After")
  port(project, made, "--upstream", upstream)
  once = (project / PORTED).read_text()
  capsys.readouterr()
  assert port(project, made, "--upstream", upstream) == 0
  assert verdicts(capsys.readouterr().out) == [THERE]
  assert (project / PORTED).read_text() == once


@pytest.mark.parametrize("how", ["range", "since"])
def test_many_commits_are_carried_in_their_order(upstream, project, capsys, how):
  first = commit(upstream, {JATEN: BASE}, "Before")
  texts = [
    BASE + lowering("glu_jvp", "return self + 1"),
    BASE + lowering("glu_jvp", "return self + 2"),
    BASE + lowering("glu_jvp", "return self + 2") + lowering("native_norm"),
  ]
  for number, text in enumerate(texts):
    commit(upstream, {JATEN: text}, f"Commit {number}")
  wanted = [f"{first}..HEAD"] if how == "range" else ["--since", first]
  assert port(project, *wanted, "--upstream", upstream) == 0
  ported = (project / PORTED).read_text()
  assert "self + 2" in ported and "self + 1" not in ported and "native_norm" in ported
  page = (project / "docs/upstream.md").read_text()
  assert page.index("Commit 0") < page.index("Commit 1") < page.index("Commit 2")
  assert verdicts(capsys.readouterr().out) == [CARRIED] * 3


@pytest.mark.skipif(
  not pathlib.Path(sys.executable).with_name("ruff").exists(),
  reason="the lint extra is not installed",
)
def test_ported_code_is_formatted(upstream, project):
  commit(upstream, {JATEN: BASE}, "Before")
  long = lowering(
    "glu_jvp", f"return jnp.add(jnp.{'exp(jnp.' * 9}exp(self{')' * 10}, 1)"
  )
  made = commit(upstream, {JATEN: BASE + long}, "After")
  assert port(project, made, "--upstream", upstream) == 0
  ruff = str(pathlib.Path(sys.executable).with_name("ruff"))
  settings = ("--config", ROOT / "pyproject.toml", project / PORTED)
  subprocess.run([ruff, "format", "--check", *settings], check=True)
  subprocess.run([ruff, "check", *settings], check=True)


def test_a_dry_run_says_the_same_and_writes_nothing(upstream, project, capsys):
  commit(upstream, {JATEN: BASE}, "Before")
  made = commit(upstream, {JATEN: BASE + lowering("glu_jvp")}, "After")
  before = contents(project)
  assert port(project, made, "--upstream", upstream, "--dry-run") == 0
  assert contents(project) == before
  assert verdicts(capsys.readouterr().out) == [CARRIED]


# Bad input ----------------------------------------------------------------------------

BAD = {
  "does not parse": (
    {JATEN: BASE + "def f(:\n  pass\n"},
    rf"{JATEN}:\d+ does not parse: .*",
  ),
  "a conflict": (
    {JATEN: BASE + "<<<<<<< ours\nx = 1\n=======\nx = 2\n>>>>>>> theirs\n"},
    rf"{JATEN}:\d+ has a conflict that is not resolved",
  ),
  "an operator that torch lacks": (
    {JATEN: BASE + lowering("glu_jvp") + lowering("no_such_operator")},
    r"torch .* has no torch.ops.aten.no_such_operator",
  ),
  "a form of an operator that torch lacks": (
    {
      JATEN: BASE
      + "out_variants = {\n  torch.ops.aten.no_such.out: op_base.OutVariant(1),\n}\n"
    },
    r"has no torch.ops.aten.no_such.out",
  ),
  "another layout": (
    {JATEN: BASE, "src/thing/a.py": "a = 1\n"},
    r"src/thing/a.py is in neither layout",
  ),
}


@pytest.mark.parametrize("how", ["commit", "patch"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_error_and_writes_nothing(
  upstream, project, capsys, name, how
):
  after, message = BAD[name]
  commit(upstream, {JATEN: BASE}, "Before")
  # The first commit of the range could be carried.
  good = BASE + lowering("native_norm")
  commit(upstream, {JATEN: good}, "Good")
  made = commit(upstream, {k: v.replace(BASE, good) for k, v in after.items()}, "Bad")
  patch = upstream.parent / "change.patch"
  patch.write_text(git(upstream, "show", made))
  before = contents(project)
  arguments = ("HEAD~2..HEAD", "--upstream", upstream) if how == "commit" else (patch,)
  assert port(project, *arguments) == 2
  said = capsys.readouterr()
  assert re.search(message, said.err) and not said.out
  assert said.err.startswith("Nothing was written. ") and said.err.count("\n") == 1
  assert contents(project) == before


NOT_PATCHES = {
  "nothing": ("", "holds no change"),
  "prose": ("Dear all,\n", "holds no change"),
  "cut off": (
    f"diff --git a/{JATEN} b/{JATEN}\n--- a/{JATEN}\n+++ b/{JATEN}\n"
    "@@ -1,3 +1,4 @@\n a\n",
    "the hunk at line 1 is cut off; 2 old and 3 new lines are missing",
  ),
  "no hunk": (
    f"diff --git a/{JATEN} b/{JATEN}\n--- a/{JATEN}\n+++ b/{JATEN}\n@@ some @@\n a\n",
    "does not start a hunk",
  ),
}


@pytest.mark.parametrize("name", NOT_PATCHES)
def test_file_that_is_not_a_patch_is_rejected(project, tmp_path, capsys, name):
  text, message = NOT_PATCHES[name]
  (tmp_path / "change.patch").write_text(text)
  before = contents(project)
  assert port(project, tmp_path / "change.patch") == 2
  assert message in capsys.readouterr().err
  assert contents(project) == before


def test_commits_and_checkouts_that_are_not_there_are_named(
  upstream, project, tmp_path, capsys
):
  def refused(*arguments) -> str:
    before = contents(project)
    assert port(project, *arguments) == 2
    assert contents(project) == before
    return capsys.readouterr().err

  commit(upstream, {JATEN: BASE}, "Before")
  assert "no commit 'nosuch'" in refused("nosuch", "--upstream", upstream)
  assert "no commit 'nosuch'" in refused("nosuch..HEAD", "--upstream", upstream)
  assert "no commits in HEAD..HEAD" in refused(
    "--since", "HEAD", "--upstream", upstream
  )
  assert "no git checkout" in refused("HEAD", "--upstream", tmp_path / "nowhere")
  assert "Name a patch" in refused()
  page = project / "docs" / "upstream.md"
  text = page.read_text()
  page.write_text("# A page without a table\n")
  assert "docs/upstream.md: The page needs" in refused("HEAD", "--upstream", upstream)
  page.unlink()
  assert "no docs/upstream.md" in refused("HEAD", "--upstream", upstream)
  page.write_text(text)
  commit(upstream, {"src/jaten.py": "a = 1\n"}, "Another layout")
  assert "layout that is known" in refused("HEAD", "--upstream", upstream)


@pytest.mark.parametrize("arguments", [("abc123",), ("--since", "abc123")])
def test_a_commit_needs_a_checkout(project, capsys, monkeypatch, arguments):
  monkeypatch.delenv("UPSTREAM", raising=False)
  assert port(project, *arguments) == 2
  said = capsys.readouterr().err
  assert "--upstream PATH" in said and "None" not in said


def test_of_a_merge_its_commits_are_named(upstream, project, capsys):
  commit(upstream, {JATEN: BASE}, "Before")
  git(upstream, "checkout", "--quiet", "-b", "side")
  commit(upstream, {JATEN: BASE + lowering("glu_jvp")}, "On the side")
  git(upstream, "checkout", "--quiet", "-b", "other", "HEAD~1")
  commit(upstream, {JATEN: BASE, "docs/a.md": "a\n"}, "Beside it")
  git(upstream, "merge", "--quiet", "--no-edit", "side")
  assert port(project, "HEAD", "--upstream", upstream) == 2
  assert "HEAD is a merge" in capsys.readouterr().err
  assert port(project, "HEAD^..HEAD", "--upstream", upstream) == 0
  assert "_aten_glu_jvp" in (project / PORTED).read_text()


# Tests --------------------------------------------------------------------------------

TESTED = """
def test_it_is_seven():
  from torchax.ops.jaten import activation
  assert activation.seven() == {}
"""
SEVEN = IMPORTS + "@op(torch.ops.aten.relu)\ndef seven():\n  return {}\n"


@pytest.mark.parametrize(
  "upstreams_value, tested_value, expected, has",
  [
    (7, 7, [CARRIED, CARRIED], "return 7"),  # they pass with the change
    (8, 7, [BY_HAND, BY_HAND], "return 6"),  # they fail with it
    (7, 6, [THERE, CARRIED], "return 6"),  # they pass without
  ],
)
def test_change_that_fails_its_tests_is_left_for_manual_work(
  upstream, project, capsys, upstreams_value, tested_value, expected, has
):
  for package in ("torchax", "torchax/ops", "torchax/ops/jaten"):
    write(project, {f"{package}/__init__.py": ""})
  write(project, {THEME: "def op(x):\n  pass\n\n\ndef seven():\n  return 6\n"})
  commit(upstream, {JATEN: SEVEN.format(5), "test/test_ops.py": "a = 1\n"}, "Before")
  after = {
    JATEN: SEVEN.format(upstreams_value),
    "test/test_ops.py": "a = 1\n\n" + TESTED.format(tested_value),
  }
  made = commit(upstream, after, "After")
  arguments = [made, "--upstream", str(upstream)]
  assert port_upstream.main(arguments, project) == int(BY_HAND in expected)
  assert sorted(verdicts(capsys.readouterr().out)) == sorted(expected)
  assert has in (project / THEME).read_text()


def test_ported_code_runs(upstream, tmp_path):
  """In a copy of this project, with a theme that the tool has made."""
  project = tmp_path / "copy"
  shutil.copytree(ROOT / "torchax", project / "torchax")
  write(project, {"docs/upstream.md": PROJECT["docs/upstream.md"]})
  commit(upstream, {JATEN: BASE, JTORCH: IMPORTS}, "Before")
  after = {
    JATEN: BASE
    + lowering("hinge_embedding_loss", "return self[self > margin] + 100").replace(
      "(self)", "(self, target, margin=1.0, reduction=1)"
    ),
    JTORCH: IMPORTS
    + "@register_function(torch.atleast_1d)\ndef _at(x):\n  return jnp.ravel(x) + 7\n",
  }
  made = commit(upstream, after, "After")
  assert port(project, made, "--upstream", upstream) == 0
  # Autograd takes the first one apart; in inference mode it arrives whole.
  program = textwrap.dedent("""
    import torch, torchax
    x = torch.arange(4.0).to("jax")
    with torch.inference_mode():
      print(torch.ops.aten.hinge_embedding_loss(x, x, 1.0, 1).tolist())
    with torchax.default_env():
      print(torch.atleast_1d(x).tolist())
  """)
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=project,
    env={**os.environ, "PYTHONPATH": str(project)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.splitlines() == ["[102.0, 103.0]", "[7.0, 8.0, 9.0, 10.0]"], done
