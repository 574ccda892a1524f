"""Examples in docstrings run and give the results shown."""

import doctest
import importlib
import re
import subprocess
import sys

import jax
import pytest
import torch
from source_tree import modules

import torchax

EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
WITH_EXAMPLES = {m.name for m in modules() if EXAMPLE.search(m.path.read_text("utf-8"))}

# Their examples must run before any other code uses a device.
OWN_PROCESS = {"torchax.distributed.processes", "torchax.distributed.processes.start"}
RUN = """
import doctest, importlib, sys
sys.exit(doctest.testmod(importlib.import_module(sys.argv[1])).failed)
"""

# Module -> package of an extra that its examples use.
EXTRAS = {
  "torchax.flax": "flax.linen",
  "torchax.rng.ledger": "matplotlib",
  "torchax.rng.runs": "matplotlib",
}

# Names that examples use without importing them.
NAMES = {"jax": jax, "jnp": jax.numpy, "torch": torch, "torchax": torchax}


class _Checker(doctest.OutputChecker):
  """Comparison of outputs that accepts both names JAX prints for a PartitionSpec."""

  def check_output(self, want, got, optionflags):
    want, got = (text.replace("PartitionSpec(", "P(") for text in (want, got))
    return super().check_output(want, got, optionflags)


@pytest.fixture
def restored():
  """Restore JAX's configuration after examples that change it."""
  names = ("jax_enable_x64", "jax_default_matmul_precision")
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def _has_name_of_torch(value) -> bool:
  return isinstance(value, type) and value.__module__ in ("torch", "torch.jax")


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES - OWN_PROCESS))
def test_examples_of_a_module_run(name, restored):
  if name in EXTRAS:
    pytest.importorskip(EXTRAS[name], reason="the extra is not installed")
  runner = doctest.DocTestRunner(_Checker(), verbose=False)
  module = importlib.import_module(name)
  # doctest leaves out classes that seem to be from another module.
  for owner in (module, *filter(_has_name_of_torch, vars(module).values())):
    for examples in doctest.DocTestFinder().find(owner, name, module, extraglobs=NAMES):
      runner.run(examples)
  assert runner.tries and not runner.failures


@pytest.mark.parametrize("name", sorted(OWN_PROCESS))
def test_examples_for_a_new_process_run(name):
  result = subprocess.run(
    [sys.executable, "-c", RUN, name], capture_output=True, text=True, check=False
  )
  assert result.returncode == 0, result.stdout + result.stderr
