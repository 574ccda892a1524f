"""Activation functions and softmax against CPU torch."""

import jax
import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats

from torchax.ops import mappings
from torchax.ops.jaten import activation

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)

# The range contains every kink and threshold of the functions below.
WIDE = floats(3, 8, low=-7.0, high=7.0)
LARGE = torch.tensor([-100.0, -30.0, -3.0, -0.0, 0.0, 3.0, 19.0, 30.0, 100.0])
KINKS = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0])

NOT_FINITE = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -1.0])
CASES = (
  *(
    Case(function, values, grad=True)
    for function in (
      F.relu,
      F.relu6,
      F.leaky_relu,
      F.hardtanh,
      F.hardsigmoid,
      F.hardswish,
      F.hardshrink,
      F.softshrink,
      F.elu,
      F.celu,
      F.selu,
      F.softplus,
      F.mish,
      F.silu,
      F.gelu,
      F.logsigmoid,
    )
    for values in (WIDE, KINKS)
  ),
  *(
    Case(function, LARGE, grad=True)
    for function in (F.elu, F.softplus, F.mish, F.silu, F.gelu, F.logsigmoid)
  ),
  *(
    Case(function, WIDE.to(dtype), grad=True)
    for function in (F.gelu, F.silu, F.mish, F.elu, F.softplus, F.leaky_relu)
    for dtype in HALVES
  ),
  Case(torch.sigmoid, WIDE, grad=True),
  Case(torch.tanh, WIDE, grad=True),
  Case(F.gelu, WIDE, approximate="tanh", grad=True),
  Case(F.leaky_relu, WIDE, 0.3, grad=True),
  Case(F.leaky_relu_, floats(4, 5), grad=False),
  Case(lambda x: F.elu(x * 1, 1.5, inplace=True), WIDE, grad=True, name="elu_"),
  Case(F.elu, WIDE, 0.5, grad=True),
  Case(F.celu, WIDE, 0.7, grad=True),
  *(Case(function, NOT_FINITE, grad=True) for function in (F.elu, F.celu, F.selu)),
  Case(F.threshold, WIDE, 0.5, -2.0, grad=True),
  Case(F.threshold, torch.arange(-3, 4), 1, 9),
  Case(F.relu, torch.arange(-3, 4)),
  Case(F.hardtanh, torch.arange(-5, 5), -2, 2),
  Case(F.hardtanh, WIDE, -2.5, 0.5, grad=True),
  Case(F.softplus, WIDE, 2.0, 4.0, grad=True),
  Case(F.hardshrink, WIDE, 1.0, grad=True),
  Case(F.softshrink, WIDE, 1.0, grad=True),
  Case(F.prelu, floats(2, 3, 4), floats(3), grad=True),
  Case(F.prelu, floats(2, 3, 4), floats(1), grad=True),
  Case(F.prelu, floats(4), floats(1), grad=True),
  Case(F.glu, floats(3, 8), grad=True),
  Case(F.glu, floats(4, 3), dim=0, grad=True),
  Case(F.silu, torch.complex(floats(4), floats(4, seed=1))),
  *(
    Case(function, *args, grad=True)
    for function in (F.softmax, F.log_softmax)
    for args in (
      (WIDE, 1),
      (WIDE, 0),
      (WIDE, -1, 3, torch.float32),
      (torch.tensor(2.0), 0),
      (floats(2, 0), 1),
      (WIDE.bfloat16(), 1),
      (WIDE.half(), 1),
    )
  ),
  Case(torch.softmax, WIDE.half(), 1, torch.float32, grad=True),
  Case(torch.softmax, torch.arange(5), 0, torch.float32),
  Case(torch.softmax, torch.tensor([[-torch.inf, 0.0, 1.0]]), 1, grad=True),
  Case(torch.softmax, torch.full((2, 3), -torch.inf), 1),
  Case(F.softmin, WIDE, dim=0, grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activation(case):
  check(case)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", (F.mish, F.silu, F.softplus, F.elu))
def test_gradients_of_half_precision_round_once(function, dtype):
  values = torch.linspace(-6, 6, 999, dtype=dtype)
  leaf, exact = values.to("jax").requires_grad_(), values.double().requires_grad_()
  for x in (leaf, exact):
    function(x).backward(torch.ones_like(x))
  size = exact.grad.abs().clamp(min=torch.finfo(dtype).tiny)
  unit = torch.finfo(dtype).eps * 2 ** size.log2().floor()
  assert ((leaf.grad.cpu() - exact.grad).abs() <= 0.7 * unit).all()


@pytest.mark.parametrize(
  "function",
  (F.relu, F.leaky_relu, F.hardtanh, F.hardshrink, F.softshrink, F.gelu, F.relu6),
)
def test_nan_passes_through(function):
  check(Case(function, torch.tensor([float("nan"), 1.0])))


@pytest.mark.parametrize(
  "lowering, function",
  (
    (activation._aten_relu, F.relu),
    (activation._aten_relu6, F.relu6),
    (activation._aten_hardtanh, F.hardtanh),
    (activation._aten_hardsigmoid, F.hardsigmoid),
    (activation._aten_hardshrink, F.hardshrink),
    (activation._aten_softshrink, F.softshrink),
    (activation._aten_elu, F.elu),
    (activation._aten_leaky_relu, F.leaky_relu),
    (activation._aten_softplus, F.softplus),
    (activation._aten_log_sigmoid, F.logsigmoid),
  ),
)
@pytest.mark.parametrize("values", (KINKS, LARGE), ids=("kinks", "large"))
def test_jax_gradient_of_lowering_equals_torch_gradient(lowering, function, values):
  leaf = values.clone().requires_grad_()
  function(leaf).sum().backward()
  gradient = jax.grad(lambda array: lowering(array).sum())(mappings.t2j(values))
  torch.testing.assert_close(mappings.j2t(gradient), leaf.grad)
