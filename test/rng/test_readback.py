"""Draws and compiled calls read nothing back from the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import (
  drop,
)
from rng.draws import DRAWS

from torchax.compat import jax_compat
from torchax.interop import (
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  torch_view,
)
from torchax.rng import is_typed_key


@pytest.fixture
def no_readback(monkeypatch):
  """Any read of an array's numbers on the host raises, also where memory is shared."""

  def read(array, *args):
    raise AssertionError("an array was read back from the device")

  monkeypatch.setattr(jax_compat.ArrayImpl, "_value", property(read))
  monkeypatch.setattr(jax_compat.ArrayImpl, "item", read)
  # numpy takes the memory of a CPU array without asking it.
  for name in ("array", "asarray"):
    plain = getattr(np, name)

    def guarded(value, *args, plain=plain, **kwargs):
      is_array = isinstance(value, jax.Array)
      return read(value) if is_array else plain(value, *args, **kwargs)

    monkeypatch.setattr(np, name, guarded)


@pytest.mark.parametrize(
  "read",
  [
    float,
    int,
    bool,
    repr,
    jax.device_get,
    lambda array: array.item(),
    lambda array: np.asarray(array),
    lambda array: np.array(array),
    lambda array: torch.multinomial(torch_view(array.reshape(1)), 1),
  ],
  ids=[
    "float",
    "int",
    "bool",
    "repr",
    "get",
    "item",
    "asarray",
    "array",
    "multinomial",
  ],
)
def test_the_guard_against_reading_back_sees_reads(no_readback, read):
  array = jnp.zeros(()) + 1
  with pytest.raises(AssertionError, match="read back"):
    read(array)


def test_no_draw_and_no_compiled_call_reads_from_the_device(env, no_readback):
  # multinomial checks its weights, as torch does; every other draw must not wait.
  draws = [draw for name, draw in DRAWS.items() if "multinomial" not in name]

  def program(x):
    return [draw(x) for draw in draws]

  x = torch.ones(6, device="jax")
  compiled = jax_jit(program)
  step = jax_value_and_grad(gradient_checkpoint(lambda x: drop(x).sum()))
  # Under a guard no operation runs on the host while its shapes are new.
  with jax.transfer_guard_device_to_host("disallow"):
    for n in (1, 2):  # so those of the program are operands: they are not the first
      torch.randint(n, 90, (6,), device="jax")
      torch.empty_like(x).random_(n, 90)
      torch.empty_like(x).bernoulli_(n / 10)
      F.dropout(x, n / 10)
    program(x)
    compiled(x)
    compiled(x)
    step(x)
    torch.manual_seed(4)
    compiled(x)
    with env.rng_scope(3):
      compiled(x)
    env.rng.fork("data").next_key()
    assert is_typed_key(env.prng_key)
