"""Exceptions that torchax raises: what was expected, what came, what to do.

Where torch itself raises a type for a mistake (`ValueError`, `RuntimeError`,
`IndexError`), lowerings raise that type; the classes here are for mistakes that
only exist because a tensor lives in JAX. Each derives from the built-in type
that torch users already catch, and has a section of its own in `docs/errors.md`.
"""

from typing import Any, ClassVar

PAGE = "https://github.com/torchax/torchax/blob/main/docs/errors.md"
"""Where the classes are explained, under headings that are their names."""


class Documented(Exception):
  """Base of the classes here: the last line of a message is a link to its section."""

  # The name of the heading; a class in another module inherits the one of its base.
  heading: ClassVar[str] = ""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    if cls.__module__ == __name__:
      cls.heading = cls.__name__

  def __str__(self) -> str:
    return f"{super().__str__()}\nSee {PAGE}#{self.heading.lower()}"

  # Not `message`: torch passes an argument of that name where a class has it, as it
  # raises what a worker of a DataLoader has raised.
  @property
  def text(self) -> str:
    """The message without the link, for messages that quote it."""
    return super().__str__()


class OperatorNotFound(Documented, NotImplementedError):
  """A torch operation has neither a lowering nor a decomposition."""


class DataDependentError(Documented, RuntimeError):
  """A compiled program would need numbers that are only known when it runs."""


class TracedStateError(Documented, RuntimeError):
  """A tensor, or the random state, has no value: it is being traced, or once was."""


class ConversionError(Documented, ValueError):
  """A function of JAX was given a torch tensor, or one of torch an array of JAX."""


class MixedDeviceError(Documented, RuntimeError):
  """A torchax tensor met a tensor of another device in one operation."""


class CollectiveError(Documented, RuntimeError):
  """A collective, group or mesh that cannot be run as it was written."""


class ForkError(Documented, RuntimeError):
  """A process that was forked from one that had used JAX needs JAX itself."""


class NoSuchDeviceError(Documented, RuntimeError, ValueError):
  """A device was asked for that this process does not have."""


class ShardingError(Documented, ValueError):
  """A mesh, a spec or a rule that does not fit the tensor that it is to lay out."""


class NotAddressableError(Documented, RuntimeError):
  """Numbers were asked for that devices of other processes have."""


class ProcessError(Documented, RuntimeError):
  """Processes of one run do not find one another, or do not agree."""


class UnsupportedDtypeError(Documented, TypeError):
  """A dtype or layout that JAX arrays cannot represent."""


class WrongDtypeError(Documented, NotImplementedError, TypeError):
  """An operation that torch does not have for the dtype of its tensor.

  torch's own class for it differs by operation and version: this one is each of them.
  """


class MutationError(Documented, RuntimeError):
  """An in-place change that could not reach the tensor it was made on."""


class DonationError(Documented, RuntimeError):
  """A compiled function was given the memory of a tensor that is still in use."""


class RngError(Documented, RuntimeError):
  """A draw that could not be the one of an eager run; base of the classes for draws."""


class TracedDrawError(RngError):
  """A draw would be baked into, or repeated by, a JAX transformation."""


class ClosedScopeError(RngError):
  """A stream was used after the scope that owned it had closed."""


class SeedError(Documented, TypeError):
  """A seed, key or state of a type that cannot seed a stream."""


class NarrowingWarning(UserWarning):
  """A 64-bit floating-point dtype is stored in 32 bits; not raised but warned of."""


class PrivateApiError(Documented, RuntimeError):
  """A feature needs a private piece that this version of torch or JAX does not have."""


class UnsupportedVersionError(Documented, ImportError):
  """A library is too old, or so new that not even a tensor can be made with it."""
