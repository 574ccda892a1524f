"""Check the language of docstrings, comments, pages and test names.

usage: python -m tools.check_words [PATH ...]

The section "Language" of CONTRIBUTING.md has the rules. Each finding is a line with its
file, the words found and advice. Exit status: 1 if there are findings, or rows of
`EXCEPTIONS` that match nothing.
"""

import ast
import dataclasses
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_TEST_NAME = 60

OPENERS = re.compile(
  r"(What|Who|Whose|How|Why|Which|When|Of|That|Has|Have|As|Where|Whether|Without|Is"
  r"|Are|Goes|Gone|Never|Both)\b"
)

# Phrase -> plain form.
PHRASES = {
  r"anew": "again, or the verb with re-: retrace, rebuild, recompile",
  r"(of|by|from|to) which": "a sentence of its own",
  r"nobody": "no caller, no user, nothing",
  r"besides": "also, other than, next to",
  r"stands? for": "means, represents, replaces",
  r"comes? to": "is, becomes, reaches",
  r"lies?": "is; for arrays: is on, is sharded over",
  r"but for": "except",
  r"(is that|are those) of": "the noun again",
  r"is of the": "the noun: belongs to, has the",
  r"no more\b(?! than)": "no longer",
  r"(say|says|said) so": "the verb: raises, reports, documents",
  r"made of": "made from, built from, holds",
  r"what (an?|the|is|are|it|they|no|each|every|has|was|were)": "a noun as the subject",
}

# Retired name -> name to use.
RETIRED = {
  "settle": "apply or resolve",
  "settled": "applied or resolved",
  "noted": "recorded",
  "foretell": "dry run",
  "foretold": "dry run",
  "until_often": "with_warmup",
  "host_moves": "numpy_fallback",
  "word_programs": "flat draws",
  "shared_bits": "by_element",
  "shape_questions": "meta_functions",
  "faces": "upstream aliases",
  "counted_anew": "fresh_grad_mode",
  "pass_over": "advance",
  "return_to": "restore",
  "belong_with": "active_functions",
  "told_class": "dtensor_class",
  "is_told": "is_dtensor",
  "of_fake": "from_fake",
  "bring_home": "gather",
  "parted": "split",
  "again": "replay, retrace, rebuild",
  "elsewhere": "where it is",
  "spoiled": "fill_invalid",
  "are_few": "is_small",
  "meant": "unwrap_module",
  "place_of": "committed_sharding, source_line",
  "put_back": "restore_sharding",
  "laid_out": "using_layout, with_placements",
  "ending_at_the_user": "hide_library_frames",
  "handing_out_saved": "accessing_saved_tensors",
  "recording_anew": "enable_recording",
  "taking_any": "accept_any_sharding",
  "no_number": "fill_value",
  "bounds_here": "local_bounds",
  "values_here": "local_values",
}

# Path, words found, reason.
EXCEPTIONS: tuple[tuple[str, str, str], ...] = ()

PHRASE = re.compile(
  "|".join(rf"(?P<p{n}>\b{p}\b)" for n, p in enumerate(PHRASES)).replace(" ", r"\s+"),
  re.IGNORECASE,
)
PLAIN_FORMS = list(PHRASES.values())


@dataclasses.dataclass(frozen=True)
class Finding:
  """Words that a rule forbids.

  Attributes:
    path: file, relative to the project.
    line: line number, from 1.
    words: the words found.
    advice: plain form to write instead.
  """

  path: str
  line: int
  words: str
  advice: str

  def __str__(self) -> str:
    return f"{self.path}:{self.line}: {self.words!r}: write {self.advice}"


def main() -> int:
  """Print the findings in the named files and folders, or in all; return the status."""
  paths = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
  files = [path for path in all_files() if not paths or _is_below(path, paths)]
  findings = [finding for path in files for finding in findings_in(path)]
  excused = {(path, words) for path, words, _ in EXCEPTIONS}
  met = {(f.path, f.words) for f in findings}
  findings = [f for f in findings if (f.path, f.words) not in excused]
  stale = [] if paths else [row for row in EXCEPTIONS if row[:2] not in met]
  for finding in findings:
    print(finding)
  for path, words, _ in stale:
    print(f"tools/check_words.py: no {words!r} in {path}: delete the row of EXCEPTIONS")
  return 1 if findings or stale else 0


def _is_below(path: pathlib.Path, paths: list[pathlib.Path]) -> bool:
  return any(path.is_relative_to(given) for given in paths)


def all_files() -> list[pathlib.Path]:
  """Return the files with prose: code, tests and pages."""
  code = [
    p
    for folder in ("torchax", "test", "tools", "examples", "benchmarks")
    for p in (ROOT / folder).rglob("*.py")
  ]
  pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
  return sorted(code) + sorted(pages)


def findings_in(path: pathlib.Path) -> Iterator[Finding]:
  """Yield the findings in one file."""
  text = path.read_text(encoding="utf-8")
  name = path.relative_to(ROOT).as_posix()
  if path.suffix == ".md":
    yield from _phrases(name, _prose(text))
  else:
    tree = ast.parse(text)
    yield from _docstrings(name, tree)
    yield from _phrases(name, _comments(text))
    yield from _names(name, tree)
    yield from _test_names(name, tree)


def _phrases(name: str, text: str, start: int = 1) -> Iterator[Finding]:
  for match in PHRASE.finditer(text):
    line = start + text.count("\n", 0, match.start())
    advice = PLAIN_FORMS[int((match.lastgroup or "p0")[1:])]
    yield Finding(name, line, " ".join(match.group().split()), advice)


def _prose(text: str) -> str:
  """Return the text of a page without code and tables, with its line breaks."""
  code_or_table = re.compile(r"(?ms)```.*?```|`[^`]*`|^\|[^\n]*$")
  return code_or_table.sub(lambda match: "\n" * match.group().count("\n"), text)


def _comments(text: str) -> str:
  """Return the comments of a program, each on its line."""
  lines = [""] * (text.count("\n") + 1)
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      lines[token.start[0] - 1] = token.string.lstrip("# ")
  return "\n".join(lines)


def _docstrings(name: str, tree: ast.Module) -> Iterator[Finding]:
  for node in ast.walk(tree):
    if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
      continue
    text = ast.get_docstring(node)
    if not text:
      continue
    start = node.body[0].lineno
    first = text.partition("\n")[0]
    if opener := OPENERS.match(first):
      yield Finding(name, start, opener.group(), "a noun or a verb at the start")
    elif " " not in first:
      yield Finding(name, start, first, "a sentence, or no docstring")
    yield from _phrases(name, text, start)


def _names(name: str, tree: ast.Module) -> Iterator[Finding]:
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      word = node.name.lstrip("_")
      if word in RETIRED:
        yield Finding(name, node.lineno, node.name, RETIRED[word])


def _test_names(name: str, tree: ast.Module) -> Iterator[Finding]:
  for node in ast.walk(tree):
    is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    if is_test and len(node.name) > LONGEST_TEST_NAME:
      advice = f"at most {LONGEST_TEST_NAME} characters; the rest is a docstring"
      yield Finding(name, node.lineno, node.name, advice)


if __name__ == "__main__":
  sys.exit(main())
