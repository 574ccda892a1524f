"""Self-check that torchax works on this machine, in seconds: `python -m torchax`."""

import dataclasses
import time
from collections.abc import Callable

import torch

from torchax.compat import torch_compat
from torchax.environment import default_env
from torchax.errors import PrivateApiError
from torchax.interop import jax_jit

# Errors of a failed check: a wrong result, or an incompatible torch or JAX.
_FAILURES = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  ImportError,
  LookupError,
  OSError,
  RuntimeError,
  TypeError,
  ValueError,
)


@dataclasses.dataclass(frozen=True)
class Result:
  """Result of one check.

  Attributes:
    name: name of the check.
    error: reason of the failure; None for success.
    seconds: duration, including compilation.
    is_unavailable: True if the feature needs a private API that was not found; the rest
      of torchax works without it.
  """

  name: str
  error: str | None
  seconds: float
  is_unavailable: bool = False

  @property
  def failed(self) -> bool:
    return self.error is not None and not self.is_unavailable

  def __str__(self) -> str:
    state = "ok" if self.error is None else "FAILED"
    state = "unavailable" if self.is_unavailable else state
    reason = "" if self.error is None else f": {self.error}"
    return f"{self.name:<14} {state} ({self.seconds:.1f} s){reason}"


def _require_close(got: torch.Tensor, expected: torch.Tensor) -> None:
  torch.testing.assert_close(got.detach().cpu(), expected.detach(), check_stride=False)


def _eager() -> None:
  _require_close(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))
  x = torch.arange(6.0)
  on_jax = x.to("jax").view(2, 3)
  on_jax[0] *= 2
  expected = x.clone().view(2, 3)
  expected[0] *= 2
  _require_close(on_jax @ on_jax.t(), expected @ expected.t())


def _gradient() -> None:
  x, weight = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 6).view(2, 3)

  def gradient(x, weight):
    weight = weight.detach().requires_grad_()
    torch.nn.functional.linear(x, weight).tanh().pow(2).sum().backward()
    return weight.grad

  _require_close(gradient(x.to("jax"), weight.to("jax")), gradient(x, weight))


def _jit() -> None:
  x = torch.linspace(0, 1, 5)
  _require_close(jax_jit(lambda x: x.sin() * 2)(x.to("jax")), x.sin() * 2)


def _draws() -> None:
  def draw():
    return torch.rand(3, device="jax")

  def drawn_by(function):
    torch.manual_seed(0)
    return function()

  with torch.random.fork_rng(devices=[0], device_type=torch_compat.BACKEND):
    eager = drawn_by(draw)
    _require_close(drawn_by(jax_jit(draw)), eager.cpu())
    _require_close(drawn_by(draw), eager.cpu())


def _compile() -> None:
  torch_compat.require_capture()
  x = torch.linspace(0, 1, 4)
  _require_close(torch.compile(lambda x: x.cos() + 1, backend="jax")(x), x.cos() + 1)


CHECKS: dict[str, Callable[[], None]] = {
  "eager": _eager,
  "gradient": _gradient,
  "jax_jit": _jit,
  "random numbers": _draws,
  "torch.compile": _compile,
}


def run(name: str) -> Result:
  """Run one of `CHECKS`; the random state is unchanged afterwards."""
  check, start = CHECKS[name], time.perf_counter()
  error, is_unavailable = None, False
  try:
    with default_env():
      check()
  except PrivateApiError as raised:
    # Only torch.compile is optional: eager mode and jit must work.
    error, is_unavailable = str(raised), check is _compile
  except _FAILURES as raised:
    error = f"{type(raised).__name__}: {raised}"
  return Result(name, error, time.perf_counter() - start, is_unavailable)
