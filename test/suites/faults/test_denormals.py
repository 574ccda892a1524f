"""Subnormal numbers on the CPU, as docs/types.md describes them.

XLA flushes them to zero. When a release does not, these tests fail, and the page must
change.
"""

import jax
import pytest
import torch

from torchax.interop import jax_jit

TINY = 1e-40

pytestmark = pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="what XLA does on the CPU"
)


def _tiny() -> torch.Tensor:
  return torch.tensor([TINY]).to("jax")


FLUSHED = {
  "product": lambda x: x * 1.5,
  "sum of two": lambda x: x + x,
  "small product": lambda x: (x + 1e-30) * 1e-10,
}
KEPT = {
  "itself": lambda x: x,
  "negative": torch.neg,
  "copy": torch.clone,
  "gathered": lambda x: x[torch.zeros(1, dtype=torch.long, device="jax")],
  "chosen": lambda x: torch.where(torch.ones(1, dtype=torch.bool, device="jax"), x, -x),
  "joined": lambda x: torch.cat([x, x])[:1],
}


@pytest.mark.parametrize("call", FLUSHED.values(), ids=FLUSHED)
def test_arithmetic_gives_zero(call):
  assert call(_tiny()).item() == 0
  assert jax_jit(call)(_tiny()).item() == 0


@pytest.mark.parametrize("call", KEPT.values(), ids=KEPT)
def test_moving_data_keeps_denormals(call):
  assert abs(call(_tiny()).item()) == pytest.approx(TINY)


def test_a_comparison_sees_zero():
  tiny = _tiny()
  assert not (tiny > 0).item() and (tiny == 0).item()
