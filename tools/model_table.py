"""Write the table of models for the docs from the report of `make test-models`.

usage: python -m tools.model_table REPORT.xml docs/models.md

The text between the two markers of the page is replaced.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

from tools import tables

# Test of test/suites/models/test_matrix.py -> name of the check, in the table's order.
CHECKS = {
  "test_results_in_evaluation_equal_the_cpu": "results",
  "test_gradients_in_training_equal_the_cpu": "gradients",
  "test_a_seed_gives_the_same_draws_in_each_way": "draws",
}
# Way -> title of its column; other ways have their own names.
TITLES = {
  "eager": "eagerly",
  "jit": "`jax_jit` of the step",
  "module": "`JittableModule`",
  "compile": "`torch.compile`",
}
# model -> way -> check -> True if it passed, None if it was skipped.
Verdicts = dict[str, dict[str, dict[str, bool | None]]]


def read(report: pathlib.Path) -> Verdicts:
  """Return the verdicts in a JUnit report.

  Raises:
    ValueError: there are none.
  """
  verdicts: Verdicts = {}
  for case in ElementTree.parse(report).iter("testcase"):
    named = re.fullmatch(r"(\w+)\[(.+)-(\w+)\]", case.get("name") or "")
    if named and named[1] in CHECKS:
      test, model, way = named.groups()
      passed = None if case.find("skipped") is not None else not list(case)
      verdicts.setdefault(model, {}).setdefault(way, {})[CHECKS[test]] = passed
  if not verdicts:
    raise ValueError(
      f"No verdicts on models in {report}; write them with `make test-models`."
    )
  return verdicts


def _cell(checks: dict[str, bool | None]) -> str:
  """Return the cell of a model and a way: the checks that passed and failed."""
  passed = [name for name in CHECKS.values() if checks.get(name)]
  failed = [f"✗ {name}" for name in CHECKS.values() if checks.get(name) is False]
  is_all = len(passed) == len(CHECKS)
  return "✓" if is_all else ", ".join(passed + failed) or "–"


def render(verdicts: Verdicts) -> str:
  """Return the table in Markdown."""
  ways = list(dict.fromkeys(way for by_way in verdicts.values() for way in by_way))
  ways.sort(key=[*TITLES, *ways].index)
  titles = [TITLES.get(way, way) for way in ways]
  header, rows = ["model", *titles], []
  # The order in which tests end is arbitrary. Models come before their variants ("BERT,
  # attention …").
  for model in sorted(verdicts, key=lambda name: ("," in name, name.lower())):
    by_way = verdicts[model]
    rows.append([model, *(_cell(by_way.get(way, {})) for way in ways)])
  return tables.markdown(header, rows)


def main(arguments: list[str]) -> None:
  """Entry point."""
  tables.main("model_table", __doc__, lambda report: render(read(report)), arguments)


if __name__ == "__main__":
  main(sys.argv[1:])
