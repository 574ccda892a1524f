"""Every test here starts at seed 0, and JAX refuses raw uint32 keys throughout."""

import jax
import pytest
import torch

import torchax


@pytest.fixture
def env():
  return torchax.default_env()


@pytest.fixture(autouse=True)
def typed_keys_only():
  """A key without its type would raise wherever it is used."""
  with jax.legacy_prng_key("error"):
    yield


@pytest.fixture(autouse=True)
def seed_zero():
  torch.manual_seed(0)
