"""Isolation of `torchax.rng`: its imports from the rest of torchax and from torch."""

import subprocess
import sys

import pytest
from source_tree import PACKAGE, dotted_names, modules

# All modules of torchax that the package may import.
NEEDED = ("torchax.compat", "torchax.errors", "torchax.rng", "torchax.version")

ALONE = f"""
import importlib.abc, sys, types

class Blocked(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.startswith("torchax.") and not name.startswith({NEEDED!r}):
      raise ImportError(name + " is not there")

package = types.ModuleType("torchax")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["torchax"] = package
sys.meta_path.insert(0, Blocked())
"""

PROGRAM = """
import jax
import torch
from torchax import rng

rng.manual_seed(7)
stream = rng.current()
drawn = [jax.random.bits(stream.next_key()).tolist() for _ in range(3)]
with rng.rng_scope(7) as scope:
  pure = rng.KeyedFunction(lambda: jax.random.bits(rng.current().next_key()))
  jitted = jax.jit(pure)
  again = [pure.run(jitted).tolist() for _ in range(3)]
assert drawn == again and scope.state.count == 3
with stream.record() as ledger:
  rng.generator_operands(torch.Generator(), "a draw")
  stream.next_key()
assert len(ledger) == 1

for module in sorted(name for name in sys.modules if name.startswith("torchax")):
  print(module)
"""

# Names of torch: generators, and tensors of seeds and states at the boundary.
OF_TORCH = {
  *("torch.Generator", "torch.Tensor", "torch.bool", "torch.equal", "torch.frombuffer"),
  *("torch.initial_seed", "torch.int64", "torch.randint", "torch.uint8"),
}


def test_rng_is_imported_and_draws_without_the_rest_of_torchax():
  run = subprocess.run(
    [sys.executable, "-c", ALONE + PROGRAM], capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr
  found = run.stdout.split()
  assert "torchax.rng.keyed_function" in found
  assert all(name == "torchax" or name.startswith(NEEDED) for name in found)


@pytest.mark.parametrize(
  "module", [m for m in modules() if m.name.startswith("torchax.rng")], ids=str
)
def test_rng_needs_of_torch_only_generators_and_states(module):
  names = {name for _, name in dotted_names(module) if name.startswith("torch.")}
  names = {".".join(name.split(".")[:2]) for name in names}
  assert names <= OF_TORCH
