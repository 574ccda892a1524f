"""Docstrings as the reference of the site shows them."""

import pytest

pytest.importorskip("griffe", reason="the extra `docs` is not installed")

from tools.docstring_examples import as_markdown


def test_an_example_is_a_code_block_as_it_stands():
  docstring = "One.\n\n>>> 2**3\n8\n>>> f()\n\nArgs:\n  x: `2**3` or 2**64."
  assert as_markdown(docstring) == (
    "One.\n\n```pycon\n>>> 2**3\n8\n>>> f()\n```\n\nArgs:\n  x: `2**3` or 2\\*\\*64."
  )


def test_an_example_may_end_the_docstring():
  assert as_markdown("One.\n\n>>> 1\n1\n") == "One.\n\n```pycon\n>>> 1\n1\n```\n"
