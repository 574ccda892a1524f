"""Carry a change of upstream over to this project.

usage: python -m tools.port_upstream [PATCH | COMMIT | FIRST..LAST] [options]

  --upstream PATH   a clone of upstream's repository, for commits; by default $UPSTREAM
  --since COMMIT    all commits after that one
  --dry-run         print the verdicts and write nothing
  --no-tests        do not run the tests concerned

A changed function replaces the function of the same name here; its decorator keeps our
`compiled=` and `static=`. Other functions go to a theme `ported`, with the helpers and
imports that they need. Parts left to do by hand are listed with their lines upstream
and here. A row is added to docs/upstream.md, and each file with code of upstream gets a
notice of its license. Nothing is written if the input is wrong.

Exit status: 0 if nothing is left to do, 1 if parts are left to do by hand, 2 for input
that cannot be carried over.
"""

import argparse
import datetime
import os
import pathlib
import sys
import tempfile

from tools import tables
from tools.porting.carry import BY_HAND, CARRIED, MEANINGLESS, THERE, Carrier, Item
from tools.porting.changes import Change, Checkout, PortError, read_patch
from tools.porting.tree import Tree, run_tests

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = "docs/upstream.md"
# The license asks for it where code is copied and changed.
NOTICE = (
  "# Parts are from google/torchax: copyright 2025 Google LLC, Apache-2.0, changed.\n"
)
HEADER = ("commit", "subject", CARRIED, THERE, MEANINGLESS, BY_HAND, "date")


def main(arguments: list[str], root: pathlib.Path = ROOT) -> int:
  """Carry changes over; return the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tools.port_upstream",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("change", nargs="?")
  parser.add_argument("--upstream", default=os.environ.get("UPSTREAM"))
  parser.add_argument("--since")
  parser.add_argument("--dry-run", action="store_true")
  parser.add_argument("--no-tests", action="store_true")
  parser.add_argument("--time-limit", type=float, default=900.0)
  chosen = parser.parse_args(arguments)
  try:
    changes = _changes(chosen)
    tree = Tree(root)
    found = []
    for change in changes:
      limit = 0 if chosen.dry_run or chosen.no_tests else chosen.time_limit
      found.append((change, carried(tree, change, limit)))
    page = tree.read(PAGE)
    if page is None:
      raise PortError(f"There is no {PAGE}, whose table takes a line for each commit.")
    for change, items in found:
      page = with_row(page, change, items)
    tree.written[PAGE] = page
    if not chosen.dry_run:
      tree.tidy(ROOT / "pyproject.toml")
      tree.written = {path: with_notice(path, s) for path, s in tree.written.items()}
      tree.write()
  except PortError as error:
    print(f"Nothing was written. {error}", file=sys.stderr)
    return 2
  for change, items in found:
    print(f"{change.name} {change.subject}")
    for item in items:
      print(f"  {item}")
  left = sum(item.verdict == BY_HAND for _, items in found for item in items)
  print(f"{len(found)} changes, {left} parts left to do by hand.")
  if chosen.dry_run:
    print("Nothing was written: --dry-run.")
  return 1 if left else 0


def _changes(chosen) -> list[Change]:
  """Return the changes to carry over.

  Raises:
    PortError: there is no such patch or commit.
  """
  if (chosen.change is None) == (chosen.since is None):
    raise PortError("Name a patch, a commit or a range, or --since COMMIT; see --help.")
  if chosen.change and pathlib.Path(chosen.change).is_file():
    path = pathlib.Path(chosen.change)
    text = path.read_text(encoding="utf-8", errors="replace")
    return [read_patch(text, path.name)]
  if not chosen.upstream:
    named = f"There is no file {chosen.change!r}. " if chosen.change else ""
    raise PortError(
      f"{named}A commit needs a clone of upstream's repository: --upstream PATH."
    )
  checkout = Checkout(pathlib.Path(chosen.upstream))
  wanted = f"{chosen.since}..HEAD" if chosen.since else chosen.change
  return [checkout.change(commit) for commit in checkout.commits(wanted)]


def carried(tree: Tree, change: Change, limit: float) -> list[Item]:
  """Carry a change into a tree, unless tests fail with it; return the verdicts.

  Args:
    tree: tree to change.
    change: change of upstream.
    limit: seconds for the tests; 0 runs none.
  """
  before = dict(tree.written)
  items = Carrier(tree).carry(change)
  changed = {i.here.partition(":")[0] for i in items if i.verdict == CARRIED}
  if not limit or not changed:
    return items
  tests = sorted(path for path in changed if path.startswith("test/"))
  code = {path: text for path, text in tree.written.items() if before.get(path) != text}
  if tests and len(tests) < len(changed) and not _failure(before, tree, tests, limit):
    # The new tests pass without the new code, so the feature is here already.
    tree.written = {**before, **{path: code[path] for path in tests if path in code}}
    return [_judged(i, THERE, "its tests pass as it is") for i in items]
  concerned = sorted({*tests, *_tests_of(tree, changed)})
  failed = _failed(tree, concerned, limit) if concerned else ""
  if not failed:
    return items
  tree.written = before
  return [
    _judged(item, BY_HAND, f"tests fail with it: {failed}", True) for item in items
  ]


def _judged(item: Item, verdict: str, reason: str, also_tests=False) -> Item:
  is_test = item.here.startswith("test/")
  if item.verdict != CARRIED or (is_test and not also_tests):
    return item
  return Item(verdict, item.what, item.place, reason, item.here)


def _failure(before: dict, tree: Tree, tests: list[str], limit: float) -> str:
  """Return the reason why tests fail without the rest of a change, or ""."""
  alone = Tree(tree.root)
  alone.written = {**before, **{p: tree.written[p] for p in tests if p in tree.written}}
  return _failed(alone, tests, limit)


def _failed(tree: Tree, tests: list[str], limit: float) -> str:
  with tempfile.TemporaryDirectory() as place:
    tree.copied_to(pathlib.Path(place))
    return run_tests(pathlib.Path(place), tests, limit)


def _tests_of(tree: Tree, changed: set[str]) -> list[str]:
  """Return the tests of the changed themes."""
  found = []
  for path in changed:
    name = path.rpartition("/")[2]
    found += [t for t in tree.paths("test") if t.endswith(f"/test_{name}")]
    if name == "ported.py":
      found += [t for t in tree.paths("test") if t == "test/registry/test_operators.py"]
  return found


def with_notice(path: str, text: str) -> str:
  """Return the text of a file, with the notice on top if it is Python without one."""
  return text if NOTICE in text or not path.endswith(".py") else NOTICE + text


def with_row(page: str, change: Change, items: list[Item]) -> str:
  """Return the page with a row for a change, which replaces an earlier row of it."""
  verdicts = (CARRIED, THERE, MEANINGLESS, BY_HAND)
  counts = [sum(item.verdict == verdict for item in items) for verdict in verdicts]
  today = datetime.date.today().isoformat()
  subject = change.subject.replace("|", "\\|")
  row = [change.name, subject, *[str(count or "") for count in counts], today]
  try:
    lines = tables.read_table(page, "port_upstream").splitlines()[2:]
  except ValueError as error:
    raise PortError(f"{PAGE}: {error}") from None
  rows = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines]
  rows = [one for one in rows if one[0] != change.name]
  return tables.insert(page, "port_upstream", tables.markdown(HEADER, [*rows, row]))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
