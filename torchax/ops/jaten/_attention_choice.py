"""Choice of the attention implementation, from the platform and the shapes of a call.

`functions/attention.py` calls it; nothing here queries a device. The implementations:

  - "plain": all scores at once (`attention.py`); supports every call on any device.
  - "cudnn": cuDNN's flash attention, through `jax.nn.dot_product_attention`.
  - "pallas": JAX's flash attention for TPUs.
  - "blockwise": one block of keys at a time (`_blockwise_attention.py`), on any device.

The dropout of the kernels draws other numbers than the plain form. Therefore a call
with dropout that would use a kernel is blockwise.
"""

import dataclasses

PLAIN, CUDNN, PALLAS, BLOCKWISE = "plain", "cudnn", "pallas", "blockwise"

# With "plain" and "blockwise", the values of the attention option of `Configuration`.
AUTO, FLASH = "auto", "flash"

LONG = 1024**2
"""Least number of scores per head for "pallas" and, unless asked for, "blockwise".

Fewer scores fit in a few megabytes. The value is not measured on an accelerator.
"""

_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32", "float64")
# Positions per block of the TPU kernel.
_TPU_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Target:
  """Platform and transformations that a program is compiled for.

  Attributes:
    platform: "cpu", "cuda", "rocm" or "tpu".
    capability: compute capability of a CUDA device.
    may_be_partitioned: XLA may partition the program over devices.
    is_typed: inside a `shard_map` that tracks the mesh axes along which arrays vary.
    is_mapped: inside a `vmap`.
    has_x64: JAX's x64 mode is on.
  """

  platform: str = "cpu"
  capability: tuple[int, int] = (0, 0)
  may_be_partitioned: bool = False
  is_typed: bool = False
  is_mapped: bool = False
  has_x64: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
  """Properties of an attention call that decide the implementation.

  Attributes:
    query, key, value: shapes.
    dtypes: names of the dtypes of query, key and value.
    mask: shape of the mask; None without one.
    mask_dtype: name of the mask's dtype.
    has_dropout: the dropout probability is strictly between 0 and 1.
    has_positions: the dropout mask can be drawn by position.
    is_causal, enable_gqa: arguments of the call.
  """

  query: tuple[int, ...]
  key: tuple[int, ...]
  value: tuple[int, ...]
  dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
  mask: tuple[int, ...] | None = None
  mask_dtype: str = "bool"
  has_dropout: bool = False
  has_positions: bool = True
  is_causal: bool = False
  enable_gqa: bool = False

  @property
  def is_long(self) -> bool:
    return self.query[-2] * self.key[-2] >= LONG


def choose(target: Target, call: Call, requested: str = AUTO) -> str:
  """Return the name of the implementation for a call.

  Args:
    target: platform of the program.
    call: properties of the call; invalid ones are "plain", which raises the error.
    requested: "auto"; "flash" to use kernels also in programs that XLA may partition;
      "plain"; or "blockwise" to use it wherever it is supported.
  """
  if requested == PLAIN or not _is_regular(call):
    return PLAIN
  if requested == BLOCKWISE:
    has_bools = call.mask is None or call.mask_dtype == "bool"
    is_possible = has_bools and (call.has_positions or not call.has_dropout)
    return BLOCKWISE if is_possible else PLAIN
  if target.may_be_partitioned and requested != FLASH:
    return PLAIN
  if call.has_dropout:
    without = dataclasses.replace(call, has_dropout=False)
    would = choose(target, without, requested) in (CUDNN, PALLAS)
    return BLOCKWISE if would and call.is_long and call.has_positions else PLAIN
  if _takes_cudnn(target, call):
    return CUDNN
  return PALLAS if _takes_pallas(target, call) else PLAIN


def _is_regular(call: Call) -> bool:
  """Return True if (…, heads, positions, features) need no broadcasting."""
  query, key, value = call.query, call.key, call.value
  if not all(isinstance(size, int) for size in (*query, *key, *value)):
    return False  # sizes of an exported program may be symbolic
  if not 3 <= len(query) == len(key) == len(value) or 0 in (*query, *key, *value):
    return False
  if len(set(call.dtypes)) != 1 or call.dtypes[0] not in _FLOATS:
    return False
  if query[-1] != key[-1] or key[:-1] != value[:-1] or query[:-3] != key[:-3]:
    return False
  if call.mask is not None and (call.is_causal or not _is_mask(call)):
    return False
  if call.enable_gqa:
    return query[-3] % key[-3] == 0
  return query[-3] == key[-3]


def _is_mask(call: Call) -> bool:
  """Return True if the mask broadcasts to the scores."""
  scores = (*call.query[:-1], call.key[-2])
  mask = call.mask or ()
  if len(mask) > len(scores):
    return False
  return all(m in (1, s) for m, s in zip(reversed(mask), reversed(scores)))


def _takes_cudnn(target: Target, call: Call) -> bool:
  """Check the limits of `jax.nn.dot_product_attention(implementation="cudnn")`.

  A float mask is excluded: as a half-precision bias it may hold infinities.
  """
  features = call.query[-1]
  most = 256 if target.capability >= (9, 0) else 128
  rows, keys = call.query[-2], call.key[-2]
  return (
    target.platform == "cuda"
    and target.capability >= (8, 0)
    and not target.is_mapped
    and call.dtypes[0] in _HALVES
    and call.value[-1] == features
    and features % 8 == 0
    and features <= most
    and (not call.is_causal or rows == keys)
    and (call.mask is None or call.mask_dtype == "bool")
    and (call.mask is None or (rows % 2 == 0 and keys % 2 == 0))
  )


def _takes_pallas(target: Target, call: Call) -> bool:
  features = call.query[-1]
  rows, keys = call.query[-2], call.key[-2]
  return (
    target.platform == "tpu"
    and not target.is_typed
    and not target.has_x64
    and call.dtypes[0] in ("bfloat16", "float32")
    and call.value[-1] == features
    and features in (64, 128, 256)
    and rows % _TPU_BLOCK == 0
    and keys % _TPU_BLOCK == 0
    and (not call.is_causal or rows == keys)
    and call.mask is None
    and call.is_long
  )
