"""Stateless random operations of `torch.func._random`, with the numbers of CPU torch.

They take a key as a tensor, so no stream is involved: the same key gives the same
numbers. A key is uint64 of shape (*batch, 2), as `rng/philox.py` explains. torch checks
shapes and dtypes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.ops.builtin import op
from torchax.registry.names import aten
from torchax.rng import philox

_WORD = 0xFFFFFFFF


def _check_split(key, num_splits):
  if num_splits < 1:
    raise RuntimeError(f"split expects one key at least, but got num={num_splits}.")


@op(aten._philox_key_split, check=_check_split)
def _aten__philox_key_split(key, num_splits):
  return philox.key_of(philox.split(philox.words_of(key), num_splits))


@op(aten._philox_key_fold_in, dynamic=("data",))
def _aten__philox_key_fold_in(key, data):
  if isinstance(data, int):
    low, high = np.uint32(data & _WORD), np.uint32(data >> 32 & _WORD)
  elif data.dtype == jnp.uint64:
    low, high = lax.bitcast_convert_type(data.reshape(()), jnp.uint32)
  else:
    low, high = (
      data.astype(jnp.uint32),
      (data < 0).astype(jnp.uint32) * np.uint32(_WORD),
    )
  return philox.key_of(philox.fold_in(philox.words_of(key), low, high))


def _fill(like, key, draw) -> jax.Array:
  """Return numbers in the shape of an array; each key fills its part of it.

  Leading dimensions of the keys are broadcast, so their numbers repeat. Trailing ones
  of size 1 are filled with the numbers of one key.

  Args:
    like: array of the shape of the result.
    key: torch's keys, for which torch has checked the shape.
    draw: function of the words (*batch, 4) of the keys and a number n; returns n
      numbers for each key, of shape (*batch, n).
  """
  batch = key.shape[:-1]
  while batch and batch[-1] == 1:
    batch = batch[:-1]
  event = like.shape[len(batch) :]
  words = philox.words_of(key).reshape(*batch, 4)
  numbers = draw(words, math.prod(event)).reshape(*batch, *event)
  return jnp.broadcast_to(numbers, like.shape)


def _width(dtype) -> int:
  return 64 if dtype.itemsize == 8 else 32


def _scale(numbers, factor, term) -> jax.Array:
  """Return `numbers * factor + term`, rounded twice as on CPU torch.

  XLA would fuse the product with the sum. So it is computed in float64, exactly, and
  rounded to the digits of float32.
  """
  if numbers.dtype == jnp.float32:
    with jax_compat.explicit_x64_dtypes("allow"):
      wide = (jnp.asarray(part).astype(jnp.float64) for part in (numbers, factor))
      product = lax.reduce_precision(math.prod(wide), 11, 23)
      return product.astype(jnp.float32) + term
  return numbers * factor + term


def _check_key(self, key, *_, **__):
  """Raise for keys that torch refuses; only its in-place variants check them."""
  batch = key.shape[:-1]
  if key.dtype != torch.uint64 or key.shape[-1:] != (2,):
    raise RuntimeError(
      "A draw from a key expects a uint64 key of shape (2,) or (*batch, 2), but got "
      f"{key.dtype} of shape {tuple(key.shape)}. Make it with torch.func._random.key."
    )
  fits = all(size in (1, other) for size, other in zip(batch, self.shape))
  if batch and (len(batch) != self.dim() or not fits):
    raise RuntimeError(
      "A draw from batched keys expects a batch of as many dimensions as the result, "
      f"each of its size or 1, but got {tuple(batch)} for the shape "
      f"{tuple(self.shape)}."
    )


def _check_floats(self, key, *args, **kwargs):
  if not self.dtype.is_floating_point:
    raise RuntimeError(
      "A uniform or normal draw from a key expects a float dtype, but got "
      f"{self.dtype}."
    )
  _check_key(self, key)


@op(aten._philox_uniform, overwrites=True, check=_check_floats)
def _aten__philox_uniform(self, key, low=0.0, high=1.0):
  digits = jnp.finfo(self.dtype).nmant + 1
  wide = jnp.promote_types(self.dtype, jnp.float32)

  def unit(words, number):
    bits = philox.bits(words, number, _width(wide))
    bits &= np.asarray((1 << digits) - 1, bits.dtype)
    return bits.astype(wide) * np.asarray(2.0**-digits, wide)

  low, high = (jnp.asarray(bound, self.dtype).astype(wide) for bound in (low, high))
  info = jnp.finfo(self.dtype)
  span = lax.reduce_precision(high - low, info.nexp, info.nmant)
  return _scale(_fill(self, key, unit), span, low).astype(self.dtype)


@op(aten._philox_normal, overwrites=True, check=_check_floats)
def _aten__philox_normal(self, key, mean=0.0, std=1.0):
  """Draw normal numbers, each pair of them from a pair of uniform ones.

  Source: Box and Muller, "A note on the generation of random normal deviates" (1958),
  https://doi.org/10.1214/aoms/1177706645.
  """
  wide = jnp.promote_types(self.dtype, jnp.float32)
  width = _width(wide)
  step = 2.0**-width

  def pairs(words, number):
    bits = philox.bits(words, number + number % 2, width)
    first, second = bits[..., 0::2].astype(wide), bits[..., 1::2].astype(wide)
    radius = jnp.sqrt(-2 * jnp.log(first * step + step / 2))
    angle = _scale(second, np.asarray(2 * math.pi * step, wide), math.pi * step)
    drawn = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], -1)
    return drawn.reshape(bits.shape)[..., :number]

  mean, std = jnp.asarray(mean, wide), jnp.asarray(std, wide)
  return _scale(_fill(self, key, pairs), std, mean).astype(self.dtype)


def _check_randint(self, key, low=None, high=None):
  _check_key(self, key)
  if self.dtype.is_floating_point or self.dtype in (torch.bool, torch.complex64):
    raise RuntimeError(
      f"A draw of integers from a key expects an integer dtype, but got {self.dtype}."
    )
  limits = torch.iinfo(self.dtype)
  low = limits.min if low is None else low
  high = limits.max + 1 if high is None else high
  if not limits.min <= low < high <= limits.max + 1:
    raise RuntimeError(
      f"_philox_randint_ expects {limits.min} <= low < high <= {limits.max + 1} for "
      f"{self.dtype}, but got low={low}, high={high}."
    )
  span, width = high - low, _width(self.dtype)
  if span >> (width - 4) and span & (span - 1):
    raise RuntimeError(
      f"_philox_randint_ expects high - low to be a power of two or less than "
      f"2**{width - 4} for {self.dtype}, but got {span}: some numbers would be drawn "
      "much more often than others. Draw int64 numbers, in JAX's x64 mode."
    )


@op(
  aten._philox_randint, overwrites=True, dynamic=("low", "high"), check=_check_randint
)
def _aten__philox_randint(self, key, low=None, high=None):
  limits, unsigned = jnp.iinfo(self.dtype), f"uint{_width(self.dtype)}"

  def modulo(bound):
    if isinstance(bound, int):
      return np.asarray(bound % 2 ** _width(self.dtype), unsigned)
    return bound.astype(unsigned)

  least = modulo(int(limits.min))
  low = least if low is None else modulo(low)
  span = modulo(int(limits.max) + 1 if high is None else high) - low
  # torch takes the bits as they are for the whole range of a dtype.
  is_whole = (high is None) & (low == least)

  def integers(words, number):
    bits = philox.bits(words, number, _width(self.dtype))
    return jnp.where(is_whole, bits, low + bits % jnp.maximum(span, 1))

  return _fill(self, key, integers).astype(self.dtype)
