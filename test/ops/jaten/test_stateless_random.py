"""`torch.func._random` on jax, beside the numbers of CPU torch.

torch has CPU kernels since 2.15. `KNOWN` holds numbers that these draw, so that older
versions are compared too.
"""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from torch._higher_order_ops.scan import scan as torch_scan

from torchax.export import exported_program_to_jax
from torchax.interop import (
  jax_jit,
  jax_shard_map,
  jax_view,
  jax_vmap,
  scan,
  torch_view,
)

random = pytest.importorskip(
  "torch.func._random", reason="torch has stateless random numbers since 2.13"
)

SEED, SHAPE = 42, (2, 3)
SPLIT = [
  [8643895580192075859, 6287785766076502189],
  [6033254488940945703, 8380643633896839790],
  [12143778050234647077, 14270118698559565209],
]
# Of the key (42, 2**64 - 1), whose second block has the offset 0.
SPLIT_AT_THE_END = [[1685533963231214966, 14993516311478150012], *SPLIT[:2]]
UNIFORM = {
  torch.float32: [0.9177295565605164, 0.9581486582756042, 0.7473247647285461],
  torch.float16: [0.04052734375, 0.15380859375, 0.08447265625],
  torch.bfloat16: [0.32421875, 0.23046875, 0.67578125],
}
BOUNDED = {
  torch.float32: [3.2063772678375244, 3.4488918781280518, 2.1839487552642822],
  torch.float16: [-2.05859375, -1.3779296875, -1.7939453125],
  torch.bfloat16: [-0.3515625, -0.9140625, 1.7578125],
}
NORMAL = [
  -0.9701898097991943,
  0.1940188705921173,
  -1.2356212139129639,
  1.923926591873169,
  -0.07318153232336044,
]
# Keys of a batch, shape of the numbers: words that the keys fill it with.
BATCHES = (
  ((2, 1, 2), (2, 5), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], [[0] * 5, [1] * 5]),
  ((1, 3, 2), (2, 3), [[0] * 3] * 2, [[0, 1, 2]] * 2),
  ((2, 3, 2), (2, 3), [[0] * 3] * 2, [[0, 1, 2], [3, 4, 5]]),
)


def key(device="jax", offset=0):
  return torch.tensor([SEED, offset], dtype=torch.uint64).to(device)


def has_cpu_kernels() -> bool:
  try:
    random.split(key("cpu"))
  except NotImplementedError:
    return False
  return True


def units_in_last_place(actual, expected) -> np.ndarray:
  actual, expected = (t.detach().cpu().float().numpy() for t in (actual, expected))
  return np.abs(actual - expected) / np.spacing(np.abs(expected))


def test_a_key_has_64_bits():
  assert random.key(2**64 - 1, device="jax").tolist() == [2**64 - 1, 0]


def test_split_gives_the_keys_of_torch():
  assert random.split(key(), 3).tolist() == SPLIT
  assert random.split(key(offset=2**64 - 1), 3).tolist() == SPLIT_AT_THE_END
  batch = random.split(random.split(key(), 3), 2)
  assert batch.shape == (2, 3, 2)
  assert batch[:, 1].tolist() == random.split(random.split(key(), 3)[1]).tolist()


@pytest.mark.parametrize(
  "data, expected",
  [
    (0, SPLIT[0]),
    (2, SPLIT[2]),
    (2**40, [1129788994863232172, 9927196553896652948]),
    (-1, SPLIT_AT_THE_END[0]),
  ],
)
def test_fold_in_gives_the_keys_of_torch(data, expected):
  assert random.fold_in(key(), data).tolist() == expected


def test_fold_in_of_numbers_shares_a_program():
  folded = [random.fold_in(key(), step).tolist() for step in range(5)]
  assert folded == random.split(key(), 5).tolist()


@pytest.mark.parametrize("dtype", UNIFORM)
def test_uniform_numbers_are_those_of_torch(dtype):
  drawn = random.uniform(key(), 3, dtype=dtype)
  assert drawn.dtype == dtype and drawn.tolist() == UNIFORM[dtype]
  bounded = random.uniform(key(), 3, dtype=dtype, low=-2.3, high=3.7)
  assert bounded.tolist() == BOUNDED[dtype]


def test_normal_numbers_are_those_of_torch():
  drawn = random.normal(key(), 5)
  assert units_in_last_place(drawn, torch.tensor(NORMAL)).max() <= 3
  assert torch.equal(random.normal(key(), 4), drawn[:4])


def test_normal_numbers_are_normal():
  drawn = random.normal(key(), 1 << 18).cpu().double()
  expected = torch.distributions.Normal(0.0, 1.0).cdf(drawn.sort().values)
  steps = torch.arange(1, drawn.numel() + 1) / drawn.numel()
  # Kolmogorov and Smirnov, p = 1e-6.
  assert (expected - steps).abs().max() < 2.7 / drawn.numel() ** 0.5


@pytest.mark.parametrize("keys, shape, element, owner", BATCHES)
def test_each_key_of_a_batch_fills_its_part(keys, shape, element, owner):
  flat = random.split(key(), int(np.prod(keys[:-1])))
  drawn = random.uniform(flat.reshape(keys), shape)
  alone = torch.stack([random.uniform(one, 5) for one in flat])
  assert torch.equal(drawn, alone[torch.tensor(owner), torch.tensor(element)])


@pytest.mark.parametrize(
  "transform",
  (jax_jit, lambda f: jax_jit(jax_jit(f)), lambda f: torch.compile(f, backend="jax")),
  ids=("jax_jit", "nested", "compile"),
)
def test_compiled_draws_are_the_eager_ones(transform):
  def draws(key):
    first, second = random.split(key)
    return random.uniform(first, SHAPE, low=-1.0), random.normal(second, SHAPE)

  for compiled, eager in zip(transform(draws)(key()), draws(key()), strict=True):
    assert torch.equal(compiled, eager)


def draw_four(key):
  return random.uniform(key, 4)


def map_shards(function):
  mesh, keys = jax.make_mesh((1,), ("keys",)), PartitionSpec("keys")
  return jax_shard_map(jax_vmap(function), mesh=mesh, in_specs=keys, out_specs=keys)


MAPS = {
  "jax.vmap": lambda f: torch_view(jax.vmap(jax_view(f))),
  "jax_vmap": jax_vmap,
  "jax_shard_map": map_shards,
  "scan": lambda f: lambda keys: scan(lambda _, key: (_, f(key)), None, keys)[1],
  "torch": lambda f: (
    lambda keys: torch_scan(
      lambda total, key: (total + 1, f(key)), torch.zeros(1, device="jax"), keys
    )[1]
  ),
}


@pytest.mark.parametrize("maps", MAPS.values(), ids=MAPS)
def test_maps_over_keys_draw_from_each_key(maps):
  keys = random.split(key(), 3)
  expected = torch.stack([draw_four(one) for one in keys])
  assert torch.equal(maps(draw_four)(keys), expected)


@pytest.mark.skipif(hasattr(random, "randint"), reason="torch 2.15 may map over keys")
@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_torch_refuses_a_vmap_over_keys(device):
  """Its batching rule for operations in place refuses keys that it maps over."""
  keys = key(device).expand(3, 2)
  with pytest.raises(RuntimeError, match="vmap: aten::_philox_uniform_"):
    torch.func.vmap(draw_four)(keys)


def test_a_key_is_the_carry_of_a_scan():
  def split_and_draw(key, _):
    key, child = random.split(key)
    return key, draw_four(child)

  scanned, rows, current = scan(split_and_draw, key(), length=3), [], key()
  for _ in range(3):
    current, row = split_and_draw(current, None)
    rows.append(row)
  assert torch.equal(scanned[0], current)
  assert torch.equal(scanned[1], torch.stack(rows))


class Draws(torch.nn.Module):
  """Module that draws from a key."""

  def forward(self, key):
    first, second = random.split(key)
    return random.uniform(first, 4), random.normal(second, 4)


@pytest.mark.parametrize("compiles", [False, True])
def test_an_exported_program_draws_from_its_key(compiles):
  states, function = exported_program_to_jax(
    torch.export.export(Draws(), (key("cpu"),))
  )
  function = jax.jit(function) if compiles else function
  found = function(states, (key().jax(),))
  for have, want in zip(found, Draws()(key()), strict=True):
    assert np.array_equal(have, want.cpu())


@pytest.mark.parametrize("name", ["_philox_uniform", "_philox_normal"])
def test_out_takes_the_numbers(name):
  draw, x = getattr(torch.ops.aten, name), torch.zeros(SHAPE, device="jax")
  expected, out = draw(x, key(), -1.0, 2.0), torch.empty_like(x)
  assert draw(x, key(), -1.0, 2.0, out=out) is out
  assert torch.equal(out, expected) and not x.any()


def test_a_draw_in_place_writes_to_a_view():
  x = torch.zeros(2, 5, device="jax")
  random.uniform_(key(), x[1, 2:])
  assert x[1, 2:].tolist() == UNIFORM[torch.float32] and not x[0].any()


def test_the_stream_of_the_environment_does_not_move():
  before = torch.jax.get_rng_state()
  random.normal(key(), 3)
  assert torch.equal(torch.jax.get_rng_state(), before)


REFUSALS = {
  "key of another dtype": (
    lambda: random.uniform(key().view(torch.uint32), 3),
    "uint64",
  ),
  "no pair": (lambda: random.uniform(key()[:1], 3), r"shape [\(\[]1"),
  "batch": (lambda: random.uniform(random.split(key(), 3), (2, 2)), r"\W3, ?2?\W"),
  "integers": (
    lambda: random.normal(key(), 3, dtype=torch.int32),
    "[fF]loat|not implemented for",
  ),
  "no parts": (lambda: random.split(key(), 0), "split"),
}


@pytest.mark.parametrize("call, message", REFUSALS.values(), ids=REFUSALS)
def test_bad_arguments_are_refused(call, message):
  with pytest.raises(RuntimeError, match=message):
    call()


# Newer torch -------------------------------------------------------------------------

needs_integers = pytest.mark.skipif(
  not hasattr(random, "randint"), reason="torch draws integers from keys since 2.15"
)
needs_cpu_kernels = pytest.mark.skipif(
  not has_cpu_kernels(), reason="CPU torch draws from keys since 2.15"
)


@needs_integers
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint32, torch.uint64])
@pytest.mark.parametrize("bounds", [(0, 10), (3, 100), (0, None), (None, None)])
def test_integers_are_those_of_torch(dtype, bounds):
  low, high = bounds
  drawn, expected = (
    random.randint(key(device), 33, low=low, high=high, dtype=dtype)
    for device in ("jax", "cpu")
  )
  assert drawn.dtype == dtype and drawn.tolist() == expected.tolist()


@needs_integers
def test_a_range_that_32_bits_cannot_cover_evenly_is_refused():
  with pytest.raises(RuntimeError, match=r"less than 2\*\*28"):
    random.randint(key(), 3, low=0, high=2**31 - 1)


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", UNIFORM)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.1, 0.7), (-1 / 3, 1e-3)])
def test_many_uniform_numbers_equal_cpu_torch(dtype, bounds):
  low, high = bounds
  drawn, expected = (
    random.uniform(key(device), 1000, low=low, high=high, dtype=dtype)
    for device in ("jax", "cpu")
  )
  assert torch.equal(drawn.cpu(), expected)


@needs_cpu_kernels
def test_many_normal_numbers_are_close_to_cpu_torch():
  drawn, expected = (random.normal(key(device), 10**5) for device in ("jax", "cpu"))
  distance = units_in_last_place(drawn, expected)
  assert distance.max() <= 3 and (distance <= 1).mean() > 0.99
