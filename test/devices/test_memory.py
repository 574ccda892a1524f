"""Figures of device memory in `torch.jax`; a device with figures is simulated."""

import pytest
import torch

from torchax.devices import memory, placement


class _Counting:
  """Fake of a device with memory statistics."""

  platform = "gpu"

  def __init__(self):
    self.figures = {"bytes_in_use": 30, "peak_bytes_in_use": 50, "bytes_limit": 100}

  def memory_stats(self):
    return self.figures


@pytest.fixture
def counting(monkeypatch):
  torch.ones(1, device="jax")  # JAX starts on the device that there is
  device = _Counting()
  monkeypatch.setattr(placement, "jax_device", lambda index: device)
  monkeypatch.setattr(memory, "_peaks", {})
  return device


def test_memory_statistics_equal_jax_statistics(counting):
  assert torch.jax.memory_allocated() == torch.accelerator.memory_allocated() == 30
  assert torch.jax.max_memory_allocated() == 50
  assert torch.accelerator.max_memory_allocated() == 50
  assert torch.jax.mem_get_info() == torch.accelerator.get_memory_info() == (70, 100)
  assert torch.jax.memory_stats()["bytes_limit"] == 100
  assert "bytes_in_use: 30" in torch.jax.memory_summary()


def test_reset_peak_equals_jax_peak_once_it_grows(counting):
  torch.jax.reset_peak_memory_stats()
  assert torch.jax.max_memory_allocated() == 30
  counting.figures["bytes_in_use"] = 40
  assert torch.jax.max_memory_allocated() == 40
  counting.figures["bytes_in_use"] = 20
  assert torch.jax.max_memory_allocated() == 40
  counting.figures["peak_bytes_in_use"] = 60
  assert torch.jax.max_memory_allocated() == 60


def test_cpu_reports_total_memory_but_no_statistics():
  assert torch.jax.memory_stats() == {} and torch.jax.memory_allocated() == 0
  assert torch.accelerator.memory_allocated() == torch.jax.max_memory_reserved() == 0
  free, total = torch.jax.mem_get_info()
  assert 0 < free <= total
  for release in (torch.jax.empty_cache, torch.jax.ipc_collect):
    assert release() is None
  torch.accelerator.empty_cache()
  torch.accelerator.reset_peak_memory_stats()
