"""Write the tables of configuration fields and environment variables for the docs.

usage: python -m tools.configuration_table

Fields come from `torchax/config.py`: annotations, defaults and the docstring. Names of
variables that the package reads or sets come from its source, their meanings from here.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

from tools import tables

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
TOOL = "configuration_table"

_TORCHRUN = "set by torchrun: "
# Variable of the process environment that the package reads or sets -> meaning.
VARIABLES = {
  "TORCHAX_CHECK": "`1`: the default of `check_indices` is True. Read by the import.",
  "TORCHAX_EAGER": "mode of eager operations in all threads: `strict`, `fused` or "
  "`debug`. See `torchax.eager_mode`.",
  "TORCHAX_LOGS": "kinds of log messages, separated by commas; `torchax.set_logs` "
  "lists them. Read by the import.",
  "TORCHAX_TRACEBACK": "`full`: exceptions show the frames of torchax, JAX and torch.",
  "ACCELERATE_TORCH_DEVICE": "set to `jax` by `use_jax` of "
  "`torchax.integrations.accelerate`.",
  "JAX_COORDINATOR_ADDRESS": "host and port of process 0, if no launcher gives them. "
  "Read by JAX.",
  "XLA_FLAGS": "options of XLA. `torchax.processes.initialize` adds a time limit of "
  "collectives on CPUs, unless there is one.",
  "WORLD_SIZE": _TORCHRUN + "number of processes.",
  "RANK": _TORCHRUN + "number of this process.",
  "LOCAL_WORLD_SIZE": _TORCHRUN + "number of processes on this host.",
  "LOCAL_RANK": _TORCHRUN + "number of this process on its host.",
  "MASTER_ADDR": _TORCHRUN + "host of process 0.",
  "MASTER_PORT": _TORCHRUN + "port of process 0.",
  "TORCHELASTIC_USE_AGENT_STORE": _TORCHRUN + "whether it listens at that port itself.",
  "TORCHELASTIC_RESTART_COUNT": _TORCHRUN + "number of restarts.",
}
_NAME = re.compile(
  r"(TORCHAX|ACCELERATE|JAX|XLA|TORCHELASTIC|MASTER|LOCAL|WORLD)_[A-Z_]+|RANK"
)
# Names of this form that are no variables of the process environment.
_OTHER = {"JAX_DTYPE_TO_TORCH", "JAX_TRACEBACK_FILTERING"}


def main() -> None:
  """Write the tables to their page."""
  page = tables.insert(PAGE.read_text(encoding="utf-8"), TOOL, render())
  PAGE.write_text(page, encoding="utf-8")
  print(f"written to {PAGE}")


def render() -> str:
  """Return both tables in Markdown, with a heading for the second one."""
  fields = tables.markdown(["field", "type", "default", "meaning"], list(_fields()))
  rows = [[f"`{name}`", meaning] for name, meaning in VARIABLES.items()]
  variables = tables.markdown(["variable", "meaning"], rows)
  return f"{fields}\n\n## Environment variables\n\n{variables}"


def _fields() -> Iterator[list[str]]:
  tree = ast.parse((ROOT / "torchax" / "config.py").read_text(encoding="utf-8"))
  (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
  meanings = _attributes(ast.get_docstring(cls) or "")
  for node in cls.body:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
      name = ast.unparse(node.target)
      type_ = ast.unparse(node.annotation).replace(" | ", "` or `")
      is_fixed = isinstance(node.value, ast.Constant)
      default = f"`{ast.unparse(node.value)}`" if is_fixed else "by a variable, below"
      yield [f"`{name}`", f"`{type_}`", default, meanings[name]]


def _attributes(docstring: str) -> dict[str, str]:
  """Return the meaning of each attribute in a docstring in Google form."""
  section = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
  entries = re.split(r"(?m)^  (?=\w+: )", section)[1:]
  pairs = (" ".join(entry.split()).split(": ", 1) for entry in entries)
  return {name: meaning for name, meaning in pairs}


def variables_of_code() -> set[str]:
  """Return the names of environment variables among the strings of the package."""
  files = (ROOT / "torchax").rglob("*.py")
  trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
  strings = {
    node.value
    for tree in trees
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  }
  return {string for string in strings if _NAME.fullmatch(string)} - _OTHER


if __name__ == "__main__":
  main()
