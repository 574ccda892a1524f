"""Ledgers as files: JSON lines, which open anywhere.

The first line says what the file is; each line after it is a draw, an object with the
attributes of `Draw`. The key is a list: the PRNG implementation, the words of the key,
and the number that is folded in.
"""

import dataclasses
import json
import os
from collections.abc import Iterable

from torchax.rng.arguments import hashable
from torchax.rng.draw import Draw

_KIND = "torchax ledger"
_VERSION = 1


def save(draws: Iterable[Draw], path: str | os.PathLike) -> None:
  """Writes draws to a file; see `Ledger.save`."""
  lines = [json.dumps({"kind": _KIND, "version": _VERSION})]
  lines += [json.dumps(_fields(draw), allow_nan=False) for draw in draws]
  with open(path, "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n")


def _fields(draw: Draw) -> dict:
  """The attributes of a draw, but for what is known to its process alone."""
  fields = dataclasses.asdict(draw)
  del fields["environment"]
  return fields


def load(path: str | os.PathLike) -> list[Draw]:
  """The draws of a file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file holds no ledger, one of a newer version, or is damaged.
  """
  with open(path, encoding="utf-8", errors="replace") as file:
    lines = file.read().splitlines()
  header = _parsed(lines[0] if lines else "", path, 1)
  if header.get("kind") != _KIND:
    raise ValueError(
      f"{os.fspath(path)!r} holds no ledger. Expected what `ledger.save(path)` wrote: "
      "lines of JSON, of which the first one says so."
    )
  if header.get("version") != _VERSION:
    raise ValueError(
      f"{os.fspath(path)!r} holds a ledger of version {header.get('version')}, but "
      f"this torchax reads version {_VERSION}. Read it with the version that wrote it."
    )
  return [_draw(line, path, n) for n, line in enumerate(lines[1:], start=2)]


def _parsed(line: str, path, number: int) -> dict:
  try:
    found = json.loads(line)
  except json.JSONDecodeError:
    found = None
  if isinstance(found, dict):
    return found
  if number == 1:
    return {}
  raise ValueError(
    f"The ledger {os.fspath(path)!r} is damaged: line {number} is no object of JSON."
  )


def _draw(line: str, path, number: int) -> Draw:
  found = _parsed(line, path, number)
  names = {field.name for field in dataclasses.fields(Draw)} - {"environment"}
  if set(found) != names:
    wrong = sorted(set(found) ^ names)
    raise ValueError(
      f"The ledger {os.fspath(path)!r} is damaged: line {number} has other fields than "
      f"those of a draw: {', '.join(wrong)}."
    )
  return Draw(**{name: hashable(value) for name, value in found.items()})
