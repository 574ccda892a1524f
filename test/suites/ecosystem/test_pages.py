"""Programs of the page about libraries run, each by itself, without a network."""

import os
import re
import subprocess
import sys

import pytest
from source_tree import ROOT

pytest.importorskip("accelerate", reason="the extra `ecosystem` is not installed")

PAGE = ROOT / "docs" / "training-scripts.md"
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _programs() -> dict[str, str]:
  """Return the blocks of each section, joined to one program."""
  _, *parts = HEADING.split(PAGE.read_text(encoding="utf-8"))
  sections = dict(zip(parts[::2], parts[1::2], strict=True))
  joined = {title: "\n".join(BLOCK.findall(text)) for title, text in sections.items()}
  return {title: program for title, program in joined.items() if program}


PROGRAMS = _programs()


@pytest.mark.parametrize("section", PROGRAMS)
def test_the_program_of_a_section_runs(section, tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", PROGRAMS[section]],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
