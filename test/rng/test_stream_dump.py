"""Bits of streams as `tools/rng_stream.py` writes them, and tests of these bits.

A counter-based generator could fail between neighbouring keys (draws, forks, threads,
seeds), so each mode is tested along the sequence of keys.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from rng.goodness import SEEDS, p_of_categories, p_value, require_good
from scipy import stats

from tools import rng_stream

pytestmark = pytest.mark.programs

WORDS = rng_stream.WORDS
each_mode = pytest.mark.parametrize("mode", rng_stream.MODES)


def _first_block(mode: str, seed: int = 0, **options) -> np.ndarray:
  return next(rng_stream.dump(mode, seed, **options))


# The dump equals the draws of programs ----------------------------------------------


def _torch_words() -> list:
  bounds = (-(2**31), 2**31)
  drawn = torch.randint(*bounds, (WORDS,), dtype=torch.int32, device="jax")
  return (drawn.numpy().astype(np.int64) - bounds[0]).tolist()


def test_the_counter_mode_has_the_numbers_of_torch():
  torch.manual_seed(5)
  expected = [_torch_words() for _ in range(3)]
  assert _first_block("counter", 5)[:3].tolist() == expected


def test_the_seeds_mode_has_the_numbers_of_torch():
  expected = []
  for seed in (5, 6, 7):
    torch.manual_seed(seed)
    expected.append(_torch_words())
  assert _first_block("seeds", 5)[:3].tolist() == expected


def test_the_interleaved_mode_has_the_numbers_of_forks(env):
  torch.manual_seed(5)
  forks = [env.rng.fork(f"fork {i}") for i in range(rng_stream.STREAMS)]
  expected = []
  for fork in forks[:2] * 2:
    with env.rng_scope(fork):
      expected.append(_torch_words())
  block = _first_block("interleaved", 5)
  rows = [0, 1, rng_stream.STREAMS, rng_stream.STREAMS + 1]
  assert block[rows].tolist() == expected


def test_the_threads_mode_begins_with_the_main_thread():
  counter, threads = _first_block("counter", 5), _first_block("threads", 5)
  rounds = len(threads) // rng_stream.STREAMS
  assert (threads[:: rng_stream.STREAMS] == counter[:rounds]).all()


@each_mode
def test_blocks_go_on_where_the_last_one_ended(mode):
  blocks = rng_stream.dump(mode)
  keys = np.concatenate([next(blocks), next(blocks)])
  assert len(np.unique(keys, axis=0)) == len(keys)


# The program ------------------------------------------------------------------------


def test_the_program_writes_the_requested_number_of_bytes(tmp_path):
  path = tmp_path / "bits"
  rng_stream.main(["--mode", "seeds", "--bytes", "1001", "--output", str(path)])
  assert path.read_bytes() == _first_block("seeds").tobytes()[:1001]


def test_the_program_ends_quietly_when_its_reader_does():
  program = subprocess.Popen(
    [sys.executable, rng_stream.__file__],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  head = program.stdout.read(64)
  program.stdout.close()
  assert head == _first_block("counter").tobytes()[:64]
  assert program.wait(60) == 0
  assert program.stderr.read() == b""


@pytest.mark.parametrize(
  "wrong",
  [
    {"mode": "sideways"},
    {"mode": "counter", "words": 0},
    {"mode": "seeds", "seed": -1},
    {"mode": "counter", "impl": "philox2x32"},
  ],
)
def test_wrong_options_are_refused(wrong):
  with pytest.raises(ValueError):
    next(rng_stream.dump(**wrong))


@pytest.mark.parametrize("text, expected", [("17", 17), ("64K", 65536), ("2g", 2**31)])
def test_sizes_have_suffixes(text, expected):
  assert rng_stream.size(text) == expected


# The bits ---------------------------------------------------------------------------


def _byte_p(words: np.ndarray) -> float:
  return p_of_categories(words.ravel().view(np.uint8), np.full(256, 1 / 256))


def _serial_p(words: np.ndarray) -> float:
  """Test the top hexadecimal digits of successive keys, as pairs."""
  digits = (words[:, 0] >> 28).astype(int)
  return p_of_categories(digits[:-1:2] * 16 + digits[1::2], np.full(256, 1 / 256))


def _flips_p(words: np.ndarray) -> float:
  """Test the number of bits, of 32, that differ between one key and the next."""
  changed = words[1::2, 0] ^ words[:-1:2, 0]
  counts = np.unpackbits(changed.view(np.uint8).reshape(-1, 4), axis=1).sum(1)
  return p_value(counts.astype(float), stats.binom(32, 0.5))


def _within_p(words: np.ndarray) -> float:
  """Test the number of bits, of 32, that differ between two words of one draw."""
  return _flips_p(words[:, :2].reshape(-1, 1))


def _each_bit_p(words: np.ndarray) -> float:
  """Test the frequency of each bit of the first word."""
  ones = np.unpackbits(words[:, :1].copy().view(np.uint8), axis=1).sum(0)
  deviations = (ones - len(words) / 2) ** 2 / (len(words) / 4)
  return stats.chi2(32).sf(deviations.sum())


QUESTIONS = {
  "bytes": _byte_p,
  "pairs of successive keys": _serial_p,
  "bits changed from key to key": _flips_p,
  "bits changed within a draw": _within_p,
  "each bit": _each_bit_p,
}
ROW_COUNT = len(rng_stream.MODES) * len(QUESTIONS)


@pytest.mark.statistics
@each_mode
def test_bits_along_neighbouring_keys_are_random(mode):
  # Seeds far apart, so that the sequences of seeds do not overlap.
  seeds = [seed * rng_stream.BLOCK for seed in range(SEEDS)]
  blocks = [_first_block(mode, seed) for seed in seeds]
  for ask in QUESTIONS.values():
    require_good([ask(block) for block in blocks], ROW_COUNT)


def _repeated(block: np.ndarray) -> np.ndarray:
  """Repeat one key in sixteen as the next key."""
  is_kept = np.arange(len(block))[:, None] % 16 > 0
  return np.where(is_kept, block, np.roll(block, -1, axis=0))


@pytest.mark.statistics
@pytest.mark.parametrize(
  "question, spoil",
  [
    ("bytes", lambda block: block & np.uint32(0xFFFFFFFE)),
    ("pairs of successive keys", lambda block: np.sort(block, axis=0)),
    ("bits changed from key to key", _repeated),
    ("bits changed within a draw", lambda block: block[:, [0, 0]]),
    ("each bit", lambda block: block | np.uint32(1 << 7) * (block % 20 == 0)),
  ],
)
def test_the_tests_see_bits_that_are_not_random(question, spoil):
  ask = QUESTIONS[question]
  blocks = [_first_block("counter", seed) for seed in range(SEEDS)]
  with pytest.raises(AssertionError):
    require_good([ask(spoil(block)) for block in blocks], ROW_COUNT)
