"""Importing torchax changes nothing for code that does not use it.

Each row is a program that imports torchax in a new process.
"""

import os
import subprocess
import sys

import pytest
import torch

from torchax.compat import versions

pytestmark = pytest.mark.programs

# Programs that must print the same with and without torchax.
PREPARE = {
  "plain": "import torch",
  "with torchax": "import torch, torchax",
}


def run(program: str, **environment) -> str:
  """Run a program; return its output."""
  result = subprocess.run(
    [sys.executable, "-W", "error::DeprecationWarning:torchax", "-c", program],
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
    env={**os.environ, **environment},
  )
  assert result.returncode == 0, result.stderr[-4000:]
  return result.stdout


NUMBERS = """
torch.manual_seed(0)
def show(name, tensor):
  values = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
  print(name, tensor.dtype, list(tensor.shape), values.hex())
x = torch.randn(4, 5)
model = torch.nn.Sequential(
  torch.nn.Linear(5, 6), torch.nn.Dropout(0.5), torch.nn.LayerNorm(6))
out = model(x)
out.pow(2).sum().backward()
show("out", out)
show("grad", model[0].weight.grad)
show("randint", torch.randint(0, 100, (5,)))
show("perm", torch.randperm(7))
show("conv", torch.nn.functional.conv1d(x[None], torch.ones(2, 4, 3)))
batch = x[None]
show("attention", torch.nn.functional.scaled_dot_product_attention(batch, batch, batch))
show("state", torch.get_rng_state())
optimizer = torch.optim.Adam(model.parameters())
optimizer.step()
show("step", model[0].weight)
with torch.random.fork_rng():
  show("forked", torch.rand(3))
show("after", torch.rand(3))
print(torch.get_default_device(), torch.get_default_dtype())
"""


def test_cpu_operations_and_draws_are_bit_identical():
  plain, with_torchax = (run(f"{line}\n{NUMBERS}") for line in PREPARE.values())
  assert with_torchax == plain
  assert plain.count("\n") > 8


COMPILE = """
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
x = torch.ones(2, 4)
torch.testing.assert_close(compiled(x), model(x))
compiled(x).sum().backward()
assert model[0].weight.grad is not None

@torch.compile(backend=BACKEND)
def with_breaks(x):
  y = x * 2
  torch._dynamo.graph_break()
  return y + torch.ones(3)

torch.testing.assert_close(with_breaks(torch.ones(3)), torch.full((3,), 3.0))
print("compiled")
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_works_with_other_backends(backend):
  output = run(f"import torch, torchax\nBACKEND = {backend!r}\n{COMPILE}")
  assert output == "compiled\n"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_works_after_torchax_was_used(backend):
  used = "torch.ones(2, device='jax').exp()\nwith torchax.default_env(): torch.ones(2)"
  output = run(f"import torch, torchax\nBACKEND = {backend!r}\n{used}\n{COMPILE}")
  assert output == "compiled\n"


LOADER = """
import warnings
from torch.utils.data import DataLoader, TensorDataset

def main():
  data = TensorDataset(torch.arange(8.0), torch.arange(8))
  for workers, pin in ((0, False), (0, True), (2, False), (2, True)):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=pin)
      batches = [x for x, y in loader]
    assert all(type(x) is torch.Tensor and x.device.type == "cpu" for x in batches)
    assert torch.equal(torch.cat(batches), torch.arange(8.0))
  print("loaded")

if __name__ == "__main__":
  main()
"""


def test_a_data_loader_loads_with_workers_and_pinned_memory():
  assert run(f"import torch, torchax\n{LOADER}") == "loaded\n"


def test_a_data_loader_loads_after_torchax_was_used():
  used = "torch.ones(2, device='jax').exp()"
  assert run(f"import torch, torchax\n{used}\n{LOADER}") == "loaded\n"


# Before torch 2.13 the default device is CUDA's.
_DEVICE = (
  "" if not versions.is_older(torch.__version__, "2.13") else "device_type='jax'"
)
FORK = f"""
torch.manual_seed(3)
with torch.random.fork_rng({_DEVICE}):
  a = torch.rand(2)
  b = torch.rand(2, device="jax")
c = torch.rand(2)
d = torch.rand(2, device="jax")
torch.manual_seed(3)
assert torch.equal(a, c) and torch.equal(b, d)
with torch.random.fork_rng(devices=[]):
  torch.rand(2)
with torch.random.fork_rng(devices=[0], device_type="jax"):
  torch.rand(2, device="jax")
assert torch.equal(torch.rand(2), a) and torch.equal(torch.rand(2, device="jax"), b)
print("forked")
"""


def test_forking_the_random_state_restores_both_worlds():
  assert run(f"import torch, torchax\n{FORK}") == "forked\n"


NO_BACKEND = """
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "{when} set up a JAX backend"
"""


ACCELERATOR = """
accelerator = torch.accelerator
assert accelerator.is_available()
accelerator.synchronize()
if hasattr(accelerator, "empty_host_cache"):  # torch 2.11 has none
  accelerator.empty_host_cache()
accelerator.memory_stats()
assert accelerator.current_accelerator(check_available=True).type == "jax"
accelerator.current_device_index()
accelerator.set_device_index(0)
with accelerator.device_index(0):
  pass
assert torch.Stream().device.type == torch.Event().device.type == "jax"
accelerator.current_stream()
torch.utils.checkpoint.checkpoint(
  lambda x: x * 2, torch.ones(2, requires_grad=True), use_reentrant=False
).sum().backward()
with torch.autocast("cpu", torch.bfloat16):
  assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
torch.nn.Linear(2, 2).share_memory()
model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
assert torch.equal(torch.nn.DataParallel(model)(x), model(x))
print("ran")
"""


def test_the_accelerator_api_does_not_crash():
  check = NO_BACKEND.format(when="asking for the accelerator")
  assert run(f"import torch, torchax\n{ACCELERATOR}{check}") == "ran\n"


GENERATORS = """
import copy, pickle
g = torch.Generator("jax")
plain = torch.Generator()
assert isinstance(plain, torch.Generator) and isinstance(g, torch.Generator)
assert isinstance(torch.default_generator, torch.Generator)
assert not isinstance(1, torch.Generator)
assert type(plain) is type(torch.default_generator)
assert issubclass(type(plain), torch.Generator)
assert pickle.loads(pickle.dumps(plain)).device.type == "cpu"
assert copy.deepcopy(plain).initial_seed() == plain.initial_seed()

class Mine(torch.Generator):
  pass

assert isinstance(Mine(), Mine) and not isinstance(plain, Mine)
print("made")
"""


def test_generators_are_instances_of_torchs_class_too():
  check = NO_BACKEND.format(when="making a generator")
  assert run(f"import torch, torchax\n{GENERATORS}{check}") == "made\n"


def test_importing_sets_up_no_jax_backend():
  check = NO_BACKEND.format(when="importing torchax")
  run(f"import torch, torchax\n{check}")
  run(f"import torch, torchax, torchax.interop\n{check}")


USES_NO_JAX = {
  "environment": "with torchax.default_env(): torch.ones(2)",
  "seed": "torch.manual_seed(1)",
  "fork_rng": "with torch.random.fork_rng(): torch.rand(2)",
  "module": "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()",
  "loader": "list(torch.utils.data.DataLoader([1, 2], num_workers=1))",
  "default_device": "torch.get_default_device()",
}


@pytest.mark.parametrize("line", USES_NO_JAX.values(), ids=USES_NO_JAX)
def test_code_that_uses_no_jax_tensor_sets_up_no_jax_backend(line):
  check = NO_BACKEND.format(when="it")
  run(f"import torch, torchax\n{line}\n{check}")


def test_jax_is_configured_as_without_torchax():
  show = "import jax; print(sorted((k, str(v)) for k, v in jax.config.values.items()))"
  plain = run(f"import torch\n{show}")
  assert run(f"import torch, torchax\n{show}") == plain


def test_the_order_of_imports_does_not_matter():
  check = "print(torch.ones(2, device='jax').sum().item())"
  assert run(f"import torchax, torch\n{check}") == "2.0\n"
  assert run(f"import jax, torchax, torch\n{check}") == "2.0\n"
  assert run(f"import torch.nn, torchax.interop\n{check}") == "2.0\n"


def test_a_process_exits_cleanly_with_tensors_and_threads_alive():
  program = """
import threading, torch, torchax
x = torch.ones(3, device="jax", requires_grad=True)
kept = [(x * 2).sum()]
thread = threading.Thread(target=lambda: kept[0].backward())
thread.start()
thread.join()
print(x.grad.tolist())
"""
  assert run(program) == "[2.0, 2.0, 2.0]\n"


def test_another_backend_of_the_process_is_named():
  program = """
import torch
torch.utils.rename_privateuse1_backend("mine")
try:
  import torchax
except RuntimeError as error:
  print(error)
"""
  assert "'mine' has taken it" in run(program)


def test_no_global_mode_or_default_is_left_behind():
  program = """
import torch, torchax
assert torch._C._len_torch_function_stack() == 0
assert torch._C._len_torch_dispatch_stack() == 0
assert torch.get_default_device().type == "cpu"
assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
print(type(torch.ones(2)).__name__, type(torch.tensor([1.0])).__name__)
"""
  assert run(program) == "Tensor Tensor\n"


def test_warnings_of_others_are_not_filtered():
  program = """
import warnings
before = list(warnings.filters)
import torch
plain = list(warnings.filters)
import jax
with_jax = list(warnings.filters)
import torchax
print(list(warnings.filters) == with_jax)
"""
  assert run(program) == "True\n"


def test_attention_on_the_cpu_does_not_import_pallas():
  program = """
import sys, torch, torchax
x = torch.ones(1, 1, 4, 4, device="jax")
with torchax.default_env():
  torch.nn.functional.scaled_dot_product_attention(x, x, x)
print("jax.experimental.pallas" in sys.modules)
"""
  assert run(program) == "False\n"


def test_importing_does_not_load_compilers():
  """Loading them takes as long as loading torch; only compilation should pay for it."""
  slow = {"torch._dynamo", "torch._inductor", "functorch.compile", "sympy"}
  program = f"""
import sys, torch
by_torch = set(sys.modules)
import torchax, torchax.export
print(sorted({slow} & (set(sys.modules) - by_torch)))
"""
  assert run(program) == "[]\n"
