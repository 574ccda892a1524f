"""The random words of a draw, drawn before it: one program for draws of many sizes.

With threefry2x32 word i of a draw is a function of the key and of i, so that a draw of
fewer elements has the first words of one of more. The rounds of the generator are most
of what a draw takes to compile; a sampler that gets its words is a small program.
"""

import functools
from collections.abc import Callable

import jax

from torchax.core import programs
from torchax.rng import state, threefry

# As many elements share a program, and as many words are drawn at most.
LEAST, MOST = 2**10, 2**20


def number_for(key: jax.Array, elements: int) -> int | None:
  """How many words are drawn for so many elements; None where they cannot be."""
  number = max(LEAST, 1 << (elements - 1).bit_length()) if elements else LEAST
  is_fit = number <= MOST and threefry.is_addressable(key, (number,))
  return number if is_fit else None


def drawn(key: jax.Array, count, number: int) -> threefry.Words:
  """The words of draw `count` of a stream.

  Args:
    key: typed, of the stream.
    count: of draws before it.
    number: by `number_for`.
  """
  return _program()(key, count, number)


@functools.cache
def _program() -> Callable:
  def random_words(key, count, number):
    draw = threefry.unrolled_key(state.fold_in(key, count))
    return threefry.Words(*threefry.two_words(draw, (number,)))

  return programs.jit(random_words, static_argnums=2)
