"""Programs of plain torch print the same with and without torchax imported."""

import fnmatch
import re

import pytest
import source_tree
from faults.programs import run

pytestmark = pytest.mark.programs

PROGRAMS = {
  "backward passes on both sides of a fork": """
def gradient():
  leaf = torch.ones(3, requires_grad=True)
  (leaf * 2).sum().backward()
  return leaf.grad

print(gradient(), flush=True)
child = os.fork()
if not child:
  print(gradient(), flush=True)
  os._exit(0)
print(os.waitpid(child, 0)[1])
""",
  "DataLoader": """
rows = torch.utils.data.TensorDataset(torch.arange(8.0))
for workers in (0, 2):
  print(list(torch.utils.data.DataLoader(rows, 4, num_workers=workers)))
""",
  "pinning": """
rows = torch.utils.data.TensorDataset(torch.arange(8.0))
print(list(torch.utils.data.DataLoader(rows, 4, pin_memory=True)))
""",
  "autocast": """
with torch.autocast("cpu", torch.bfloat16):
  print(torch.ones(2, 2) @ torch.ones(2, 2))
""",
  "save": """
file = io.BytesIO()
torch.save({"weight": torch.arange(3.0), "step": 1}, file)
print(file.getvalue().hex())
file.seek(0)
print(torch.load(file))
""",
  "distributed gloo": """
import tempfile
import torch.distributed as dist
with tempfile.TemporaryDirectory() as folder:
  dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
  total = torch.ones(3)
  dist.all_reduce(total)
  print(total, dist.get_backend())
  dist.destroy_process_group()
""",
  "profiler": """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
  torch.ones(3).exp().sum()
print(sorted((e.key, e.count, str(e.device_type)) for e in found.key_averages()))
""",
  "optimizer": """
torch.manual_seed(0)
layer = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(3)).sum().backward()
torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
optimizer.step()
print(layer.weight, layer.bias)
""",
  "compiled functions with a gradient of their own": """
class Twice(torch.autograd.Function):
  @staticmethod
  def forward(ctx, x):
    ctx.mark_dirty(x)  # breaks the graph
    return x.mul_(2) if x.sum() > 0 else x.mul_(3)

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 5

def count(graph, inputs):
  print(sorted(str(node.target) for node in graph.graph.nodes))
  return graph.forward

@torch.compile(backend=count)
def run(x):
  return Twice.apply(x * 1) + 1

for grad in (False, True):
  x = torch.ones(3, requires_grad=grad)
  print(run(x))
  if grad:
    print(torch.autograd.grad(run(x).sum(), x))
""",
  # Inductor writes C++ here; where there is no compiler, both print its error.
  "inductor": """
layer = torch.nn.Linear(3, 2)
torch.nn.init.ones_(layer.weight)
torch.nn.init.zeros_(layer.bias)
try:
  loss = torch.compile(lambda t: layer(t).relu().sum())(torch.ones(4, 3))
  loss.backward()
  print(loss, layer.weight.grad)
except torch._dynamo.exc.TorchDynamoException as error:
  print(type(error))
""",
  "compile": """
print(torch.compile(lambda t: t * 2 + 1, backend="aot_eager")(torch.ones(3)))
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_of_plain_torch_does_the_same_with_torchax_imported(program):
  start = "import io, os, torch"
  plain = run(f"{start}\n{program}")
  assert plain
  assert run(f"{start}, torchax\n{program}") == plain


# Counted up by whoever registers a hook; written by Python's warnings and imports.
COUNTERS = {"RemovableHandle.next_id", "overrides.__warningregistry__", "ops.__path__"}

CHANGES = """
import sys, torch, torch.utils.data, torch.optim, torch.distributed, jax, numpy

def attributes():
  found = {}
  for name, module in list(sys.modules.items()):
    if name.partition(".")[0] != "torch" or not hasattr(module, "__dict__"):
      continue
    for key, value in list(vars(module).items()):
      if getattr(value, "__module__", None) == name and isinstance(value, type):
        for k, v in list(vars(value).items()):
          if k not in ("__dict__", "__weakref__"):
            found[id(value), f"{key}.{k}"] = v
      found[name, f"{name.rpartition('.')[2]}.{key}"] = value
  return found

before = attributes()
known = {module for module, name in before}  # and classes, by their id
import torchax
for (module, name), value in attributes().items():
  if module in known and before.get((module, name), before) is not value:
    print(name)
"""


def test_the_page_names_what_the_import_changes_in_torch():
  page = (source_tree.ROOT / "docs" / "devices.md").read_text()
  section = page.partition("## What the import changes")[2].partition("\n## ")[0]
  patterns = re.findall("`([^`]+)`", section)
  changed = set(run(CHANGES).split()) - COUNTERS
  assert "Tensor.jax" in changed and "utils.swap_tensors" in changed
  unnamed = [
    name for name in changed if not any(fnmatch.fnmatch(name, p) for p in patterns)
  ]
  assert not sorted(unnamed)
