"""`torch_call`: functions of CPU tensors inside compiled functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torchax
from torchax.interop import jax_jit, jax_view, jax_vmap, torch_call

X = torch.tensor([0.3, 0.7])


def native_sinc(x):
  return torch.from_numpy(np.sinc(x.numpy()))


def powers(x, y, tree, exponent=2):
  """Return a tree with a bool; no gradient reaches `tree["unused"]`."""
  return {"power": x**exponent * y * tree["scale"], "big": (x > 0.5,)}


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_native_function_runs_with_values(wrap, is_inside):
  sinc = wrap(torch_call(native_sinc, torch.empty(2, device="meta")))
  if is_inside:
    with torchax.default_env():
      out = sinc(X.to("jax"))
  else:
    out = sinc(X.to("jax"))
  assert out.device.type == "jax"
  torch.testing.assert_close(out.cpu(), native_sinc(X))


def gradients(function, device):
  """Return the first derivatives by x and y, and the second by x."""
  x, y = (part.clone().to(device).requires_grad_() for part in (X, X + 1))
  ones = torch.ones(2, device=device, requires_grad=True)
  out = function(x, y, {"scale": ones, "unused": ones}, exponent=3)
  assert out["big"][0].tolist() == [False, True]
  first = torch.autograd.grad(out["power"].square().sum(), (x, y), create_graph=True)
  (second,) = torch.autograd.grad(first[0].sin().sum(), x)
  return [part.detach().cpu() for part in (*first, second)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_gradients_of_any_order_equal_cpu_torch(wrap):
  native = wrap(torch_call(powers, powers))
  torch.testing.assert_close(gradients(native, "jax"), gradients(powers, "cpu"))


def test_complex_gradient_follows_jax():
  square = jax_view(torch_call(torch.square, torch.empty((), dtype=torch.complex64)))
  value = jax.grad(lambda z: jnp.abs(square(z)))(1 + 2j)
  assert value == jax.grad(lambda z: jnp.abs(z * z))(1 + 2j)


def test_rows_of_a_batch_are_calls():
  cube = torch_call(lambda x: x**3, torch.empty((), device="meta"))
  gradient = jax.jit(jax.vmap(jax.grad(jax_view(cube))))
  assert gradient(jnp.arange(3.0)).tolist() == [0.0, 3.0, 12.0]
  assert jax_vmap(cube)(torch.arange(3.0).to("jax")).tolist() == [0.0, 1.0, 8.0]


def test_integers_are_stored_in_32_bits():
  order = torch_call(torch.argsort, torch.empty(2, dtype=torch.int64))
  out = jax_jit(order)(X.to("jax"))
  assert out.tolist() == [0, 1] and out.dtype is torch.int32


def test_frozen_module_has_the_gradient_of_its_input():
  layer = torch.nn.Linear(2, 2).requires_grad_(False)
  x = X.clone().to("jax").requires_grad_()
  jax_jit(torch_call(layer, torch.empty(2)))(x).sum().backward()
  torch.testing.assert_close(x.grad.cpu(), layer.weight.sum(0))


def test_constant_result_has_zero_gradient():
  one = jax_view(torch_call(lambda x: torch.ones(()), torch.empty(())))
  assert jax.jit(jax.grad(one))(2.0) == 0


IMPURE = {
  "shape": (lambda x: x[:1], r"ConversionError.*shape \[2\].*returned.*shape \[1\]"),
  "dtype": (lambda x: x.half(), r"ConversionError.*float32.*returned.*float16"),
  "tree": (lambda x: (x, x), r"ConversionError.*like the example"),
  "number": (lambda x: 3.0, r"ConversionError.*like the example.*returned 3\.0"),
  "device": (lambda x: x.to("jax"), r"ConversionError.*returned.* on jax"),
  "draw": (torch.rand_like, "RngError.*draws from torch's generator"),
  "write": (lambda x: x.add_(1), "MutationError.*argument 0 in place"),
  "error": (lambda x: x.reshape(3), "RuntimeError.*shape"),
}


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("case", IMPURE)
def test_impure_or_unlike_function_raises(case, is_recorded):
  function, message = IMPURE[case]
  x = X.clone().to("jax").requires_grad_(is_recorded)
  state = torch.get_rng_state()
  with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
    jax_jit(torch_call(function, torch.empty(2)))(x).tolist()
  assert torch.equal(torch.get_rng_state(), state)


def test_captured_tensor_that_requires_gradient_raises():
  layer = torch.nn.Linear(2, 2)
  call = jax_jit(torch_call(layer, torch.empty(2)))
  torch.testing.assert_close(call(X.to("jax")).cpu(), layer(X).detach())
  with pytest.raises(jax.errors.JaxRuntimeError, match="captures.*require gradients"):
    call(X.clone().to("jax").requires_grad_()).tolist()


def test_wrong_arguments_raise():
  with pytest.raises(TypeError, match="expects a function of tensors, but got int"):
    torch_call(3, torch.empty(2))
  with pytest.raises(TypeError, match="example of the results.*has a float"):
    torch_call(torch.sin, (torch.empty(2), 3.0))
