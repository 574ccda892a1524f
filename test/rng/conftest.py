"""Fixtures of the random tests: each starts at seed 0; JAX refuses raw uint32 keys."""

import jax
import pytest
import torch

import torchax


@pytest.fixture
def env():
  return torchax.default_env()


@pytest.fixture(autouse=True)
def typed_keys_only():
  """Raise whenever a key without a key dtype is used."""
  with jax.legacy_prng_key("error"):
    yield


@pytest.fixture(autouse=True)
def seed_zero():
  torch.manual_seed(0)
