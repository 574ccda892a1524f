"""Draw the pictures of the docs as SVG, or one of a report of `make bench`.

usage: python -m tools.pictures [REPORT.json PICTURE.svg]

Text is dark on light boxes, or grey, and the background is transparent, so that a
picture reads on a light and on a dark page. The width fits a phone.
"""

import ast
import functools
import html
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH = 460
GAP = 6
LINE = 18
BLUE, GREEN, YELLOW, GREY = "#dbe7f8", "#d9f0de", "#fbeec7", "#e9eaed"
# Colors that show on a light and on a dark page.
BARS = ("#4c8bf5", "#e8833a", "#3fa34d", "#b07cc6")
PLAIN = "#808080"
_EDGE, _TEXT, _ARROW = "#6b7f9c", "#18222f", "#808a96"
_LETTER = 7.2  # width of a letter, rounded up


def box(
  x: float, y: float, width: float, height: float, lines: Iterable[str], fill: str
) -> str:
  """Return a rectangle with centered lines; the first one of several is bold."""
  lines = list(lines)
  middle, top = x + width / 2, y + height / 2 - LINE * (len(lines) - 1) / 2 + 4.5
  parts = [
    f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
    f'fill="{fill}" stroke="{_EDGE}"/>'
  ]
  for number, line in enumerate(lines):
    weight = ' font-weight="bold"' if number == 0 and len(lines) > 1 else ""
    parts.append(
      f'<text x="{middle:g}" y="{top + LINE * number:g}"{weight}>'
      f"{html.escape(line)}</text>"
    )
  return "\n".join(parts)


def arrow(x: float, y: float, to_y: float) -> str:
  """Return a vertical arrow, downward."""
  return (
    f'<path d="M{x:g} {y:g}V{to_y:g}m-4 -6l4 6l4 -6" fill="none" stroke="{_ARROW}" '
    'stroke-width="2"/>'
  )


def svg(height: float, title: str, parts: Sequence[str]) -> str:
  """Return the file of a picture; the title is for readers that cannot see it."""
  return "\n".join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
      f'viewBox="0 0 {WIDTH} {height:g}" role="img" font-family="sans-serif" '
      f'font-size="13" text-anchor="middle" fill="{_TEXT}">',
      f"<title>{html.escape(title)}</title>",
      *parts,
      "</svg>",
      "",
    ]
  )


def imports_of_parts() -> dict[str, set[str]]:
  """Return, for each folder and public module of the package, those that it imports.

  Modules of `ops` that no other one imports are left out: they re-export names of all
  layers.
  """
  package = ROOT / "torchax"
  files = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
      ".__init__"
    ): path
    for path in package.rglob("*.py")
  }
  found = {
    name: _imported(path, files) for name, path in files.items() if name != "torchax"
  }
  used = set().union(*found.values())
  parts: dict[str, set[str]] = {}
  for name, imported in found.items():
    part = name.split(".")[1]
    own = parts.setdefault(part, set())
    if name in used or part != "ops":
      own |= {other.split(".")[1] for other in imported} - {part}
  del parts["__main__"]
  return parts


def _imported(path: pathlib.Path, files: dict[str, pathlib.Path]) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        names.add(inner if inner in files else str(node.module))
  return {name for name in names if name in files and name != "torchax"}


def reachable(imports: dict[str, set[str]]) -> dict[str, set[str]]:
  """Return, for each part, those that it imports directly or through others."""
  below = {part: set(others) for part, others in imports.items()}
  for middle in below:
    for others in below.values():
      if middle in others:
        others |= below[middle]
  return below


def layers() -> str:
  """Draw folders and modules in layers; each imports from its own and lower ones."""
  imports = imports_of_parts()
  below = reachable(imports)

  @functools.cache
  def level(part: str) -> int:
    lower = (level(other) for other in below[part] if part not in below[other])
    return 1 + max(lower, default=-1)

  y, parts = 2.0, []
  for height in range(max(map(level, imports)), -1, -1):
    x = 2.0
    for part in sorted(name for name in imports if level(name) == height):
      width = _LETTER * len(part) + 14
      if x + width > WIDTH - 2:
        x, y = 2.0, y + 26 + GAP
      is_folder = (ROOT / "torchax" / part).is_dir()
      parts.append(box(x, y, width, 26, [part], BLUE if is_folder else GREY))
      x += width + GAP
    y += 26 + 2 * GAP
  return svg(y, "The layers of torchax, from its imports", parts)


CALL = (
  (GREY, "torch.add(x, y)", "your program"),
  (BLUE, "function", "handler of torchax, or torch's own function"),
  (YELLOW, "autograd", "torch records the operation"),
  (BLUE, "plan", "lowering, arguments to write; cached for an overload"),
  (BLUE, "lowering", "pure JAX function of operands: arrays, numbers, a key"),
  (GREEN, "XLA program", "one for a static key; in a trace, part of a jaxpr"),
  (BLUE, "tensor", "a new one, or new values for the storage"),
)


def call() -> str:
  """Draw the steps of one operation; blue is torchax, yellow torch, green JAX."""
  step = 68
  parts = [
    box(30, 2 + step * number, WIDTH - 60, 46, lines, fill)
    for number, (fill, *lines) in enumerate(CALL)
  ]
  for number in range(1, len(CALL)):
    parts.append(arrow(WIDTH / 2, 2 + step * number - 20, step * number))
  return svg(step * len(CALL) - 18, "The way of an operation through torchax", parts)


MESH = {"data": 4, "model": 2}
# Array -> mesh axis of its rows, mesh axis of its columns.
ARRAYS = {
  "batch": ("data", None),
  "linear1.weight": ("model", None),
  "linear2.weight": (None, "model"),
  "linear2.bias": (None, None),
}


def mesh() -> str:
  """Draw a mesh of eight devices, and the devices that hold each part of an array."""
  devices = np.arange(8).reshape(tuple(MESH.values()))
  parts = [box(2, 2, WIDTH - 4, 26, ["mesh: data 4 x model 2"], GREY)]
  for (row, column), device in np.ndenumerate(devices):
    fill = (BLUE, GREEN)[column]
    parts.append(box(2 + 114.5 * row, 34 + 32 * column, 112, 28, [f"{device}"], fill))
  y = 34 + 64 + 16.0
  for number, (name, axes) in enumerate(ARRAYS.items()):
    x, top = 2 + 232 * (number % 2), y + 186 * (number // 2)
    names = ("None" if axis is None else f'"{axis}"' for axis in axes)
    spec = ", ".join(names) if any(axes) else ""
    parts.append(box(x, top, 224, 44, [name, f"PartitionSpec({spec})"], GREY))
    parts += _parts_of_array(axes, devices, x, top + 50)
  return svg(y + 2 * 186 - 12, "Arrays on a mesh of eight devices", parts)


def _parts_of_array(axes, devices: np.ndarray, x: float, y: float) -> list[str]:
  rows, columns = (MESH.get(axis, 1) for axis in axes)
  width, height = 226 / columns, 120 / rows
  parts = []
  for row, column in np.ndindex(rows, columns):
    index = {axes[0]: row, axes[1]: column}
    holders = devices[tuple(index.get(axis, slice(None)) for axis in MESH)]
    fill = (BLUE, GREEN)[index["model"]] if "model" in index else YELLOW
    text = " ".join(map(str, np.ravel(holders)))
    place = x + width * column, y + height * row
    parts.append(box(*place, width - 2, height - 2, [text], fill))
  return parts


# Program -> implementation -> time in microseconds, and the text of the time.
Times = dict[str, dict[str, tuple[float, str]]]


def bars(title: str, caption: str, times: Times) -> str:
  """Draw the times of each program as bars; the longest of a program has one length."""
  kinds = list(dict.fromkeys(kind for row in times.values() for kind in row))
  colors = dict(zip(kinds, BARS, strict=False))
  y, parts = 16.0, []
  for number, kind in enumerate(kinds):
    x = 2 + 110 * number
    parts += [_bar(x, y - 10, 11, colors[kind]), _left(x + 16, y, kind)]
  for line in textwrap.wrap(caption, 72):
    y += LINE
    parts.append(_left(2, y, line))
  for name, row in times.items():
    y += 8
    for line in textwrap.wrap(name, 66):
      y += 15
      parts.append(_left(2, y, line))
    longest = max(time for time, _ in row.values())
    for kind, (time, text) in row.items():
      length = (WIDTH - 90) * time / longest
      parts += [_bar(2, y + 5, length, colors[kind]), _left(length + 8, y + 15, text)]
      y += 14
    y += 4
  return svg(y + 6, title, parts)


def _bar(x: float, y: float, width: float, color: str) -> str:
  return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="11" fill="{color}"/>'


def _left(x: float, y: float, text: str) -> str:
  return (
    f'<text x="{x:.1f}" y="{y:g}" text-anchor="start" fill="{PLAIN}" font-size="12">'
    f"{html.escape(text)}</text>"
  )


def gpu() -> str:
  """Draw the table of docs/performance.md, with the device, versions and date there."""
  page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
  section = page.partition("\n## On a GPU\n")[2].partition("\n###")[0]
  (where,) = re.findall(r"(?s)Measured on (.+?\d{4}-\d\d-\d\d)\.", section)
  (table,) = re.findall(r"(?m)(?:^\|.*\n)+", section)
  head, _, *rows = (
    [cell.strip().replace("`", "") for cell in line.strip("|\n").split("|")]
    for line in table.splitlines()
  )
  times: Times = {}
  for name, *cells in rows:
    found = {kind: _time(cell) for kind, cell in zip(head[1:], cells) if cell}
    times[name] = found
  return bars("Times on a GPU", " ".join(where.split()), times)


def _time(cell: str) -> tuple[float, str]:
  """Return microseconds and a text, of "1,060" (microseconds) or "5.7 s"."""
  number, _, unit = cell.replace(",", "").partition(" ")
  return float(number) * {"": 1, "s": 1e6}[unit], cell if unit else f"{cell} µs"


def report(path: pathlib.Path) -> str:
  """Draw a report of `make bench`, with its date, machine and versions."""
  found = json.loads(path.read_text(encoding="utf-8"))
  given = found["environment"]
  versions = (f"{key} {given[key]}" for key in ("torchax", "torch", "jax", "python"))
  times: Times = {
    row["name"]: {
      "torchax": (row["ours_us"], f"{row['ours_us']:,.1f} µs"),
      "baseline": (row["baseline_us"], f"{row['baseline_us']:,.1f} µs"),
    }
    for row in found["rows"]
  }
  where = (given["machine"], *versions, f"on {given['date']}")
  return bars("Times of make bench", ", ".join(where), times)


PICTURES = {"layers": layers, "call": call, "mesh": mesh, "gpu": gpu}


def main() -> None:
  """Write the pictures to the docs, or draw a report."""
  if sys.argv[1:]:
    source, target = map(pathlib.Path, sys.argv[1:])
    target.write_text(report(source), encoding="utf-8")
    return
  for name, draw in PICTURES.items():
    (ROOT / "docs" / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
  main()
