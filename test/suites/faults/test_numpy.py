"""Arrays and numbers of numpy with a jax tensor: a jax tensor, or torch's refusal."""

import operator

import numpy as np
import pytest
import torch

ARRAY = np.full(3, 2.0, np.float32)


def _tensor(device):
  return torch.arange(1.0, 4.0, device=device)


def _into(x, value):
  x[0:2] = value
  return x


ROWS = {
  **{
    apply.__name__: lambda x, apply=apply: apply(x, ARRAY)
    for apply in (
      *(operator.add, operator.sub, operator.mul, operator.truediv),
      *(operator.floordiv, operator.mod, operator.pow, operator.matmul),
    )
  },
  "in place": lambda x: operator.iadd(x, ARRAY),
  "a 0-d array": lambda x: x + np.array(2.0, np.float32),
  "a double array": lambda x: x + np.ones(3),
  "an integer array": lambda x: x * np.arange(3),
  "np.float32 on the left": lambda x: np.float32(2) * x,
  "np.float64 on the left": lambda x: np.float64(2) + x,
  "np.float64 on the right": lambda x: x / np.float64(2),
  "np.int64": lambda x: np.int64(2) * x,
  "np.bool": lambda x: x * np.bool_(True),
  "a comparison with a number": lambda x: np.float32(2) < x,
  "a function of numpy": np.sin,
  "two arguments of numpy": lambda x: np.add(x, ARRAY),
  "an index": lambda x: x[np.array([0, 2])],
  "a fill": lambda x: x.fill_(np.float32(3)),
  "a bound": lambda x: x.clamp(np.float32(2), np.float32(3)),
}


@pytest.mark.parametrize("call", ROWS.values(), ids=ROWS)
@pytest.mark.filterwarnings("ignore::torchax.errors.NarrowingWarning")
def test_the_result_is_torchs_on_the_device_of_the_tensor(call):
  expected, found = call(_tensor("cpu")), call(_tensor("jax"))
  assert found.device.type == "jax"
  torch.testing.assert_close(found.cpu(), expected, check_dtype=False)


REFUSED = {
  "an array on the left": lambda x: ARRAY + x,
  "an array on the left of @": lambda x: ARRAY @ x,
  "a comparison": lambda x: x < ARRAY,
  "a function": lambda x: torch.add(x, ARRAY),
  "a list": lambda x: torch.cat([x, ARRAY]),
  "a method in place": lambda x: x.add_(ARRAY),
  "a copy": lambda x: x.copy_(ARRAY),
  "an assignment": lambda x: _into(x, ARRAY[:2]),
  "an assignment of a number": lambda x: _into(x, ARRAY[0]),
  "a tensor that needs its gradient": lambda x: x.requires_grad_() * ARRAY,
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_invalid_numpy_use_raises_torchs_class(call):
  with pytest.raises((TypeError, RuntimeError)) as expected:
    call(_tensor("cpu"))
  x = _tensor("jax")
  with pytest.raises(type(expected.value)) as found:
    call(x)
  assert x.tolist() == [1.0, 2.0, 3.0]
  assert "meta" not in str(found.value)


def test_comparison_with_numpy_array_raises_with_advice():
  with pytest.raises(RuntimeError, match=r'\.to\("jax"\)'):
    _tensor("jax") == ARRAY  # noqa: B015
