"""Copy of this project in memory that changes are carried into."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys

import torch

import torchax
from tools.porting.changes import PortError
from tools.porting.syntax import Definition, Source
from torchax.dispatch.decomposed import DecompositionPlan, TensorPlan
from torchax.errors import OperatorNotFound
from torchax.ops import ops_registry
from torchax.registry.schema import functional_form, schema_of


class Tree:
  """Files of this project, with changes that are not written yet.

  Args:
    root: folder of the project.
  """

  def __init__(self, root: pathlib.Path):
    self.root = root
    self.written: dict[str, str] = {}

  def read(self, path: str) -> str | None:
    """Return a file's text, or None if there is no file."""
    if path in self.written:
      return self.written[path]
    file = self.root / path
    return file.read_text(encoding="utf-8") if file.is_file() else None

  def source(self, path: str) -> Source:
    """Return a parsed Python file; a missing file is empty."""
    return Source(self.read(path) or "", path)

  def paths(self, folder: str) -> list[str]:
    """Return the paths of Python files below a folder."""
    found = {str(p.relative_to(self.root)) for p in (self.root / folder).rglob("*.py")}
    found |= {path for path in self.written if path.startswith(f"{folder}/")}
    return sorted(found)

  def find(
    self, name: str, folder: str = "torchax/ops"
  ) -> list[tuple[str, Definition]]:
    """Return the files that define a name at their top level, with the definitions."""
    found = []
    for path in self.paths(folder):
      if name in (text := self.read(path) or ""):
        definition = Source(text, path).definitions.get(name)
        if definition is not None:
          found.append((path, definition))
    return found

  def tidy(self, settings: pathlib.Path) -> None:
    """Sort imports, drop unused ones and format, as `make format` does.

    Args:
      settings: path of the project's `pyproject.toml`.
    """
    ruff = shutil.which("ruff", path=str(pathlib.Path(sys.executable).parent))
    if ruff is None:
      return  # `make lint` will report it
    given = ("--quiet", "--config", str(settings))
    for path, text in self.written.items():
      if not path.endswith(".py"):
        continue
      for command in (["check", "--fix", "--select", "F401,I"], ["format"]):
        done = subprocess.run(
          [ruff, *command, *given, "--stdin-filename", path, "-"],
          cwd=self.root,
          input=text,
          capture_output=True,
          text=True,
          check=False,
        )
        text = done.stdout or text
      self.written[path] = text

  def copied_to(self, place: pathlib.Path) -> None:
    """Write the project with the changes to another folder."""
    for name in ("torchax", "test", "tools", "pyproject.toml"):
      source = self.root / name
      if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, place / name, ignore=ignored)
      elif source.is_file():
        shutil.copy(source, place / name)
    self._write_to(place)

  def write(self) -> None:
    """Write the changes, all or none of them."""
    before = {path: (self.root / path) for path in self.written}
    texts = {
      path: file.read_bytes() if file.exists() else None
      for path, file in before.items()
    }
    try:
      self._write_to(self.root)
    except BaseException:
      for path, text in texts.items():
        if text is None:
          before[path].unlink(missing_ok=True)
        else:
          before[path].write_bytes(text)
      raise

  def _write_to(self, place: pathlib.Path) -> None:
    for path, text in self.written.items():
      (place / path).parent.mkdir(parents=True, exist_ok=True)
      (place / path).write_text(text, encoding="utf-8")


def run_tests(place: pathlib.Path, paths: list[str], limit: float) -> str:
  """Run test files of a copy of the project; return "" or the reason of a failure."""
  command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
  command += ["-m", "not programs", *paths]
  try:
    done = subprocess.run(
      command,
      cwd=place,
      env={**os.environ, "PYTHONPATH": str(place)},
      capture_output=True,
      text=True,
      timeout=limit,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return f"the tests take longer than {limit:g} s"
  if done.returncode in (0, 5):  # 5: all tests have another mark
    return ""
  lines = [
    line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
  ]
  return (
    lines or (done.stdout + done.stderr).splitlines()[-1:] or ["they do not run"]
  )[0]


@functools.cache
def operation(written: str):
  """Return the operation with a name such as `torch.ops.aten.add.Tensor`.

  Raises:
    PortError: torch has no such operation or function.
  """
  name = written if written.startswith("torch.") else f"torch.ops.{written}"
  if "(" in name or name.split(".")[2:3] == ["torchvision"]:
    return None
  found = torch
  for part in name.split(".")[1:]:
    try:
      found = getattr(found, part)
    except AttributeError:
      raise PortError(
        f"torch {torch.__version__} has no {written}, for which the change has a "
        "lowering. Carry it over with a version of torch that has it."
      ) from None
  return found


def state_here(written: str) -> str:
  """Return "there" or "derived" if an operation runs in this project, else ""."""
  found = operation(written)
  if found is None:
    return ""
  if found in ops_registry.all_torch_functions:
    return "there"
  if hasattr(found, "overloads"):
    overloads = [getattr(found, name) for name in found.overloads()]
    functional = [one for one in overloads if not schema_of(one).outputs]
    states = {_state_of(one) for one in functional or overloads if _is_run(one)}
  elif hasattr(found, "overloadpacket"):
    states = {_state_of(found)}
  else:
    return ""
  if not states or "" in states:
    return ""
  return "derived" if states == {"derived"} else "there"


def _is_run(overload) -> bool:
  """Return False for overloads of lists and numbers, which only TorchScript has."""
  try:
    overload._can_decompose()
  except RuntimeError:
    return False
  return True


def _state_of(overload) -> str:
  try:
    plan = torchax.default_env()._dispatcher.choose(overload).plan
  except OperatorNotFound:
    return ""
  dispatcher = torchax.default_env()._dispatcher
  if schema_of(overload).written and functional_form(overload) is not None:
    operator = dispatcher.operator(overload)
    is_written_down = operator is not None and operator.torch_op is overload
    return "there" if is_written_down else "derived"
  is_decomposed = isinstance(plan, DecompositionPlan) or (
    isinstance(plan, TensorPlan) and dispatcher.operator(overload) is None
  )
  return "" if is_decomposed else "there"
