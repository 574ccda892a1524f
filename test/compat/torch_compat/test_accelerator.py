"""`torch.accelerator`, whose answers come from the device module."""

import torch

import torchax


def test_the_accelerator_api_asks_python_about_the_device():
  assert torch.accelerator.is_available()
  assert torch.accelerator.current_accelerator(True) == torch.device("jax")
  for name, answer in torchax.device_module.ANSWERS.items():
    known = getattr(torch._C, f"_accelerator_{name}", answer)
    assert known is answer, name
  assert torch.accelerator.device_count() == 1
