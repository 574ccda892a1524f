"""`tools/port_upstream.py`: changes of upstream's kinds, in repositories made here.

A row has upstream's files before and after a commit. The project that they are carried
to is a small one too; what its operations have is asked of torchax itself.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from source_tree import ROOT

from tools import port_upstream

JATEN = "torchax/ops/jaten.py"
JTORCH = "torchax/ops/jtorch.py"
PORTED = "torchax/ops/jaten/ported.py"
PORTED_TESTS = "test/suites/ported/test_ops.py"
PORTED_FUNCTIONS = "torchax/functions/ported.py"
THEME = "torchax/ops/jaten/activation.py"

# What the operator files of both projects start with.
IMPORTS = """
import functools
import jax
import jax.numpy as jnp
from jax import lax
import torch
from torchax.ops import mappings, op_base, ops_registry


def op(*aten, **kwargs):
  return lambda func: func


"""
RELU = """@op(torch.ops.aten.relu)
def _aten_relu(self):
  return jnp.maximum(self, 0)


"""
OUR_THEME = '''"""Activations."""

import jax.numpy as jnp
import torch

from torchax.ops.builtin import op


_WIDTH = 3


def _slope(x):
  return x * 2


# Ours.
@op(torch.ops.aten.relu, compiled=False, static=("limit",))
def _aten_relu(self):
  """Ours."""
  return jnp.maximum(self, 0)


@op(torch.ops.aten.bernoulli, kind=Kind.SAMPLER)
def _aten_bernoulli(key, self):
  return self


@op(torch.ops.aten.erf)
def _aten_erf(self):
  return jnp.clip(self, 0, 1)
'''
PROJECT = {
  THEME: OUR_THEME,
  "torchax/ops/jimage.py": "import jax.numpy as np\n\n\ndef cubic(x):\n  return x\n",
  "torchax/tensor.py": "def first(x):\n  return x + 1\n\n\ndef last(x):\n  return x\n",
  "test/ops/test_activation.py": "def test_ours():\n  pass\n",
  "docs/upstream.md": (ROOT / "docs" / "upstream.md").read_text(),
}
TABLE = """mutation_ops_to_functional = {
  torch.ops.aten.add_: op_base.InplaceOp(torch.ops.aten.add),
}
"""
OUT = """out_variants = {
  torch.ops.aten.add.out: op_base.OutVariant(torch.ops.aten.add.Tensor),
}
"""
TESTS = """import unittest
import torch
import torchax


class TestOps(unittest.TestCase):
  def setUp(self):
    self.env = torchax.default_env()

  def test_before(self):
    self.assertTrue(self.env)
"""


def lowering(name: str, body: str = "return self", more: str = "") -> str:
  return f"@op(torch.ops.aten.{name}{more})\ndef _aten_{name}(self):\n  {body}\n\n\n"


@dataclasses.dataclass
class Row:
  """A commit of upstream's, and what is to become of it.

  Attributes:
    before, after: its files.
    verdicts: of its parts.
    status: of the tool.
    has: file here -> what is in it afterwards.
    lacks: file here -> what is not.
    patch: verdicts of the patch alone, without the files; by default the same.
    said: what the tool says.
  """

  before: dict
  after: dict
  verdicts: list
  status: int = 0
  has: dict = dataclasses.field(default_factory=dict)
  lacks: dict = dataclasses.field(default_factory=dict)
  patch: list | None = None
  said: str = ""


BASE = IMPORTS + RELU
CARRIED, THERE, MEANINGLESS, BY_HAND = (
  "carried",
  "already there",
  "meaningless",
  "by hand",
)

ROWS = {
  "a changed function goes where ours of its name is": Row(
    {JATEN: BASE},
    {JATEN: BASE.replace("jnp.maximum(self, 0)", "jax.nn.relu(self)")},
    [CARRIED],
    has={
      THEME: (
        '# Ours.\n@op(torch.ops.aten.relu, compiled=False, static=("limit",))\n'
        "def _aten_relu(self):\n  return jax.nn.relu(self)\n",
        "import jax\n",
      )
    },
    said="compiled= and static= of ours kept",
  ),
  "one in the old layout": Row(
    {f"torchax/{JATEN}": BASE},
    {f"torchax/{JATEN}": BASE.replace("self, 0)", "self, 0.0)")},
    [CARRIED],
    has={THEME: ("jnp.maximum(self, 0.0)",)},
  ),
  "one with two changes": Row(
    {JATEN: BASE + lowering("erf", "return jax.lax.erf(self)")},
    {
      JATEN: BASE.replace("self, 0)", "self, 0.0)")
      + lowering("erf", "return lax.erf(self)")
    },
    [CARRIED, CARRIED],
    has={THEME: ("jnp.maximum(self, 0.0)", "lax.erf(self)", "from jax import lax")},
  ),
  "a new function": Row(
    {JATEN: BASE},
    {JATEN: BASE + lowering("glu_jvp", "return jnp.flip(self)")},
    [CARRIED],
    has={PORTED: ("from torchax.ops.jaten import op", "import jax.numpy as jnp")},
  ),
  "a new function with helpers": Row(
    {JATEN: BASE},
    {
      JATEN: BASE + "_LIMIT = 3\n\n\ndef _helped(x):\n  return _deep(x, _LIMIT)\n\n\n"
      "def _deep(x, n):\n  return functools.reduce(jnp.add, [x] * n)\n\n\n"
      + lowering("glu_jvp", "return _helped(self)")
    },
    [CARRIED, CARRIED, CARRIED, CARRIED],
    has={PORTED: ("_LIMIT = 3", "def _deep", "def _helped", "import functools")},
  ),
  "a new function with a helper that is here": Row(
    {JATEN: BASE},
    {
      JATEN: BASE
      + "def _slope(x):\n  return x * 2\n\n\n"
      + lowering("glu_jvp", "return _slope(self)")
    },
    [THERE, CARRIED],
    has={PORTED: ("from torchax.ops.jaten.activation import _slope",)},
    lacks={PORTED: ("def _slope",)},
  ),
  "a new torch function": Row(
    {JTORCH: IMPORTS},
    {
      JTORCH: IMPORTS + "@register_function(torch.nn.functional.hinge_embedding_loss)\n"
      "def _hinge(x, y):\n  return jnp.abs(x)\n"
    },
    [CARRIED],
    has={PORTED_FUNCTIONS: ("import register_function", "def _hinge")},
  ),
  "an operator that runs here": Row(
    {JATEN: BASE}, {JATEN: BASE + lowering("exp", "return jnp.exp(self)")}, [THERE]
  ),
  "a function that is the same here": Row(
    {JATEN: BASE.replace("jnp.maximum(self, 0)", "self")}, {JATEN: BASE}, [THERE]
  ),
  "one more operation for a function": Row(
    {JATEN: BASE},
    {
      JATEN: BASE.replace(
        "@op(torch.ops.aten.relu)",
        "@op(torch.ops.aten.relu)\n@op(torch.ops.aten.glu_jvp)",
      )
    },
    [CARRIED],
    has={THEME: ("@op(torch.ops.aten.glu_jvp)\n# Ours.\n@op(torch.ops.aten.relu",)},
  ),
  "a constant that is the same here": Row(
    {JATEN: BASE + "_WIDTH = 3\n"},
    {JATEN: BASE + "_WIDTH = 4\n"},
    [CARRIED],
    has={THEME: ("_WIDTH = 4",)},
  ),
  "a constant that is not here": Row(
    {JATEN: BASE + "_DEPTH = 3\n"}, {JATEN: BASE + "_DEPTH = 4\n"}, [BY_HAND], 1
  ),
  "a function that calls another lowering": Row(
    {JATEN: BASE},
    {JATEN: BASE + lowering("glu_jvp", "return _aten_relu(self)")},
    [CARRIED],
    has={PORTED: ("from torchax.ops.jaten.activation import _aten_relu",)},
  ),
  "a helper of what is there": Row(
    {JATEN: BASE},
    {
      JATEN: BASE
      + "def _more(x):\n  return x\n\n\n"
      + lowering("exp", "return _more(self)")
    },
    [MEANINGLESS, THERE],
  ),
  "a test with a helper of upstream's folder": Row(
    {"test/test_ops.py": "import torch\n"},
    {
      "test/test_ops.py": "import torch\nfrom . import base\n\n\n"
      "def test_new():\n  assert base.check(torch)\n"
    },
    [BY_HAND],
    1,
  ),
  "an in-place form": Row(
    {JATEN: BASE + TABLE},
    {
      JATEN: BASE
      + TABLE.replace(
        "}", "  torch.ops.aten.relu_: op_base.InplaceOp(torch.ops.aten.relu),\n}"
      )
    },
    [THERE],
    said="derived: torch's schema says it",
  ),
  "an out form": Row(
    {JATEN: BASE + OUT},
    {
      JATEN: BASE
      + OUT.replace(
        "}", "  torch.ops.aten.exp.out: op_base.OutVariant(torch.ops.aten.exp),\n}"
      )
    },
    [THERE],
    said="derived: torch's schema says it",
  ),
  "an in-place form that nothing derives": Row(
    {JATEN: BASE + TABLE},
    {
      JATEN: BASE
      + TABLE.replace(
        "}", "  torch.ops.aten.batch_norm_elemt: op_base.InplaceOp(torch.neg),\n}"
      )
    },
    [BY_HAND],
    1,
    said="torchax/registry/schema.py",
  ),
  "a random operator, which takes a key here": Row(
    {JATEN: BASE + lowering("bernoulli", more=", needs_env=True")},
    {JATEN: BASE + lowering("bernoulli", "return self > 0", ", needs_env=True")},
    [BY_HAND],
    1,
    said="written otherwise here (Kind.SAMPLER)",
  ),
  "a rewrite of another module": Row(
    {"torchax/interop.py": "def call(f):\n  return f()\n", JATEN: BASE},
    {
      "torchax/interop.py": "class Call:\n  def now(self):\n    return 1\n",
      JATEN: BASE,
    },
    [BY_HAND],
    1,
  ),
  "lines of another module that are the same here": Row(
    {"torchax/tensor.py": PROJECT["torchax/tensor.py"]},
    {"torchax/tensor.py": PROJECT["torchax/tensor.py"].replace("x + 1", "x + 2")},
    [CARRIED],
    has={"torchax/tensor.py": ("return x + 2",)},
  ),
  "lines of another module that are there already": Row(
    {"torchax/tensor.py": PROJECT["torchax/tensor.py"].replace("x + 1", "x")},
    {"torchax/tensor.py": PROJECT["torchax/tensor.py"]},
    [THERE],
  ),
  "a function of a module that is shared": Row(
    {"torchax/ops/jimage.py": PROJECT["torchax/ops/jimage.py"]},
    {
      "torchax/ops/jimage.py": PROJECT["torchax/ops/jimage.py"].replace(
        " x\n", " x * x\n"
      )
    },
    [CARRIED],
    has={"torchax/ops/jimage.py": ("x * x",)},
    patch=[CARRIED],
  ),
  "a workflow": Row(
    {".github/workflows/ci.yml": "a: 1\n"},
    {".github/workflows/ci.yml": "a: 2\n"},
    [MEANINGLESS],
  ),
  "a version": Row(
    {"torchax/__init__.py": '__version__ = "0.0.1"\nVERSION = __version__\n'},
    {"torchax/__init__.py": '__version__ = "0.0.2"\nVERSION = __version__\n'},
    [MEANINGLESS],
  ),
  "a page and an example": Row(
    {"docs/a.md": "a\n", "examples/a.py": "a = 1\n"},
    {"docs/a.md": "b\n", "examples/a.py": "a = 2\n"},
    [MEANINGLESS, MEANINGLESS],
  ),
  "comments and types": Row(
    {JATEN: BASE},
    {
      JATEN: BASE.replace(
        "def _aten_relu(self):", "# Rectifies.\ndef _aten_relu(self: jax.Array):"
      ).replace("# Rectifies.\n", "")
    },
    [MEANINGLESS],
  ),
  "a file that moves": Row({f"torchax/{JATEN}": BASE}, {JATEN: BASE}, [MEANINGLESS]),
  "a file that moves and changes": Row(
    {f"torchax/{JATEN}": BASE},
    {JATEN: BASE.replace("self, 0)", "self, 0.0)")},
    [CARRIED],
    has={THEME: ("jnp.maximum(self, 0.0)",)},
  ),
  "a picture": Row({"docs/a.png": b"\0\1"}, {"docs/a.png": b"\0\2"}, [MEANINGLESS]),
  "binary data of a test": Row(
    {"test/a.bin": b"\0\1"}, {"test/a.bin": b"\0\2"}, [BY_HAND], 1
  ),
  "a test method": Row(
    {"test/test_ops.py": TESTS},
    {
      "test/test_ops.py": TESTS
      + "\n  def test_after(self):\n    self.assertEqual(torch.ones(1).sum(), 1)\n"
    },
    [CARRIED],
    has={
      PORTED_TESTS: (
        "def setUp",
        "def test_after",
        "import unittest",
      )
    },
    lacks={PORTED_TESTS: ("def test_before",)},
  ),
  "a test in a file that is here": Row(
    {"test/test_activation.py": "import torch\n"},
    {
      "test/test_activation.py": "import torch\n\n\ndef test_new():\n  assert torch.e\n"
    },
    [CARRIED],
    has={
      "test/ops/test_activation.py": ("def test_ours", "def test_new", "import torch")
    },
  ),
  "a function and its test": Row(
    {JATEN: BASE, "test/test_ops.py": "import torch\n"},
    {
      JATEN: BASE + lowering("glu_jvp"),
      "test/test_ops.py": "import torch\n\n\ndef test_new():\n  assert torch.e\n",
    },
    [CARRIED, CARRIED],
    has={
      PORTED: ("_aten_glu_jvp",),
      PORTED_TESTS: ("def test_new",),
    },
  ),
  "what is dropped": Row({JATEN: BASE + lowering("exp")}, {JATEN: BASE}, [MEANINGLESS]),
  "nothing but white space": Row({JATEN: BASE}, {JATEN: BASE + "\n\n"}, [MEANINGLESS]),
}


def git(place: pathlib.Path, *arguments: str) -> str:
  identity = ("-c", "user.name=upstream", "-c", "user.email=upstream@example.com")
  done = subprocess.run(
    ["git", *identity, *arguments],
    cwd=place,
    capture_output=True,
    text=True,
    check=True,
    env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
  )
  return done.stdout


def write(place: pathlib.Path, files: dict) -> None:
  for path, content in files.items():
    file = place / path
    file.parent.mkdir(parents=True, exist_ok=True)
    content = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(content)


def commit(place: pathlib.Path, files: dict, subject: str) -> str:
  """A commit of these files and no others."""
  for old in place.rglob("*"):
    if old.is_file() and ".git" not in old.relative_to(place).parts:
      old.unlink()
  write(place, files)
  git(place, "add", "--all")
  git(place, "commit", "--quiet", "--allow-empty", "--message", subject)
  return git(place, "rev-parse", "HEAD").strip()


@pytest.fixture(name="upstream")
def _upstream(tmp_path) -> pathlib.Path:
  place = tmp_path / "upstream"
  place.mkdir()
  git(place, "init", "--quiet")
  return place


@pytest.fixture(name="project")
def _project(tmp_path) -> pathlib.Path:
  place = tmp_path / "project"
  write(place, PROJECT)
  return place


def with_operators(files: dict) -> dict:
  """The files, and the one by which a checkout is known."""
  known = any(path.endswith(JATEN) for path in files)
  return files if known else {JATEN: BASE, **files}


def contents(place: pathlib.Path) -> dict:
  return {
    str(path.relative_to(place)): path.read_bytes()
    for path in place.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
  }


def port(project, *arguments) -> int:
  return port_upstream.main([*map(str, arguments), "--no-tests"], project)


def verdicts(said: str) -> list[str]:
  names = "|".join((CARRIED, THERE, MEANINGLESS, BY_HAND))
  return re.findall(rf"^  ({names}): ", said, re.MULTILINE)


@pytest.mark.parametrize("how", ["commit", "patch"])
@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_carried(upstream, project, capsys, name, how):
  row = ROWS[name]
  commit(upstream, with_operators(row.before), "Before")
  made = commit(upstream, with_operators(row.after), f"Does {name}")
  if how == "commit":
    arguments = (made, "--upstream", upstream)
  else:
    patch = upstream.parent / "change.patch"
    shown = ("show", "--format=email", "--binary", "-M", "--function-context", made)
    patch.write_text(git(upstream, *shown))
    arguments = (patch,)
  status = port(project, *arguments)
  said = capsys.readouterr()
  wanted = row.patch if how == "patch" and row.patch is not None else row.verdicts
  assert (sorted(verdicts(said.out)), status) == (sorted(wanted), row.status), said
  assert row.said in said.out
  assert f"Does {name}" in said.out
  for path, parts in row.has.items():
    text = (project / path).read_text()
    compile(text, path, "exec")
    for part in parts:
      assert part in text
  for path, parts in row.lacks.items():
    assert not any(part in (project / path).read_text() for part in parts)
  if not row.has:
    assert {k: v for k, v in contents(project).items() if k != "docs/upstream.md"} == {
      k: v.encode() for k, v in PROJECT.items() if k != "docs/upstream.md"
    }


def test_a_patch_of_a_part_goes_in_where_ours_has_the_lines(upstream, project, capsys):
  long = "".join(f"  a{n} = {n}\n" for n in range(9))
  ours = OUR_THEME.replace("  return jnp.clip(self, 0, 1)", long + "  return a1\n")
  (project / THEME).write_text(ours)
  before = BASE + lowering("erf").replace("  return self\n", f"{long}  return a1\n")
  commit(upstream, {JATEN: before}, "Before")
  made = commit(upstream, {JATEN: before.replace("a4 = 4", "a4 = 5")}, "After")
  patch = upstream.parent / "change.patch"
  patch.write_text(git(upstream, "show", made))
  assert port(project, patch) == 0
  carried = (project / THEME).read_text()
  assert "  a4 = 5\n" in carried and "a4 = 4" not in carried and "a3 = 3" in carried
  # Of other lines the patch alone is not enough, and the commit is.
  (project / THEME).write_text(OUR_THEME)
  assert port(project, patch) == 1
  assert f"{JATEN}:" in (said := capsys.readouterr().out) and f"-> {THEME}:" in said
  assert "--upstream" in said and (project / THEME).read_text() == OUR_THEME
  assert port(project, made, "--upstream", upstream) == 0
  assert "a4 = 5" in (project / THEME).read_text()


# The table, ranges, dry runs ----------------------------------------------------------


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
    BASE + lowering("glu_jvp", "return self + 2") + lowering("conv_tbc"),
  ]
  for number, text in enumerate(texts):
    commit(upstream, {JATEN: text}, f"Commit {number}")
  wanted = [f"{first}..HEAD"] if how == "range" else ["--since", first]
  assert port(project, *wanted, "--upstream", upstream) == 0
  ported = (project / PORTED).read_text()
  assert "self + 2" in ported and "self + 1" not in ported and "conv_tbc" in ported
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
  good = BASE + lowering("conv_tbc")
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
