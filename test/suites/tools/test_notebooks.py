"""Outputs of a tutorial, and the notebook of its page."""

import json

from tools import notebooks

PAGE = """\
# Title

```python
x = 20
print("first")
x + 1
```

```text
an old output
```

Text.

```python
y = x
```
"""


def test_a_page_gets_the_printed_text_and_the_last_value():
  page = notebooks.executed(PAGE)
  assert page == PAGE.replace("an old output", "first\n21")
  assert notebooks.executed(page) == page


def test_a_notebook_has_the_cells_and_outputs_of_the_page():
  cells = json.loads(notebooks.notebook(PAGE))["cells"]
  assert ["".join(cell["source"]) for cell in cells] == [
    "# Title",
    'x = 20\nprint("first")\nx + 1',
    "Text.",
    "y = x",
  ]
  outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
  stream = {"name": "stdout", "output_type": "stream", "text": ["an old output\n"]}
  assert outputs == [[stream], []]
