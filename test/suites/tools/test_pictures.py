"""Pictures of the docs are those that the tool draws."""

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
