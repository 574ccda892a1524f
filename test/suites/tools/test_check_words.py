"""Check of the language of docstrings, comments, pages and test names."""

import pytest

from tools import check_words


@pytest.fixture
def found(tmp_path, monkeypatch):
  """Return the words that are found in a file with the given text."""
  monkeypatch.setattr(check_words, "ROOT", tmp_path)

  def find(name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [(f.line, f.words) for f in check_words.findings_in(path)]

  return find


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ('"""What a plan is."""\n', [(1, "What"), (1, "What a")]),
    ('"""How a plan runs."""\n', [(1, "How")]),
    ('"""Plans."""\n', [(1, "Plans.")]),
    ('def f():\n  """Return what is\n  left.\n  """\n', [(2, "what is")]),
    ("x = 1  # nobody reads it anew\n", [(1, "nobody"), (1, "anew")]),
    ("x = 'nobody'\n", []),
    ("def _settled():\n  pass\n", [(1, "_settled")]),
    ('"""Plans of operations."""\n\nx = 1  # one per key\n', []),
  ],
)
@pytest.mark.parametrize("name", ["torchax/module.py", "test/test_module.py"])
def test_code_is_checked_outside_of_strings(found, name, text, expected):
  assert found(name, text) == expected


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("The array, but\nfor its dtype.\n", [(1, "but for")]),
    ("| nobody |\n| - |\n\nNobody reads it.\n", [(4, "Nobody")]),
    ("```python\nx = 1  # nobody\n```\n`nobody` reads it.\n", []),
    ("There are no more than two.\n", []),
  ],
)
def test_pages_are_checked_outside_of_code_and_tables(found, text, expected):
  assert found("docs/page.md", text) == expected


def test_only_names_of_tests_are_checked_for_length(found):
  name = f"test_{'x' * 60}"
  text = f"def {name}():\n  pass\n\n\ndef helper_{'x' * 60}():\n  pass\n"
  assert found("test/test_page.py", text) == [(1, name)]


def test_findings_and_stale_exceptions_fail(found, monkeypatch, capsys):
  found("docs/page.md", "Nobody reads it.\n")
  monkeypatch.setattr("sys.argv", ["check_words"])
  monkeypatch.setattr(check_words, "EXCEPTIONS", ())
  assert check_words.main() == 1
  assert "docs/page.md:1: 'Nobody': write" in capsys.readouterr().out
  monkeypatch.setattr(check_words, "EXCEPTIONS", (("docs/page.md", "Nobody", "why"),))
  assert check_words.main() == 0
  found("docs/page.md", "Users read it.\n")
  assert check_words.main() == 1
  assert "delete the row" in capsys.readouterr().out
