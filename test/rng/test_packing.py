"""Packed stream operands: the words that a graph of `torch.compile` receives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax import rng
from torchax.compat.torch_compat import active_functions
from torchax.errors import TracedDrawError
from torchax.rng import packing
from torchax.rng.packing import DrawPosition, Form, PackedStream, Packer


@pytest.mark.parametrize("impl", ["threefry2x32", "threefry4x32", "rbg"])
def test_words_are_the_key_and_the_count(impl):
  try:
    key = jax.random.key(7, impl=impl)
  except ValueError:
    pytest.skip(f"this JAX has no {impl}")
  with rng.rng_scope(rng.RngState(key, 5)):
    words, form = Packer().pack("a test")
  assert form == Form(impl, None)
  assert words.dtype == np.uint32
  assert words[:-1].tolist() == np.asarray(jax.random.key_data(key)).tolist()
  assert words[-1] == 5


def test_a_packed_stream_draws_as_the_stream():
  with rng.rng_scope(3) as stream:
    words, form = Packer().pack("a test")
    expected = [jax.random.bits(stream.next_key()) for _ in range(3)]

  def draw(words):
    packed = PackedStream(words, form)
    found = []
    for number in (2, 0, 1):
      with packed.at(DrawPosition(number, "site"), "line"):
        found.append(jax.random.bits(packed.next_key()))
    return jnp.stack(found)

  assert jax.jit(draw)(words).tolist() == [expected[n] for n in (2, 0, 1)]


def test_the_key_is_read_once():
  packer = Packer()
  with rng.rng_scope(3) as stream:
    first, _ = packer.pack("a test")
    packing.commit(4, {}, ())
    assert stream.state.count == 4
    with jax.transfer_guard("disallow"):
      second, _ = packer.pack("a test")
  assert second[:-1].tolist() == first[:-1].tolist()
  assert second[-1] == first[-1] + 4


def test_inside_a_transformation_there_are_no_words():
  def pack(x):
    Packer().pack("a test")
    return x

  with pytest.raises(TracedDrawError, match="a test"):
    jax.jit(pack)(1.0)


def test_sites_are_packed_behind_their_environment():
  """Draws of a site have their own count, whatever is drawn between them."""
  places = [
    DrawPosition(number, site, ((site, turn),))
    for number, (site, turn) in enumerate([("a", 0), ("b", 0), ("a", 1)])
  ]
  with rng.rng_scope(rng.RngState(jax.random.key(3), 0, {"a": 4})) as stream:
    words, form = Packer().pack("a test", ("a", "b"))
    with active_functions.at_path("a"):
      expected = {"a": [stream.next_key(), stream.next_key()]}
    with active_functions.at_path("b"):
      expected["b"] = [stream.next_key()]

  def draw(words):
    packed = PackedStream(words, form)
    found = []
    for place in reversed(places):
      with packed.at(place, "line"):
        found.append(jax.random.bits(packed.next_key()))
    return jnp.stack(found)

  wanted = [jax.random.bits(expected[p.site][dict(p.turns)[p.site]]) for p in places]
  assert jax.jit(draw)(words).tolist() == list(map(int, reversed(wanted)))


def test_a_commit_moves_the_sites():
  with rng.rng_scope(rng.RngState(jax.random.key(3), 0, {"a": 4})) as stream:
    packing.commit(3, {"a": 2, "b": 1}, ())
    assert stream.state.sites == {"a": 6, "b": 1} and stream.state.count == 3
