"""Exceptions that torchax raises: what was expected, what came, what to do.

Where torch itself raises a type for a mistake (`ValueError`, `RuntimeError`,
`IndexError`), lowerings raise that type; the classes here are for mistakes that
only exist because a tensor lives in JAX. Each derives from the built-in type
that torch users already catch.
"""


class OperatorNotFound(NotImplementedError):
  """A torch operation has neither a lowering nor a decomposition."""


class DataDependentError(RuntimeError):
  """A compiled program would need numbers that are only known when it runs."""


class MixedDeviceError(RuntimeError):
  """A torchax tensor met a tensor of another device in one operation."""


class NoSuchDeviceError(RuntimeError, ValueError):
  """A device was asked for that this process does not have."""


class UnsupportedDtypeError(TypeError):
  """A dtype or layout that JAX arrays cannot represent."""


class RngError(RuntimeError):
  """Base of the errors about the random number state."""


class TracedDrawError(RngError):
  """A draw would be baked into, or repeated by, a JAX transformation."""


class ClosedScopeError(RngError):
  """A stream was used after the scope that owned it had closed."""


class TracedStateError(RngError):
  """The random state has no value yet because it is being traced."""


class SeedError(TypeError):
  """A seed, key or state of a type that cannot seed a stream."""


class MutationError(RuntimeError):
  """An in-place change that could not reach the tensor it was made on."""


class NarrowingWarning(UserWarning):
  """A 64-bit floating-point dtype is stored in 32 bits; not raised but warned of."""


class DamagedFileError(RuntimeError, EOFError):
  """A file is cut off, empty or changed; nothing of it was loaded."""


class PrivateApiError(RuntimeError):
  """A feature needs a private piece that this version of torch or JAX does not have."""


class UnsupportedVersionError(ImportError):
  """A library is too old, or so new that not even a tensor can be made with it."""
