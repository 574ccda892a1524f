"""Small tensors, rows of tests, and a fixture that enters the default environment."""

import jax
import jax.numpy as jnp
import pytest
import torch

import torchax

DATA = torch.tensor([[1.5, -2.5], [3.0, 0.0]])


@pytest.fixture(autouse=True)
def in_environment():
  with torchax.default_env():
    yield


def rows(table: dict):
  return pytest.mark.parametrize("row", table.values(), ids=table)


def x(device: str) -> torch.Tensor:
  return DATA.to(device)


def ints(device: str, *values, dtype=torch.int32) -> torch.Tensor:
  return torch.tensor(values, dtype=dtype).to(device)


def vector() -> torch.Tensor:
  return torch.arange(3.0, device="jax")


def learned_vector() -> torch.Tensor:
  return torch.ones(3, device="jax", requires_grad=True)


def jax_vector() -> jax.Array:
  return jnp.arange(3.0)


def condition() -> torch.Tensor:
  return torch.tensor(True, device="jax")


def same(t):
  return {"a": {"b": t}}


def shorter(t):
  return {"a": {"b": t[:2]}}


def first(t, *others, **named):
  return t
