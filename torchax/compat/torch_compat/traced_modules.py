"""Modules of `torch.nn` that read numbers of a tensor, which a trace does not have."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import transformer
from torch.nn.utils.rnn import pad_packed_sequence

from torchax.compat import patches, private
from torchax.compat.patches import patch, setting

_MASKS = "masks of nn.TransformerEncoder and nn.TransformerDecoder in a trace"
_detect_is_causal = private.find(
  "torch.nn.modules.transformer._detect_is_causal_mask", _MASKS, instead=None
)
_AVERAGES = "nn.BatchNorm with momentum=None in a trace"
_BatchNorm = private.find(
  "torch.nn.modules.batchnorm._BatchNorm", _AVERAGES, instead=None
)
_CLUSTERS = "nn.AdaptiveLogSoftmaxWithLoss in a trace"
_AdaptiveOutput = private.find(
  "torch.nn.modules.adaptive._ASMoutput", _CLUSTERS, instead=None
)

_LENGTHS = "pad_packed_sequence of unsorted sequences in a trace"


def patch_modules(is_traced: Callable[[Any], bool]) -> Callable[[], None]:
  """Patch the modules not to read traced tensors; return the function to undo that.

  The patches are for the time of a trace, since TorchScript compiles torch's own code.

  Args:
    is_traced: return True for tensors whose numbers cannot be read.
  """
  made = []
  if _detect_is_causal is not None:
    detect = _without_reading_masks(_detect_is_causal, is_traced)
    made.append(patch(transformer, _detect_is_causal.__name__, detect, _MASKS))
  for cls in filter(None, (_BatchNorm, torch.nn.SyncBatchNorm)):
    forward = _with_traced_averages(cls.forward, is_traced)
    made.append(patch(cls, "forward", forward, _AVERAGES))
  if _AdaptiveOutput is not None:
    adaptive = torch.nn.AdaptiveLogSoftmaxWithLoss
    forward = _with_all_clusters(adaptive.forward, is_traced)
    made.append(patch(adaptive, "forward", forward, _CLUSTERS))
    predict = _with_all_probabilities(adaptive.predict, is_traced)
    made.append(patch(adaptive, "predict", predict, _CLUSTERS))
  pad = functools.partial(_with_traced_order, is_traced)
  made += patches.reroute(pad_packed_sequence, pad, _LENGTHS)

  def undo() -> None:
    for each in made:
      each.undo()

  return undo


def _without_reading_masks(detect, is_traced):
  @functools.wraps(detect)
  def detect_is_causal(mask, is_causal=None, size=None):
    if is_causal is None and is_traced(mask):
      is_causal = False  # a hint only: the mask itself is applied
    return detect(mask, is_causal, size)

  return detect_is_causal


def _with_traced_averages(forward, is_traced):
  @functools.wraps(forward)
  def averaged(self, input):
    count = self.num_batches_tracked
    is_read = self.training and self.track_running_stats and self.momentum is None
    if not is_read or not is_traced(count):
      return forward(self, input)
    running = self.running_mean, self.running_var
    before = [statistics.clone() for statistics in running]
    with setting(self, "momentum", 1.0):  # the statistics become those of the batch
      output = forward(self, input)
    for statistics, old in zip(running, before):
      # `data`: the backward pass has saved the statistics, which it does not read.
      statistics.data.copy_(old + (statistics - old) / count)
    return output

  return averaged


def _with_all_clusters(forward, is_traced):
  @functools.wraps(forward)
  def computed(self, input_, target_):
    if not is_traced(target_):
      return forward(self, input_, target_)
    # torch computes the clusters of the targets only, whose number is data.
    probabilities = self.log_prob(torch.atleast_2d(input_))
    output = probabilities.gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
    return _AdaptiveOutput(output, -output.mean())

  return computed


def _with_all_probabilities(predict, is_traced):
  @functools.wraps(predict)
  def predicted(self, input):
    # torch computes the clusters of the examples that need them only.
    return self.log_prob(input).argmax(1) if is_traced(input) else predict(self, input)

  return predicted


def _with_traced_order(is_traced, pad, sequence, batch_first=False, *args, **kwargs):
  order = sequence.unsorted_indices
  if not is_traced(order):
    return pad(sequence, batch_first, *args, **kwargs)
  is_sorted = type(sequence)(sequence.data, sequence.batch_sizes)
  padded, lengths = pad(is_sorted, batch_first, *args, **kwargs)
  lengths = lengths.to(order.device)[order]  # torch takes them on the CPU
  return padded.index_select(0 if batch_first else 1, order), lengths
