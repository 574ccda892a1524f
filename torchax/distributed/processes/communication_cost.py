"""Communication cost of a compiled step: the collectives in its XLA program."""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchax.core.tracebacks import hide_library_frames

_CALL = re.compile(
  r" = (?P<results>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute|collective-broadcast)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
  """Collective of a compiled program.

  Attributes:
    kind: XLA's name, such as "all-gather".
    bytes: size of its results on one device.
    where: `op_name` in the program: the JAX operations it comes from.

  >>> Collective("all-gather", 8, "jit(step)/dot_general").bytes
  8
  """

  kind: str
  bytes: int
  where: str


@hide_library_frames
def collectives(function: Any, *args: Any, **kwargs: Any) -> list[Collective]:
  """List the collectives of a function, compiled for these arguments but not run.

  Args:
    function: result of `jax_jit` or `jax.jit`.
    *args, **kwargs: arguments of a call.

  Returns:
    The collectives, in program order.

  >>> import jax
  >>> collectives(jax.jit(lambda x: x + 1), 1.0)  # one device
  []
  """
  return collectives_of(function.lower(*args, **kwargs).compile().as_text())


def collectives_of(program: str) -> list[Collective]:
  """List the collectives in the text of a compiled program, in program order."""
  records = []
  for line in program.splitlines():
    call = _CALL.search(line)
    if call is None:
      continue
    arrays = [_bytes(*array) for array in _ARRAY.findall(call["results"])]
    # The results of an asynchronous start include the operands.
    size = max(arrays, default=0) if call["start"] else sum(arrays)
    name = _NAME.search(line)
    records.append(Collective(call["kind"], size, name[1] if name else ""))
  return records


def bytes_by_kind(found: Iterable[Collective]) -> dict[str, int]:
  """Sum the bytes of collectives, by kind.

  Args:
    found: collectives, such as the result of `collectives`.

  Returns:
    Bytes on one device by kind.

  >>> bytes_by_kind([Collective("all-reduce", 8, ""), Collective("all-reduce", 4, "")])
  {'all-reduce': 12}
  """
  sums: dict[str, int] = {}
  for collective in found:
    sums[collective.kind] = sums.get(collective.kind, 0) + collective.bytes
  return sums


def _bytes(dtype: str, shape: str) -> int:
  count = math.prod(int(extent) for extent in shape.split(",") if extent)
  # XLA's names of dtypes contain their bits, except for "pred", one byte.
  bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
  return -(-count * bits // 8)
