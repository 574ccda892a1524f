"""Private API of torch and JAX, looked up by name: what has moved costs one feature.

The two `_compat` modules take each private piece from here and say what it is for.
Where a version of torch or JAX has it no more, importing goes on: what is found in its
place raises `PrivateApiError` when the feature is used, or, where `instead` is given,
does without. A piece without which no tensor can exist is `essential`.
"""

import dataclasses
import importlib
from typing import Any, NoReturn

from torchax.compat import versions
from torchax.errors import PrivateApiError, UnsupportedVersionError

_LIBRARIES = ("torch", "jax")


@dataclasses.dataclass
class Piece:
  """A private name of torch or JAX.

  Attributes:
    path: its dotted name, which begins with "torch" or "jax".
    feature: what needs it, as messages say it.
    since: the first version that has it; None where all that are tested do.
    degrades: what does without it: the feature is slower or less, and nothing raises.
    is_essential: without it, torchax cannot be imported.
    is_found: whether the installed version has it; None before it is looked up.
  """

  path: str
  feature: str
  since: str | None = None
  degrades: bool = False
  is_essential: bool = False
  is_found: bool | None = None

  @property
  def library(self) -> str:
    """The name of the package that it belongs to."""
    return self.path.partition(".")[0]

  @property
  def known(self) -> str:
    """The versions that are known to have it, in words: "2.11 to 2.15"."""
    lowest, highest = versions.TESTED[self.library]
    return f"{self.since or lowest} to {highest}"

  @property
  def is_yet_to_come(self) -> bool:
    """True where the installed version is older than the piece: nothing is lost."""
    installed = importlib.import_module(self.library).__version__
    return self.since is not None and versions.is_older(installed, self.since)

  @property
  def is_lost(self) -> bool:
    """True for a piece that the installed version should have, and has not."""
    return self.is_found is False and not self.is_yet_to_come

  def message(self) -> str:
    """What is missing, for what, and what to do."""
    installed = importlib.import_module(self.library).__version__
    rest = "" if self.is_essential else " Everything else works."
    return (
      f"{self.library} {installed} has no {self.path}, which torchax needs for "
      f"{self.feature}; {self.library} {self.known} has it.{rest} Install one of these "
      "versions, or a newer torchax. `python -m torchax` shows what was found."
    )


PIECES: dict[str, Piece] = {}
"""Dotted name -> every private piece, in the order of the look-ups."""


class Unavailable:
  """Stands for a piece that was not found; any use of it raises."""

  def __init__(self, piece: Piece):
    self._piece = piece

  def _raise(self) -> NoReturn:
    raise PrivateApiError(self._piece.message())

  def __call__(self, *args, **kwargs):
    """Raises `PrivateApiError`."""
    self._raise()

  def __getattr__(self, name: str):
    if name.startswith("__") and name.endswith("__"):
      raise AttributeError(name)
    self._raise()

  def __repr__(self) -> str:
    return f"<{self._piece.path}, which was not found>"


def walk(path: str) -> Any:
  """The object of a dotted name; modules on the way are imported.

  Raises:
    AttributeError, ImportError: there is none.
  """
  library, *parts = path.split(".")
  owner = importlib.import_module(library)
  for place, part in enumerate(parts):
    # torch hides some modules behind functions of their name: what is no attribute of
    # the function is one of the module.
    following = parts[place + 1 : place + 2]
    found = getattr(owner, part, None)
    is_whole = found is not None and all(hasattr(found, name) for name in following)
    if hasattr(owner, "__path__") and not is_whole:
      owner = _submodule(f"{owner.__name__}.{part}", found)
    else:
      owner = getattr(owner, part)
  return owner


def _submodule(name: str, otherwise: Any) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    if otherwise is None:
      raise
    return otherwise


_NOTHING = object()


def find(
  path: str, feature: str, *, instead: Any = _NOTHING, since: str | None = None
) -> Any:
  """A private piece of torch or JAX.

  Args:
    path: its dotted name.
    feature: what needs it: "which torchax needs for `feature`".
    instead: what is taken in its place; by default, something that raises when used.
    since: the first version that has it, if not all that are tested do.

  Returns:
    The piece, `instead`, or an `Unavailable`.
  """
  piece = _declare(path, feature, since)
  piece.degrades = instead is not _NOTHING
  try:
    found = walk(path)
  except (AttributeError, ImportError):
    piece.is_found = False
    return instead if piece.degrades else Unavailable(piece)
  piece.is_found = True
  return found


def essential(path: str, reason: str) -> Any:
  """A private piece without which no tensor can exist.

  Args:
    path: its dotted name.
    reason: what it is for.

  Raises:
    UnsupportedVersionError: the installed version does not have it.
  """
  piece = _declare(path, reason)
  piece.is_essential = True
  try:
    found = walk(path)
  except (AttributeError, ImportError) as error:
    piece.is_found = False
    raise UnsupportedVersionError(piece.message()) from error
  piece.is_found = True
  return found


class Later:
  """A piece in a module that is slow to import, so looked up when it is used.

  Args:
    path, feature: of `find`, and `options` are its `instead` and `since`.
  """

  def __init__(self, path: str, feature: str, **options):
    self._path, self._feature, self._options = path, feature, options
    piece = _declare(path, feature, options.get("since"))
    piece.degrades = "instead" in options

  def __call__(self) -> Any:
    """The piece, what is taken `instead`, or an `Unavailable`."""
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
  """Raises for a feature of which a piece is missing.

  Raises:
    PrivateApiError: a piece that was looked up for this feature was not found.
  """
  for piece in PIECES.values():
    if piece.feature == feature and piece.is_found is False:
      raise PrivateApiError(piece.message())


def look_up_all() -> list[Piece]:
  """All pieces, those that are slow to import looked up as well."""
  for piece in list(PIECES.values()):
    if piece.is_found is None:
      instead = {"instead": None} if piece.degrades else {}
      find(piece.path, piece.feature, since=piece.since, **instead)
  return list(PIECES.values())
