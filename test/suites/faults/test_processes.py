"""Forks of a process in which JAX has started: they refuse jax, and run the rest.

All rows of a table are children of one program; an alarm ends a child that hangs.
"""

import functools
import json

import pytest
from faults.programs import run

import torchax

pytestmark = pytest.mark.programs

# `outcome(f)` is the outcome of `f` in a forked child: class and message, or a repr.
PRELUDE = """
import copy, io, json, os, signal, sys, torch, torchax
import jax.numpy as jnp
from torchax import interop
env = torchax.default_env()

def outcome(function, seconds=20):
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    signal.alarm(seconds)
    try:
      found = ["value", repr(function())]
    except BaseException as error:
      found = [type(error).__name__, str(error)]
    os.write(writing, json.dumps(found).encode())
    os._exit(0)
  os.close(writing)
  with os.fdopen(reading, "rb") as pipe:
    said = pipe.read()
  status = os.waitpid(child, 0)[1]
  return json.loads(said) if said else ["died", str(status)]
"""

USED = """
x = torch.arange(3.0, device="jax")
x.add(1).sum().item()
jitted = interop.jax_jit(lambda t: t + 1)
linear = torch.nn.Linear(3, 3).to("jax")
compiled = torch.compile(linear, backend="jax")
jitted(x), linear(x).sum().backward(), compiled(x)
cpu = torch.arange(3.0)
"""

REFUSED = [
  "x * 3",
  "x.add_(1)",
  "x[0]",
  "x[:2]",
  "list(x)",
  "x.view(3, 1)",
  "torch.stack([x, x])",
  "x.detach()",
  "torch.ones(2, device='jax')",
  "torch.empty(2, device='jax')",
  "env.to_xla(torch.ones(2))",
  "torch.rand(2, device='jax')",
  "torch.rand(2, device='jax', generator=torch.Generator('jax'))",
  "torch.ones(2).to('jax')",
  "torch.nn.Linear(2, 2).to('jax')",
  "torch.nn.Linear(2, 2, device='jax')",
  "x.cpu()",
  "x.to('cpu')",
  "x.numpy()",
  "x.tolist()",
  "x.sum().item()",
  "repr(x)",
  "copy.deepcopy(x)",
  "torch.save(x, io.BytesIO())",
  "linear(x)",
  "jitted(x)",
  "compiled(x)",
  "interop.jax_view(x)",
  "interop.call_jax(jnp.sin, x)",
  "interop.scan(lambda c, t: (c, t), x, x)",
  "torch.func.grad(lambda t: (t * t).sum())(x)",
  "env.prng_key",
  "torch.jax.synchronize()",
  "torch.utils.data.default_collate([x, x])",
  "torch.optim.SGD(linear.parameters(), lr=1.0).step()",
]

RUNS = {
  "cpu + 1": "tensor([1., 2., 3.])",
  "torch.nn.functional.dropout(cpu, 0.0)": "tensor([0., 1., 2.])",
  "torch.nn.functional.linear(cpu, torch.eye(3))": "tensor([0., 1., 2.])",
  "torch.manual_seed(1).initial_seed()": "1",
  "torch.jax.manual_seed(1)": "None",
  "torch.save(cpu, io.BytesIO())": "None",
  "copy.deepcopy(cpu)": "tensor([0., 1., 2.])",
  "x.shape": "torch.Size([3])",
  "x.device": "device(type='jax', index=0)",
  "torch.utils.data.default_collate([cpu, cpu]).shape": "torch.Size([2, 3])",
}


def _outcomes(lines) -> str:
  return f"""
with env if inside else torch.enable_grad():
  found = [outcome(lambda: eval(line)) for line in {list(lines)!r}]
print(json.dumps(found))
"""


@functools.cache
def _children(inside: bool) -> dict[str, list]:
  lines = [*REFUSED, *RUNS]
  program = f"{PRELUDE}\ninside = {inside}\n{USED}\n{_outcomes(lines)}"
  return dict(zip(lines, json.loads(run(program, 300))))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the environment"])
@pytest.mark.parametrize("line", REFUSED)
def test_a_forked_child_refuses_jax(line, inside):
  kind, message = _children(inside)[line]
  assert kind == "ForkError", message
  assert message.startswith("Cannot re-initialize JAX in forked subprocess")
  assert "'spawn'" in message and "collate_fn" in message


@pytest.mark.parametrize(("owner", "name"), torchax._WAYS_TO_JAX)
def test_each_function_that_a_forked_child_refuses_exists(owner, name):
  assert hasattr(owner, name)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the environment"])
@pytest.mark.parametrize(("line", "result"), RUNS.items(), ids=RUNS)
def test_forked_child_runs_code_without_jax(line, result, inside):
  assert _children(inside)[line] == ["value", result]


def test_cpu_backward_runs_in_a_forked_child_after_jax_was_used():
  program = f"""{PRELUDE}
def gradient():
  leaf = torch.ones(3, requires_grad=True)
  (leaf * 2).sum().backward()
  return leaf.grad

gradient()
{USED}
gradient()
print(outcome(gradient)[1])
"""
  assert run(program) == "tensor([2., 2., 2.])\n"


def test_the_parent_goes_on_after_a_fork():
  program = f"{PRELUDE}{USED}\noutcome(lambda: x + 1)\nprint((x + 1).tolist())"
  assert run(program) == "[1.0, 2.0, 3.0]\n"


def test_a_child_of_a_process_that_has_not_used_jax_uses_it():
  program = f"""{PRELUDE}
torch.manual_seed(0)
print(outcome(lambda: (torch.ones(2, device="jax") + 1).tolist()))
print(outcome(lambda: torch.ones(2).to("jax").sum().item()))
"""
  assert run(program) == "['value', '[2.0, 2.0]']\n['value', '2.0']\n"


def test_a_grandchild_refuses_as_well():
  program = f"{PRELUDE}{USED}\nprint(outcome(lambda: outcome(lambda: x + 1)[0])[1])"
  assert run(program) == "'ForkError'\n"


LOADERS = """
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Rows(Dataset):
  def __init__(self, row):
    self.row = row
  def __len__(self):
    return 8
  def __getitem__(self, place):
    return self.row(place)

def batches(dataset, **options):
  try:
    loaded = list(DataLoader(dataset, 4, num_workers=2, **options))
  except Exception as error:
    print(type(error).__name__, "Cannot re-initialize JAX" in str(error))
  else:
    print(len(loaded), loaded[0])

x = torch.ones(8, device="jax") + 1
x.sum().item()
"""
JAX_LOADERS = [
  "Rows(lambda i: torch.ones(2, device='jax'))",
  "Rows(lambda i: x[i])",
  "Rows(lambda i: torch.ones(2).to('jax'))",
  "TensorDataset(x)",
]


@pytest.mark.parametrize("dataset", JAX_LOADERS)
def test_worker_that_makes_jax_tensors_raises_with_advice(dataset):
  program = f"{PRELUDE}{LOADERS}\nbatches({dataset})"
  assert run(program) == "ForkError True\n"


def test_collation_onto_jax_belongs_into_the_parent():
  program = f"""{PRELUDE}{LOADERS}
rows = Rows(lambda i: torch.tensor(float(i)))
batches(rows, collate_fn=lambda rows: torch.stack(rows).to("jax"))
batches(rows)
print([batch.to("jax").sum().item() for batch in DataLoader(rows, 4, num_workers=2)])
"""
  assert run(program).splitlines() == [
    "ForkError True",
    "2 tensor([0., 1., 2., 3.])",
    "[6.0, 22.0]",
  ]
