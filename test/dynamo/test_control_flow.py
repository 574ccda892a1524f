"""Higher-order operators: eager, in `jax_jit` and in `torch.compile`."""

import contextlib

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from packaging import version

import torchax
from torchax.errors import RngError
from torchax.export import exported_program_to_jax
from torchax.interop import jax_jit, while_loop

X = torch.linspace(-1.0, 2.0, 8)


has_cond = pytest.mark.skipif(
  version.parse(torch.__version__) < version.parse("2.13"),
  reason="Dynamo before torch 2.13 takes fakes of its own class only in torch.cond",
)


def branch(x):
  return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,))


def branch_by_number(x):
  return torch.cond(x.shape[0] > 3, lambda x: x + 1, lambda x: x - 1, (x,))


def loop(x):
  start = torch.zeros((), dtype=torch.int64, device=x.device)
  return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (start, x))[
    1
  ]


def loop_over_closure(x):
  scale = x.abs().sum()
  start = torch.zeros((), dtype=torch.int64, device=x.device)
  return torch.while_loop(
    lambda i, y: (i < 5) & (y.sum() < 100),
    lambda i, y: (i + 1, y * 2 + scale),
    (start, x),
  )[1]


def product_of_integers(x):
  q = (x * 60).to(torch.int8).reshape(2, 4)
  return torch.ops.higher_order.out_dtype(
    torch.ops.aten.mm.default, torch.int32, q, q.t()
  )


def product_of_halves(x):
  x = x.to(torch.float16)
  return torch.ops.higher_order.out_dtype(
    torch.ops.aten.mul.Tensor, torch.float32, x, x * 100
  )


BRANCHES = [branch, branch_by_number]
LOOPS = [loop, loop_over_closure]
PRODUCTS = [product_of_integers, product_of_halves]
WAYS = {
  "eager": lambda function: function,
  "jit": jax_jit,
  "compile": lambda function: torch.compile(function, backend="jax", fullgraph=True),
}


@has_cond
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", BRANCHES, ids=lambda function: function.__name__)
def test_on_jax(function, way, is_inside):
  place = torchax.default_env() if is_inside else contextlib.nullcontext()
  for sign in (1, -1):
    expected = function(X * sign)
    with place:
      actual = WAYS[way](function)((X * sign).to("jax"))
    assert actual.device.type == "jax"
    torch.testing.assert_close(actual.cpu(), expected)


@pytest.mark.parametrize(
  "function", [*BRANCHES, *LOOPS, *PRODUCTS], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("way", ["eager", "compile"])
def test_tensors_on_the_cpu_inside_the_environment(function, way):
  expected = function(X)
  with torchax.default_env():
    torch.testing.assert_close(WAYS[way](function)(X), expected)


@has_cond
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_branches_on_jax(way):
  for sign in (1, -1):
    plain = (X * sign).requires_grad_()
    branch(plain).sum().backward()
    x = (X * sign).to("jax").requires_grad_()
    WAYS[way](branch)(x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), plain.grad)


def test_gradients_of_branches_on_the_cpu():
  for sign in (1, -1):
    first, second = ((X * sign).requires_grad_() for _ in range(2))
    branch(first).sum().backward()
    torch.compile(branch, backend="jax", fullgraph=True)(second).sum().backward()
    torch.testing.assert_close(second.grad, first.grad)


def longer(x):
  return x * 2


def shorter(x):
  return x[:1].clone()


def whole(x):
  return (x * 2).int()


def pair(x):
  return x + 1, x + 2


def branch_into(other):
  return lambda x: torch.cond(x.sum() > 0, longer, other, (x,))


# The other branch -> message about it and `longer`.
MISMATCHES = {
  shorter: ("torch.float32 of shape [1]", "torch.float32 of shape [8]"),
  whole: ("torch.int32 of shape [8]", "torch.float32 of shape [8]"),
  pair: ("torch.float32 of shape [8]", "nothing there"),
}


def assert_names_branches(error, other):
  message = str(error.value)
  of_other, of_longer = MISMATCHES[other]
  assert f"the false branch `{other.__name__}` has {of_other}" in message
  assert f"the true branch `longer` has {of_longer}" in message
  assert "Make them equal" in message


@has_cond
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", MISMATCHES, ids=lambda function: function.__name__)
def test_branches_on_jax_that_differ_are_named(other, way):
  with pytest.raises(TypeError, match="branches of cond") as error:
    WAYS[way](branch_into(other))(X.to("jax"))
  assert_names_branches(error, other)


# torch itself refuses branches on CPU tensors whose dtypes or structures differ, with
# messages of its own; sizes that differ become data-dependent.


def test_branches_on_the_cpu_that_differ_are_named():
  with pytest.raises(Exception, match="branches of cond") as error:
    torch.compile(branch_into(shorter), backend="jax", fullgraph=True)(X)
  assert_names_branches(error, shorter)
  assert "test_control_flow.py, line" in str(error.value)


@pytest.mark.parametrize("strict", [True, False])
def test_branches_of_an_exported_program_that_differ_are_named(strict):
  module = torch.nn.Module()
  module.forward = branch_into(shorter)
  states, program = exported_program_to_jax(
    torch.export.export(module, (X,), strict=strict)
  )
  with pytest.raises(TypeError, match="the false branch.* has .* of shape") as error:
    program(states, (jnp.asarray(X),))
  if strict:  # otherwise torch forgets the source of a branch's graph
    assert_names_branches(error, shorter)


def draw_in_branch(x):
  return torch.cond(
    x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x * torch.rand_like(x), (x,)
  )


@has_cond
def test_branches_on_jax_draw_the_same_in_each_mode():
  x = X.to("jax")
  drawn = {}
  for way, make in WAYS.items():
    with torchax.default_env() as env:
      torch.manual_seed(3)
      function = make(draw_in_branch)
      drawn[way] = [function(x).tolist(), function(-x).tolist(), env.rng.state.count]
  assert drawn["eager"] == drawn["jit"] == drawn["compile"]
  assert drawn["eager"][2] == 2


@has_cond
def test_plain_branches_draw_as_in_eager_mode():
  run = torch.compile(draw_in_branch, backend="jax", fullgraph=True)
  with torchax.default_env() as env:
    torch.manual_seed(3)
    expected = [draw_in_branch(x.to("jax")).cpu() for x in (X, -X, X)]
    count = env.rng.state.count
  torch.manual_seed(3)
  assert all(map(torch.equal, map(run, (X, -X, X)), expected))
  assert env.rng.state.count == count == 3


def branches_in_turn(x, y):
  """Choose twice by one number and the same operands, with draws around the choices."""
  x = F.dropout(x, 0.5)
  choice = x.sum() > 0
  first = torch.cond(choice, lambda x, y: F.dropout(x * y, 0.5), torch.mul, (x, y))
  second = torch.cond(
    choice,
    lambda x, y: F.dropout(y, 0.5) * torch.rand_like(x) * x,
    lambda x, y: torch.rand_like(x) * y,
    (x, y),
  )
  return F.dropout(first, 0.5) + second


@has_cond
def test_plain_branch_gradients_reuse_the_forward_masks():
  """torch runs a branch again in the backward pass, draws included."""

  def gradients(function, device):
    found = []
    torch.manual_seed(3)
    for sign in (1, -1):
      leaves = [
        (t * sign).to(device).requires_grad_() for t in (X.abs() + 1, X.abs() + 2)
      ]
      out = function(*leaves)
      out.square().sum().backward()
      found += [t.detach().cpu() for t in (out, *[leaf.grad for leaf in leaves])]
    return found

  with torchax.default_env():
    expected = gradients(branches_in_turn, "jax")
  compiled = torch.compile(branches_in_turn, backend="jax", fullgraph=True)
  for have, want in zip(gradients(compiled, "cpu"), expected):
    torch.testing.assert_close(have, want)


@has_cond
def test_nested_cond_that_draws_raises_for_gradients():
  """torch runs it twice in the outer one's backward pass: refused, with its line."""

  def inside(x):
    return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), torch.sin, (x,))

  def nested(x):
    return torch.cond(x.sum() > 1, lambda x: inside(x) * x, torch.cos, (x,))

  run = torch.compile(nested, backend="jax")
  assert run(X).shape == X.shape
  with pytest.raises(Exception, match="draws other numbers.*test_control_flow") as e:
    run(X.clone().requires_grad_())
  assert "RngError" in str(e.value)


def draw_in_loop(x):
  start = torch.zeros((), dtype=torch.int64)
  return torch.while_loop(
    lambda i, x: i < 3, lambda i, x: (i + 1, x + torch.rand_like(x)), (start, x)
  )[1]


def test_plain_while_loop_draws_from_a_child_stream():
  """`interop.while_loop` draws in the same way, with the same body."""
  run = torch.compile(draw_in_loop, backend="jax", fullgraph=True)
  with torchax.default_env() as env:
    torch.manual_seed(3)
    start = torch.zeros((), dtype=torch.int32, device="jax")
    expected = [
      while_loop(
        lambda s: s[0] < 3,
        lambda s: (s[0] + 1, s[1] + torch.rand_like(s[1])),
        (start, x),
      )[1].cpu()
      for x in (X.to("jax"),) * 2
    ]
    count = env.rng.state.count
  torch.manual_seed(3)
  found = [run(X) for _ in range(2)]
  assert all(map(torch.equal, found, expected))
  assert not torch.equal(*found)
  assert env.rng.state.count == count == 2


def test_condition_that_draws_raises():
  def f(x):
    return torch.while_loop(
      lambda x: torch.rand_like(x).sum() < 3, lambda x: (x + 1,), (x,)
    )[0]

  before = torchax.default_env().rng.state
  with pytest.raises(RngError, match=r"condition.*draws"):
    torch.compile(f, backend="jax")(X)
  assert torchax.default_env().rng.state == before
