"""Sizes and dims that CPU torch refuses are refused on jax, by error class."""

import contextlib

import pytest
import torch
from torch.nn import functional

import torchax


def _index(*places):
  return torch.tensor(places, device="cpu")


def _grid(t, last):
  return functional.grid_sample(
    t.new_ones(1, 1, 2, 2), t.new_ones(1, 2, 2, last), align_corners=False
  )


# Functions of a tensor with three elements.
ROWS = {
  "zeros": lambda t: torch.zeros(-1, device=t.device),
  "ones": lambda t: torch.ones(2, -1, device=t.device),
  "full": lambda t: torch.full((-1,), 1.0, device=t.device),
  "empty": lambda t: torch.empty(-1, device=t.device),
  "empty_strided": lambda t: torch.empty_strided((-1,), (1,), device=t.device),
  "eye": lambda t: torch.eye(-1, device=t.device),
  "eye of columns": lambda t: torch.eye(2, -1, device=t.device),
  "rand": lambda t: torch.rand(-1, device=t.device),
  "randn": lambda t: torch.randn(2, -1, device=t.device),
  "randint": lambda t: torch.randint(3, (-1,), device=t.device),
  "randperm": lambda t: torch.randperm(-1, device=t.device),
  "normal": lambda t: torch.normal(0.0, 1.0, (-1,), device=t.device),
  "linspace": lambda t: torch.linspace(0, 1, -1, device=t.device),
  "logspace": lambda t: torch.logspace(0, 1, -1, device=t.device),
  "tril_indices": lambda t: torch.tril_indices(-1, 2, device=t.device),
  "triu_indices": lambda t: torch.triu_indices(2, -1, device=t.device),
  "new_zeros": lambda t: t.new_zeros(-1),
  "new_ones": lambda t: t.new_ones(-1),
  "new_full": lambda t: t.new_full((-1,), 1.0),
  "new_empty": lambda t: t.new_empty(-1),
  "repeat": lambda t: t.repeat(-1),
  "repeat of new dimensions": lambda t: t.repeat(-1, 2),
  "tile": lambda t: t.tile(-1),
  "flip": lambda t: t.flip(2),
  "flip from the end": lambda t: t.flip(-2),
  "flip of a number": lambda t: t.sum().flip(1),
  "roll": lambda t: t.roll(1, 2),
  "gather": lambda t: t.gather(2, _index(0).to(t.device)),
  "gather from a number": lambda t: t.sum().gather(1, _index(0).to(t.device)),
  "scatter": lambda t: t.scatter(2, _index(0).to(t.device), t),
  "scatter of a number": lambda t: t.scatter(1, _index(0).to(t.device), 1.0),
  "scatter_add": lambda t: t.scatter_add(-2, _index(0).to(t.device), t),
  "grid_sample": lambda t: _grid(t, 3),
  "repeat_interleave": lambda t: t.repeat_interleave(_index(1, -1, 1).to(t.device)),
  "repeat_interleave of repeats": lambda t: torch.repeat_interleave(
    _index(1, -1).to(t.device)
  ),
  "repeat_interleave by a number": lambda t: t.repeat_interleave(-1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the environment"])
@pytest.mark.parametrize("call", ROWS.values(), ids=ROWS)
def test_invalid_dimensions_raise_torchs_class(call, inside):
  with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
    call(torch.ones(3, device="cpu"))
  tensor = torch.ones(3, device="jax")
  environment = torchax.default_env() if inside else contextlib.nullcontext()
  with environment, pytest.raises(type(expected.value)) as found:
    call(tensor)
  assert not isinstance(found.value, RecursionError)


ACCEPTED = {
  "zeros": lambda t: torch.zeros(0, 2, device=t.device),
  "eye": lambda t: torch.eye(0, device=t.device),
  "repeat": lambda t: t.repeat(0),
  "tile": lambda t: t.tile(2, 0),
  "flip": lambda t: t.flip(-1),
  "flip of a number": lambda t: t.sum().flip(-1),
  "gather from a number": lambda t: t.sum().gather(-1, _index(0).to(t.device)),
  "scatter": lambda t: t.scatter(-1, _index(0).to(t.device), 5.0),
  "grid_sample": lambda t: _grid(t, 2),
  "repeat_interleave": lambda t: t.repeat_interleave(_index(1, 0, 2).to(t.device)),
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_smallest_valid_dimensions_are_accepted(call):
  result = call(torch.arange(3.0, device="jax"))
  torch.testing.assert_close(result.cpu(), call(torch.arange(3.0, device="cpu")))
