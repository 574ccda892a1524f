"""Metadata and syntax trees of the library, for tests of its structure."""

import ast
import dataclasses
import functools
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
  "project"
]


@dataclasses.dataclass(frozen=True)
class Module:
  """One file: dotted name, path and syntax tree."""

  name: str
  path: pathlib.Path
  tree: ast.Module

  def __str__(self):
    return self.name

  @property
  def is_package(self) -> bool:
    return self.path.name == "__init__.py"


def _dotted(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> tuple[Module, ...]:
  """Return all Python files of the package, sorted by name."""
  return tuple(
    Module(_dotted(path), path, ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted(PACKAGE.rglob("*.py"))
  )


@functools.cache
def module_names() -> frozenset[str]:
  """Return the dotted names of `modules()`."""
  return frozenset(module.name for module in modules())


def _origin(module: Module, node: ast.ImportFrom) -> str:
  """Return the absolute name of the module in `from … import`."""
  if not node.level:
    return node.module or ""
  parts = module.name.split(".")
  parts = parts[: len(parts) - node.level + module.is_package]
  return ".".join(parts + ([node.module] if node.module else []))


def imports(module: Module, node: ast.AST) -> list[str]:
  """Return the absolute dotted names that an import statement imports."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    origin = _origin(module, node)
    return [f"{origin}.{alias.name}" for alias in node.names]
  return []


def _aliases(module: Module) -> dict[str, str]:
  """Return the imported dotted names, by local name."""
  table = {}
  for node in ast.walk(module.tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        root = alias.name.split(".")[0]
        table[alias.asname or root] = alias.name if alias.asname else root
    elif isinstance(node, ast.ImportFrom):
      origin = _origin(module, node)
      for alias in node.names:
        table[alias.asname or alias.name] = f"{origin}.{alias.name}"
  return table


def _chain(node: ast.AST) -> list[str] | None:
  parts = []
  while isinstance(node, ast.Attribute):
    parts.append(node.attr)
    node = node.value
  return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def dotted_names(module: Module) -> list[tuple[int, str]]:
  """Return (line, absolute dotted name) of all imports and attribute chains.

  `from jax import random as r; r.key(0)` gives `jax.random` and `jax.random.key`.
  """
  table = _aliases(module)
  found = []
  for node in ast.walk(module.tree):
    found.extend((node.lineno, name) for name in imports(module, node))
    chain = _chain(node) if isinstance(node, ast.Attribute) else None
    if chain and chain[0] in table:
      found.append((node.lineno, ".".join([table[chain[0]], *chain[1:]])))
  return found
