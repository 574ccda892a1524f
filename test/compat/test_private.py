"""A missing private name of torch or JAX disables its feature only.

Names are removed one after the other, in processes that import torchax without them.
"""

import importlib
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from source_tree import ROOT

import torchax
from torchax.compat import private
from torchax.errors import OperatorNotFound, PrivateApiError, UnsupportedVersionError
from torchax.registry import names, operators

pytestmark = pytest.mark.programs

ZYGOTE = ROOT / "test" / "zygote.py"

# Plain eager program: operations, a write, a training step, moves.
EAGER = """
import torch, torchax
assert (torch.ones(2, device="jax") + 1).tolist() == [2.0, 2.0]

def step():
  model = torch.nn.Linear(2, 1).to("jax")
  x = torch.ones(3, 2, device="jax")
  x[0] = 2
  model(x).relu().sum().backward()
  assert model.weight.grad.shape == (1, 2)
  assert [row.tolist() for row in x] == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
  with torch.no_grad():
    model.bias -= model.bias.grad
  assert model.cpu().bias.device.type == "cpu"

step()
with torchax.default_env():
  step()
"""

# Without these names there is no tensor, or its contents would be silently wrong.
ESSENTIAL = {
  "torch.Tensor._make_wrapper_subclass",
  "torch._C._DisableTorchDispatch",
  "torch._C._set_only_lift_cpu_tensors",
  "torch._C.DispatchKey.Meta",
  "torch._C.DispatchKeySet",
  "torch._C.DisableTorchFunctionSubclass",
  "jax._src.core.trace_ctx",
  "torch._C._acc.DeviceGuard",
  "torch._C._acc.register_python_privateuseone_device_guard",
  "torch._C._autograd.DeviceType.PrivateUse1",
}


@pytest.fixture(scope="module")
def run_without(tmp_path_factory):
  """Return a function: (program, lists of hidden names) -> the error of each run."""
  # All processes run the same few programs, which are compiled once.
  cache = tmp_path_factory.mktemp("cache")
  zygote = subprocess.Popen(
    [sys.executable, str(ZYGOTE), str(cache / "bytecode")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    },
  )

  def run(program: str, cases: list[list[str]]) -> list[str | None]:
    zygote.stdin.write(json.dumps([program, cases]) + "\n")
    zygote.stdin.flush()
    outcomes = json.loads(zygote.stdout.readline())
    assert len(outcomes) == len(cases)
    return outcomes

  with zygote:
    yield run
    zygote.stdin.close()
  assert zygote.returncode == 0


def test_the_essential_pieces_are_a_handful():
  found = {path for path, piece in private.PIECES.items() if piece.is_essential}
  assert found == ESSENTIAL


PARTS = 9


@pytest.mark.parametrize("part", range(PARTS))
def test_eager_mode_works_without_each_private_piece(part, run_without):
  paths = [path for path in private.PIECES if path not in ESSENTIAL]
  assert len(paths) > 50
  cases = {path: [path] for path in paths[part::PARTS]}
  if not part:
    cases |= {"none": [], "all of them": paths}
  outcomes = run_without(EAGER, list(cases.values()))
  assert dict(zip(cases, outcomes)) == dict.fromkeys(cases)


def test_importing_without_an_essential_piece_names_it(run_without):
  paths = sorted(ESSENTIAL)
  outcomes = run_without("import torchax", [[path] for path in paths])
  for path, error in zip(paths, outcomes):
    library = path.partition(".")[0]
    assert error.startswith(f"UnsupportedVersionError: {library} "), (path, error)
    assert f"has no {path}, which torchax needs for" in error


def test_missing_piece_error_names_piece_feature_and_versions():
  piece = private.Piece("torch._C._set_conj", "conjugate views")
  with pytest.raises(PrivateApiError) as caught:
    private.Unavailable(piece)(torch.ones(2), True)
  message = str(caught.value)
  assert f"torch {torch.__version__} has no torch._C._set_conj" in message
  assert "needs for conjugate views; torch 2.11 to 2.15 has it" in message
  assert "Everything else works" in message


def test_any_use_of_a_missing_piece_raises(monkeypatch):
  monkeypatch.setattr(private, "PIECES", {})
  found = private.find("torch._C._there_is_no_such_thing", "a test")
  for use in (found, lambda: found.attribute, lambda: isinstance(1, found.cls)):
    with pytest.raises(PrivateApiError, match="_there_is_no_such_thing"):
      use()
  assert private.find("torch._no.such.module", "a test", instead=3) == 3
  with pytest.raises(PrivateApiError, match="_there_is_no_such_thing"):
    private.require("a test")
  private.require("another test")


def test_a_piece_in_a_slow_module_is_looked_up_when_it_is_used(monkeypatch):
  monkeypatch.setattr(private, "PIECES", {})
  later = private.Later("torch._inductor.config", "a test")
  assert private.PIECES["torch._inductor.config"].is_found is None
  assert later() is torch._inductor.config
  assert private.PIECES["torch._inductor.config"].is_found
  without = private.Later("torch._inductor.gone", "a test", instead=3)
  assert without() == 3 and private.PIECES["torch._inductor.gone"].degrades


def test_a_module_behind_a_function_of_its_name_is_found():
  optimizer = importlib.import_module("torch.optim.optimizer")
  path = "torch.optim.optimizer._foreach_supported_types"
  assert private.resolve(path) is optimizer._foreach_supported_types
  module = importlib.import_module("torch.nn.parallel.data_parallel")
  assert private.resolve("torch.nn.parallel.data_parallel.DataParallel") is (
    module.DataParallel
  )
  with pytest.raises(AttributeError):
    private.resolve("torch.nn.parallel.data_parallel.there_is_no_such_thing")


def test_pieces_are_of_torch_or_jax():
  with pytest.raises(ValueError, match="torch or jax"):
    private.find("numpy._core", "a test")


# Functions whose results depend on private names of torch, and their messages.
FEATURES = {
  "torch.compile": (
    "torch._guards.TracingContext",
    "torch.compile(torch.nn.ReLU(), backend='jax')(torch.ones(2))",
  ),
  "autocast": (
    "torch._C.DispatchKey.AutocastPrivateUse1",
    "torch.autocast('jax', torch.bfloat16).__enter__()",
  ),
  "conjugate": (
    "torch._C._set_conj",
    "torch.ones(2, dtype=torch.complex64, device='jax').conj()",
  ),
  "composite": (
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "with torch.inference_mode(): torch.ones(2, 2, device='jax').matrix_power(2)",
  ),
  "vmap": (
    "jax._src.interpreters.batching.BatchTrace",
    "import jax, jax.numpy as jnp; from torchax.interop import torch_view; "
    "torch_view(jax.vmap)(lambda x: x + torch.rand((), device='jax'))"
    "(torch.ones(2, device='jax'))",
  ),
}


def test_a_feature_raises_one_error_that_names_its_piece(run_without):
  for path, line in FEATURES.values():
    program = f"import torch, torchax\nwith torchax.default_env():\n  {line}\n"
    (error,) = run_without(program, [[path]])
    assert error is not None and f"has no {path}, which" in error, (path, error)


# Operations ---------------------------------------------------------------------------


NAMESPACES = (
  *(names.aten, names.prims, names.higher_order),
  *(names.F, names.functions, names.methods),
)


def _all_operations() -> list[str]:
  """Return all packets and overloads that a table or a lowering of torchax names."""
  paths = []
  for namespace in NAMESPACES:
    for name, found in list(vars(namespace).items()):
      if name.startswith("_") and not isinstance(found, names.Packet):
        continue
      path = f"{vars(namespace)['_path']}.{name}"
      paths.append(path)
      if isinstance(found, names.Packet):
        inner = [n for n in found.packet.overloads() if n in vars(found)]
        paths.extend(f"{path}.{overload}" for overload in inner)
  return sorted(paths)


# Names that the eager program calls, itself or through torch.
USED = (
  *("add", "addmm", "mm", "ones", "relu", "sum", "t", "threshold_backward", "mul"),
  *("_to_copy", "copy", "detach", "expand", "view", "empty", "empty_strided", "alias"),
  *("zeros", "fill", "ones_like", "zeros_like", "transpose", "linear", "_local_scalar"),
  *("lift_fresh", "clone", "_unsafe_view", "set_", "resize_", "new_empty", "permute"),
  *("as_strided", "full", "is_same_size", "unsqueeze", "squeeze", "matmul"),
  *("accumulate", "select", "slice", "sub", "unbind"),
)


def test_import_works_without_any_of_the_operations(run_without):
  operations = _all_operations()
  assert len(operations) > 500
  draw = random.Random(0)
  halves = [draw.sample(operations, len(operations) // 2) for _ in range(4)]
  outcomes = run_without("import torchax", [operations, *halves])
  assert outcomes == [None] * 5


def test_eager_mode_works_without_operations_it_does_not_use(run_without):
  parts = tuple(f"torch.ops.aten.{name}" for name in USED)
  rare = [path for path in _all_operations() if not path.startswith(parts)]
  assert len(rare) > 400
  assert run_without(EAGER, [rare]) == [None]


def test_an_operation_that_torch_lacks_is_not_registered():
  gone = names.aten.there_is_no_such_operation
  before = dict(operators.all_aten_ops)
  for operation in (gone, gone.default):
    torchax.jaten.op(operation)(lambda self: self)
  assert operators.all_aten_ops == before
  assert not gone
  assert names.present({gone: 1, names.aten.add: gone.out}) == {}
  with pytest.raises(OperatorNotFound, match="no torch.ops.aten.there_is_no_such"):
    gone.default(torch.ones(2))


def test_an_overload_that_torch_lacks_is_missing_as_well():
  assert not names.aten.add.there_is_no_such_overload
  with pytest.raises(AttributeError):
    names.aten.add._there_is_no_such_attribute  # noqa: B018


def test_packet_is_torchs_object():
  add = torch.ops.aten.add
  assert names.aten.add == add and add == names.aten.add
  assert {add: 1}[names.aten.add] == {names.aten.add: 1}[add] == 1
  assert names.aten.add.Tensor is add.Tensor
  assert names.resolve(names.aten.add) is add
  assert names.aten.add(torch.ones(2), 1).tolist() == [2.0, 2.0]


def test_operation_defined_later_is_found():
  namespace = names.Namespace("torch.ops.torchax_late", torch.ops.torchax_late)
  assert not namespace.twice
  library = torch.library.Library("torchax_late", "DEF")
  library.define("twice(Tensor x) -> Tensor")
  assert namespace.twice.default is torch.ops.torchax_late.twice.default
  del library


def test_an_essential_piece_that_is_missing_is_an_import_error(monkeypatch):
  monkeypatch.setattr(private, "PIECES", {})
  with pytest.raises(UnsupportedVersionError, match="needs for a test") as caught:
    private.essential("torch._C._there_is_no_such_thing", "a test")
  assert isinstance(caught.value, ImportError)
  assert "Everything else" not in str(caught.value)
