"""Look-up of private API of torch and JAX; a missing name disables its feature only.

`torch_compat` and `jax_compat.py` look up each private piece here, with its feature. If
a version of torch or JAX lacks a piece, the import of torchax still succeeds. The
feature then raises `PrivateApiError`, or uses the replacement given as `instead`.
Pieces that every tensor needs are `essential`: the import fails without them.
"""

import dataclasses
import importlib
from typing import Any, NoReturn

from torchax.compat import versions
from torchax.errors import PrivateApiError, UnsupportedVersionError

_LIBRARIES = ("torch", "jax")


@dataclasses.dataclass
class Piece:
  """Private name of torch or JAX.

  Attributes:
    path: dotted name, which begins with "torch" or "jax".
    feature: name of the feature that needs it, for messages.
    since: first version that has it; None if all tested versions do.
    degrades: True if the feature works without it, slower or in part.
    is_essential: True if torchax cannot be imported without it.
    is_found: True if the installed version has it; None before the look-up.
  """

  path: str
  feature: str
  since: str | None = None
  degrades: bool = False
  is_essential: bool = False
  is_found: bool | None = None

  @property
  def library(self) -> str:
    """Name of the package of this piece."""
    return self.path.partition(".")[0]

  @property
  def tested(self) -> str:
    """Tested versions with this piece, as text: "2.11 to 2.15"."""
    lowest, highest = versions.TESTED[self.library]
    return f"{self.since or lowest} to {highest}"

  @property
  def is_future(self) -> bool:
    """True if the installed version is older than `since`."""
    installed = importlib.import_module(self.library).__version__
    return self.since is not None and versions.is_older(installed, self.since)

  @property
  def is_missing(self) -> bool:
    """True if the installed version should have the piece but does not."""
    return self.is_found is False and not self.is_future

  def message(self) -> str:
    """Return the error message: the missing name, its feature and the remedy."""
    installed = importlib.import_module(self.library).__version__
    remark = "" if self.is_essential else " Everything else works."
    return (
      f"{self.library} {installed} has no {self.path}, which torchax needs for "
      f"{self.feature}; {self.library} {self.tested} has it.{remark} Install one of "
      "these versions, or a newer torchax. `python -m torchax` shows what was found."
    )


PIECES: dict[str, Piece] = {}
"""All private pieces by dotted name, in the order of declaration."""


class NoInstances:
  """Replacement for a class that was not found: `isinstance` is always False."""


class Unavailable:
  """Placeholder for a piece that was not found; any use raises PrivateApiError."""

  def __init__(self, piece: Piece):
    self._piece = piece

  def _raise(self) -> NoReturn:
    raise PrivateApiError(self._piece.message())

  def __call__(self, *args, **kwargs):
    """Raise PrivateApiError."""
    self._raise()

  def __getattr__(self, name: str):
    if name.startswith("__") and name.endswith("__"):
      raise AttributeError(name)
    self._raise()

  def __repr__(self) -> str:
    return f"<{self._piece.path}, which was not found>"


def resolve(path: str) -> Any:
  """Return the object of a dotted name, importing its modules.

  Raises:
    AttributeError, ImportError: there is no such object.
  """
  library, *names = path.split(".")
  owner = importlib.import_module(library)
  for index, part in enumerate(names):
    # Some functions of torch shadow a submodule of the same name. If the function lacks
    # the next attribute, use the submodule.
    next_parts = names[index + 1 : index + 2]
    member = getattr(owner, part, None)
    has_next = member is not None and all(hasattr(member, name) for name in next_parts)
    if hasattr(owner, "__path__") and not has_next:
      owner = _submodule(f"{owner.__name__}.{part}", member)
    else:
      owner = getattr(owner, part)
  return owner


def _submodule(name: str, default: Any) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    if default is None:
      raise
    return default


_NOTHING = object()


def find(
  path: str, feature: str, *, instead: Any = _NOTHING, since: str | None = None
) -> Any:
  """Look up a private piece of torch or JAX.

  Args:
    path: dotted name.
    feature: name of the feature that needs it, for messages.
    instead: replacement if it is not found; by default, an object that raises on use.
    since: first version that has it; None if all tested versions do.

  Returns:
    The piece, `instead`, or an `Unavailable`.
  """
  piece = _declare(path, feature, since)
  piece.degrades = instead is not _NOTHING
  try:
    value = resolve(path)
  except (AttributeError, ImportError):
    piece.is_found = False
    return instead if piece.degrades else Unavailable(piece)
  piece.is_found = True
  return value


def essential(path: str, feature: str) -> Any:
  """Look up a private piece that every tensor needs.

  Args:
    path: dotted name.
    feature: name of the feature that needs it, for messages.

  Raises:
    UnsupportedVersionError: the installed version does not have it.
  """
  piece = _declare(path, feature)
  piece.is_essential = True
  value = find(path, feature)
  if not piece.is_found:
    raise UnsupportedVersionError(piece.message())
  return value


class Later:
  """Deferred look-up of a piece whose module is slow to import.

  Args:
    path, feature: as in `find`.
    **options: `instead` and `since` of `find`.
  """

  def __init__(self, path: str, feature: str, **options):
    self._path, self._feature, self._options = path, feature, options
    piece = _declare(path, feature, options.get("since"))
    piece.degrades = "instead" in options

  def __call__(self) -> Any:
    """Return the piece, `instead`, or an `Unavailable`."""
    return find(self._path, self._feature, **self._options)


def _declare(path: str, feature: str, since: str | None = None) -> Piece:
  library = path.partition(".")[0]
  if library not in _LIBRARIES:
    raise ValueError(f"Expected a name of {' or '.join(_LIBRARIES)}, but got {path!r}.")
  piece = PIECES.get(path)
  if piece is None:
    piece = PIECES[path] = Piece(path, feature, since)
  return piece


def require(feature: str) -> None:
  """Raise PrivateApiError if a piece of the feature was looked up and not found."""
  for piece in PIECES.values():
    if piece.feature == feature and piece.is_found is False:
      raise PrivateApiError(piece.message())


def look_up_all() -> list[Piece]:
  """Look up the deferred pieces, and return all pieces."""
  for piece in list(PIECES.values()):
    if piece.is_found is None:
      instead = {"instead": None} if piece.degrades else {}
      find(piece.path, piece.feature, since=piece.since, **instead)
  return list(PIECES.values())
