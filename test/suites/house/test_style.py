"""Style rules that the linter does not check."""

import ast

import pytest
from source_tree import PACKAGE, ROOT, dotted_names, modules

# A file has one theme; a longer one has two.
MOST_LINES = 600

# Keys are made and derived only in torchax/rng, so that no draw bypasses its streams.
KEY_MAKERS = {
  f"jax.random.{name}"
  for name in ("PRNGKey", "clone", "fold_in", "key", "split", "wrap_key_data")
}
DEBUGGERS = {"pdb", "ipdb", "breakpoint"}

each_module = pytest.mark.parametrize("module", modules(), ids=str)


@each_module
def test_keys_are_made_in_rng_only(module):
  if module.name.startswith("torchax.rng"):
    return
  made = [
    f"line {line}: {name}" for line, name in dotted_names(module) if name in KEY_MAKERS
  ]
  assert not made, f"{module.path} makes keys; take one from torchax.rng: {made}"


def _called_names(module):
  for node in ast.walk(module.tree):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      yield node.lineno, node.func.id


@each_module
def test_library_neither_prints_nor_stops_in_a_debugger(module):
  calls = [
    f"line {line}: {name}"
    for line, name in _called_names(module)
    if name == "print" or name in DEBUGGERS
  ]
  calls += [
    f"line {line}: {name}"
    for line, name in dotted_names(module)
    if name.split(".")[0] in DEBUGGERS
  ]
  assert not calls, f"{module.path}: {calls}"


# The result of a function must not depend on its caller. Lines shown to users come from
# JAX's record (`user_code.py`).
FRAMES = {"_getframe", "_current_frames", "currentframe", "getouterframes"}
FRAMES |= {"f_back", "f_locals", "f_globals", "tb_frame", "gi_frame", "cr_frame"}
WALKS = {
  *("inspect.stack", "inspect.trace", "traceback.walk_stack"),
  *("traceback.extract_stack", "traceback.format_stack", "traceback.StackSummary"),
}


@each_module
def test_nothing_looks_at_the_frames_of_its_callers(module):
  found = [
    f"line {node.lineno}: {node.attr}"
    for node in ast.walk(module.tree)
    if isinstance(node, ast.Attribute) and node.attr in FRAMES
  ]
  found += [
    f"line {line}: {name}"
    for line, name in dotted_names(module)
    if name in WALKS or name.rpartition(".")[2] in FRAMES
  ]
  assert not found, f"{module.path} looks at frames: {found}"


def _catches_everything(handler: ast.ExceptHandler) -> bool:
  if handler.type is None:
    return True
  types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
  return any(
    isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
    for kind in types
  )


@each_module
def test_broad_except_clauses_reraise(module):
  swallowed = [
    f"line {node.lineno}"
    for node in ast.walk(module.tree)
    if isinstance(node, ast.ExceptHandler)
    and _catches_everything(node)
    and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
  ]
  assert not swallowed, f"{module.path}: {swallowed}"


@each_module
def test_a_file_says_its_theme(module):
  if module.path.read_text(encoding="utf-8").strip():
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"


def test_no_file_is_longer_than_one_theme():
  long = {
    str(path.relative_to(ROOT)): lines
    for folder in ("torchax", "test", "tools", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if (lines := path.read_text(encoding="utf-8").count("\n")) > MOST_LINES
  }
  assert not long, f"split these files by theme: {long}"


def test_folders_of_tests_mirror_the_package():
  tests = ROOT / "test"
  folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
  own = {folder for folder in folders if folder.parts[:1] != ("suites",)}
  assert own and not {str(f) for f in own if not (PACKAGE / f).is_dir()}
