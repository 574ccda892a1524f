"""Files of lowerings in upstream's style, unchanged."""

import importlib
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import registries
import torch
from compare import assert_same
from registries import ONES, library, on_jax
from source_tree import PACKAGE

import torchax
from torchax.ops import jaten


@pytest.fixture(name="restored")
def _restored():
  """Restore the registry after a test."""
  with registries.restored():
    yield


THEME = '''"""Operators as upstream writes them."""

from typing import Sequence

import jax.numpy as jnp
import torch

from torchax.ops import mappings
from torchax.registry import operators
{imports}

@op(torch.ops.aten.heaviside)
@op(torch.ops.torchax_test.{name}_0)
def _aten_heaviside(x, values):
  return jnp.where(x == 0, values, (x > 0).astype(x.dtype)) + 10


@op(torch.ops.torchax_test.{name}_1, is_jax_function=False, needs_env=True)
def _sum_of_drawn(x, scale: float, *, env):
  assert type(scale) is float
  return x * scale + env.j2t_iso(jnp.ones(3))


@op(torch.ops.torchax_test.{name}_2, is_view_op=True, is_jax_function=False)
def _middle(x):
  return x[1:2]


@op(torch.ops.torchax_test.{name}_3)
def _chosen(x, alpha: float):
  return x[x > alpha] if alpha > 0 else x


@register_function(torch.nn.functional.{function})
def _function(x, *args, **kwargs):
  return x + 100
'''
FROM = "from torchax.ops.{} import op\nfrom torchax.ops.jtorch import register_function"
IMPORTS = {
  "jaten": FROM.format("jaten"),
  "op_base": FROM.format("op_base"),
  "an op of its own": """

def op(*aten, **kwargs):
  def inner(func):
    for a in aten:
      operators.register_torch_dispatch_op(a, func, **kwargs)
    return func

  return inner


def register_function(torch_func):
  def inner(func):
    operators.register_torch_function_op(torch_func, func)
    return func

  return inner
""",
}
FUNCTIONS = ("logsigmoid", "softsign", "tanhshrink")


@pytest.mark.parametrize("imports", IMPORTS)
@pytest.mark.parametrize("place", ["a package", "among the themes"])
def test_a_file_in_upstreams_style_works_unchanged(
  restored, tmp_path, monkeypatch, imports, place
):
  base = list(IMPORTS).index(imports) + 3 * (place == "a package")
  name = f"a_file_of_upstreams_style_works_as_it_is_{base}"
  for index, signature in enumerate(
    (
      "(Tensor x, Tensor values) -> Tensor",
      "(Tensor x, float scale) -> Tensor",
      "(Tensor(a) x) -> Tensor(a)",
      "(Tensor x, Scalar alpha) -> Tensor",
    )
  ):
    library.define(f"{name}_{index}{signature}")
  function = FUNCTIONS[base % 3]
  text = THEME.format(name=name, imports=IMPORTS[imports], function=function)
  module = f"a_theme_of_upstream_{base}"
  (tmp_path / f"{module}.py").write_text(text)
  if place == "a package":
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="aten.heaviside already has the lowering"):
      importlib.import_module(module)
  else:
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      monkeypatch.setattr(jaten, "__path__", [*jaten.__path__, str(tmp_path)])
      importlib.import_module(f"torchax.ops.jaten.{module}")

  ops = [getattr(torch.ops.torchax_test, f"{name}_{index}") for index in range(4)]
  x = torch.arange(-1.0, 2.0)
  tensor = x.to("jax")
  assert_same(torch.heaviside(tensor, tensor), torch.heaviside(x, x) + 10)
  assert_same(ops[0](tensor, tensor), torch.heaviside(x, x) + 10)
  assert_same(ops[1](tensor, 2.0), x * 2 + 1)
  ops[2](tensor).add_(5)
  assert_same(tensor, torch.tensor([-1.0, 5.0, 1.0]))
  assert_same(ops[3](tensor, 2), torch.tensor([5.0]))
  assert_same(ops[3](tensor, -1), tensor.cpu())
  with torchax.default_env():
    called = getattr(torch.nn.functional, function)(on_jax())
  assert_same(called, ONES + 100)


DROPPED = """
import torch
from torchax.ops.jaten import op


@op(torch.ops.aten.relu)
def _aten_relu(self):
  return self * 0 + 7
"""


@pytest.mark.programs
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_file_in_jaten_is_loaded(tmp_path, name):
  """It is loaded before ours, or after them."""
  shutil.copytree(PACKAGE, tmp_path / "torchax")
  (tmp_path / "torchax" / "ops" / "jaten" / f"{name}.py").write_text(DROPPED)
  code = "import torch, torchax; print(torch.relu(torch.ones(1).to('jax')).item())"
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.strip() == "7.0", done.stdout + done.stderr
