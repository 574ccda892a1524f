"""Files that are damaged, or of another kind: one error that says which and what to do.

torch's readers say what they have stumbled over, and not in which file; of a web page
that was saved under the name of a file they advise to load it without a check. Here a
file is looked at once `torch.load` has failed: one that is whole keeps torch's error.
"""

import contextlib
import functools
import io
import os
import zipfile
from collections.abc import Iterator

import torch

from torchax.errors import DamagedFileError

_ARCHIVE = b"PK\x03\x04"
# torch's older format is a row of pickles, of which the first is this number; before
# that, an archive of tar, which has its own mark at a place of its own.
_PICKLE, _MAGIC = b"\x80", b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TAR, _TAR_AT = b"ustar", 257
_AHEAD = 512
# Bytes that each file has, whatever is in it.
_LEAST = 64
_IS_CHANGED = "PytorchStreamReader failed reading zip archive"


def _named(file) -> str:
  name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
  return str(name) if name is not None else f"the given {type(file).__name__}"


@contextlib.contextmanager
def _opened(file) -> Iterator[io.IOBase | None]:
  """The bytes of what `torch.load` was given; None where they cannot be looked at."""
  if isinstance(file, str | os.PathLike):
    is_open = os.path.isfile(file) and os.access(file, os.R_OK)
    if not is_open or os.fspath(file).endswith(".safetensors"):
      yield None
      return
    with open(file, "rb") as stream:
      yield stream
    return
  if isinstance(file, io.TextIOBase):
    yield None
    return
  try:
    is_seekable = file.seekable()
  except (AttributeError, ValueError):  # not a file, or a closed one
    is_seekable = False
  if not is_seekable:
    yield None
    return
  place = file.tell()
  file.seek(0)
  try:
    yield file
  finally:
    file.seek(place)


def _kind(start: bytes) -> str | None:
  """What a file of none of torch's formats is; None for one of them.

  Args:
    start: its first bytes, at least as many as there are.
  """
  if not start.strip(b"\0"):
    return f"is damaged: its first {len(start)} bytes are zeros"
  if start.startswith(_PICKLE):
    # The number comes first, or after a frame; perhaps it is cut off.
    is_first = any(_MAGIC.startswith(start[at : at + len(_MAGIC)]) for at in (2, 11))
    return None if is_first else _OF_PICKLE
  if start.find(_TAR, _TAR_AT) == _TAR_AT:
    return None
  return f"is of another kind: it starts with {start[:24]!r}"


_OF_PICKLE = (
  "is a pickle that torch.save has not written. `pickle.load` opens it, and runs what "
  "it says: only for one whose source you trust"
)


def _damage(stream, error: Exception) -> str | None:
  """What is wrong with the bytes of a file; None if nothing is seen."""
  start = stream.read(_AHEAD)
  size = stream.seek(0, os.SEEK_END)
  if not size:
    return "is damaged: it is empty"
  if not _ARCHIVE.startswith(start[: len(_ARCHIVE)]):
    kind = _kind(start)
    is_short = (
      size < _LEAST or isinstance(error, EOFError) or "unexpected EOF" in str(error)
    )
    if kind is None and is_short:
      return f"is damaged: it ends too early, after {size} bytes"
    return kind
  try:
    with zipfile.ZipFile(stream) as archive:
      for part in archive.infolist():
        archive.open(part).close()
        if part.header_offset + part.compress_size > size:
          return (
            f"is damaged: its part {part.filename} lies beyond its end, at {size} bytes"
          )
  except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError):
    return f"is damaged: its {size} bytes are an archive that is cut off or changed"
  # Python forgives what torch's reader does not.
  return (
    "is damaged: its zip archive was changed" if _IS_CHANGED in str(error) else None
  )


def naming_damage(load):
  """`load(file, …)`, as `torch.load`, which raises DamagedFileError for such a file.

  A file of safetensors, which torch knows by its name, keeps the error of its library.
  """

  @functools.wraps(load)
  def checked(f, *args, **kwargs):
    try:
      return load(f, *args, **kwargs)
    # Readers of bytes that mean something else raise anything, KeyError for one.
    except Exception as error:
      with _opened(f) as stream:
        damage = stream and _damage(stream, error)
      if not damage:
        raise
      raise DamagedFileError(
        "torch.load expects a whole file that torch.save has written, but "
        f"{_named(f)} {damage}. Nothing was loaded. Copy or download it again, or load "
        "an earlier one."
      ) from error

  return checked


def register() -> None:
  """Has `torch.load` name damaged files, in the whole process."""
  torch.load = torch.serialization.load = naming_damage(torch.load)
