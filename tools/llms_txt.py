"""List of the pages as plain text: hook of mkdocs that writes `llms.txt` to the site.

A page has a line with its title, its address and its first sentence. The `nav` of
`mkdocs.yml` gives sections and titles.
"""

import pathlib
import re
from collections.abc import Iterator
from typing import Any


def on_post_build(config: Any) -> None:
  """Write the list after mkdocs has built the site; mkdocs calls it by its name."""
  text = render(
    config["site_name"],
    config["site_description"],
    config["nav"],
    pathlib.Path(config["docs_dir"]),
  )
  path = pathlib.Path(config["site_dir"]) / "llms.txt"
  path.write_text(text, encoding="utf-8")


def render(name: str, description: str, nav: list[Any], docs: pathlib.Path) -> str:
  """Return the list of the pages of a `nav`, section by section."""
  lines = [f"# {name}", "", f"> {description}"]
  for section in nav:
    for title, entries in section.items():
      lines += ["", f"## {title}", "", *_lines(entries, docs)]
  return "\n".join(lines) + "\n"


def _lines(entries: list[Any], docs: pathlib.Path) -> Iterator[str]:
  for entry in entries:
    title, path = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
    text = (docs / path).read_text(encoding="utf-8")
    heading, sentence = first_sentence(text)
    address = re.sub(r"(^|/)index/$", r"\1", path.removesuffix(".md") + "/") or "./"
    yield f"- [{title or heading}]({address}): {sentence}"


def first_sentence(page: str) -> tuple[str, str]:
  """Return the heading of a page and its first sentence, as plain text.

  Raises:
    ValueError: no sentence follows the heading.
  """
  page = re.sub(r"(?s)<!--.*?-->", "", page)
  found = re.match(r"\s*# (.+)\n+(?=\w)((?:.+\n)+)", page)
  if found is None:
    raise ValueError(f"A page needs a heading and a sentence, but got {page[:60]!r}.")
  paragraph = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", " ".join(found[2].split()))
  sentence = re.split(r"(?<=[.:?]) (?=[A-Z`])", paragraph)[0]
  return found[1], re.sub(r"^This page is for ", "For ", sentence)
