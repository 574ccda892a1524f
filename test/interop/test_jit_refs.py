"""Mutable arrays of JAX (`jax.new_ref`) as arguments of compiled functions."""

import jax
import jax.numpy as jnp
import pytest
import torch

from torchax.interop import jax_jit, jax_value_and_grad, torch_view


def add_and_count(x, counter):
  counter[...] += 1.0
  return x + torch_view(counter[...])


@pytest.mark.parametrize("is_nested", [False, True])
def test_ref_argument_is_read_and_changed(is_nested):
  counter, x = jax.new_ref(jnp.zeros(3)), torch.ones(3, device="jax")
  compiled = jax_jit(
    lambda x, tree: add_and_count(x, tree["counter"] if is_nested else tree)
  )
  for calls in (1, 2):
    out = compiled(x, {"counter": counter} if is_nested else counter)
    assert out.tolist() == [1.0 + calls] * 3
    assert counter[...].tolist() == [calls] * 3


def test_each_ref_has_its_own_value():
  first, second = (jax.new_ref(jnp.full(3, n)) for n in (0.0, 5.0))
  compiled, x = jax_jit(add_and_count), torch.zeros(3, device="jax")
  assert compiled(x, first).tolist() == [1.0] * 3
  assert compiled(x, second).tolist() == [6.0] * 3


def test_gradient_beside_a_ref():
  counter = jax.new_ref(jnp.zeros(3))
  x = torch.ones(3, device="jax", requires_grad=True)
  jax_jit(lambda x, c: (x * add_and_count(x, c)).sum())(x, counter).backward()
  assert x.grad.tolist() == [3.0] * 3
  _, gradient = jax_value_and_grad(lambda x, c: (x * add_and_count(x, c)).sum())(
    torch.ones(3, device="jax"), counter
  )
  assert gradient.tolist() == [4.0] * 3
  assert counter[...].tolist() == [2.0] * 3


USES = [torch.add, lambda x, ref: x + ref, lambda x, ref: ref * x]


@pytest.mark.parametrize("use", USES, ids=["function", "left", "right"])
def test_ref_as_operand_raises(use):
  ref = jax.new_ref(jnp.zeros(3))
  with pytest.raises((AttributeError, TypeError), match=r"jax\.Ref.*torch_view\(ref"):
    jax_jit(use)(torch.ones(3, device="jax"), ref)


def test_returned_ref_raises():
  with pytest.raises(TypeError, match=r"returns a jax\.Ref.*`ref\[\.\.\.\]`"):
    jax_jit(lambda ref: ref)(jax.new_ref(jnp.zeros(3)))
