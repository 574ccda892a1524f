"""Gradients by `jax_value_and_grad`, and rematerialization."""

import jax
import torch
from compare import assert_same
from ops.harness import floats

from torchax import interop
from torchax.interop import jax_jit

A = floats(3, 4)


B = floats(3, 4, seed=1)


def test_value_and_grad_gives_the_gradients_of_torch(x):
  def loss(a, b):
    return (a * b).tanh().sum()

  a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
  loss(a, b).backward()
  other = B.to("jax")
  value, grad = interop.jax_value_and_grad(loss)(x, other)
  assert_same([value, grad], [loss(A, B), a.grad])
  _, grads = interop.jax_value_and_grad(loss, {"argnums": (0, 1)})(x, other)
  assert_same(list(grads), [a.grad, b.grad])
  (_, aux), grad = interop.jax_value_and_grad(
    lambda a, b: (loss(a, b), {"aux": a + b}), {"has_aux": True, "argnums": 1}
  )(x, other)
  assert_same([aux, grad], [{"aux": A + B}, b.grad])


def test_value_and_grad_takes_trees_of_parameters(x):
  params = {"w": B.to("jax"), "b": torch.zeros(3, device="jax")}
  value, grads = interop.jax_value_and_grad(
    lambda p, a: ((a @ p["w"].t() + p["b"]) ** 2).sum()
  )(params, x)
  w, b = B.clone().requires_grad_(), torch.zeros(3, requires_grad=True)
  expected = ((A @ w.t() + b) ** 2).sum()
  expected.backward()
  assert_same([value, grads], [expected.detach(), {"w": w.grad, "b": b.grad}])


def test_value_and_grad_can_be_compiled(x):
  compiled = jax_jit(interop.jax_value_and_grad(lambda a: (a**3).sum()))
  assert_same(list(compiled(x)), [(A**3).sum(), 3 * A**2])


def test_changes_under_value_and_grad_reach_the_caller(x):
  calls = torch.zeros((), device="jax")

  def loss(a):
    calls.add_(1)
    return (a**2).sum()

  _, grad = interop.jax_value_and_grad(loss)(x)
  assert_same([grad, calls], [A * 2, torch.ones(())])


def test_a_checkpoint_keeps_values_and_gradients(x):
  def block(a):
    return (a.sin() * a).sum()

  checkpointed = interop.gradient_checkpoint(block)
  assert_same(checkpointed(x), block(A))
  leaf = A.clone().requires_grad_()
  block(leaf).backward()
  _, grad = interop.jax_value_and_grad(checkpointed)(x)
  assert_same(grad, leaf.grad)
  text = jax.make_jaxpr(interop.jax_view(checkpointed))(x.jax()).pretty_print()
  assert "checkpoint" in text or "remat" in text
