"""Which form of attention a call takes: a function of where it runs and of its shapes.

Nothing here looks at a device. The forms:

  - "plain": all scores at once (`attention.py`); takes everything, everywhere.
  - "cudnn": cuDNN's flash attention, by `jax.nn.dot_product_attention`.
  - "pallas": the flash attention for TPUs that comes with JAX.
  - "blockwise": a block of keys at a time (`_blockwise_attention.py`), on any device.

The kernels know no dropout that draws what the other devices draw. With dropout, what
would take a kernel is blockwise.
"""

import dataclasses

PLAIN, CUDNN, PALLAS, BLOCKWISE = "plain", "cudnn", "pallas", "blockwise"

AUTO, FLASH = "auto", "flash"  # beside two of these, wishes of `Configuration`

LONG = 1024**2
"""Scores of a head from which on other forms than cuDNN's are taken by themselves.

Below, they fit in few megabytes. It has not been measured on an accelerator.
"""

_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32", "float64")
# The kernel for TPUs works on blocks of so many positions.
_TPU_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a program runs.

  Attributes:
    platform: "cpu", "cuda", "rocm" or "tpu".
    capability: of a CUDA device.
    is_divided: XLA may divide the program among devices.
    is_typed: inside of a `shard_map` that checks along which axes arrays differ.
    is_mapped: inside of a `vmap`.
    has_x64: JAX's types of 64 bits are on.
  """

  platform: str = "cpu"
  capability: tuple[int, int] = (0, 0)
  is_divided: bool = False
  is_typed: bool = False
  is_mapped: bool = False
  has_x64: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
  """The arguments of attention, as far as a choice looks at them.

  Attributes:
    query, key, value: shapes.
    dtypes: names of the dtypes of these three.
    mask: the shape of the mask; None without one.
    mask_dtype: its name.
    drops: there is dropout, of some of the weights but not all.
    has_positions: what is kept can be drawn by position.
    is_causal, enable_gqa: as given.
  """

  query: tuple[int, ...]
  key: tuple[int, ...]
  value: tuple[int, ...]
  dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
  mask: tuple[int, ...] | None = None
  mask_dtype: str = "bool"
  drops: bool = False
  has_positions: bool = True
  is_causal: bool = False
  enable_gqa: bool = False

  @property
  def scores(self) -> int:
    """How many scores a head has."""
    return self.query[-2] * self.key[-2]


def choose(place: Place, call: Call, wish: str = AUTO) -> str:
  """The name of the form that a call takes.

  Args:
    place: where the program runs.
    call: its arguments; those that are refused are plain, where an error says why.
    wish: "auto"; "flash", kernels also in programs that XLA may divide; "plain"; or
      "blockwise", wherever that form can be taken.
  """
  if wish == PLAIN or not _is_regular(call):
    return PLAIN
  if wish == BLOCKWISE:
    has_bools = call.mask is None or call.mask_dtype == "bool"
    is_possible = has_bools and (call.has_positions or not call.drops)
    return BLOCKWISE if is_possible else PLAIN
  if place.is_divided and wish != FLASH:
    return PLAIN
  if call.drops:
    without = dataclasses.replace(call, drops=False)
    would = choose(place, without, wish) in (CUDNN, PALLAS)
    return BLOCKWISE if would and _is_long(call) and call.has_positions else PLAIN
  if _takes_cudnn(place, call):
    return CUDNN
  return PALLAS if _takes_pallas(place, call) else PLAIN


def _is_regular(call: Call) -> bool:
  """True for tensors (…, heads, positions, features) that need no broadcasting."""
  query, key, value = call.query, call.key, call.value
  if not all(isinstance(size, int) for size in (*query, *key, *value)):
    return False  # the sizes of an exported program may be symbols
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
  """True for a mask that broadcasts to the scores."""
  scores = (*call.query[:-1], call.key[-2])
  mask = call.mask or ()
  if len(mask) > len(scores):
    return False
  return all(m in (1, s) for m, s in zip(reversed(mask), reversed(scores)))


def _is_long(call: Call) -> bool:
  return call.scores >= LONG


def _takes_cudnn(place: Place, call: Call) -> bool:
  """What `jax.nn.dot_product_attention(implementation="cudnn")` says that it takes.

  A mask of floats is left out: as a bias of half precision it may hold infinities.
  """
  features = call.query[-1]
  most = 256 if place.capability >= (9, 0) else 128
  rows, keys = call.query[-2], call.key[-2]
  return (
    place.platform == "cuda"
    and place.capability >= (8, 0)
    and not place.is_mapped
    and call.dtypes[0] in _HALVES
    and call.value[-1] == features
    and features % 8 == 0
    and features <= most
    and (not call.is_causal or rows == keys)
    and (call.mask is None or call.mask_dtype == "bool")
    and (call.mask is None or (rows % 2 == 0 and keys % 2 == 0))
  )


def _takes_pallas(place: Place, call: Call) -> bool:
  features = call.query[-1]
  rows, keys = call.query[-2], call.key[-2]
  return (
    place.platform == "tpu"
    and not place.is_typed
    and not place.has_x64
    and call.dtypes[0] in ("bfloat16", "float32")
    and call.value[-1] == features
    and features in (64, 128, 256)
    and rows % _TPU_BLOCK == 0
    and keys % _TPU_BLOCK == 0
    and (not call.is_causal or rows == keys)
    and call.mask is None
    and _is_long(call)
  )
