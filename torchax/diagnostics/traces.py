"""Operations of compiled programs in a trace of JAX's profiler, with their modules.

On the CPU an event of a trace has the name of an HLO instruction. The module is in the
metadata of that instruction, in the programs that the trace contains. Both are in the
protocol buffers `XSpace` and `HloProto` of XLA; `profiles.py` adds up the times.
"""

import gzip
import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.profiler import ProfileData

# Numbers of the fields that lead to a value.
_PLANES, _PLANE_NAME = (1,), (2,)
_PROGRAMS = (4, 2)  # of the plane with metadata: one entry for each program
_PROGRAM_NAME, _INSTRUCTIONS = (2,), (5, 6, 1, 3, 2)
_INSTRUCTION_NAME, _OP_NAME = (1,), (7, 2)
_METADATA = b"/host:metadata"

# Length of the other wire types in bytes.
_FIXED = {1: 8, 5: 4}

_TRANSFORMS = re.compile(r"^(?:\w+\()+([^()]*)\)+$")


class Operation(NamedTuple):
  """Instruction of a compiled program that has run.

  Attributes:
    module: path of its module; the name of the program outside of modules.
    is_backward: True if it computes a gradient.
    seconds: time without the instructions that it calls.
  """

  module: str
  is_backward: bool
  seconds: float


def operations(file: str | os.PathLike) -> Iterator[Operation]:
  """Yield the operations of compiled programs in a trace.

  Args:
    file: the `.xplane.pb` file of the trace.
  """
  with open(file, "rb") as opened:
    content = opened.read()
  names = _op_names(memoryview(content))
  for plane in ProfileData.from_serialized_xspace(content).planes:
    for line in plane.lines:
      for (program, instruction), seconds in _times(line.events):
        yield _operation(program, names.get((program, instruction), ""), seconds)


def add_names(directory: pathlib.Path) -> pathlib.Path:
  """Add the names with modules to the events of a trace for Perfetto; return its file.

  Args:
    directory: directory of one trace.
  """
  names = {}
  for file in directory.glob("*.xplane.pb"):
    names.update(_op_names(memoryview(file.read_bytes())))
  # Several hosts may write to one directory; the newest file is this one's.
  files = directory.glob("*.trace.json.gz")
  path = max(files, key=lambda file: file.stat().st_mtime_ns)
  with gzip.open(path, "rt") as opened:
    trace = json.load(opened)
  for event in trace["traceEvents"]:
    details = event.get("args", {})
    name = names.get((details.get("hlo_module"), details.get("hlo_op")))
    if name:
      details["op_name"] = name
  with gzip.open(path, "wt") as opened:
    json.dump(trace, opened)
  return path


def _operation(program: str, op_name: str, seconds: float) -> Operation:
  """Return the operation with a name such as "jit(step)/layers.0/linear/dot_general".

  The names of its modules follow that of the program, and end at the primitive or the
  first inner program or loop.
  """
  first, _, _ = op_name.partition(";")  # a fusion may have several names
  outermost, *scopes = first.split("/")
  function = _TRANSFORMS.match(outermost)
  modules, is_backward = [], False
  for scope in scopes[:-1]:
    transformed = _TRANSFORMS.match(scope)
    if scope.startswith("jit(") or scope in ("while", "cond") or "..." in scope:
      break
    is_backward |= scope.startswith("transpose(")
    modules.append(transformed[1] if transformed else scope)
  module = ".".join(filter(None, modules))
  name = function[1] if function else program.removeprefix("jit_")
  return Operation(module or name, is_backward, seconds)


def _times(events) -> Iterator[tuple[tuple[str, str], float]]:
  """Yield (program, instruction) of each event, and its seconds without inner ones."""
  found: list[list[Any]] = []
  running: list[list[Any]] = []
  with warnings.catch_warnings():
    # JAX 0.12 aborts the process if its warning about the type of `stats` is an error.
    warnings.simplefilter("ignore", DeprecationWarning)
    read = [(e.start_ns, e.duration_ns, dict(e.stats)) for e in events]
  for start, duration, stats in sorted(read, key=lambda e: (e[0], -e[1])):
    if "hlo_op" not in stats:
      continue
    while running and running[-1][0] <= start:
      running.pop()
    if running:
      running[-1][2] -= duration
    key = str(stats.get("hlo_module", "")), str(stats["hlo_op"])
    running.append([start + duration, key, duration])
    found.append(running[-1])
  for _, key, nanoseconds in found:
    yield key, nanoseconds / 1e9


def _op_names(space: memoryview) -> dict[tuple[str, str], str]:
  """Return the name with scopes by (program, instruction)."""
  names = {}
  for plane in _values(space, *_PLANES):
    if _METADATA not in map(bytes, _values(plane, *_PLANE_NAME)):
      continue
    for program in _values(plane, *_PROGRAMS):
      name = _text(program, *_PROGRAM_NAME).partition("(")[0]  # "jit_step(26)"
      for instruction in _values(program, *_INSTRUCTIONS):
        key = name, _text(instruction, *_INSTRUCTION_NAME)
        names[key] = _text(instruction, *_OP_NAME)
  return names


def _text(message: memoryview, *path: int) -> str:
  return bytes(next(_values(message, *path), b"")).decode()


def _values(message: memoryview, *path: int) -> Iterator[Any]:
  """Yield the values of a field, by the numbers of the fields that lead to it."""
  if not path:
    yield message
    return
  for number, value in _fields(message):
    if number == path[0]:
      yield from _values(value, *path[1:])


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
  """Yield number and value of each field of a serialized protocol buffer."""
  position = 0
  while position < len(message):
    tag, position = _varint(message, position)
    number, wire_type = tag >> 3, tag & 7
    if wire_type == 0:
      value, position = _varint(message, position)
      yield number, value
      continue
    length = _FIXED.get(wire_type)
    if length is None:
      length, position = _varint(message, position)
    yield number, message[position : position + length]
    position += length


def _varint(message: memoryview, position: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[position]
    value |= (byte & 127) << shift
    position, shift = position + 1, shift + 7
    if byte < 128:
      return value, position
