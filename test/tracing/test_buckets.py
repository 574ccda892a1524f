"""Option `buckets` of `jax_jit`, as it is checked when a function is wrapped."""

import pytest
import torch

from torchax.interop import jax_jit

pytestmark = pytest.mark.usefixtures("env")


@pytest.mark.parametrize(
  ("buckets", "kind", "message"),
  [
    ({"y": {1: "pow2"}}, ValueError, "'y', but f takes \\['x'"),
    ({"x": "pow2"}, TypeError, "by argument name and dimension"),
    (["x"], TypeError, "by argument name and dimension"),
    ({"x": {1: "pow3"}}, TypeError, "expects a dimension and its sizes"),
    ({"x": {1: []}}, TypeError, "expects a dimension and its sizes"),
    ({"x": {1: [4, -1]}}, TypeError, "positive integers"),
    ({"x": {"1": "pow2"}}, TypeError, "expects a dimension"),
  ],
)
def test_wrong_buckets_are_refused_when_wrapped(buckets, kind, message):
  def f(x):
    return x

  with pytest.raises(kind, match=message):
    jax_jit(f, buckets=buckets)


def test_buckets_of_a_builtin_function_are_refused():
  with pytest.raises(ValueError, match="no names in Python. Wrap it"):
    jax_jit(torch.sin, buckets={"input": {0: "pow2"}})


def test_buckets_and_shardings_exclude_each_other():
  with pytest.raises(ValueError, match="in_shardings exclude"):
    jax_jit(lambda x: x, buckets={"x": {1: "pow2"}}, in_shardings=object())
