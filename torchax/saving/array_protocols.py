"""Copies of a tensor for numpy, Python, DLPack and JAX, as methods of `Tensor`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from torchax.core import mappings
from torchax.core.error_messages import loses_gradient, no_numbers, packed_error
from torchax.core.tracebacks import hide_library_frames


class ArrayProtocols(torch.Tensor):
  """Base class of `Tensor` with the methods for numpy, DLPack and JAX.

  >>> torch.ones(2, device="jax").tolist()
  [1.0, 1.0]
  """

  def jax(self) -> Array:
    """Return the array; defined in `Tensor`."""
    raise NotImplementedError

  @hide_library_frames
  def numpy(self, *, force: bool = False) -> np.ndarray:
    """Return a copy as a numpy array.

    Args:
      force: True to detach a tensor that requires grad.

    Raises:
      RuntimeError: the tensor requires grad and `force` is False.
      TracedStateError: inside a compiled function, where the values are not known.

    >>> x = torch.ones(2, device="jax")
    >>> x.numpy()[0] = 3  # torch's own CPU tensor would change
    >>> x
    tensor([1., 1.], device='jax:0')
    """
    if self.requires_grad and not force:
      raise RuntimeError(
        "Can't call numpy() on Tensor that requires grad. Use "
        "tensor.detach().numpy() or numpy(force=True)."
      )
    return mappings.numpy_copy(self.jax(), "`.numpy()`")

  @hide_library_frames
  def __array__(self, dtype=None, copy=None):
    if copy is False:
      raise ValueError(
        "A jax tensor is copied to become a numpy array, but copy=False was asked for. "
        "Use np.asarray(tensor)."
      )
    return np.asarray(self.numpy(), dtype=dtype)

  def __array_wrap__(self, array, context=None, return_scalar=False):
    """Move numpy's result (of `tensor + array`) to the tensor's device."""
    return super().__array_wrap__(array).to(self.device)

  def __dlpack_device__(self) -> tuple:
    """Return DLPack's type and index of the array's device."""
    array: Any = self.jax()  # JAX's annotations lack the method
    return array.__dlpack_device__()

  @hide_library_frames
  def __dlpack__(self, *, copy: bool | None = None, **options):
    """Return a copy as a DLPack capsule; a copy, because the consumer may write to it.

    Raises:
      BufferError: the tensor requires grad, or `copy` is False.
    """
    if self.requires_grad or copy is False:
      raise BufferError(
        "A jax tensor is exported as a copy without gradients. Call `.detach()` on one "
        "that requires grad, and leave `copy` out."
      )
    copied = jnp.copy(self.jax())
    if isinstance(copied, jax.core.Tracer):
      raise no_numbers("DLPack")
    return copied.__dlpack__(**options)

  @hide_library_frames
  def __jax_array__(self) -> Array:
    if self.requires_grad and torch.is_grad_enabled():
      raise loses_gradient()
    return self.jax()

  @hide_library_frames
  def tolist(self) -> Any:
    """Return the values as nested Python lists.

    Raises:
      TracedStateError: inside a compiled function, where they are not known.
      NotImplementedError: the dtype is float4_e2m1fn_x2.
    """
    if self.dtype is torch.float4_e2m1fn_x2:
      raise packed_error("tolist")
    return mappings.numpy_copy(self.jax(), "`.tolist()`").tolist()
