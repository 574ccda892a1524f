"""`torch.func` and forward-mode differentiation on jax tensors."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from compare import assert_same, to_jax
from torch import func
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchax
from torchax.interop import jax_jit

X = torch.tensor([0.5, -1.0, 1.5, 2.0])
V = torch.tensor([1.0, 0.5, -0.5, 2.0])
A = torch.arange(12.0).reshape(3, 4) / 7
W = torch.linspace(-1, 1, 20).reshape(5, 4)
B = torch.linspace(0, 1, 5)


def scalar(x):
  return (x.sin() * x).sum()


def vector(x):
  return x.sin() * x.sum()


def layer(x, w, b):
  return F.gelu(F.linear(x, w, b))


def loss(x, w, b):
  return F.layer_norm(layer(x, w, b), (5,)).square().sum()


TRANSFORMS = {
  "grad": (lambda x: func.grad(scalar)(x), (X,)),
  "grad_and_value": (lambda x: func.grad_and_value(scalar)(x), (X,)),
  "grad with aux": (
    lambda x: func.grad(lambda y: (scalar(y), y.cos()), has_aux=True)(x),
    (X,),
  ),
  "grad of grad": (lambda x: func.grad(lambda y: func.grad(scalar)(y).sum())(x), (X,)),
  "grad of parameters": (
    lambda x, w, b: func.grad(loss, (0, 1, 2))(x, w, b),
    (A, W, B),
  ),
  "vjp": (lambda x, v: func.vjp(vector, x)[1](v), (X, V)),
  "jvp": (lambda x, v: func.jvp(vector, (x,), (v,)), (X, V)),
  "jvp of a layer": (
    lambda x, w, b: func.jvp(layer, (x, w, b), (x, w, b)),
    (A, W, B),
  ),
  "jvp of attention": (
    lambda q: func.jvp(lambda t: F.scaled_dot_product_attention(t, t, t), (q,), (q,)),
    (A.reshape(1, 3, 4),),
  ),
  "jacrev": (lambda x: func.jacrev(vector)(x), (X,)),
  "jacrev of a layer": (
    lambda x, w, b: func.jacrev(layer, (0, 1))(x, w, b),
    (A[0], W, B),
  ),
  "jacfwd": (lambda x: func.jacfwd(vector)(x), (X,)),
  "hessian": (lambda x: func.hessian(scalar)(x), (X,)),
  "hessian of a layer": (
    lambda x, w, b: func.hessian(loss)(x, w, b),
    (A[0], W, B),
  ),
  "vmap": (lambda a: func.vmap(vector)(a), (A,)),
  "vmap over nothing": (lambda a, x: func.vmap(torch.mul, (0, None))(a, x), (A, X)),
  "vmap with out_dims": (lambda a: func.vmap(vector, out_dims=1)(a), (A,)),
  "vmap of vmap": (lambda a: func.vmap(func.vmap(torch.sin))(a), (A,)),
  "vmap in chunks": (lambda a: func.vmap(vector, chunk_size=2)(a), (A,)),
  "vmap of a slice": (lambda a: func.vmap(lambda row: row[1:3] * 2)(a), (A,)),
  "vmap of a change in place": (
    lambda a: func.vmap(lambda row: row.clone().mul_(2).add_(row))(a),
    (A,),
  ),
  "vmap of softmax": (lambda a: func.vmap(lambda row: row.softmax(0))(a), (A,)),
  "vmap of where": (lambda a: func.vmap(lambda r: torch.where(r > 1, r, 0.0))(a), (A,)),
  "vmap of a convolution": (
    lambda a: func.vmap(lambda x: F.conv1d(x[None, None], x[None, None, :2]))(a),
    (A,),
  ),
  "gradient of each sample": (
    lambda x, w, b: func.vmap(func.grad(loss, (1, 2)), (0, None, None))(x, w, b),
    (A, W, B),
  ),
  "vmap of jacrev": (lambda a: func.vmap(func.jacrev(vector))(a), (A,)),
  "functionalize": (
    lambda x: func.functionalize(lambda y: y.clone().add_(1).view(2, 2))(x),
    (X,),
  ),
  "autograd.functional": (
    lambda x, v: (
      torch.autograd.functional.hessian(scalar, x),
      torch.autograd.functional.jvp(vector, x, v),
      torch.autograd.functional.vhp(scalar, x, v),
    ),
    (X, V),
  ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("way", ["eager", "jit"])
def test_transforms_equal_the_cpu(name, way):
  function, inputs = TRANSFORMS[name]
  with torchax.default_env():
    run = jax_jit(function) if way == "jit" else function
    actual = run(*to_jax(inputs))
  # On the CPU, some kernels of attention lack one kind of derivative.
  with sdpa_kernel(SDPBackend.MATH):
    assert_same(actual, function(*inputs), name)


# C++ makes a tensor on the wrapper's meta device here.
NEEDS_ENV = {
  "autograd.functional",
  "hessian",
  "hessian of a layer",
  "jvp of attention",
  "vmap of where",
}


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - NEEDS_ENV))
def test_most_work_without_the_environment(name):
  function, inputs = TRANSFORMS[name]
  assert_same(function(*to_jax(inputs)), function(*inputs), name)


def test_linearize_of_cpu_tensors_works_beside_torchax():
  value, tangent = func.linearize(vector, X)
  torch.testing.assert_close((value, tangent(V)), func.jvp(vector, (X,), (V,)))


def test_linearize_has_the_tangent_of_cpu_torch():
  expected = func.jvp(vector, (X,), (V,))
  x, direction = to_jax((X, V))
  with torchax.default_env():
    value, tangent = func.linearize(vector, x)
    assert_same((value, tangent(direction)), expected)


def test_forward_mode_of_rrelu_has_the_slopes_of_its_result():
  x = -torch.ones(64, device="jax")
  with torchax.default_env():
    result, slopes = func.jvp(
      lambda x: F.rrelu(x, training=True), (x,), (torch.ones_like(x),)
    )
  assert torch.equal(slopes, -result) and len(slopes.unique()) > 32


def test_a_module_is_called_with_other_parameters():
  models = [torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()) for _ in "ab"]

  def ensemble(models, x):
    parameters, buffers = func.stack_module_state(models)

    def call(parameters, buffers, x):
      return func.functional_call(models[0], (parameters, buffers), (x,))

    return func.vmap(call, (0, 0, None))(parameters, buffers, x)

  expected = ensemble(models, A)
  with torchax.default_env():
    actual = ensemble([model.to("jax") for model in models], to_jax(A))
  assert_same(actual, expected)


# Forward mode -------------------------------------------------------------------------


@pytest.mark.parametrize("with_env", [True, False])
@pytest.mark.parametrize(
  "function",
  [vector, lambda x: F.linear(x, x.reshape(1, 4)), lambda x: x.reshape(2, 2).T @ x[:2]],
  ids=["elementwise", "linear", "views"],
)
def test_a_dual_tensor_carries_its_tangent(function, with_env):
  def tangent(x, v):
    with forward_ad.dual_level():
      return forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent

  expected = tangent(X, V)
  with torchax.default_env() if with_env else torch.enable_grad():
    actual = tangent(*to_jax((X, V)))
  assert_same(actual, expected)


WITH_NUMBERS = {
  "x - 1": lambda x: x - 1,
  "1 - x": lambda x: 1 - x,
  "x * 2": lambda x: x * 2,
  "2 / x": lambda x: 2 / x,
  "x ** 2": lambda x: x**2,
  "2 ** x": lambda x: 2**x,
  "less its mean": lambda x: (x - x.mean()) ** 2 + 1,
  "a norm": lambda x: x / x.norm() - 1,
  "addcmul": lambda x: torch.addcmul(x, torch.ones_like(x), x) * 3,
  "a second derivative": lambda x: func.hessian(lambda y: (y**3 * 2 - 1).sum())(x),
}


@pytest.mark.parametrize("with_env", [True, False])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_numbers_beside_a_dual_tensor_have_no_tangent(name, with_env):
  """C++ asks for the shape of a sum with zeros before it makes none."""
  function = WITH_NUMBERS[name]
  expected = func.jvp(function, (X,), (V,))
  with torchax.default_env() if with_env else torch.enable_grad():
    actual = func.jvp(function, to_jax((X,)), to_jax((V,)))
  assert_same(actual, expected)


def test_a_tangent_takes_the_layout_of_its_primal():
  def tangent(x, v):
    with forward_ad.dual_level():
      dual = forward_ad.make_dual(x.T, v.T.contiguous())
      return forward_ad.unpack_dual(dual.sin()).tangent

  assert_same(tangent(*to_jax((A, A + 1))), tangent(A, A + 1))


# Draws --------------------------------------------------------------------------------

DRAWS = {
  "dropout": lambda x: F.dropout(x),
  "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
  "rrelu": lambda x: F.rrelu(-x, training=True),
  "rand_like": lambda x: x * torch.rand_like(x),
  "rand": lambda x: x * torch.rand(3, 4, device="jax"),
  "bernoulli_": lambda x: x * x.detach().clone().bernoulli_(0.3),
}


# transform -> (function, x) -> value
VALUES = {
  "vjp": lambda function, x: func.vjp(function, x)[0],
  "jvp": lambda function, x: func.jvp(function, (x,), (x,))[0],
  "grad": lambda function, x: func.grad(lambda y: _with_aux(function(y)), has_aux=True)(
    x
  )[1],
}


@pytest.mark.parametrize("transform", VALUES)
@pytest.mark.parametrize("name", DRAWS)
def test_transforms_draw_as_the_function_does(name, transform):
  function, x = DRAWS[name], to_jax(A)
  with torchax.default_env():
    torch.manual_seed(3)
    eager, after = function(x), torch.rand(2, device="jax")
    torch.manual_seed(3)
    assert torch.equal(VALUES[transform](function, x), eager)
    assert torch.equal(torch.rand(2, device="jax"), after)


def _with_aux(result):
  return result.sum(), result


def test_the_gradient_of_dropout_has_the_mask_of_its_result():
  x = torch.ones(64, device="jax")
  with torchax.default_env():
    gradient, result = func.grad(lambda y: _with_aux(F.dropout(y)), has_aux=True)(x)
  assert 0 < int(result.count_nonzero()) < 64
  assert torch.equal(gradient, result)


@pytest.mark.parametrize("name", sorted(set(DRAWS) - {"bernoulli_", "rrelu"}))
def test_rows_of_vmap_draw_by_the_randomness_policy(name):
  rows = torch.ones(5, 3, 4, device="jax")
  with torchax.default_env():
    with pytest.raises(RuntimeError, match="randomness"):
      func.vmap(DRAWS[name])(rows)
    same = func.vmap(DRAWS[name], randomness="same")(rows)
    different = func.vmap(DRAWS[name], randomness="different")(rows)
  assert all(torch.equal(row, same[0]) for row in same)
  pairs = [(i, j) for i in range(5) for j in range(i)]
  assert not any(torch.equal(different[i], different[j]) for i, j in pairs)


COMPLEX_PARTS = {
  "real": lambda z: z.real,
  "imag": lambda z: z.imag,
  "part of imag": lambda z: z.imag[1:],
  "row of view_as_real": lambda z: torch.view_as_real(z)[1],
}


@pytest.mark.parametrize("part", COMPLEX_PARTS.values(), ids=COMPLEX_PARTS)
def test_part_of_a_complex_tensor_takes_a_tangent(part):
  with forward_ad.dual_level():
    primal = part(torch.complex(X, V).to("jax"))
    tangent = torch.ones(primal.shape).to("jax")
    found = forward_ad.unpack_dual(forward_ad.make_dual(primal, tangent) * 3)
    assert_same(found.primal, 3 * part(torch.complex(X, V)))
    assert_same(found.tangent, 3 * torch.ones(primal.shape))


@pytest.mark.parametrize("source", ["cpu", "jax"])
@pytest.mark.parametrize("target", ["cpu", "jax"])
def test_copy_of_a_dual_tensor_keeps_its_tangent(source, target):
  with forward_ad.dual_level():
    dual = forward_ad.make_dual(X.to(source), V.to(source))
    copy = torch.zeros(4).to(target).copy_(dual)
    primal, tangent = forward_ad.unpack_dual(copy)
    assert primal.device.type == target
    assert torch.equal(primal.cpu(), X) and torch.equal(tangent.cpu(), V)
