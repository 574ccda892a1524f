"""Pictures of the docs are those that the tool draws."""

import json
import re

import pytest
from source_tree import ROOT

from tools import pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_up_to_date(name):
  drawn = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
  assert drawn == pictures.PICTURES[name](), "run: python -m tools.pictures"


def test_no_part_is_drawn_below_one_that_it_imports():
  found = re.findall(r'y="([\d.]+)">(\w+)</text>', pictures.layers())
  heights = {name: float(y) for y, name in found}
  imports = pictures.imports_of_parts()
  assert heights.keys() == imports.keys()
  below = pictures.reachable(imports)
  for part, others in below.items():
    for other in others:
      if part in below[other]:
        assert heights[part] == heights[other]
      else:
        assert heights[part] < heights[other]


def test_parts_of_an_array_name_the_devices_that_hold_them():
  drawn = re.findall(r">([\d ]+)</text>", pictures.mesh())
  weight = ["0 2 4 6", "1 3 5 7"]
  batch = ["0 1", "2 3", "4 5", "6 7"]
  assert drawn[8:] == [*batch, *weight, *weight, "0 1 2 3 4 5 6 7"]


def test_bars_of_a_gpu_are_the_numbers_of_the_page():
  page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
  table = page[page.index("| program | torchax |") :].partition("\n\n")[0]
  cells = [line.split("|")[2:-1] for line in table.splitlines()[2:]]
  expected = [cell.strip() for row in cells for cell in row if cell.strip()]
  drawn = re.findall(r">([\d,.]+(?: s)?)(?: µs)?</text>", pictures.gpu())
  assert drawn == expected and len(drawn) > 20


def test_a_report_is_drawn_with_its_date_machine_and_versions(tmp_path):
  versions = {"torchax": "1.2", "torch": "3.4", "jax": "5.6", "python": "7.8"}
  given = {**versions, "machine": "x86_64, 2 cores", "date": "2026-11-27"}
  row = {"name": "a < b", "ours_us": 30.0, "baseline_us": 1200.0}
  path = tmp_path / "report.json"
  path.write_text(json.dumps({"environment": given, "rows": [row]}))
  drawn = pictures.report(path)
  where = "torchax 1.2, torch 3.4, jax 5.6, python 7.8, on 2026-11-27"
  assert f"x86_64, 2 cores, {where}" in re.sub(r"</text>\n<text[^>]*>", " ", drawn)
  assert "a &lt; b" in drawn and "30.0 µs" in drawn and "1,200.0 µs" in drawn
  widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="11"', drawn)[2:]]
  assert widths[1] == pytest.approx(40 * widths[0], rel=0.01)
