"""`tools/port_upstream.py`: changes of upstream's kinds, in repositories made here.

A row has upstream's files before and after a commit. The project that they are carried
to is a small one too; what its operations have is asked of torchax itself.
"""

import dataclasses

import pytest
from upstream_projects import (
  BASE,
  BY_HAND,
  CARRIED,
  IMPORTS,
  JATEN,
  JTORCH,
  MEANINGLESS,
  OUR_THEME,
  PORTED,
  PORTED_FUNCTIONS,
  PORTED_TESTS,
  PROJECT,
  THEME,
  THERE,
  commit,
  contents,
  git,
  lowering,
  port,
  verdicts,
  with_operators,
)

from tools.port_upstream import NOTICE, with_notice

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


@dataclasses.dataclass
class Row:
  """A commit of upstream, and the expected result of porting it.

  Attributes:
    before, after: its files.
    verdicts: of its parts.
    status: of the tool.
    has: file here -> text that it contains afterwards.
    lacks: file here -> text that it does not contain.
    patch: verdicts of the patch alone, without the files; by default the same.
    said: output of the tool.
  """

  before: dict
  after: dict
  verdicts: list
  status: int = 0
  has: dict = dataclasses.field(default_factory=dict)
  lacks: dict = dataclasses.field(default_factory=dict)
  patch: list | None = None
  said: str = ""


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
  "an in-place variant": Row(
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
  "an in-place variant that nothing derives": Row(
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
      "test/ops/jaten/test_activation.py": (
        "def test_ours",
        "def test_new",
        "import torch",
      )
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
    assert text.startswith(NOTICE)
    for part in parts:
      assert part in text
  for path, parts in row.lacks.items():
    assert not any(part in (project / path).read_text() for part in parts)
  if not row.has:
    assert {k: v for k, v in contents(project).items() if k != "docs/upstream.md"} == {
      k: v.encode() for k, v in PROJECT.items() if k != "docs/upstream.md"
    }


def test_a_notice_is_written_once_and_only_in_python_files():
  assert with_notice("a.py", NOTICE + "a = 1\n") == NOTICE + "a = 1\n"
  assert with_notice("docs/upstream.md", "a\n") == "a\n"


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
