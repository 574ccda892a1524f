"""Modules of `torch.nn`, and functions whose options `op_db` lacks, by theme.

Each class occurs, with its options, masks, packed, unbatched and empty inputs. Inputs
are tiny, and share their shapes.
"""

from functools import partial

import torch
import torch.nn.functional as F
from opinfo.module_calls import use
from ops.harness import floats, ints
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def x(*shape, seed=0):
  """Return an input with a gradient."""
  return floats(*shape, seed=seed).requires_grad_()


SIGNAL, IMAGE, VOLUME = x(2, 4, 6), x(2, 4, 6, 6), x(2, 4, 4, 4, 4)
BY_DIM = {1: SIGNAL, 2: IMAGE, 3: VOLUME}
EMPTY_IMAGE, ONE_IMAGE = x(0, 4, 6, 6), x(4, 6, 6)

ACTIVATIONS = [
  *(
    use(cls, SIGNAL)
    for cls in (
      *(nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6),
      *(nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.GELU),
      *(nn.Identity, nn.PReLU),
    )
  ),
  use(lambda: nn.CELU(0.5), SIGNAL),
  use(lambda: nn.ELU(0.5), SIGNAL),
  use(lambda: nn.GELU("tanh"), SIGNAL),
  use(lambda: nn.GLU(1), SIGNAL),
  use(lambda: nn.Hardshrink(0.3), SIGNAL),
  use(lambda: nn.Hardtanh(-0.5, 0.4), SIGNAL),
  use(lambda: nn.LeakyReLU(0.3), SIGNAL),
  use(lambda: nn.PReLU(4), SIGNAL),
  use(lambda: nn.Softplus(2.0, 0.5), SIGNAL),
  use(lambda: nn.Softshrink(0.3), SIGNAL),
  use(lambda: nn.Threshold(0.1, -2.0), SIGNAL),
  use(lambda: nn.Softmax2d(), IMAGE),
  *(use(lambda cls=cls: cls(1), SIGNAL) for cls in (nn.Softmax, nn.LogSoftmax)),
  use(lambda: nn.Softmin(0), x(0, 3)),
  use(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), SIGNAL),
]
SHAPES = [
  use(lambda: nn.ChannelShuffle(2), IMAGE),
  use(lambda: nn.PixelShuffle(2), IMAGE),
  use(lambda: nn.PixelUnshuffle(2), IMAGE),
  use(lambda: nn.Flatten(0, -2), IMAGE),
  use(lambda: nn.Unflatten(1, (2, -1)), EMPTY_IMAGE),
  use(lambda: nn.Fold((4, 5), 2, padding=1, stride=2), x(2, 8, 9)),
  use(lambda: nn.Unfold(2, dilation=2, padding=1), IMAGE),
  *(
    use(partial(getattr(nn, f"{kind}Pad{dim}d"), (1, 2) * dim), input)
    for dim, input in BY_DIM.items()
    for kind in ("Reflection", "Replication", "Zero", "Circular")
  ),
  *(use(partial(getattr(nn, f"ConstantPad{d}d"), 1, 2.5), BY_DIM[d]) for d in BY_DIM),
]
CONVOLUTIONS = [
  *(
    use(lambda mode=mode: nn.Conv1d(4, 2, 4, padding="same", padding_mode=mode), SIGNAL)
    for mode in ("zeros", "reflect", "replicate", "circular")
  ),
  *(
    use(lambda: nn.Conv2d(4, 2, 3, 2, 1, 2, groups=2, bias=False), each)
    for each in (IMAGE, ONE_IMAGE, EMPTY_IMAGE)
  ),
  use(lambda: nn.Conv3d(4, 2, 2, padding="valid"), VOLUME),
  use(lambda: nn.ConvTranspose1d(4, 2, 3, 2), SIGNAL, output_size=[14]),
  use(lambda: nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, 2, dilation=2), IMAGE),
  use(lambda: nn.ConvTranspose3d(4, 2, 2), VOLUME[:0].detach().requires_grad_()),
]
POOLS = [
  made
  for dim, input in BY_DIM.items()
  for max_pool, avg_pool, lp_pool, max_adaptive, avg_adaptive in [
    [
      getattr(nn, f"{name}Pool{dim}d")
      for name in ("Max", "Avg", "LP", "AdaptiveMax", "AdaptiveAvg")
    ]
  ]
  for made in (
    use(lambda cls=max_pool: cls(3, 2, 1, ceil_mode=True), input),
    use(lambda cls=max_pool: cls(2, return_indices=True), input),
    use(
      lambda cls=avg_pool: cls(3, 2, 1, ceil_mode=True, count_include_pad=False), input
    ),
    use(lambda cls=lp_pool: cls(2.0, 2, ceil_mode=True), input),
    use(lambda cls=max_adaptive: cls(3), input),
    use(lambda cls=avg_adaptive: cls(3), input),
  )
]
UNPOOLS = [
  use(lambda: nn.AvgPool2d(2, divisor_override=3), ONE_IMAGE),
  use(
    lambda: nn.FractionalMaxPool2d(
      2, output_size=3, _random_samples=floats(2, 4, 2, low=0)
    ),
    IMAGE,
  ),
  use(lambda: nn.AdaptiveAvgPool2d((None, 2)), EMPTY_IMAGE),
  *(
    use(partial(getattr(nn, f"MaxUnpool{dim}d"), 2), pooled.requires_grad_(), indices)
    for dim, input in BY_DIM.items()
    for pooled, indices in [
      getattr(F, f"max_pool{dim}d")(input.detach(), 2, return_indices=True)
    ]
  ),
]
NORMS = [
  use(lambda: nn.BatchNorm1d(4, momentum=None), SIGNAL),
  use(lambda: nn.BatchNorm1d(4, affine=False), x(5, 4)),
  use(lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.3), IMAGE),
  use(lambda: nn.BatchNorm3d(4, track_running_stats=False), VOLUME),
  use(lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), SIGNAL),
  use(lambda: nn.InstanceNorm2d(4), ONE_IMAGE),
  use(lambda: nn.InstanceNorm3d(4, affine=True), VOLUME),
  use(lambda: nn.LayerNorm((4, 6), bias=False), SIGNAL),
  use(lambda: nn.LayerNorm(6, elementwise_affine=False), x(0, 6)),
  use(lambda: nn.RMSNorm(6, eps=0.1), SIGNAL),
  use(lambda: nn.GroupNorm(2, 4), IMAGE),
  use(lambda: nn.LocalResponseNorm(3, 0.1, 0.5, 2.0), IMAGE),
]
MODES = {1: ("nearest", "linear"), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}
RESIZES = [
  *(
    use(lambda mode=mode: nn.Upsample(scale_factor=1.5, mode=mode), BY_DIM[dim])
    for dim, modes in MODES.items()
    for mode in (*modes, "nearest-exact", "area")
  ),
  *(
    use(
      lambda dim=dim, mode=mode: nn.Upsample((3,) * dim, None, mode, True), BY_DIM[dim]
    )
    for dim, modes in MODES.items()
    for mode in modes
    if mode != "nearest"
  ),
  use(lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
  use(lambda: nn.UpsamplingNearest2d((3, 9)), IMAGE),
]
LAZY = [
  use(partial(getattr(nn, f"Lazy{name}{dim}d"), *given), input)
  for dim, input in BY_DIM.items()
  for name, given in (
    *(("Conv", (2, 2)), ("ConvTranspose", (2, 2))),
    *(("BatchNorm", ()), ("InstanceNorm", ())),
  )
] + [use(partial(nn.LazyLinear, 3), SIGNAL)]

# Embeddings and linear maps.
IDS, BAG, OFFSETS = ints(2, 3, high=4), ints(6, high=4), torch.tensor([0, 2, 2])
TABLES = [
  use(lambda: nn.Linear(6, 3), SIGNAL),
  use(lambda: nn.Linear(6, 3, bias=False), x(0, 6)),
  use(lambda: nn.Bilinear(6, 6, 3), SIGNAL, x(2, 4, 6, seed=1)),
  use(lambda: nn.CosineSimilarity(1), SIGNAL, x(2, 4, 6, seed=1)),
  use(lambda: nn.PairwiseDistance(1.0, 0.1, True), SIGNAL, x(2, 4, 6, seed=1)),
  use(lambda: nn.Embedding(4, 3, padding_idx=-1, scale_grad_by_freq=True), IDS),
  use(lambda: nn.EmbeddingBag(4, 3, mode="mean", padding_idx=1), BAG, OFFSETS),
  use(
    lambda: nn.EmbeddingBag(4, 3, mode="max", include_last_offset=True),
    *(BAG, torch.tensor([0, 2, 2, 6])),
  ),
  use(lambda: nn.EmbeddingBag(4, 3, mode="sum"), IDS, per_sample_weights=x(2, 3)),
]

# Sequences.
TOKENS, MEMORY, ONE = x(2, 3, 4), x(2, 5, 4), x(3, 4)
PADDING = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool()
CAUSAL = torch.ones(3, 3).triu(1).bool()
CAUSAL_FLOATS = torch.zeros(3, 3).masked_fill(CAUSAL, -torch.inf)
MEMORY_PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()


def _attention(**options):
  return lambda: nn.MultiheadAttention(4, 2, **{"batch_first": True, **options})


def _encoder(**options):
  options = {"dropout": 0.0, "batch_first": True, **options}
  layer = partial(nn.TransformerEncoderLayer, 4, 2, 8, **options)
  # The fast path of CPU torch writes zeros to padded positions.
  return lambda: nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False)


def _decoder(**options):
  options = {"dropout": 0.0, "batch_first": True, **options}
  layer = partial(nn.TransformerDecoderLayer, 4, 2, 8, **options)
  return lambda: nn.TransformerDecoder(layer(), 1)


ATTENTION = [
  use(
    _attention(), *[TOKENS] * 3, key_padding_mask=PADDING, average_attn_weights=False
  ),
  use(
    _attention(), *[TOKENS] * 3, attn_mask=CAUSAL, is_causal=True, need_weights=False
  ),
  use(
    _attention(kdim=3, vdim=5, bias=False),
    *(TOKENS, x(2, 5, 3), x(2, 5, 5)),
    key_padding_mask=MEMORY_PADDING,
  ),
  use(_attention(add_bias_kv=True, add_zero_attn=True), *[TOKENS] * 3),
  use(_attention(batch_first=False), *[TOKENS] * 3, attn_mask=torch.zeros(2, 2)),
  use(_attention(), *[ONE] * 3, attn_mask=CAUSAL),
  use(_attention(), *[x(0, 3, 4)] * 3, need_weights=False),
]
TRANSFORMERS = [
  use(_encoder(), TOKENS, src_key_padding_mask=PADDING),
  use(_encoder(activation="gelu", bias=False), TOKENS, mask=CAUSAL_FLOATS),
  use(_encoder(norm_first=True), TOKENS, mask=CAUSAL, src_key_padding_mask=PADDING),
  use(_encoder(activation=F.silu), ONE),
  use(
    _decoder(),
    *(TOKENS, MEMORY),
    tgt_mask=CAUSAL,
    tgt_key_padding_mask=PADDING,
    memory_key_padding_mask=MEMORY_PADDING,
  ),
  use(_decoder(norm_first=True, batch_first=False), ONE, x(5, 4)),
  use(
    lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True),
    *(TOKENS, TOKENS),
    tgt_mask=CAUSAL_FLOATS,
    src_key_padding_mask=PADDING,
    memory_key_padding_mask=PADDING,
  ),
]


class Packed(nn.Module):
  """A recurrent module that packs its input, and returns padded or packed numbers."""

  def __init__(self, module, lengths):
    super().__init__()
    self.module, self.lengths = module, torch.tensor(lengths)

  def forward(self, input):
    is_sorted = bool((self.lengths.diff() <= 0).all())
    packed = pack_padded_sequence(input, self.lengths, True, enforce_sorted=is_sorted)
    output, state = self.module(packed)
    return pad_packed_sequence(output)[0] if is_sorted else output.data, state


RECURRENT = [
  *(
    use(
      lambda cls=cls: cls(4, 3, 2, bidirectional=True, batch_first=True),
      *(TOKENS, (h, h) if cls is nn.LSTM else h),
    )
    for cls in (nn.RNN, nn.LSTM, nn.GRU)
    for h in [x(4, 2, 3)]
  ),
  use(lambda: nn.RNN(4, 3, nonlinearity="relu", bias=False), ONE),
  use(lambda: nn.LSTM(4, 3, proj_size=2), TOKENS),
  use(lambda: nn.GRU(4, 3), x(3, 0, 4)),
  use(lambda: Packed(nn.LSTM(4, 3), [3, 1]), TOKENS),
  use(lambda: Packed(nn.GRU(4, 3, bidirectional=True), [1, 3]), TOKENS),
  *(use(lambda cls=cls: cls(4, 3), ONE) for cls in (nn.RNNCell, nn.LSTMCell)),
  use(lambda: nn.GRUCell(4, 3, bias=False), ONE[0].detach().requires_grad_()),
]

# Losses.
SCORES, OTHERS = x(3, 4), floats(3, 4, seed=1)
LABELS, POSITIVE = ints(3, high=4), floats(3, 4, low=0.1)
SHARES = POSITIVE / POSITIVE.sum(1, keepdim=True)
SIGNS = torch.tensor([1.0, -1.0, 1.0])
CTC = floats(6, 2, 5).log_softmax(2).requires_grad_()
LOSSES = [
  made
  for reduction in ("none", "mean")
  for options in [{"reduction": reduction}]
  for made in (
    *(
      use(lambda cls=cls, options=options: cls(**options), SCORES, OTHERS)
      for cls in (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss)
    ),
    *(
      use(lambda cls=cls, options=options: cls(**options), SCORES, OTHERS.sign())
      for cls in (nn.SoftMarginLoss, nn.HingeEmbeddingLoss)
    ),
    use(lambda o=options: nn.BCEWithLogitsLoss(POSITIVE.clone(), **o), SCORES, SHARES),
    use(lambda o=options: nn.BCELoss(**o), SHARES.clone().requires_grad_(), SHARES),
    use(
      lambda o=options: nn.CrossEntropyLoss(None, label_smoothing=0.1, **o),
      *(SCORES, SHARES),
    ),
    use(
      lambda o=options: nn.CrossEntropyLoss(None, ignore_index=1, **o), SCORES, LABELS
    ),
    use(lambda o=options: nn.NLLLoss(None, ignore_index=1, **o), SCORES, LABELS),
    use(lambda o=options: nn.KLDivLoss(log_target=True, **o), SCORES, OTHERS),
    use(lambda o=options: nn.PoissonNLLLoss(full=True, **o), SCORES, POSITIVE * 3),
    use(
      lambda o=options: nn.GaussianNLLLoss(full=True, **o),
      *(SCORES, OTHERS, POSITIVE.clone().requires_grad_()),
    ),
    use(lambda o=options: nn.MultiMarginLoss(2, 0.5, **o), SCORES, LABELS),
    use(
      lambda o=options: nn.MultiLabelMarginLoss(**o),
      *(SCORES, torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0], [-1, 0, 0, 0]])),
    ),
    use(lambda o=options: nn.MultiLabelSoftMarginLoss(**o), SCORES, SHARES.round()),
    use(
      lambda o=options: nn.CosineEmbeddingLoss(0.3, **o), SCORES, x(3, 4, seed=2), SIGNS
    ),
    use(
      lambda o=options: nn.MarginRankingLoss(0.3, **o), SCORES, x(3, 4, seed=2), OTHERS
    ),
    use(
      lambda o=options: nn.TripletMarginLoss(swap=True, **o),
      *(SCORES, OTHERS, POSITIVE),
    ),
    use(
      lambda o=options: nn.TripletMarginWithDistanceLoss(
        distance_function=nn.CosineSimilarity(), **o
      ),
      *(SCORES, OTHERS, POSITIVE),
    ),
    use(
      lambda o=options: nn.CTCLoss(1, zero_infinity=True, **o),
      *(CTC, torch.tensor([[0, 2], [4, 4]]), (6, 5), (2, 2)),
    ),
  )
]


class LogProbabilities(nn.AdaptiveLogSoftmaxWithLoss):
  """All of them; the loss itself has results whose sizes depend on the labels."""

  def forward(self, input):
    return self.log_prob(input)


CONTAINERS = [
  use(lambda: nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4)})["a"]), ONE),
  use(lambda: LogProbabilities(4, 10, [3, 6]), ONE),
  use(lambda: F.interpolate, IMAGE, scale_factor=0.5, mode="bilinear", antialias=True),
  use(lambda: F.pad, IMAGE, (1, 1, -1, 0), value=2.5),
  use(lambda: F.softmax, SIGNAL, 0, dtype=torch.float32),
  use(lambda: F.affine_grid, x(2, 2, 3), [2, 1, 3, 4], align_corners=False),
]

RANDOM = [
  *(
    use(lambda cls=cls: cls(0.4), input)
    for cls in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for input in (SIGNAL,)
  ),
  *(use(lambda d=d: getattr(nn, f"Dropout{d}d")(0.4), BY_DIM[d]) for d in BY_DIM),
  use(nn.RReLU, SIGNAL),
  use(lambda: F.dropout, SIGNAL, 0.4, True),
  use(lambda: F.gumbel_softmax, SIGNAL, 0.5, True),
  use(lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), IMAGE),
  use(lambda: nn.FractionalMaxPool3d(2, output_size=2), VOLUME),
  use(lambda: nn.LSTM(4, 3, 2, dropout=0.5), TOKENS),
  use(_attention(dropout=0.5), *[TOKENS] * 3, need_weights=False),
  use(_encoder(dropout=0.4), TOKENS, src_key_padding_mask=PADDING),
]

GROUPS = {
  "activations": ACTIVATIONS,
  "shapes": SHAPES,
  "convolutions": CONVOLUTIONS,
  "pools": POOLS,
  "unpools": UNPOOLS,
  "norms": NORMS,
  "resizes": RESIZES,
  "tables": TABLES,
  "attention": ATTENTION,
  "transformers": TRANSFORMERS,
  "recurrent": RECURRENT,
  "losses": LOSSES,
  "containers": CONTAINERS,
}
