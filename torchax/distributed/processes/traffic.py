"""What the devices of a compiled step send one another, read off its program."""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from torchax.core.tracebacks import ending_at_the_user

_CALL = re.compile(
  r" = (?P<results>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute|collective-broadcast)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')
# XLA's names of dtypes that are not numpy's with a number of bits.
_BITS = {"pred": 8, "s4": 4, "u4": 4}


class Collective(NamedTuple):
  """One collective of a compiled program.

  Attributes:
    kind: XLA's name: "all-gather".
    bytes: of its results on one device.
    where: the operations of JAX that it belongs to.
  """

  kind: str
  bytes: int
  where: str


@ending_at_the_user
def collectives(function: Any, *args: Any, **kwargs: Any) -> list[Collective]:
  """The collectives of a compiled function for these arguments; nothing is run.

  Args:
    function: what `jax_jit` or `jax.jit` returns.
    *args, **kwargs: of a call.

  >>> import jax
  >>> collectives(jax.jit(lambda x: x + 1), 1.0)  # one device
  []
  """
  return collectives_of(function.lower(*args, **kwargs).compile().as_text())


def collectives_of(program: str) -> list[Collective]:
  """The collectives in the text of a compiled program, in its order."""
  found = []
  for line in program.splitlines():
    call = _CALL.search(line)
    if call is None:
      continue
    arrays = [_bytes(*array) for array in _ARRAY.findall(call["results"])]
    # What starts a collective has its operands among the results.
    size = max(arrays, default=0) if call["start"] else sum(arrays)
    name = _NAME.search(line)
    found.append(Collective(call["kind"], size, name[1] if name else ""))
  return found


def moved(found: Iterable[Collective]) -> dict[str, int]:
  """The bytes of all collectives of each kind."""
  sums: dict[str, int] = {}
  for one in found:
    sums[one.kind] = sums.get(one.kind, 0) + one.bytes
  return sums


def _bytes(dtype: str, shape: str) -> int:
  count = math.prod(int(extent) for extent in shape.split(",") if extent)
  bits = _BITS.get(dtype)
  if bits is None:
    number = re.search(r"\d+", dtype)
    bits = int(number[0]) if number else 8 * jnp.dtype(dtype).itemsize
  return -(-count * bits // 8)
