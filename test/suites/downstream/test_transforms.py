"""Queries of tensors inside the transforms of `torch.func`."""

import pytest
import torch
from compare import assert_same

import torchax
from torchax import interop


def _shifted(x):
  return (x * torch.arange(2.0, device=x.device) + torch.ones(2, device=x.device)).sum()


TRANSFORMS = {
  "grad": lambda: torch.func.grad(_shifted),
  "vmap": lambda: torch.func.vmap(_shifted),
  "jvp": lambda: lambda x: torch.func.jvp(_shifted, (x,), (x,)),
  "per_sample": lambda: torch.func.vmap(torch.func.grad(_shifted)),
  "compiled": lambda: interop.jax_jit(torch.func.grad(_shifted)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_are_made_on_the_device_of_a_wrapped_one(name):
  x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
  expected = {
    "grad": torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
    "vmap": torch.tensor([4.0, 6.0]),
    "jvp": (torch.tensor(10.0), torch.tensor(6.0)),
  }
  expected["per_sample"] = expected["compiled"] = expected["grad"]
  with torchax.default_env():
    found = TRANSFORMS[name]()(x.to("jax"))
  for part, wanted in zip(
    found if name == "jvp" else (found,),
    expected[name] if name == "jvp" else (expected[name],),
    strict=True,
  ):
    assert_same(part.detach(), wanted)


@pytest.mark.parametrize("name", ["jax", None])
def test_constants_in_vmap_are_on_the_device_of_the_tensor(name):
  def picked(x):
    index = torch.tensor([1, 0, 1], device=name or x.device)
    return x[index] * torch.tensor(2.0, device=name or x.device)

  x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
  with torchax.default_env():
    for function in (torch.vmap(picked), interop.jax_jit(torch.vmap(picked))):
      found = function(x.to("jax"))
      assert_same(found, torch.tensor([[4.0, 2.0, 4.0], [8.0, 6.0, 8.0]]))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_captured_tensor_prints_inside_transforms(transform):
  texts = []
  with torchax.default_env():
    captured = torch.ones(2, device="jax")

    def function(x):
      texts.append(repr(captured))
      return x.sum()

    transform(function)(torch.ones(2, device="jax"))
    assert texts == [repr(captured)]


def test_a_meta_tensor_stays_on_meta():
  with torchax.default_env():
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).device.type == "cpu"
