"""Tracebacks end at the user's line."""

import operator
import traceback

import jax
import pytest
import torch
from small_tensors import (  # noqa: F401  a fixture
  condition,
  first,
  in_environment,
  jax_vector,
  learned_vector,
  same,
  shorter,
  vector,
)
from source_tree import ROOT

import torchax
from torchax import interop
from torchax.core import tracebacks


def _raises_itself(t):
  raise ZeroDivisionError("of the user")


def _wrong_shapes(t):
  return t + torch.ones(2, device="jax")


def _too_short() -> torch.Tensor:
  return torch.ones(2, device="jax")


class _Model(torch.nn.Module):
  def forward(self, t):
    return _wrong_shapes(t)


LAST_LINES = {
  "an operation": lambda: vector() + _too_short(),
  "a function": lambda: torch.mm(vector(), vector()),
  "a method": lambda: vector().reshape(2, 2),
  "in place": lambda: vector().add_(_too_short()),
  "an index": lambda: vector()[5],
  "an assignment": lambda: operator.setitem(vector(), slice(None), _too_short()),
  "another device": lambda: vector() + torch.ones(3, device="cpu"),
  "numpy": lambda: learned_vector().numpy(),
  "jax_jit": lambda: interop.jax_jit(_raises_itself)(vector()),
  "jax_jit, wrong shapes": lambda: interop.jax_jit(_wrong_shapes)(vector()),
  "jax_jit, no argument": lambda: interop.jax_jit(_wrong_shapes)(),
  "two of them": lambda: interop.jax_jit(interop.jax_jit(_raises_itself))(vector()),
  "a module": lambda: interop.JittableModule(_Model())(vector()),
  "torchax.compile": lambda: torchax.compile(_Model())(vector()),
  "jax_value_and_grad": lambda: interop.jax_value_and_grad(_raises_itself)(vector()),
  "gradient_checkpoint": lambda: interop.gradient_checkpoint(_raises_itself)(vector()),
  "scan": lambda: interop.scan(lambda c, _: _raises_itself(c), vector(), length=2),
  "while_loop": lambda: interop.while_loop(_raises_itself, _raises_itself, vector()),
  "cond": lambda: interop.cond(condition(), _raises_itself, _raises_itself, vector()),
  "cond that differs": lambda: interop.cond(condition(), same, shorter, vector()),
  "jax_vmap": lambda: interop.jax_vmap(_raises_itself)(vector()),
  "jax_view": lambda: interop.jax_view(_raises_itself)(jax_vector()),
  "jax_view in jax.jit": lambda: jax.jit(interop.jax_view(_raises_itself))(
    jax_vector()
  ),
  "call_jax": lambda: interop.call_jax(_raises_itself, vector()),
  "call_torch": lambda: interop.call_torch(_raises_itself, jax_vector()),
  "a seed": lambda: torchax.default_env().manual_seed("seven"),
  "an option": lambda: interop.jax_jit(first, no_such_option=7),
  "no function": lambda: torchax.compile(3),
  "extract_jax": lambda: interop.extract_jax(_Model())[1]({}, (jax_vector(),)),
}


def _frames_of(name) -> tuple[list, BaseException]:
  with pytest.raises(Exception) as caught:
    LAST_LINES[name]()
  return traceback.extract_tb(caught.value.__traceback__), caught.value


@pytest.fixture
def hidden(monkeypatch):
  monkeypatch.delenv(tracebacks.VARIABLE, raising=False)


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("name", LAST_LINES)
def test_a_traceback_ends_at_the_users_line(name):
  frames, error = _frames_of(name)
  assert frames[-1].filename == __file__
  of_library = f"{ROOT / 'torchax'}"
  assert not [frame for frame in frames if frame.filename.startswith(of_library)]
  # JAX adds its own where it is the outermost.
  assert tracebacks.NOTE in error.__notes__
  assert len(error.__notes__) == 1 + (name == "jax_view in jax.jit")
  for cause in (error.__cause__, error.__context__):
    found = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    assert not [frame for frame in found if frame.filename.startswith(of_library)]


@pytest.mark.parametrize("way", ["variable", "jax"])
def test_full_traceback_is_available_on_request(way, monkeypatch):
  if way == "variable":
    monkeypatch.setenv(tracebacks.VARIABLE, "full")
  else:
    monkeypatch.delenv(tracebacks.VARIABLE, raising=False)
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
  try:
    frames, error = _frames_of("jax_jit")
  finally:
    if way == "jax":
      jax.config.update("jax_traceback_filtering", before)
  of_library = [f for f in frames if f.filename.startswith(f"{ROOT / 'torchax'}")]
  assert len(of_library) > 3
  assert tracebacks.NOTE not in getattr(error, "__notes__", [])
