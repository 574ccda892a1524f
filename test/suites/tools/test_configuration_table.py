"""The page on configuration has the fields and variables of the code."""

import dataclasses

from tools import configuration_table, tables
from torchax.config import Configuration


def test_the_page_is_up_to_date():
  table = tables.read_table(
    configuration_table.PAGE.read_text(encoding="utf-8"), configuration_table.TOOL
  )
  assert table == configuration_table.render(), (
    "run: python -m tools.configuration_table"
  )


def test_each_field_has_a_row_with_its_meaning():
  table = configuration_table.render()
  for field in dataclasses.fields(Configuration):
    assert f"\n| `{field.name}` | `" in table
  assert "| `eager_mode` | `str` or `None` | `None` | mode of" in table
  assert "| `check_indices` | `bool` | by a variable, below | raise for every" in table


def test_each_variable_that_the_package_names_has_a_row():
  assert configuration_table.variables_of_code() == set(configuration_table.VARIABLES)
