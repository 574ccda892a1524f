"""Small repositories of upstream and of this project, for tests of the porting tool."""

import os
import pathlib
import re
import subprocess

from source_tree import ROOT

from tools import port_upstream

JATEN = "torchax/ops/jaten.py"
JTORCH = "torchax/ops/jtorch.py"
PORTED = "torchax/ops/jaten/ported.py"
PORTED_TESTS = "test/suites/ported/test_ops.py"
PORTED_FUNCTIONS = "torchax/functions/ported.py"
THEME = "torchax/ops/jaten/activation.py"

# Start of the operator files of both projects.
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
  "test/ops/jaten/test_activation.py": "def test_ours():\n  pass\n",
  "docs/upstream.md": (ROOT / "docs" / "upstream.md").read_text(),
}


def lowering(name: str, body: str = "return self", more: str = "") -> str:
  return f"@op(torch.ops.aten.{name}{more})\ndef _aten_{name}(self):\n  {body}\n\n\n"


BASE = IMPORTS + RELU


CARRIED, THERE, MEANINGLESS, BY_HAND = (
  "carried",
  "already there",
  "meaningless",
  "by hand",
)


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


def with_operators(files: dict) -> dict:
  """Return the files, with the one that identifies a checkout."""
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
