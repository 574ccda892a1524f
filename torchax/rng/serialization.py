"""Random states as bytes, and back.

  magic | length of name, count, number of words | name | [length, JSON] | words

The part in brackets, the counts of sites, exists with the second magic only. Words are
little-endian 32-bit integers.

States of several environments are joined: magic, then (number, length) and the state of
each, the active environment first. `state.py` and `snapshots.py` call this.
"""

import json
import struct
from typing import Any

import numpy as np

_MAGIC = b"torchax-rng-1\0"
_MAGIC_EXTRA = b"torchax-rng-2\0"
_MAGIC_SEED = b"torchax-seed-1\0"
_MAGIC_MARK = b"torchax-mark-1\0"
_SEVERAL = b"torchax-several-1\0"
_HEADER = struct.Struct("<BQB")
_SEED = struct.Struct("<QIB")
_MARK = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")
_LENGTH = struct.Struct("<I")


def join(states: list[tuple[int, bytes]]) -> bytes:
  """Join the states of several environments, with the environments' numbers."""
  return _SEVERAL + b"".join(_ENTRY.pack(n, len(state)) + state for n, state in states)


def split(payload: bytes) -> list[tuple[int | None, bytes]]:
  """Split the result of `join`; a single state has the number None.

  Raises:
    ValueError: the bytes are truncated.
  """
  if not payload.startswith(_SEVERAL):
    return [(None, payload)]
  states: list[tuple[int | None, bytes]] = []
  start = len(_SEVERAL)
  while start < len(payload) or not states:
    header = payload[start : start + _ENTRY.size]
    number, length = _ENTRY.unpack(header) if len(header) == _ENTRY.size else (0, -1)
    start += _ENTRY.size + length
    if length < 0 or start > len(payload):
      raise ValueError(
        f"The random state is truncated: it ends after {len(payload)} bytes, within "
        "the states of its environments."
      )
    states.append((number, payload[start - length : start]))
  return states


def encode_seed(seed: int, ordinal: int, impl: str) -> bytes:
  """Encode a root stream without draws; see `environment_streams.RootSeed`."""
  name = impl.encode()
  return _MAGIC_SEED + _SEED.pack(seed, ordinal, len(name)) + name


def decode_seed(payload: bytes) -> tuple[int, int, str] | None:
  """Decode the result of `encode_seed`; None for other bytes."""
  start = len(_MAGIC_SEED) + _SEED.size
  if not payload.startswith(_MAGIC_SEED) or len(payload) < start:
    return None
  seed, ordinal, length = _SEED.unpack_from(payload, len(_MAGIC_SEED))
  name = payload[start:].decode(errors="replace")
  return (seed, ordinal, name) if len(payload) == start + length else None


def encode_mark(number: int) -> bytes:
  """Encode a mark, which replaces the state inside a compiled function."""
  return _MAGIC_MARK + _MARK.pack(number)


def decode_mark(payload: bytes) -> int | None:
  """Decode the result of `encode_mark`; None for other bytes."""
  is_mark = payload.startswith(_MAGIC_MARK)
  return _MARK.unpack(payload[len(_MAGIC_MARK) :])[0] if is_mark else None


def encode(data: dict[str, Any]) -> bytes:
  """Encode the result of `RngState.state_dict`."""
  words = np.asarray(data["key_data"], "<u4")
  name = data["impl"].encode()
  payload = _HEADER.pack(len(name), data["count"], words.shape[-1]) + name
  if "sites" not in data:
    return _MAGIC + payload + words.tobytes()
  text = json.dumps({"sites": data["sites"]}).encode()
  return _MAGIC_EXTRA + payload + _LENGTH.pack(len(text)) + text + words.tobytes()


def decode(payload: bytes) -> dict[str, Any]:
  """Decode the result of `encode`, for `RngState.from_state_dict`.

  Raises:
    ValueError: the bytes are no state, or have the wrong length.
  """
  start = len(_MAGIC) + _HEADER.size
  has_extra = payload.startswith(_MAGIC_EXTRA)
  if not (has_extra or payload.startswith(_MAGIC)) or len(payload) < start:
    raise ValueError(
      "The tensor holds no random state of torchax. Expected what "
      f"`torch.jax.get_rng_state()` returned, but got {len(payload)} other bytes."
    )
  name_length, count, n_words = _HEADER.unpack_from(payload, len(_MAGIC))
  name = payload[start : start + name_length].decode(errors="replace")
  start += name_length
  extra: dict[str, Any] = {}
  if has_extra:
    text = _read_sized(payload, start)
    start += _LENGTH.size + len(text)
    extra = json.loads(text)
  expected = start + 4 * n_words
  if len(payload) != expected:
    raise ValueError(
      f"The random state is truncated: expected {expected} bytes, but got "
      f"{len(payload)}."
    )
  words = np.frombuffer(payload, "<u4", n_words, start)
  data = {"impl": name, "key_data": words, "count": count}
  if "sites" in extra:
    data["sites"] = extra["sites"]
  return data


def _read_sized(payload: bytes, start: int) -> bytes:
  """Read a length at `start` and return that many bytes after it."""
  body = start + _LENGTH.size
  if len(payload) >= body:
    (length,) = _LENGTH.unpack_from(payload, start)
    if len(payload) >= body + length:
      return payload[body : body + length]
  raise ValueError(
    f"The random state is truncated: it ends after {len(payload)} bytes, within its "
    "header."
  )
