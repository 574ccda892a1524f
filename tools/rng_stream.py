"""Write the raw bits of random streams, for external batteries of tests.

PractRand, TestU01 or dieharder read such a dump from a pipe:

  python tools/rng_stream.py --mode seeds | RNG_test stdin32 -tlmax 64GB

The modes use keys in the order in which programs use them, because a counter-based
generator is weakest between neighbouring keys:

  counter      draw 0, 1, 2, … of one stream
  interleaved  draw 0 of 64 forks of one stream, then draw 1 of them, …
  threads      draw 0 of the root streams of 64 threads, then draw 1 of them, …
  seeds        draw 0 of seed, seed + 1, seed + 2, …

A draw is `--words` numbers of 32 bits; few words give many keys. The project's tests
call `dump`, which yields the same words.
"""

import argparse
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from torchax.rng import RngState
from torchax.rng import state as rng_state

# Number of draws of one compiled call.
BLOCK = 1 << 14
STREAMS = 64
WORDS = 4
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@functools.partial(jax.jit, static_argnames="words")
def _draw(keys, counts, words: int):
  """Return draw `counts[i]` of the stream `keys[i]`, shape (n, words)."""

  def draw(key, count):
    return jax.random.bits(rng_state.fold_in(key, count), (words,), jnp.uint32)

  return jax.vmap(draw)(keys, counts)


def _counter(state: RngState) -> Iterator[tuple]:
  keys = jnp.broadcast_to(state.key, (BLOCK,))
  for start in itertools.count(0, BLOCK):
    if start and start % rng_state.REKEY_AT == 0:
      keys = jnp.broadcast_to(rng_state.rekey(keys[0]), (BLOCK,))
    first = np.uint32(start % rng_state.REKEY_AT)
    yield keys, first + jnp.arange(BLOCK, dtype=jnp.uint32)


def _in_turn(keys) -> Iterator[tuple]:
  rounds = BLOCK // len(keys)
  repeated = jnp.tile(jnp.stack(keys), rounds)
  for start in range(0, rng_state.REKEY_AT, rounds):
    counts = np.uint32(start) + jnp.arange(rounds, dtype=jnp.uint32)
    yield repeated, jnp.repeat(counts, len(keys))


def _interleaved(state: RngState) -> Iterator[tuple]:
  return _in_turn([state.fork(f"fork {i}").key for i in range(STREAMS)])


def _threads(state: RngState) -> Iterator[tuple]:
  return _in_turn([rng_state.thread_key(state.key, i) for i in range(STREAMS)])


@functools.partial(jax.jit, static_argnames="impl")
def _keys_of(seeds, impl: str):
  return jax.vmap(lambda seed: rng_state.as_key(seed, impl))(seeds)


def _seeds(seed: int, impl: str) -> Iterator[tuple]:
  for first in range(seed, 1 << 32, BLOCK):
    seeds = np.arange(first, min(first + BLOCK, 1 << 32)).astype(np.uint32)
    yield _keys_of(seeds, impl), jnp.zeros(len(seeds), jnp.uint32)


_WALKS = {"counter": _counter, "interleaved": _interleaved, "threads": _threads}
MODES = (*_WALKS, "seeds")


def dump(
  mode: str,
  seed: int = 0,
  impl: str = rng_state.DEFAULT_IMPL,
  words: int = WORDS,
) -> Iterator[np.ndarray]:
  """Yield the draws of a mode, block by block.

  Args:
    mode: one of `MODES`.
    seed: integer that `torch.manual_seed` takes; in [0, 2**32) for "seeds".
    impl: PRNG implementation that streams may use.
    words: number of 32-bit words in a draw.

  Yields:
    Arrays of uint32 of shape (draws, words).

  Raises:
    ValueError: the mode is unknown, the seed is out of range, `words` is less than 1,
      or streams may not use the implementation.
  """
  if mode not in MODES:
    raise ValueError(f"Expected a mode among {', '.join(MODES)}, but got {mode!r}.")
  if words < 1:
    raise ValueError(f"A draw has at least one word, but got {words}.")
  state = RngState.from_seed(seed, impl)
  if mode == "seeds" and not 0 <= seed < 1 << 32:
    raise ValueError(f"The mode seeds starts in [0, 2**32), but got {seed}.")
  walk = _seeds(seed, impl) if mode == "seeds" else _WALKS[mode](state)
  for keys, counts in walk:
    yield np.asarray(_draw(keys, counts, words)).astype("<u4", copy=False)


def size(text: str) -> int:
  """Parse a number of bytes, such as 4096, 64K or 2G.

  >>> size("64K")
  65536
  """
  factor = _SUFFIXES.get(text[-1:].upper(), 1)
  number = int(text[:-1] if factor > 1 else text)
  if number < 0:
    raise ValueError(f"Expected a number of bytes, but got {text!r}.")
  return number * factor


def write(blocks: Iterator[np.ndarray], file, limit: int | None) -> int:
  """Write blocks until `limit` bytes or their end; return the bytes written."""
  written = 0
  for block in blocks:
    data = block.tobytes()
    if limit is not None:
      data = data[: limit - written]
    file.write(data)
    written += len(data)
    if written == limit:
      break
  return written


def _arguments(argv) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--mode", choices=MODES, default="counter")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--impl", default=rng_state.DEFAULT_IMPL)
  parser.add_argument("--words", type=int, default=WORDS, help="32-bit words in a draw")
  parser.add_argument("--bytes", type=size, help="e.g. 64K or 2G; endless by default")
  parser.add_argument("--output", type=pathlib.Path, help="a file; stdout by default")
  return parser.parse_args(argv)


def main(argv=None) -> None:
  """Write the dump; see the module's docstring."""
  options = _arguments(argv)
  blocks = dump(options.mode, options.seed, options.impl, options.words)
  if options.output is not None:
    with options.output.open("wb") as file:
      write(blocks, file, options.bytes)
    return
  try:
    write(blocks, sys.stdout.buffer, options.bytes)
    sys.stdout.buffer.flush()
  except BrokenPipeError:  # the battery has read enough
    sys.stderr.close()


if __name__ == "__main__":
  main()
