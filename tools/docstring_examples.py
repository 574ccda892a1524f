"""Extension of griffe for the reference: examples of docstrings become code blocks.

Our docstrings have examples as `>>>` lines without a heading, which Markdown would read
as quotes. `mkdocs.yml` names this file.
"""

import re
from typing import Any

import griffe

PART = re.compile(
  r"(?P<example>^>>> .*?(?=^\s*$|\Z))|(?P<code>`[^`]*`)|(?P<power>(?<=\d)\*\*)",
  re.MULTILINE | re.DOTALL,
)


def _markdown(part: re.Match) -> str:
  if part["example"]:
    return f"```pycon\n{part[0].rstrip()}\n```\n"
  return part[0] if part["code"] else r"\*\*"


def as_markdown(docstring: str) -> str:
  """Return a docstring with a code fence around each example, and no bold powers."""
  return PART.sub(_markdown, docstring)


class DocstringExamples(griffe.Extension):
  """Fences the examples of every documented object."""

  def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
    """Change the docstring of an object that griffe has loaded."""
    if obj.docstring:
      obj.docstring.value = as_markdown(obj.docstring.value)
