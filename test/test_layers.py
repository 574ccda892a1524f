"""The house keeps its order: imports point down, internals stay in one place."""

import ast
import graphlib

import pytest
from source_tree import Module, dotted_names, imports, module_names, modules

# Layer -> modules; a name stands for its submodules as well, the longest name counts.
# A module may import what is in its own layer (without a circle) or below.
LAYERS = {
  12: ("torchax", "torchax.__main__", "torchax.launch"),
  11: (
    "torchax.checkpoint",
    "torchax.compilation",
    "torchax.diagnostics",
    "torchax.distributed",
    "torchax.dynamo",
    "torchax.export",
    "torchax.flax",
    "torchax.integrations",
    "torchax.mesh_util",
    "torchax.processes",
    "torchax.ops.jlibrary",
    "torchax.saving.safetensors",
    "torchax.stacks",
    "torchax.train",
  ),
  10: ("torchax.graphs",),
  9: ("torchax.interop",),
  8: (
    "torchax.decompositions",
    "torchax.ops.jc10d",
    "torchax.ops.jtorch",
    "torchax.ops.jtorchvision_nms",
    "torchax.tracing",
  ),
  7: ("torchax.ops.jaten",),
  6: (
    "torchax.dispatch.backward",
    "torchax.dispatch.factories",
    "torchax.dispatch.indexing",
    "torchax.dispatch.refusals",
    "torchax.dispatch.reshapes",
    "torchax.dispatch.shortcuts",
    "torchax.ops.builtin",
    "torchax.ops.faces",
    "torchax.ops.op_base",
  ),
  5: ("torchax.environment",),
  4: ("torchax.dispatch",),
  3: (
    "torchax.dispatch.autograd",
    "torchax.dispatch.compiling",
    "torchax.dispatch.conversion_errors",
    "torchax.dispatch.debug",
    "torchax.dispatch.host_operations",
    "torchax.dispatch.transfer",
    "torchax.properties",
    "torchax.view",
  ),
  2: ("torchax.dispatch.batched_gradients", "torchax.tensor"),
  1: (
    "torchax.amp",
    "torchax.core",
    "torchax.diagnostics.printing",
    "torchax.device_module",
    "torchax.devices",
    "torchax.ops",
    "torchax.ops.jax_reimplement",
    "torchax.ops.jimage",
    "torchax.ops.mappings",
    "torchax.ops.ops_registry",
    "torchax.rng",
    "torchax.saving",
  ),
  0: (
    "torchax.compat",
    "torchax.config",
    "torchax.diagnostics.tracebacks",
    "torchax.diagnostics.user_code",
    "torchax.errors",
    "torchax.logs",
    "torchax.ops.names",
    "torchax.types",
    "torchax.util",
    "torchax.version",
  ),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}

# May be missing on a user's machine, so a function may import them.
OPTIONAL = {
  "etils",
  "flax",
  "matplotlib",
  "optax",
  "orbax",
  "safetensors",
  "tensorboard",
  "torchvision",
  "tqdm",
}

# Where private API is used: each piece is looked up by its name, a string, so that a
# version without it costs a feature. What is written out is what `find` cannot do.
PRIVATE_API = {
  "torch._C._group_tensors_by_device_and_dtype": "torchax.compat.torch_compat.backend",
}
# Underscored, yet what every extension of torch is told to use, for want of another
# name: operations, trees, and the base class of dispatch modes.
TOLERATED = (
  "torch.ops.",
  "torch.utils._pytree",
  "torch.utils._python_dispatch.TorchDispatchMode",
)

each_module = pytest.mark.parametrize("module", modules(), ids=str)


def _layer(name: str) -> int | None:
  """The layer of a module; "torchax" itself is a layer, not the rest of the world."""
  if name == "torchax":
    return LAYER_OF[name]
  while name != "torchax":
    if name in LAYER_OF:
      return LAYER_OF[name]
    name = name.rpartition(".")[0]
  return None


def _imported_modules(module: Module) -> set[str]:
  """The torchax modules that a file imports, with names cut back to their module."""
  found = set()
  for node in ast.walk(module.tree):
    for name in imports(module, node):
      while name and name not in module_names():
        name = name.rpartition(".")[0]
      found.add(name)
  return found - {"", module.name}


@each_module
def test_every_module_has_a_layer(module):
  assert _layer(module.name) is not None, (
    f"{module.path} is in no layer: enter it in LAYERS."
  )


@each_module
def test_imports_point_down(module):
  here = _layer(module.name)
  upward = sorted(
    f"{name} (layer {_layer(name)})"
    for name in _imported_modules(module)
    if _layer(name) is not None and _layer(name) > here
  )
  assert not upward, f"{module.name} (layer {here}) imports {', '.join(upward)}"


def test_imports_make_no_circle():
  graph = {module.name: _imported_modules(module) for module in modules()}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@each_module
def test_functions_import_optional_dependencies_only(module):
  inner = [
    f"line {node.lineno}: {name}"
    for function in ast.walk(module.tree)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(function)
    for name in imports(module, node)
    if name.split(".")[0] not in OPTIONAL
  ]
  assert not inner, f"imports inside functions of {module.path}: {inner}"


def _is_private(name: str) -> bool:
  if name.startswith(TOLERATED):
    return False
  owner, *parts = name.split(".")
  if owner not in ("jax", "torch"):
    return False
  return any(part.startswith("_") and not part.startswith("__") for part in parts)


@each_module
def test_private_api_stays_in_the_compat_modules(module):
  private = sorted(
    {
      f"line {line}: {name}"
      for line, name in dotted_names(module)
      if _is_private(name)
      and not any(
        allowed == module.name and piece.startswith(name)
        for piece, allowed in PRIVATE_API.items()
      )
    }
  )
  assert not private, f"private API in {module.path}: {private}"


def _looked_up_names(module: Module):
  """The strings that a file gives to `private.find` and its like."""
  for node in ast.walk(module.tree):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
      continue
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id == "private" and node.args:
      yield node.lineno


@each_module
def test_private_api_is_looked_up_in_the_compat_modules(module):
  if module.name.startswith(
    "torchax.compat."
  ):
    return
  found = list(_looked_up_names(module))
  assert not found, f"private API in {module.path}, lines {found}"
