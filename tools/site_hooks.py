"""Hook of mkdocs: the version in the footer, and no request to other hosts.

`mike` builds a version of the site, and sets `MIKE_DOCS_VERSION`. Only a site of mike
has a list of versions to select from.
"""

import os
import pathlib
import re
from typing import Any

VERSION_FILE = pathlib.Path(__file__).resolve().parent.parent / "torchax" / "version.py"
# The theme asks GitHub for numbers of the repository, for elements with this attribute.
REPOSITORY_NUMBERS = ' data-md-component="source"'


def on_config(config: Any) -> Any:
  """Put the version of the package into the footer; mkdocs calls it by its name."""
  text = VERSION_FILE.read_text(encoding="utf-8")
  (version,) = re.findall(r'^VERSION = "(.+)"$', text, re.MULTILINE)
  config["copyright"] = f"torchax {version}"
  if "MIKE_DOCS_VERSION" in os.environ:
    config["extra"]["version"] = {"provider": "mike"}
  return config


def on_post_page(output: str, **_: Any) -> str:
  """Return the page without the request to GitHub; mkdocs calls it by its name."""
  return output.replace(REPOSITORY_NUMBERS, "")


def on_post_template(output_content: str, **_: Any) -> str:
  """Do the same for pages without a source, such as `404.html`."""
  return on_post_page(output_content)
