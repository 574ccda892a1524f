"""Carrying of a change, part by part, with one of four verdicts for each."""

import ast
import dataclasses
import re

from tools.porting import tests
from tools.porting.changes import Change, FileChange, PortError
from tools.porting.names import Missing, complete
from tools.porting.syntax import Definition, Partial, Source, sides
from tools.porting.tree import Tree, operation, state_here

CARRIED, THERE, MEANINGLESS, BY_HAND = (
  "carried",
  "already there",
  "meaningless",
  "by hand",
)


@dataclasses.dataclass
class Item:
  """Verdict on one part.

  Attributes:
    verdict: one of the four.
    what: function, row or file.
    place: upstream's file and line.
    reason: reason of the verdict.
    here: file, and maybe line, in this project.
  """

  verdict: str
  what: str
  place: str
  reason: str
  here: str = ""

  def __str__(self):
    here = f" -> {self.here}" if self.here else ""
    return f"{self.verdict}: {self.place} {self.what}: {self.reason}{here}"


# Upstream's operator file -> file here for its new functions.
PORTED = {
  "torchax/ops/jaten.py": "torchax/ops/jaten/ported.py",
  "torchax/ops/jtorch.py": "torchax/functions/ported.py",
}
_HEADERS = {
  "torchax/ops/jaten/ported.py": (
    '"""Lowerings that were carried over from upstream, as they are there."""\n'
    "\nfrom torchax.ops.jaten import op\n"
  ),
  "torchax/functions/ported.py": (
    '"""Torch functions that were carried over, as they are upstream."""\n'
    "\nfrom torchax.ops.jtorch import register_function\n"
  ),
}
# Small modules of functions that have the same path here.
_SHARED = ("torchax/ops/jimage.py", "torchax/ops/jax_reimplement.py")
_HELPS = "it comes with what uses it"
_DECORATORS = ("op", "register_function")
_ROW = re.compile(r"(torch\.ops\.[\w.]+)\s*:\s*(?:\w+\.)?(InplaceOp|OutVariant)\(")


class Carrier:
  """Carrier of changes into a tree.

  Args:
    tree: tree of this project.
  """

  def __init__(self, tree: Tree):
    self.tree = tree

  def carry(self, change: Change) -> list[Item]:
    """Carry a change into the tree; return the verdicts.

    Raises:
      PortError: the change cannot be read, or names what torch does not have.
    """
    items: list[Item] = []
    for file in change.files:
      items += self._file(file)
    return items

  def _file(self, file: FileChange) -> list[Item]:
    path = file.path
    if file.kind == "binary":
      is_ours = path.startswith(("torchax/", "test/"))
      verdict = BY_HAND if is_ours else MEANINGLESS
      return [Item(verdict, path, path, "a binary file has no functions", path)]
    if not path.endswith(".py"):
      return [Item(MEANINGLESS, path, path, "it is no code of the package")]
    if not file.hunks:
      return [Item(MEANINGLESS, path, path, "a file that moves has another place here")]
    if path.startswith("test/"):
      return [Item(*row) for row in tests.carry(self.tree, file)]
    if not path.startswith("torchax/"):
      return [Item(MEANINGLESS, path, path, "it is no code of the package")]
    if file.kind == "deleted":
      return [Item(MEANINGLESS, path, path, "what upstream drops may stay here")]
    if path in PORTED or path in _SHARED or self._is_operator_file(file):
      return self._operators(file)
    return self._core(file)

  def _is_operator_file(self, file: FileChange) -> bool:
    if not file.path.startswith("torchax/ops/"):
      return False
    _, new, _ = sides(file)
    return any(one.registered() for one in new.definitions.values())

  # Operator files -------------------------------------------------------------------

  def _operators(self, file: FileChange) -> list[Item]:
    old, new, partial = sides(file)
    target = PORTED.get(file.path) or (
      file.path if file.path in _SHARED else "torchax/ops/jaten/ported.py"
    )
    items = self._rows(file)
    changed = [
      one
      for name, one in new.definitions.items()
      if name not in old.definitions or old.definitions[name].text != one.text
    ]
    used = {name for one in changed if one.is_function for name in one.names()}
    moved = {
      one.body(): one for n, one in old.definitions.items() if n not in new.definitions
    }
    for one in changed:
      before = old.definitions.get(one.name) or moved.get(one.body())
      where = f"{file.path}:{one.first}"
      if one.name in _DECORATORS or (not one.is_function and _ROW.search(one.text)):
        continue  # `_rows` has made items for it
      try:
        items.append(
          self._definition(one, before, new, target, where, one.name in used)
        )
      except Missing as error:
        items.append(
          Item(BY_HAND, one.name, where, str(error), self._here(one, target))
        )
    for part in partial:
      if not _ROW.search(
        "\n".join(line[1:] for line in part.hunk.lines if line[0] == "+")
      ):
        items.append(self._partial(part, file, target))
    for name, one in old.definitions.items():
      if name not in new.definitions and one.body() not in {c.body() for c in changed}:
        place = f"{file.path}:{one.first}"
        items.append(
          Item(MEANINGLESS, name, place, "what upstream drops may stay here")
        )
    for item in items:
      if item.reason == _HELPS and not self.tree.find(item.what):
        item.verdict, item.here = MEANINGLESS, ""
        item.reason = "what uses it is not carried"
    if not items:
      items.append(
        Item(MEANINGLESS, file.path, file.path, "comments, imports or white space")
      )
    return items

  def _rows(self, file: FileChange) -> list[Item]:
    items = []
    for match in _ROW.finditer(file.added_lines()):
      written, form = match[1], match[2]
      place = f"{file.path}:{self._line(file, written)}"
      operation(written)
      state = state_here(written)
      if state:
        reason = "torch's schema says it" if state == "derived" else "it has a lowering"
        items.append(Item(THERE, f"{form} {written}", place, f"derived: {reason}"))
      else:
        reason = "no form is derived from torch's schema"
        here = "torchax/registry/schema.py"
        items.append(Item(BY_HAND, f"{form} {written}", place, reason, here))
    return items

  def _line(self, file: FileChange, text: str) -> int:
    for hunk in file.hunks:
      line = hunk.start
      for one in hunk.lines:
        if one[0] == "+" and text in one:
          return line
        line += one[0] != "-"
    return 0

  def _here(self, one: Definition, target: str) -> str:
    found = self.tree.find(one.name)
    return f"{found[0][0]}:{found[0][1].first}" if found else target

  def _definition(
    self,
    one: Definition,
    before: Definition | None,
    new: Source,
    target: str,
    where: str,
    is_helper: bool,
  ) -> Item:
    """Carry a function or a constant that is new or has changed."""
    ours = self.tree.find(before.name if before else one.name)
    ours = ours or self.tree.find(one.name)
    registered = [written for _, written in one.registered()]
    for written in registered:
      operation(written)
    if before is not None and before.meaning() == one.meaning():
      return Item(
        MEANINGLESS, one.name, where, "only comments, types or its name change"
      )
    if len(ours) > 1:
      ours = [(path, mine) for path, mine in ours if mine.registered()]
    if len(ours) > 1:
      return Item(BY_HAND, one.name, where, "its name is in several files", ours[0][0])
    added = registered
    if before is not None:
      known = [written for _, written in before.registered()]
      added = [written for written in registered if written not in known]
      if before.body() == one.body():
        return self._registered_more(one.name, ours, added, where)
    for path, mine in ours:
      if mine.body() == one.body():
        return Item(THERE, one.name, where, "the same here", f"{path}:{mine.first}")
    if before is None and registered and all(map(state_here, registered)):
      reason = f"{', '.join(registered)} runs here"
      return Item(THERE, one.name, where, reason, self._here(one, ""))
    if not one.is_function and not (is_helper and not ours):
      here = f"{ours[0][0]}:{ours[0][1].first}" if ours else target
      if ours and before is not None and ours[0][1].body() == before.body():
        self._write(*ours[0], one.text, [])
        return Item(CARRIED, one.name, where, "it was the same here", here)
      return Item(
        BY_HAND, one.name, where, "neither a function nor a table of forms", here
      )
    if ours:
      return self._replace(one, ours[0], new, where, added)
    if is_helper:
      return Item(CARRIED, one.name, where, _HELPS, target)
    self._append(one, new, target)
    return Item(CARRIED, one.name, where, "as it is", target)

  def _registered_more(self, name: str, ours, added, where) -> Item:
    """Carry a function that upstream has registered for more operations."""
    here = f"{ours[0][0]}:{ours[0][1].first}" if ours else ""
    for written in added:
      operation(written)
    missing = [written for written in added if not state_here(written)]
    if not missing:
      return Item(THERE, name, where, "the operations run here", here)
    if not ours:
      return Item(BY_HAND, name, where, f"there is no {name} here to register", "")
    path, mine = ours[0]
    lines = self._decorators(path, missing)
    self._write(path, mine, "\n".join([*lines, mine.text]), [])
    return Item(CARRIED, name, where, f"registered for {', '.join(missing)}", here)

  def _decorators(self, path: str, operations: list[str]) -> list[str]:
    """Return decorators in a theme's style, which may import `aten` but not torch."""
    has_torch = "torch" in self.tree.source(path).imports
    names = [one if has_torch else one.removeprefix("torch.ops.") for one in operations]
    return [f"@op({name})" for name in names]

  def _replace(self, one, ours, new: Source, where: str, added) -> Item:
    path, mine = ours
    here = f"{path}:{mine.first}"
    if path in PORTED.values():
      imports, helpers = complete(self.tree, one, new, path)
      text = "\n\n\n".join([*[h.text for h in helpers], one.text])
      self._write(path, mine, text, imports)
      return Item(CARRIED, one.name, where, "as it is", here)
    kind = mine.options().get("kind")
    if kind or "needs_env" in one.options() or not mine.is_function:
      reason = f"it is written otherwise here ({kind or 'without the environment'})"
      return Item(BY_HAND, one.name, where, reason, here)
    lines = mine.text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    decorators = lines[:start]
    missing = [written for written in added if not state_here(written)]
    decorators += self._decorators(path, missing)
    text = "\n".join([*decorators, _without_decorators(one)])
    imports, helpers = complete(self.tree, one, new, path)
    self._write(path, mine, "\n\n\n".join([*[h.text for h in helpers], text]), imports)
    kept = [f"{k}=" for k in ("compiled", "static") if k in mine.options()]
    reason = "replaced" + (f", {' and '.join(kept)} of ours kept" if kept else "")
    return Item(CARRIED, one.name, where, reason, here)

  def _write(self, path: str, mine: Definition, text: str, imports: list[str]) -> None:
    source = Source(self.tree.source(path).replaced(mine, text), path)
    self.tree.written[path] = source.with_imports(imports)

  def _append(self, one: Definition, new: Source, target: str) -> None:
    imports, helpers = complete(self.tree, one, new, target)
    if self.tree.read(target) is None:
      self.tree.written[target] = _HEADERS[target]
    text = self.tree.source(target).with_imports(imports).rstrip("\n")
    parts = [text, *[helper.text for helper in helpers], one.text]
    self.tree.written[target] = "\n\n\n".join(parts) + "\n"
    Source(self.tree.written[target], target)

  # Functions that a patch shows in part ---------------------------------------------

  def _partial(self, part: Partial, file: FileChange, target: str) -> Item:
    """Carry a change inside a function if ours has the same lines."""
    where = f"{file.path}:{part.line}"
    name = part.name or "a part without a name"
    ours = self.tree.find(part.name) if part.name else []
    before, after = ("\n".join(part.hunk.side(sign)).strip("\n") for sign in "-+")
    changed = [line for line in part.hunk.lines if line[0] != " "]
    more = [re.match(r"\+@(?:\w+\.)?op\(([\w.]+)\)$", line) for line in changed]
    if all(more) and len(ours) == 1:
      return self._registered_more(name, ours, [m[1] for m in more if m], where)
    for path, mine in ours:
      here = f"{path}:{mine.first}"
      if mine.text.count(before) == 1 and before.strip():
        self._write(path, mine, mine.text.replace(before, after), [])
        return Item(CARRIED, name, where, "the same lines are here", here)
      if after.strip() and after in mine.text:
        return Item(THERE, name, where, "the same lines are here", here)
    reason = (
      "the patch shows a part of it, and here it has other lines; name the commit and "
      "--upstream, which has it whole"
    )
    return Item(BY_HAND, name, where, reason, self._here_of(part.name, target))

  def _here_of(self, name: str, target: str) -> str:
    found = self.tree.find(name) if name else []
    return f"{found[0][0]}:{found[0][1].first}" if found else target

  # Other modules --------------------------------------------------------------------

  def _core(self, file: FileChange) -> list[Item]:
    """Carry a change of another module if ours has the same lines."""
    path = file.path
    added = [line for line in file.added_lines().splitlines() if line.strip()]
    if added and all(re.match(r"\s*(#|(__version__|VERSION)\s*=)", s) for s in added):
      return [Item(MEANINGLESS, path, path, "a version or a comment")]
    text = self.tree.read(path)
    where = f"{path}:{file.hunks[0].start}"
    if text is None:
      folder = path.removesuffix(".py")
      here = f"{folder}/" if (self.tree.root / folder).is_dir() else "torchax/"
      return [Item(BY_HAND, path, where, "there is no such file here", here)]
    items = []
    for hunk in file.hunks:
      before, after = ("\n".join(hunk.side(sign)) + "\n" for sign in "-+")
      where = f"{path}:{hunk.start}"
      what = hunk.section or "the top of the file"
      if after in text and after.strip():
        items.append(Item(THERE, what, where, "the same lines are here", path))
      elif text.count(before) == 1:
        text = text.replace(before, after)
        Source(text, path)
        items.append(Item(CARRIED, what, where, "the same lines are here", path))
      else:
        items.append(Item(BY_HAND, what, where, "this module is built otherwise", path))
    if any(item.verdict == CARRIED for item in items):
      self.tree.written[path] = text
    return items


def _without_decorators(one: Definition) -> str:
  """Return the lines of a function from its `def` on."""
  assert isinstance(one.node, ast.FunctionDef)
  lines = one.text.splitlines()
  start = next(i for i, line in enumerate(lines) if re.match(r"(async )?def ", line))
  return "\n".join(lines[start:])


__all__ = ["BY_HAND", "CARRIED", "Carrier", "Item", "MEANINGLESS", "PortError", "THERE"]
