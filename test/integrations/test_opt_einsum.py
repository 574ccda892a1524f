"""Contractions of jax tensors by opt_einsum."""

import opt_einsum
import pytest
import torch

import torchax

SUBSCRIPTS = ("ij,jk->ik", "ij,jk,ki->i", "ij,jk,kl->", "ii,ij->j")


@pytest.mark.parametrize("subscripts", SUBSCRIPTS)
def test_contraction_stays_on_jax_with_its_gradient(subscripts):
  count = subscripts.count(",") + 1
  given = torch.linspace(-1, 1, 9).view(3, 3)
  found = []
  for device in ("cpu", "jax"):
    leaf = given.clone().to(device).requires_grad_()
    operands = [leaf, leaf.T, leaf * 2][:count]
    with torchax.default_env():
      result = opt_einsum.contract(subscripts, *operands)
      shapes = [tuple(each.shape) for each in operands]
      planned = opt_einsum.contract_expression(subscripts, *shapes)(*operands)
      (result.sum() + planned.sum()).backward()
    assert result.device.type == planned.device.type == device
    found.append([t.detach().cpu() for t in (result, planned, leaf.grad)])
  torch.testing.assert_close(*found)
