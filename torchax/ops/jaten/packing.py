"""Packed sequences: padded batches as rows without the padding, time after time.

The lengths are numbers on the host, as in torch; the recurrent networks themselves are
in `functions/recurrent.py`.
"""

import torch

from torchax.ops.builtin import Kind, op
from torchax.registry.names import aten


def _places(batch_sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
  """For each packed row, its time and its column of the batch."""
  times = [time for time, size in enumerate(batch_sizes) for _ in range(size)]
  columns = [column for size in batch_sizes for column in range(size)]
  return torch.tensor(times), torch.tensor(columns)


@op(aten._pack_padded_sequence, kind=Kind.TENSORS)
def _aten__pack_padded_sequence(input, lengths, batch_first):
  lengths = lengths.tolist()
  if lengths != sorted(lengths, reverse=True) or (lengths and lengths[-1] <= 0):
    raise RuntimeError(
      "_pack_padded_sequence expects lengths above 0 in decreasing order, but got "
      f"{lengths}. Pass enforce_sorted=False to have them sorted."
    )
  padded = input.transpose(0, 1) if batch_first else input
  if len(lengths) != padded.shape[1] or lengths[0] > padded.shape[0]:
    raise RuntimeError(
      f"_pack_padded_sequence got {len(lengths)} lengths up to {lengths[0]} for "
      f"{padded.shape[1]} sequences of {padded.shape[0]} steps."
    )
  sizes = [sum(length > time for length in lengths) for time in range(lengths[0])]
  times, columns = _places(sizes)
  return padded[times, columns], torch.tensor(sizes)


@op(aten._pack_padded_sequence_backward, kind=Kind.TENSORS)
def _aten__pack_padded_sequence_backward(grad, input_size, batch_sizes, batch_first):
  times, columns = _places(batch_sizes.tolist())
  shape = list(input_size)
  if batch_first:
    shape[:2] = shape[1], shape[0]
  padded = torch.index_put(grad.new_zeros(shape), (times, columns), grad)
  return padded.transpose(0, 1) if batch_first else padded
