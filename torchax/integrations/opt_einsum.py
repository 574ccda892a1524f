"""Contractions of jax tensors by opt_einsum, which JAX installs.

The library finds its functions by the package of a tensor's class. For an unknown
package it converts the tensors to numpy.
"""

from opt_einsum.backends import dispatch


def register() -> None:
  """Make opt_einsum use torch's functions for the classes of torchax."""
  aliases = getattr(dispatch, "_aliases", {})
  if "torch" in aliases:
    aliases["torchax"] = aliases["torch"]
