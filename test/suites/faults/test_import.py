"""Programs of plain torch print the same with and without torchax imported."""

import pytest
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
  # Inductor writes C++ here; without a compiler, both programs print its error.
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
def test_plain_torch_program_is_unchanged_by_importing_torchax(program):
  start = "import io, os, torch"
  plain = run(f"{start}\n{program}")
  assert plain
  assert run(f"{start}, torchax\n{program}") == plain


@pytest.mark.parametrize("name", ["Event", "Stream"])
def test_streams_and_events_need_no_tensor_first(name):
  assert run(f"import torch, torchax; print(torch.jax.{name}().device)") == "jax:0\n"
