"""`torch.jit.script` of CPU programs that use classes which torchax replaces."""

import torch


def _draw(x: torch.Tensor):
  generator = torch.Generator()
  generator.manual_seed(3)
  return x + torch.rand(2, generator=generator)


def test_script_creates_generators(env):
  assert torch.jit.script(_draw)(torch.zeros(2)).equal(_draw(torch.zeros(2)))
