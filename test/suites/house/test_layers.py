"""Layers of the package: imports point down, and private API stays in one place."""

import ast
import graphlib

import pytest
from source_tree import (
  PACKAGE,
  ROOT,
  Module,
  dotted_names,
  imports,
  module_names,
  modules,
)

# Layer -> folders and public modules. A module may import from its own layer (without a
# cycle) or from layers below.
LAYERS = {
  13: ("", "__main__"),
  12: ("checkpoint", "dynamo", "export", "stacks", "train"),
  11: (
    "distributed",
    "mesh_util",
    "processes",
    "diagnostics",
    "graphs",
    "integrations",
  ),
  10: ("interop", "flax"),
  9: ("tracing", "functions", "upstream"),
  8: ("environment", "properties"),
  7: ("dispatch", "view"),
  6: ("ops", "device_module"),
  5: ("tensor", "subclasses", "amp", "decompositions"),
  4: ("registry", "rng", "saving"),
  3: ("core", "devices"),
  2: ("compat",),
  1: ("errors", "types", "config", "util", "logs", "version"),
}
# Public modules of upstream that re-export code of higher layers; the package itself
# does not use them.
SHELLS = {
  "ops.jaten": 9,
  "ops.jc10d": 9,
  "ops.jlibrary": 10,
  "ops.jtorch": 9,
  "ops.jtorchvision_deform": 9,
  "ops.jtorchvision_nms": 9,
  "ops.jtorchvision_pool": 9,
  "ops.jtorchvision_roi": 9,
  "ops.op_base": 9,
}
LAYER_OF = {
  f"torchax.{name}".rstrip("."): layer
  for layer, names in LAYERS.items()
  for name in names
}
SHELL_OF = {f"torchax.{name}": layer for name, layer in SHELLS.items()}

# Packages that may be missing for a user, so a function may import them.
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

# Folders that may use private API. Each piece is looked up by its name, a string, so
# that a version without it loses one feature. Code spells out only names that `find`
# cannot look up.
PRIVATE_API = {
  "torch._C._group_tensors_by_device_and_dtype": (
    "torchax.compat.torch_compat.device_backend"
  ),
}
# Underscored names that torch tells every extension to use, because no other name
# exists: operations, trees, and the base class of dispatch modes.
TOLERATED = (
  "torch.ops.",
  "torch.utils._pytree",
  "torch.utils._python_dispatch.TorchDispatchMode",
)

each_module = pytest.mark.parametrize("module", modules(), ids=str)


def _layer(name: str) -> int | None:
  """Return the layer of a module: its own entry, or that of its folder."""
  folder = ".".join(name.split(".")[:2])
  return SHELL_OF.get(name, LAYER_OF.get(folder))


def _folders(place) -> set[str]:
  return {path.parent.name for path in place.glob("*/*.py")}


def test_tests_have_the_folders_of_the_package():
  tests = ROOT / "test"
  assert _folders(tests) <= _folders(PACKAGE)
  loose = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
  public = {path.stem for path in PACKAGE.glob("*.py")}
  assert not {
    name for name in loose if name not in public and name.split("_")[0] not in public
  }


@pytest.mark.parametrize("folder", sorted(_folders(PACKAGE) - {"torchax"}))
def test_each_folder_says_where_to_start_reading(folder):
  docstring = ast.get_docstring(
    ast.parse((PACKAGE / folder / "__init__.py").read_text())
  )
  assert "Start at `" in " ".join(docstring.split())


def _imported_modules(module: Module) -> set[str]:
  """Return the torchax modules that a file imports, with names cut to their module."""
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
    f"{module.path} is in no layer: enter its folder in LAYERS."
  )


@pytest.mark.parametrize("shell", SHELL_OF)
def test_shells_are_for_users_only(shell):
  users = [
    module.name
    for module in modules()
    if shell in _imported_modules(module) and _layer(module.name) < _layer(shell)
  ]
  assert not users, f"{shell} is imported by {users}"


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
  """Return the strings that a file passes to `private.find` and similar functions."""
  for node in ast.walk(module.tree):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
      continue
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id == "private" and node.args:
      yield node.lineno


@each_module
def test_private_api_is_looked_up_in_the_compat_modules(module):
  if module.name.startswith("torchax.compat."):
    return
  found = list(_looked_up_names(module))
  assert not found, f"private API in {module.path}, lines {found}"
