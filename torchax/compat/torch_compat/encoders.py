"""`nn.TransformerEncoder` in eval mode, with zeros at padded positions as in torch.

torch computes such calls on a nested tensor, which has no padded positions, and pads
the result with zeros. Here the layers compute on the padded tensor.
"""

import functools

import torch
from torch import nn

from torchax.compat.patches import patch
from torchax.compat.torch_compat.graphs import keep_from_dynamo


def zero_padded_positions(tensor_class: type) -> None:
  """Make encoders on tensors of a class return zeros wherever torch does."""
  of_torch = nn.TransformerEncoder.forward
  own = _Forward(of_torch, _without_nested_tensors(of_torch), tensor_class)
  reason = "zeros at padded positions from nn.TransformerEncoder in eval mode"
  patch(nn.TransformerEncoder, "forward", own, reason)
  # Dynamo would build the bound method by `encoder.forward`, which calls `__get__`.
  keep_from_dynamo(_Forward)


class _Forward:
  """Method `forward`; encoders without tensors of the class have torch's own.

  TorchScript compiles the source of the method.
  """

  def __init__(self, of_torch, on_class, tensor_class: type):
    self._of_torch = of_torch
    self._on_class = on_class
    self._tensor_class = tensor_class

  def __get__(self, encoder: nn.Module | None, owner: type | None = None):
    parameter = None if encoder is None else next(encoder.parameters(), None)
    is_of_class = isinstance(parameter, self._tensor_class)
    function = self._on_class if is_of_class else self._of_torch
    return function.__get__(encoder, owner)


def _without_nested_tensors(forward):
  @functools.wraps(forward)
  def padded(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
    padding = src_key_padding_mask
    if mask is not None or not _takes_nested_path(self, src, padding):
      return forward(self, src, mask, padding, is_causal)
    is_padding = padding if padding.dtype == torch.bool else padding != 0
    lengths = (~is_padding).sum(-1, keepdim=True)
    is_beyond = torch.arange(src.shape[1], device=src.device) >= lengths
    if self.mask_check:  # torch takes the path only if the padding is at the end
      is_beyond = is_beyond & (is_beyond == is_padding).all()
    else:
      padding = is_beyond
    output = src
    for layer in self.layers:
      output = layer(output, src_key_padding_mask=padding)
    output = output.masked_fill(is_beyond[..., None], 0)
    return output if self.norm is None else self.norm(output)

  return padded


def _takes_nested_path(encoder, src, padding) -> bool:
  """Return True if torch would compute a nested tensor, for masks that it checks."""
  if padding is None or src.dim() != 3 or not encoder.use_nested_tensor:
    return False
  layer = encoder.layers[0]
  return not (
    layer.training
    or not torch.backends.mha.get_fastpath_enabled()
    or torch.is_autocast_enabled()
    or encoder.mask_check
    and torch.compiler.is_compiling()
    or torch.is_grad_enabled()
    and any(tensor.requires_grad for tensor in (src, *layer.parameters()))
  )
