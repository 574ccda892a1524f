"""Exceptions of torchax, for mistakes that exist only because a tensor lives in JAX.

Each derives from the built-in type that torch users already catch, and has a section
in `docs/errors.md`. For mistakes that torch knows as well, lowerings raise torch's own
type (`ValueError`, `RuntimeError`, `IndexError`). A message says which value was
expected, which one was received and what to do.
"""

from typing import Any, ClassVar

PAGE = "https://github.com/torchax/torchax/blob/main/docs/errors.md"
"""Page that explains the classes, one section per class name."""


class Documented(Exception):
  """Base class of exceptions whose message ends with a link to their documentation.

  >>> print(NoSuchDeviceError("jax:9 does not exist."))
  jax:9 does not exist.
  See https://github.com/torchax/torchax/blob/main/docs/errors.md#nosuchdeviceerror
  """

  # Name of the section; a class in another module inherits its base's.
  heading: ClassVar[str] = ""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    if cls.__module__ == __name__:
      cls.heading = cls.__name__

  def __str__(self) -> str:
    return f"{super().__str__()}\nSee {PAGE}#{self.heading.lower()}"

  # Not `message`: when torch re-raises the exception of a DataLoader worker, it passes
  # an argument `message` to classes that have an attribute of that name.
  @property
  def text(self) -> str:
    """Message without the link, for messages that quote it."""
    return super().__str__()


class OperatorNotFound(Documented, NotImplementedError):
  """A torch operation has neither a lowering nor a decomposition."""


class DataDependentError(Documented, RuntimeError):
  """A compiled program needs values that are only known at run time."""


class TracedStateError(Documented, RuntimeError):
  """A tensor or random state has no value: it belongs to a trace, running or ended."""


class ConversionError(Documented, ValueError):
  """A JAX function received a torch tensor, or a torch function a JAX array."""


class MixedDeviceError(Documented, RuntimeError):
  """An operation received a torchax tensor and a tensor of another device."""


class CollectiveError(Documented, RuntimeError):
  """A collective, process group or mesh is not supported as written."""


class ForkError(Documented, RuntimeError):
  """A process uses JAX after a fork from a process that had used JAX."""


class NoSuchDeviceError(Documented, RuntimeError, ValueError):
  """A requested device does not exist in this process."""


class ShardingError(Documented, ValueError):
  """A mesh, partition spec or sharding rule does not fit a tensor."""


class NotAddressableError(Documented, RuntimeError):
  """Requested values are on devices of other processes."""


class ProcessError(Documented, RuntimeError):
  """Processes of one run cannot connect, or disagree."""


class UnsupportedDtypeError(Documented, TypeError):
  """A dtype or layout that JAX arrays cannot represent."""


class WrongDtypeError(Documented, NotImplementedError, TypeError):
  """An operation does not support the dtype of its tensor, in torch either.

  Derives from both built-in types that torch raises, by operation and version.
  """


class MutationError(Documented, RuntimeError):
  """An in-place operation could not write to its tensor."""


class DonationError(Documented, RuntimeError):
  """A compiled function received the memory of a tensor that is still in use."""


class BucketError(Documented, NotImplementedError):
  """An operation cannot run at the padded size of a bucket."""


class RngError(Documented, RuntimeError):
  """A draw would differ from an eager run; base class of the errors of draws."""


class TracedDrawError(RngError):
  """A draw would be baked into, or repeated by, a JAX transformation."""


class ClosedScopeError(RngError):
  """A stream was used after the scope that owned it had closed."""


class SeedError(Documented, TypeError):
  """A seed, key or state has a type that cannot seed a stream."""


class NarrowingWarning(UserWarning):
  """Warning that a 64-bit floating-point dtype is stored in 32 bits."""


class PrivateApiError(Documented, RuntimeError):
  """A feature needs a private API that this version of torch or JAX lacks."""


class UnsupportedVersionError(Documented, ImportError):
  """A library is too old, or too new to create a tensor with it."""
