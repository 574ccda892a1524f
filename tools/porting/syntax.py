"""Functions, tables and imports of a file, found in its syntax tree."""

import ast
import builtins
import dataclasses
import re

from tools.porting.changes import FileChange, Hunk, PortError


@dataclasses.dataclass
class Definition:
  """Function, class or assignment at the top level of a file.

  Attributes:
    name: name that it defines.
    node: syntax tree.
    text: lines, with decorators and the comments directly above.
    first, last: first and last line in the file, counted from 1.
  """

  name: str
  node: ast.stmt
  text: str
  first: int
  last: int

  @property
  def is_function(self) -> bool:
    """True if the definition is a function."""
    return isinstance(self.node, ast.FunctionDef)

  def registered(self) -> list[tuple[str, str]]:
    """Return (decorator, operation) of each registration, as written."""
    if not isinstance(self.node, ast.FunctionDef):
      return []
    return [
      (ast.unparse(call.func).rpartition(".")[2], ast.unparse(argument))
      for call in self.node.decorator_list
      if isinstance(call, ast.Call)
      and ast.unparse(call.func).rpartition(".")[2] in ("op", "register_function")
      for argument in call.args
    ]

  def options(self) -> dict[str, str]:
    """Return the keywords of its registrations."""
    return {
      keyword.arg: ast.unparse(keyword.value)
      for call in getattr(self.node, "decorator_list", ())
      if isinstance(call, ast.Call)
      for keyword in call.keywords
      if keyword.arg
    }

  def meaning(self) -> str:
    """Return the tree without docstrings and annotations, for comparisons."""
    return ast.dump(_Bare().visit(ast.parse(ast.unparse(self.node))))

  def body(self) -> str:
    """Return `meaning` without decorators, which is independent of registrations."""
    node = ast.parse(ast.unparse(self.node)).body[0]
    if isinstance(node, ast.FunctionDef):
      node.decorator_list = []
    return ast.dump(_Bare().visit(node))

  def names(self) -> set[str]:
    """Return the names that it uses and does not bind itself."""
    return free_names(self.node)


class _Bare(ast.NodeTransformer):
  def visit_FunctionDef(self, node):
    self.generic_visit(node)
    node.returns = None
    if ast.get_docstring(node) is not None:
      node.body = node.body[1:] or [ast.Pass()]
    return node

  def visit_arg(self, node):
    node.annotation = None
    return node


def free_names(node: ast.AST) -> set[str]:
  """Return the names that a tree reads and does not bind."""
  read, bound = set(), set()
  for part in ast.walk(node):
    if isinstance(part, ast.Name):
      (read if isinstance(part.ctx, ast.Load) else bound).add(part.id)
    elif isinstance(part, ast.arg):
      bound.add(part.arg)
    elif isinstance(part, ast.FunctionDef | ast.ClassDef):
      bound.add(part.name)
    elif isinstance(part, ast.alias):
      bound.add(part.asname or part.name.split(".")[0])
  return read - bound - set(dir(builtins))


class Source:
  """Python file.

  Args:
    text: text of the file, or the parts that a patch shows.
    where: name of the file in errors.

  Raises:
    PortError: the text does not parse.
  """

  def __init__(self, text: str, where: str):
    conflict = re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE)
    if conflict:
      line = text.count("\n", 0, conflict.start()) + 1
      raise PortError(f"{where}:{line} has a conflict that is not resolved.")
    try:
      tree = ast.parse(text)
    except SyntaxError as error:
      raise PortError(
        f"{where}:{error.lineno} does not parse: {error.msg}. The change is to be one "
        "that Python reads."
      ) from None
    self.text = text
    self._lines = text.splitlines()
    self.definitions: dict[str, Definition] = {}
    self.imports: dict[str, str] = {}
    for node in tree.body:
      self._enter(node)

  def _enter(self, node: ast.stmt) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
      for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        one = ast.parse(ast.unparse(node)).body[0]
        assert isinstance(one, ast.Import | ast.ImportFrom)
        one.names = [alias]
        self.imports[name] = ast.unparse(one).replace("torch_xla2", "torchax")
      return
    for name in _defined(node):
      start = min(
        [node.lineno, *[d.lineno for d in getattr(node, "decorator_list", ())]]
      )
      while start > 1 and self._lines[start - 2].startswith("#"):
        start -= 1
      end = node.end_lineno or node.lineno
      text = "\n".join(self._lines[start - 1 : end])
      self.definitions[name] = Definition(name, node, text, start, end)

  def replaced(self, definition: Definition, text: str) -> str:
    """Return the file with the lines of a definition replaced."""
    lines = list(self._lines)
    lines[definition.first - 1 : definition.last] = text.splitlines()
    return "\n".join(lines) + "\n"

  def with_imports(self, statements: list[str]) -> str:
    """Return the file with more imports after its last one."""
    if not statements:
      return self.text
    tree = ast.parse(self.text)
    last = 0
    for node in tree.body:
      is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
      if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring:
        last = node.end_lineno or last
    lines = list(self._lines)
    lines[last:last] = statements
    return "\n".join(lines) + "\n"


def _defined(node: ast.stmt) -> list[str]:
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    return [node.name]
  if isinstance(node, ast.Assign):
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
  if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
    return [node.target.id]
  return []


@dataclasses.dataclass
class Partial:
  """Change inside a definition that a patch shows in part."""

  name: str
  line: int
  hunk: Hunk


def sides(file: FileChange) -> tuple[Source, Source, list[Partial]]:
  """Return a file before and after, and the changes that a patch shows in part."""
  if file.new is not None or file.old is not None:
    old = Source(file.old or "", f"{file.path} (before)")
    return old, Source(file.new or "", file.path), []
  texts: dict[str, list[str]] = {"-": [], "+": []}
  partial = []
  for hunk in file.hunks:
    texts["-"] += _whole(hunk, "-", file.kind == "added")
    texts["+"] += _whole(hunk, "+", file.kind == "added")
    partial += _cut(hunk, file.kind == "added")
  old = Source("\n".join(texts["-"]) + "\n", f"{file.path} (before)")
  return old, Source("\n".join(texts["+"]) + "\n", file.path), partial


_CLOSING = re.compile(r"^[\])}]")


def _blocks(hunk: Hunk, sign: str) -> list[list[int]]:
  """Split one side of a hunk into top-level statements, as indices of its lines.

  The first block, which may be empty, belongs to a statement above the hunk.
  """
  blocks: list[list[int]] = [[]]
  in_header = False
  for place, line in enumerate(hunk.lines):
    if line[0] not in (" ", sign):
      continue
    text = line[1:]
    starts = bool(text) and not text[0].isspace() and not _CLOSING.match(text)
    # A decorator or a comment belongs to the statement below it.
    if starts and not in_header:
      blocks.append([])
    if starts:
      in_header = text.startswith(("@", "#"))
    blocks[-1].append(place)
  return blocks


def _ends(hunk: Hunk) -> bool:
  """Return True if a hunk shows the end of its last statement."""
  changes = [place for place, line in enumerate(hunk.lines) if line[0] != " "]
  after = hunk.lines[changes[-1] + 1 :]
  if len(after) < 3 or not "".join(line[1:] for line in after[-2:]).strip():
    return True  # at the end of the file, or before two blank lines
  # With `git show --function-context`, a hunk starts with its function.
  first = hunk.lines[0][1:]
  starts = bool(first) and not first[0].isspace() and not _CLOSING.match(first)
  return starts and len(after) != 3 and len(after) != changes[0]


def _without_cut(hunk: Hunk, sign: str, is_new: bool) -> tuple[list, list, list]:
  """Return the blocks of a side: (cut off above, whole, cut off below)."""
  above, *blocks = _blocks(hunk, sign)
  if blocks and not is_new and not _ends(hunk):
    first = hunk.lines[blocks[-1][0]][1:]
    if first.startswith(_OPENING):
      return above, blocks[:-1], blocks[-1]
  return above, blocks, []


# Statements that continue below their line. Others end with their closing bracket.
_OPENING = (
  "def ",
  "async ",
  "class ",
  "@",
  "#",
  "if ",
  "for ",
  "with ",
  "try",
  "while ",
)


def _whole(hunk: Hunk, sign: str, is_new: bool) -> list[str]:
  """Return the statements of a side that a hunk shows whole."""
  return [
    "\n".join(hunk.lines[place][1:] for place in block)
    for block in _without_cut(hunk, sign, is_new)[1]
  ]


def _cut(hunk: Hunk, is_new: bool) -> list[Partial]:
  """Return the changes in statements that a hunk shows in part."""
  old, new = (_without_cut(hunk, sign, is_new) for sign in "-+")
  found = []
  for places in ({*old[0], *new[0]}, {*old[2], *new[2]}):
    lines = [hunk.lines[place] for place in sorted(places)]
    if any(line[0] != " " and line[1:].strip() for line in lines):
      is_above = 0 in places
      name = _name_in([hunk.section] if is_above else [line[1:] for line in lines])
      start = hunk.start + sum(s[0] != "-" for s in hunk.lines[: min(places)])
      found.append(Partial(name, start, Hunk(start, hunk.section, lines)))
  return found


_NAMED = re.compile(r"^\s*(?:(?:async )?def|class)\s+(\w+)|^(\w+)\s*(?::[^=]+)?=")


def _name_in(lines: list[str]) -> str:
  for line in lines:
    match = _NAMED.match(line)
    if match:
      return match[1] or match[2]
  return ""
