"""Files that are cut off or damaged: one error that names the file and what to do.

torch's reader of archives says what its C++ has found, and not of which file. Here a
file is looked at once `torch.load` has failed: one that is whole keeps torch's error.
"""

import contextlib
import functools
import io
import os
import pickle
import zipfile
from collections.abc import Iterator

import torch

from torchax.errors import DamagedFileError

_ARCHIVE = b"PK\x03\x04"
# What torch's readers raise for such a file, beside others.
_RAISED = (EOFError, OSError, RuntimeError, pickle.UnpicklingError)
_IS_CHANGED = "PytorchStreamReader failed reading zip archive"


def _named(file) -> str:
  name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
  return str(name) if name is not None else f"the given {type(file).__name__}"


@contextlib.contextmanager
def _opened(file) -> Iterator[io.IOBase | None]:
  """The bytes of what `torch.load` was given; None where they cannot be looked at."""
  if isinstance(file, str | os.PathLike):
    if not (os.path.isfile(file) and os.access(file, os.R_OK)):
      yield None
      return
    with open(file, "rb") as stream:
      yield stream
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


def _damage(stream, error: Exception) -> str | None:
  """What is wrong with the bytes of a file; None if nothing is seen."""
  start = stream.read(len(_ARCHIVE))
  size = stream.seek(0, os.SEEK_END)
  if not size:
    return "it is empty"
  if not _ARCHIVE.startswith(start):
    is_short = isinstance(error, EOFError) or "unexpected EOF" in str(error)
    return f"it ends too early, after {size} bytes" if is_short else None
  try:
    with zipfile.ZipFile(stream) as archive:
      for part in archive.infolist():
        archive.open(part).close()
        if part.header_offset + part.compress_size > size:
          return f"its part {part.filename} lies beyond its end, at {size} bytes"
  except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError):
    return f"its {size} bytes are a zip archive that is cut off or changed"
  # Python forgives what torch's reader does not.
  return "its zip archive was changed" if _IS_CHANGED in str(error) else None


def naming_damage(load):
  """`load(file, …)`, as `torch.load`, which raises DamagedFileError for such a file."""

  @functools.wraps(load)
  def checked(f, *args, **kwargs):
    try:
      return load(f, *args, **kwargs)
    except _RAISED as error:
      with _opened(f) as stream:
        damage = stream and _damage(stream, error)
      if not damage:
        raise
      raise DamagedFileError(
        "torch.load expects a whole file that torch.save has written, but "
        f"{_named(f)} is damaged: {damage}. Nothing was loaded. Copy or download it "
        "again, or load an earlier one."
      ) from error

  return checked


def register() -> None:
  """Has `torch.load` name damaged files, in the whole process."""
  torch.load = torch.serialization.load = naming_damage(torch.load)
