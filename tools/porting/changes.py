"""Changes of upstream: patches, commits and ranges.

Upstream's package is at the root of its repository, and was once in a folder of a
larger one. Both layouts are read; paths here have the present layout.
"""

import dataclasses
import pathlib
import re
import subprocess


class PortError(Exception):
  """Error of input that cannot be carried over; nothing has been written."""


@dataclasses.dataclass
class Hunk:
  """Hunk of a patch.

  Attributes:
    start: its first line in the new file, counted from 1.
    section: git's heading, such as `def _aten_add(x, y):`.
    lines: lines with their first character: " ", "-" or "+".
  """

  start: int
  section: str
  lines: list[str]

  def side(self, sign: str) -> list[str]:
    """Return the lines before ("-") or after ("+") the change."""
    return [line[1:] for line in self.lines if line[0] in (" ", sign)]


@dataclasses.dataclass
class FileChange:
  """Changed file.

  Attributes:
    path: path after the change in the present layout; of a deleted file, before it.
    old, new: whole text before and after, or None if it is not known.
    hunks: hunks of the change.
    kind: "changed", "added", "deleted", "renamed" or "binary".
  """

  path: str
  kind: str = "changed"
  hunks: list[Hunk] = dataclasses.field(default_factory=list)
  old: str | None = None
  new: str | None = None

  def added_lines(self) -> str:
    """Return the added lines, joined."""
    return "\n".join(
      line[1:] for hunk in self.hunks for line in hunk.lines if line[0] == "+"
    )


@dataclasses.dataclass
class Change:
  """Commit or patch file.

  Attributes:
    name: short hash of the commit, or name of the file.
    subject: first line of the message.
    files: changed files.
  """

  name: str
  subject: str
  files: list[FileChange]


# The package and its tests, maybe below a folder of a larger repository.
_LAYOUT = re.compile(
  r"^(?:(?:[\w.-]+/)*?(?=(?:torchax|torch_xla2)/(?:torchax|torch_xla2)/)"
  r"(?:torchax|torch_xla2)/)?(?P<package>torchax|torch_xla2)/(?P<rest>.+)$"
)
_OF_REPOSITORY = re.compile(
  r"^(?:test|tests|docs|examples|benchmarks|scripts|dev|\.github|\.ci|\.kokoro)/"
  r"|^[^/]+$"
)


def present_path(path: str) -> str:
  """Convert a path of either layout to the present one.

  Raises:
    PortError: it is a Python file of neither layout.
  """
  match = _LAYOUT.match(path)
  if match and not match["rest"].startswith(("test/", "docs/", "examples/")):
    if "/" not in match["rest"] and not match["rest"].endswith(".py"):
      return match["rest"]  # a file of the folder that is the root now
    return f"torchax/{match['rest']}"
  if match:
    return match["rest"]
  if _OF_REPOSITORY.match(path) or not path.endswith(".py"):
    return path
  raise PortError(
    f"{path} is in neither layout of upstream: its package is torchax/, at the root of "
    "the repository or in a folder of that name, and its tests are beside it in test/."
  )


_FILE = re.compile(r'^diff --git "?a/(.*?)"? "?b/(.*?)"?$')
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)$")


def read_patch(text: str, name: str) -> Change:
  """Read a patch in git's format, with or without a mail header.

  Raises:
    PortError: it has no change, or one that is cut off.
  """
  lines = text.splitlines()
  subject = next((s[9:] for s in lines if s.startswith("Subject: ")), "")
  subject = re.sub(r"^\[PATCH[^\]]*\] ", "", subject)
  files: list[FileChange] = []
  place = 0
  while place < len(lines):
    found = _FILE.match(lines[place])
    if found is None and not lines[place].startswith("--- a/"):
      place += 1
      continue
    place, changed = _read_file(lines, place, name)
    files.append(changed)
  if not files:
    raise PortError(
      f"{name} holds no change: a patch is what `git diff`, `git show` or "
      "`git format-patch` writes."
    )
  return Change(name, subject or name, files)


def _read_file(lines: list[str], place: int, name: str) -> tuple[int, FileChange]:
  found = _FILE.match(lines[place])
  paths = [found[1], found[2]] if found else [lines[place][6:], lines[place + 1][6:]]
  kind = "changed"
  place += 1 if found else 0
  while place < len(lines) and not lines[place].startswith(("@@ ", "diff --git ")):
    line = lines[place]
    if line.startswith("rename to "):
      kind = "renamed"
    elif line.startswith("new file") or line == "--- /dev/null":
      kind = "added"
    elif line.startswith("deleted file") or line == "+++ /dev/null":
      kind = "deleted"
    elif line.startswith(("Binary files ", "GIT binary patch")):
      kind = "binary"
    place += 1
  change = FileChange(present_path(paths[0 if kind == "deleted" else 1]), kind)
  while place < len(lines) and lines[place].startswith("@@ "):
    place, hunk = _read_hunk(lines, place, f"{name}: {paths[1]}")
    change.hunks.append(hunk)
  return place, change


def _read_hunk(lines: list[str], place: int, where: str) -> tuple[int, Hunk]:
  header = _HUNK.match(lines[place])
  if header is None:
    raise PortError(f"{where}: {lines[place]!r} does not start a hunk of a patch.")
  left = [int(header[2] or 1), int(header[4] or 1)]
  hunk = Hunk(int(header[3]), header[5], [])
  place += 1
  while any(left):
    if place == len(lines) or lines[place][:1] not in ("", " ", "+", "-", "\\"):
      raise PortError(
        f"{where}: the hunk at line {hunk.start} is cut off; {left[0]} old and "
        f"{left[1]} new lines are missing. Write the patch again."
      )
    line = lines[place] or " "
    place += 1
    if line[0] == "\\":
      continue
    hunk.lines.append(line)
    left[0] -= line[0] in " -"
    left[1] -= line[0] in " +"
    if min(left) < 0:
      raise PortError(f"{where}: the hunk at line {hunk.start} has lines too many.")
  return place, hunk


class Checkout:
  """Clone of upstream's repository, in either layout.

  Args:
    path: root of the clone.

  Raises:
    PortError: there is no clone of upstream at the path.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    if not path.is_dir() or not (path / ".git").exists():
      raise PortError(f"{path} is no git checkout. Clone upstream's repository there.")
    # `jaten` is a file upstream and a folder in this project.
    names = self._git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    files = set()
    for name in names:
      match = _LAYOUT.match(name)
      if match:
        files.add(f"torchax/{match['rest']}")
    if "torchax/ops/jaten.py" not in files:
      raise PortError(
        f"{path} is no checkout of upstream in a layout that is known: there is "
        "neither torchax/ops/jaten.py nor torchax/torchax/ops/jaten.py."
      )

  def _git(self, *arguments: str) -> str:
    done = subprocess.run(
      ["git", "-C", str(self.path), *arguments],
      capture_output=True,
      text=True,
      errors="replace",
      check=False,
    )
    if done.returncode:
      raise PortError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout

  def commits(self, wanted: str) -> list[str]:
    """Return the commits of a name or a range, oldest first, without merges.

    Raises:
      PortError: there is no such commit, or none in the range.
    """
    for end in filter(None, re.split(r"\.\.\.?", wanted)):
      try:
        self._git("rev-parse", "--verify", "--quiet", f"{end}^{{commit}}")
      except PortError:
        raise PortError(
          f"There is no commit {end!r} in {self.path}; `git fetch` there, or name "
          "another one."
        ) from None
    if ".." not in wanted:
      commit, *parents = self._git("rev-list", "-1", "--parents", wanted).split()
      if len(parents) > 1:
        raise PortError(
          f"{wanted} is a merge. Name the commits that it brings: {wanted}^..{wanted}"
        )
      return [commit]
    found = self._git("rev-list", "--reverse", "--no-merges", wanted).split()
    if not found:
      raise PortError(f"There are no commits in {wanted}.")
    return found

  def change(self, commit: str) -> Change:
    """Return a commit with the text of its Python files before and after."""
    shown = self._git("show", "--format=", "--patch", "-M", commit)
    subject = self._git("show", "--no-patch", "--format=%s", commit).strip()
    short = self._git("rev-parse", "--short=10", commit).strip()
    if not shown.strip():
      return Change(short, subject, [])
    change = read_patch(shown, short)
    listed = self._git("show", "--format=", "--name-status", "-M", commit)
    for line, file in zip(listed.splitlines(), change.files, strict=True):
      status, *paths = line.split("\t")
      if not file.path.endswith(".py") or file.kind == "binary":
        continue
      if status[0] != "A":
        file.old = self._git("show", f"{commit}^:{paths[0]}")
      if status[0] != "D":
        file.new = self._git("show", f"{commit}:{paths[-1]}")
    change.subject = subject
    return change
