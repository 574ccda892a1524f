"""In-place changes of a compiled function's arguments, and their gradients.

The oracle is the eager run on jax.
"""

import jax.numpy as jnp
import pytest
import torch

import torchax
from torchax.errors import MutationError
from torchax.interop import jax_jit


@pytest.fixture(autouse=True)
def enabled():
  with torchax.default_env() as env:
    yield env


def _x() -> torch.Tensor:
  return torch.linspace(-1, 1, 24).view(6, 4).to("jax").requires_grad_()


def _scale_half(h):
  half = h[..., :2]
  half /= 2.0
  return (half * h[..., 2:]).sum()


# A function that changes its last argument, and its arguments, given the leaf `x`.
CHANGES = {
  "result": (lambda x, out: out.copy_(x * 2), lambda x: (x, torch.zeros_like(x))),
  "part": (_scale_half, lambda x: (x * 3,)),
  "masked": (
    lambda x, out: out.masked_fill_(x > 0, 1.0).add_(x).relu_(),
    lambda x: (x, torch.ones_like(x)),
  ),
  "twice": (lambda a, b: (b.mul_(2) * a).sum(), lambda x: (x * 3,) * 2),
  "view": (lambda part: part.exp_().sum(), lambda x: ((x * 3)[:, 1:3],)),
  "no longer read": (lambda h: (h.zero_() + 1).sum(), lambda x: (x * 3,)),
}
COMPILERS = {
  "jit": jax_jit,
  "nested": lambda f: jax_jit(jax_jit(f)),
  "compile": lambda f: torch.compile(f, backend="jax"),
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("change", CHANGES)
def test_in_place_changes_of_arguments_have_gradients(change, compiler):
  function, arguments = CHANGES[change]

  def run(call):
    x, found = _x(), []
    for _ in range(2):
      args = arguments(x)
      loss = call(*args).sum() + (args[-1] * 3).sum()
      loss.backward()
      found += [loss.detach(), args[-1].detach(), x.grad.clone()]
      x.grad = None
    return found

  for expected, found in zip(run(function), run(COMPILERS[compiler](function))):
    torch.testing.assert_close(found, expected)


# A leaf, as in torch, and a change of the shape as well.
@pytest.mark.parametrize("given", [_x, lambda: _x() * 1], ids=["leaf", "shape"])
def test_an_in_place_change_that_torch_cannot_record_raises(given):
  x = given()
  with pytest.raises(MutationError, match="Return the new value"):
    jax_jit(lambda x: x.mul_(2).t_())(x)
  assert torch.equal(x, _x())


# In-place changes of a tensor, given a second one; values of the first have been saved.
WRITES = {
  "argument": (lambda saved, compile: compile(lambda x, y: x.add_(y)), True),
  "view": (lambda saved, compile: compile(lambda x, y: x[1:].mul_(2)), True),
  "captured": (lambda saved, compile: compile(lambda x, y: saved.add_(y)), True),
  "copy from the CPU": (
    lambda saved, compile: compile(lambda x, y: saved.copy_(torch.zeros(3))),
    True,
  ),
  "list": (
    lambda saved, compile: compile(lambda x, y: torch._foreach_add_([x], [y])),
    True,
  ),
  "apply_jax_": (
    lambda saved, compile: compile(lambda x, y: x.apply_jax_(jnp.sin)),
    True,
  ),
  "only read": (lambda saved, compile: compile(lambda x, y: x + y), False),
}


@pytest.mark.parametrize("compiler", ["eager", *COMPILERS])
@pytest.mark.parametrize("write", WRITES)
def test_a_backward_rejects_saved_values_that_changed(write, compiler):
  make, changes = WRITES[write]
  weight = torch.ones(3, device="jax", requires_grad=True)
  saved, other = torch.ones(3, device="jax"), torch.ones(3, device="jax")
  call = make(saved, COMPILERS.get(compiler, lambda f: f))
  for _ in range(2):
    product = saved * weight
    call(saved, other)
    if changes:
      with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    else:
      product.sum().backward()


@pytest.mark.parametrize("compiler", ["eager", *COMPILERS])
def test_a_backward_rejects_parameters_that_a_step_changed(compiler):
  layer = torch.nn.Linear(3, 3).to("jax")
  optimizer = torch.optim.AdamW(layer.parameters())

  def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()

  x = torch.ones(2, 3, device="jax", requires_grad=True)
  call = COMPILERS.get(compiler, lambda f: f)(step)
  for _ in range(2):
    out = layer(x)
    call(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
      out.sum().backward()


@pytest.mark.parametrize("compiler", ["eager", *COMPILERS])
def test_new_statistics_of_batch_norm_do_not_count(compiler):
  layer = torch.nn.BatchNorm1d(3).to("jax")
  call = COMPILERS.get(compiler, lambda f: f)(layer)
  x = torch.ones(2, 3, device="jax", requires_grad=True)
  for _ in range(2):
    out = layer(x)
    call(x)
    out.sum().backward()
