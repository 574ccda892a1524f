"""Write the table of operators for the docs from the report of `make test-opinfo`.

usage: python -m tools.operator_coverage REPORT.xml [LATER.xml …] docs/operators.md

If an operator is in several reports, the last one counts.
"""

import collections
import importlib
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

from tools.operator_families import by_family

CHECKS = {
  "forward": "results",
  "gradient": "gradients",
  "jax_gradient": "by `jax_value_and_grad`",
  "jit": "under `jax_jit`",
  "in_place": "in place",
  "out": "`out=`",
  "error": "refusals",
}
DTYPES = ("float32", "float64", "bfloat16", "complex64", "int64", "bool")
# operator -> dtype -> check -> verdict
Verdicts = dict[str, dict[str, dict[str, str]]]


def read(*paths: pathlib.Path) -> Verdicts:
  """Return the verdicts in JUnit reports.

  Raises:
    ValueError: there are none.
  """
  verdicts: Verdicts = {}
  for case in (case for p in paths for case in ElementTree.parse(p).iter("testcase")):
    named = re.fullmatch(
      r"test_agrees_with_cpu_torch\[(.+)-(\w+)\]", case.get("name") or ""
    )
    if named:
      name, dtype = named.groups()
      found = {p.get("name"): p.get("value") for p in case.iter("property")}
      verdicts.setdefault(name, {})[dtype] = found
  if not verdicts:
    raise ValueError(
      f"No verdicts on operators in {', '.join(map(str, paths))}; write them with "
      "`make test-opinfo`."
    )
  return verdicts


def _kind(verdict: str) -> str:
  return verdict.partition(":")[0]


def _counts(verdicts: Verdicts, check: str, dtype: str) -> str:
  kinds = collections.Counter(
    _kind(dtypes[dtype][check])
    for dtypes in verdicts.values()
    if check in dtypes.get(dtype, {})
  )
  compared = kinds.total() - kinds["CPU torch refuses"]
  return f"{kinds['right']:,} of {compared:,}" if compared else "–"


def _summary(verdicts: Verdicts) -> list[str]:
  lines = [
    "| | " + " | ".join(DTYPES) + " |",
    "|---|" + "---|" * len(DTYPES),
  ]
  for check, title in CHECKS.items():
    cells = [_counts(verdicts, check, dtype) for dtype in DTYPES]
    lines.append(f"| {title} | " + " | ".join(cells) + " |")
  return lines


def _differences(verdicts: Verdicts) -> list[str]:
  differences = collections.defaultdict(lambda: collections.defaultdict(set))
  for name, dtypes in verdicts.items():
    for checks in dtypes.values():
      for check, verdict in checks.items():
        kind, _, reason = verdict.partition(": ")
        if kind == "differs":
          differences[reason][CHECKS[check]].add(name)
  lines = ["| operators | in | why |", "|---|---|---|"]
  for reason, by_check in sorted(differences.items()):
    names = sorted({name for found in by_check.values() for name in found})
    where = ", ".join(title for title in CHECKS.values() if title in by_check)
    lines.append(f"| {', '.join(f'`{n}`' for n in names)} | {where} | {reason} |")
  return lines


_MARKS = {"right": "✓", "differs": "differs", "CPU torch refuses": "–", "wrong": "✗"}
_WORST_FIRST = ("wrong", "differs", "right", "CPU torch refuses")


def _mark(dtypes, check: str) -> str:
  kinds = {_kind(checks[check]) for checks in dtypes.values() if check in checks}
  return next((_MARKS[kind] for kind in _WORST_FIRST if kind in kinds), "–")


def _row(name: str, dtypes) -> str:
  held = ", ".join(dtype for dtype in DTYPES if dtype in dtypes)
  marks = [_mark(dtypes, check) for check in CHECKS]
  return f"| `{name}` | {held} | " + " | ".join(marks) + " |"


def families(rows: dict[str, str]) -> list[str]:
  """Return links to the families of operators, then a heading and a table for each."""
  links, sections = [], []
  for family, names in by_family(list(rows)).items():
    anchor = re.sub(r"\W+", "-", family.lower())
    links.append(f"- [{family}](#{anchor}): {len(names)}")
    sections += [
      "",
      f"## {family}",
      "",
      "| operator | dtypes | " + " | ".join(CHECKS.values()) + " |",
      "|---|---|" + "---|" * len(CHECKS),
      *(rows[name] for name in names),
    ]
  return [*links, *sections]


def render(verdicts: Verdicts) -> str:
  """Return the page in Markdown."""
  return "\n".join(
    [
      "# Operators",
      "",
      "PyTorch tests its own operators with a list of them, `op_db`, and inputs for",
      "each. `make test-opinfo` runs them on jax and compares with PyTorch on the CPU,",
      "to the tolerance that `torch.testing` has for the dtype; where a result differs",
      "by more, both are measured against double precision, and ours may not be",
      "further from it. This page is written from the reports.",
      "",
      "Gradients are compared twice: by `backward`, and by `jax_value_and_grad` in a",
      "compiled function. Both are also compared at edge points of these inputs,",
      "where a derivative is a choice: zeros, ties, the bounds that a call names,",
      "infinities, tensors without elements, repeated indices, padding and ignored",
      "labels; in float32 some 9,000 points of 540 operators. Differences are rows of",
      "`test/suites/opinfo/edge_expectations.py`.",
      "",
      "## Results by dtype",
      "",
      *_summary(verdicts),
      "",
      "What PyTorch refuses on the CPU is not counted.",
      "",
      "## Differences",
      "",
      *_differences(verdicts),
      "",
      "## Families",
      "",
      "The tables have each operator, over all inputs and the dtypes named.",
      "",
      *families({name: _row(name, dtypes) for name, dtypes in verdicts.items()}),
      "",
    ]
  )


def unneeded(verdicts: Verdicts) -> list[str]:
  """Return reasons of `test/suites/opinfo/expectations.py` that no verdict gives."""
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "test" / "suites"))
  expectations = importlib.import_module("opinfo.expectations")
  given = {
    verdict
    for dtypes in verdicts.values()
    for checks in dtypes.values()
    for verdict in checks.values()
  }
  reasons = [row.reason for row in expectations.DIFFERENCES]
  return [reason for reason in reasons if f"differs: {reason}" not in given]


def main(arguments: list[str]) -> None:
  """Entry point."""
  if len(arguments) < 2:
    raise SystemExit(__doc__)
  *reports, page = map(pathlib.Path, arguments)
  verdicts = read(*reports)
  page.write_text(render(verdicts), encoding="utf-8")
  print(f"written to {page}")
  reasons = unneeded(verdicts)
  if reasons:
    raise SystemExit(
      "These rows of test/suites/opinfo/expectations.py can go:\n" + "\n".join(reasons)
    )


if __name__ == "__main__":
  main(sys.argv[1:])
