"""List the test files that a change concerns, for `make test-changed`.

A change is the difference between the working tree and its merge base with a branch,
untracked files included. It concerns

- changed test files, and those that import a changed file of the tests or of `tools/`;
- tests that import a changed module of the library, or a module that imports it;
- tests in the module's folder whose name starts with its name: `test_views_of_masks.py`
  belongs to `views`, `test_view_steps.py` does not, and `test_words.py` to `_words`;
- the rules of the house, and the tests of pages and examples if these have changed.

The list is a quick check and does not replace the whole suite.

usage: python -m tools.changed_tests [BRANCH]    main by default
"""

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOUSE = ("test/suites/house/test_layers.py", "test/suites/house/test_style.py")
# Prefix of a path -> test file of such files.
OF_OTHER_FILES = {
  "docs/": "test/suites/house/test_docs.py",
  "README.md": "test/suites/house/test_docs.py",
  "examples/": "test/suites/house/test_examples.py",
  "pyproject.toml": "test/suites/house/test_package.py",
}
# Folders that imports search, in this order (see `pythonpath` in pyproject.toml).
IMPORT_FOLDERS = ("test", "test/suites", "")


def _git(*arguments: str) -> list[str]:
  command = ["git", *arguments]
  run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  return run.stdout.splitlines()


def changed_files(branch: str) -> set[str]:
  """Return the paths that differ from the merge base with a branch, and new ones."""
  (base,) = _git("merge-base", branch, "HEAD")
  untracked = _git("ls-files", "--others", "--exclude-standard")
  return {*_git("diff", "--name-only", base), *untracked}


def _imported_names(tree: ast.AST) -> Iterator[str]:
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path_of(name: str, root: pathlib.Path) -> str | None:
  """Return the file of a dotted name, which may name an object in the file."""
  while name:
    for folder in IMPORT_FOLDERS:
      path = root.joinpath(folder, *name.split("."))
      for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
          return file.relative_to(root).as_posix()
    name = name.rpartition(".")[0]
  return None


@functools.cache
def imports_of(path: str, root: pathlib.Path = ROOT) -> frozenset[str]:
  """Return the files of the project that a file imports by name."""
  tree = ast.parse((root / path).read_text(encoding="utf-8"))
  found = {_path_of(name, root) for name in _imported_names(tree)}
  return frozenset(file for file in found if file)


def _with_helpers(test: str, root: pathlib.Path) -> set[str]:
  """Return a test file and its imports, followed through files of tests and tools."""
  found, new = set(), {test}
  while new:
    found |= new
    own = [file for file in new if not file.startswith("torchax/")]
    new = {file for path in own for file in imports_of(path, root)} - found
  return found


def _is_of_module(test: str, module: str) -> bool:
  """True for `test/a/test_b*.py` and the module `torchax/a/b.py`."""
  path, file = pathlib.PurePath(test), pathlib.PurePath(module)
  folder = pathlib.PurePath("test", *file.parent.parts[1:])
  name = f"test_{file.stem.lstrip('_')}"
  return path.parent == folder and (
    path.stem == name or path.stem.startswith(f"{name}_")
  )


def select_tests(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
  """Return the test files that a change of these files concerns, sorted.

  Args:
    changed: paths relative to `root`, deleted files included.
    root: folder of the project.
  """
  changed = set(changed)
  paths = [path.relative_to(root).as_posix() for path in root.glob("torchax/**/*.py")]
  # The package's own file imports every module.
  importers = {
    path
    for path in paths
    if path != "torchax/__init__.py" and imports_of(path, root) & changed
  }
  found = {test for test in HOUSE if (root / test).is_file()}
  for start, test in OF_OTHER_FILES.items():
    if any(path.startswith(start) for path in changed):
      found.add(test)
  modules = {path for path in changed if path.startswith("torchax/")}
  for path in root.glob("test/**/test_*.py"):
    test = path.relative_to(root).as_posix()
    imports_it = _with_helpers(test, root) & (changed | importers)
    if imports_it or any(_is_of_module(test, module) for module in modules):
      found.add(test)
  return sorted(found)


def main(arguments: list[str]) -> None:
  """Print the test files, one a line."""
  branch = arguments[0] if arguments else "main"
  print("\n".join(select_tests(changed_files(branch))))


if __name__ == "__main__":
  main(sys.argv[1:])
