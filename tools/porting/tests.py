"""Carrying of upstream's tests to the files here that mirror theirs."""

import ast
import re
import textwrap

from tools.porting.changes import FileChange
from tools.porting.names import Missing, complete
from tools.porting.syntax import Definition, Hunk, Source, sides
from tools.porting.tree import Tree

_DOCSTRING = '"""Tests that were carried over from upstream."""\n'


def mirror(tree: Tree, path: str) -> str:
  """Return the file here for a test file of upstream: of its name, else in `ported`."""
  name = path.rpartition("/")[2]
  found = [one for one in tree.paths("test") if one.rpartition("/")[2] == name]
  return found[0] if len(found) == 1 else f"test/suites/ported/{name}"


def carry(tree: Tree, file: FileChange) -> list[tuple]:
  """Carry the tests of a file; return rows of (verdict, what, place, reason, here)."""
  target = mirror(tree, file.path)
  if file.kind == "deleted":
    return [("meaningless", file.path, file.path, "what upstream drops may stay here")]
  old, new, partial = sides(file)
  rows = []
  for name, one in new.definitions.items():
    before = old.definitions.get(name)
    if before is not None and before.text == one.text:
      continue
    where = f"{file.path}:{one.first}"
    try:
      if isinstance(one.node, ast.ClassDef):
        rows += _class(tree, one, before, new, target, file.path)
      elif name.startswith("test"):
        _put(tree, one, new, target)
        rows.append(("carried", name, where, "a test", target))
    except Missing as error:
      rows.append(("by hand", name, where, str(error), target))
  for part in partial:
    where = f"{file.path}:{part.line}"
    try:
      rows += _methods_of_hunk(tree, part.hunk, new, target, where)
    except Missing as error:
      rows.append(("by hand", part.name, where, str(error), target))
  return rows or [("meaningless", file.path, file.path, "no test changes in it")]


def _put(tree: Tree, one: Definition, new: Source, target: str) -> None:
  """Add a definition to a file, or replace the one of its name."""
  imports, helpers = complete(tree, one, new, target)
  tree.written.setdefault(target, tree.read(target) or _DOCSTRING)
  source = tree.source(target)
  if one.name in source.definitions:
    source = Source(source.replaced(source.definitions[one.name], one.text), target)
    parts = [source.with_imports(imports).rstrip("\n")]
  else:
    parts = [source.with_imports(imports).rstrip("\n"), *[h.text for h in helpers]]
    parts.append(one.text)
  tree.written[target] = "\n\n\n".join(parts) + "\n"
  Source(tree.written[target], target)


def _methods(one: Definition) -> dict[str, str]:
  """Return the text of each method, with its decorators."""
  assert isinstance(one.node, ast.ClassDef)
  lines = one.text.splitlines()
  shift = one.first
  found = {}
  for node in one.node.body:
    if isinstance(node, ast.FunctionDef):
      start = min([node.lineno, *[d.lineno for d in node.decorator_list]])
      found[node.name] = "\n".join(
        lines[start - shift : (node.end_lineno or 0) - shift + 1]
      )
  return found


def _class(tree, one, before, new, target, path) -> list[tuple]:
  """Carry the new and changed tests of a class, with its changed helper methods."""
  theirs = _methods(one)
  known = _methods(before) if before is not None else {}
  changed = [n for n, text in theirs.items() if known.get(n) != text]
  tests = [n for n in changed if n.startswith("test")]
  where = f"{path}:{one.first}"
  if not tests:
    return [("meaningless", one.name, where, "no test changes in it")]
  ours = tree.source(target).definitions.get(one.name)
  if ours is not None:
    return _into_class(tree, ours, {n: theirs[n] for n in changed}, new, target, where)
  dropped = [n for n in theirs if n.startswith("test") and n not in tests]
  text = one.text
  for name in dropped:
    text = text.replace(theirs[name] + "\n", "").replace(theirs[name], "")
  text = re.sub(r"\n{3,}", "\n\n", text)
  _put(tree, _single(text, target), new, target)
  return [("carried", f"{one.name}.{name}", where, "a test", target) for name in tests]


def _single(text: str, where: str) -> Definition:
  return next(iter(Source(text, where).definitions.values()))


def _into_class(tree, ours, methods: dict[str, str], new, target, where) -> list[tuple]:
  text = ours.text
  mine = _methods(ours)
  for name, method in methods.items():
    if name in mine:
      text = text.replace(mine[name], method)
    else:
      text = f"{text.rstrip()}\n\n{method}"
  _put(tree, _single(text, target), new, target)
  return [
    ("carried", f"{ours.name}.{name}", where, "a test", target)
    for name in methods
    if name.startswith("test")
  ]


# Attributes of `self` other than those of every `unittest.TestCase`.
_GIVEN = re.compile(r"self\.(?!assert|fail|skipTest|subTest|id\b)(\w+)")


def _methods_of_hunk(tree, hunk: Hunk, new, target, where) -> list[tuple]:
  """Carry new methods in a hunk that does not show their class."""
  header = re.match(r"class (\w+)(\(.*\))?:?", hunk.section)
  text = textwrap.dedent("\n".join(s[1:] for s in hunk.lines if s[0] == "+"))
  if header is None or any(line[0] == "-" for line in hunk.lines):
    raise Missing("the patch shows a part of a test only")
  try:
    methods = ast.parse(text).body
  except SyntaxError:
    raise Missing("the patch shows a part of a test only") from None
  names = [node.name for node in methods if isinstance(node, ast.FunctionDef)]
  own = set(_GIVEN.findall(text)) - set(names)
  ours = tree.source(target).definitions.get(header[1])
  if not names or len(names) < len(methods) or (own and ours is None):
    raise Missing(f"the test needs more of its class: {', '.join(sorted(own))}")
  whole = f"class {header[1]}(unittest.TestCase):\n{textwrap.indent(text, '  ')}"
  found = _single(whole.rstrip(), target)
  if ours is not None:
    return _into_class(tree, ours, _methods(found), new, target, where)
  _put(tree, found, new, target)
  return [("carried", f"{header[1]}.{name}", where, "a test", target) for name in names]
