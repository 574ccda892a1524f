"""Errors for branches, carries and arguments that do not match."""

import pytest
import torch
from small_tensors import condition, first, in_environment, same, shorter, vector  # noqa: F401  a fixture

from torchax import interop


def _whole_numbers(t):
  return {"a": {"b": t.int()}}


def _flat(t):
  return [t]


BRANCHES = {
  "cond, shapes": (
    lambda: interop.cond(condition(), same, shorter, vector()),
    "`['a']['b']` of the result the false branch `shorter` has torch.float32 of shape "
    "[2], and the true branch `same` has torch.float32 of shape [3]",
  ),
  "cond, dtypes": (
    lambda: interop.cond(condition(), _whole_numbers, same, vector()),
    "the true branch `_whole_numbers` has torch.int32 of shape [3]",
  ),
  "cond, structures": (
    lambda: interop.cond(condition(), _flat, same, vector()),
    "the true branch `_flat` has nothing there (in a list of 1)",
  ),
  "switch": (
    lambda: interop.switch(1, [same, same, shorter], vector()),
    "branch 2 `shorter` has torch.float32 of shape [2]",
  ),
  "in jax_jit": (
    lambda: interop.jax_jit(lambda t: interop.cond(t[0] > 0, same, shorter, t))(
      vector()
    ),
    "the false branch `shorter`",
  ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_mismatch_error_names_the_position(name):
  run, part = BRANCHES[name]
  with pytest.raises(TypeError) as caught:
    run()
  assert part in str(caught.value)


def _shrinking(tree, *_):
  return shorter(tree["a"]["b"])


def _shrinking_pair(tree, _):
  return shorter(tree["a"]["b"]), None


BODIES = {
  "scan": (
    lambda: interop.scan(_shrinking_pair, same(vector()), length=2),
    "`['a']['b']` of the carry `_shrinking_pair` is given torch.float32 of shape [3] "
    "and returns torch.float32 of shape [2]",
  ),
  "fori_loop": (
    lambda: interop.fori_loop(0, 2, lambda _, t: _shrinking(t), same(vector())),
    "The value of fori_loop keeps its structure",
  ),
  "fori_loop of tensors": (
    lambda: interop.fori_loop(
      0, torch.tensor(2, device="jax"), lambda _, t: t[:2], vector()
    ),
    "The value of fori_loop keeps its structure",
  ),
  "while_loop": (
    lambda: interop.while_loop(
      lambda t: t["a"]["b"].sum() < 9, _shrinking, same(vector())
    ),
    "`['a']['b']` of the value `_shrinking` is given",
  ),
  "condition": (
    lambda: interop.while_loop(lambda t: t < 9, lambda t: t + 1, vector()),
    "it returned torch.bool of shape [3]. Reduce it",
  ),
  "no pair": (
    lambda: interop.scan(lambda carry, _: carry, vector(), length=2),
    "`<lambda>` returned one tensor",
  ),
}


@pytest.mark.parametrize("name", BODIES)
def test_changed_carry_error_names_function_and_position(name):
  run, part = BODIES[name]
  with pytest.raises(TypeError) as caught:
    run()
  assert part in str(caught.value)


# Arguments ----------------------------------------------------------------------------

ARGUMENTS = {
  "a function": (
    lambda: interop.jax_jit(first)(vector(), torch.sin),
    "`first` was given an object of the class builtin_function_or_method as args[1]",
  ),
  "an object by name": (
    lambda: interop.jax_jit(first)(vector(), other=object()),
    "`first` was given an object of the class object as kwargs['other']",
  ),
  "a static list": (
    lambda: interop.jax_jit(first, static_argnums=1)(vector(), [1]),
    "`first` has a static argument without a hash",
  ),
  "a static tensor": (
    lambda: interop.jax_jit(first, static_argnums=1)(vector(), vector()),
    "`first` has a static argument without a hash",
  ),
  "no scalar": (
    lambda: interop.jax_value_and_grad(first)(vector()),
    "`first` in jax_value_and_grad: Gradient only defined for scalar",
  ),
  "argnums": (
    lambda: interop.jax_value_and_grad(first, argnums=2)(vector()),
    "jax_value_and_grad differentiates `first` by argnums=2, but it was called with 1",
  ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_mismatch_names_function_and_position(name):
  run, part = ARGUMENTS[name]
  with pytest.raises((TypeError, ValueError)) as caught:
    run()
  assert part in str(caught.value)
