"""Tensors from sizes, numbers and other tensors; the device follows an operand."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

import torchax

MATRIX = floats(2, 3)
COMPLEX = torch.complex(floats(3), floats(3, seed=1))


def made(factory, *sizes, **kwargs):
  """A row that calls a factory on the device of a tensor."""
  name = kwargs.pop("name", factory.__name__)

  def on_device_of(tensor):
    return factory(*sizes, device=tensor.device, **kwargs)

  return Case(on_device_of, MATRIX, name=f"{name}-{sizes}-{kwargs}")


CASES = (
  made(torch.zeros, 2, 3),
  made(torch.zeros, (2,), dtype=torch.int64),
  made(torch.ones, 2, 3, dtype=torch.bool),
  made(torch.full, (2,), 2.5),
  made(torch.full, (2,), 3),
  made(torch.full, (2,), True),
  made(torch.full, (2,), 1 + 2j),
  made(torch.full, (2,), 2.5, dtype=torch.int32),
  made(torch.eye, 3),
  made(torch.empty, 0, 3),
  made(torch.empty_permuted, (0, 3), (1, 0)),
  made(torch.eye, 2, 4, dtype=torch.int64),
  made(torch.arange, 5),
  made(torch.arange, 5.0),
  made(torch.arange, 1, 7, 2),
  made(torch.arange, 7, 1, -2),
  made(torch.arange, 0.5, 3, 0.25),
  made(torch.arange, 0, 5, dtype=torch.bfloat16),
  made(torch.linspace, 0.0, 1.0, 7),
  made(torch.linspace, 0, 10, 6, dtype=torch.int64),
  made(torch.linspace, 1, 2, 1),
  made(torch.logspace, -1, 1, 5),
  made(torch.logspace, 0, 3, 4, base=2),
  made(torch.scalar_tensor, 3),
  made(torch.tril_indices, 3, 4, 1),
  made(torch.triu_indices, 3, 4, -1, dtype=torch.int32),
  Case(torch.zeros_like, MATRIX),
  Case(torch.ones_like, MATRIX, dtype=torch.int64),
  Case(torch.full_like, MATRIX, 3),
  Case(torch.full_like, ints(3), 2.7, name="full_like-truncates"),
  Case(lambda x: x.new_zeros(2), MATRIX, name="new_zeros"),
  Case(lambda x: x.new_ones((2, 1), dtype=torch.bool), MATRIX, name="new_ones"),
  Case(lambda x: x.new_full((2,), 7), MATRIX, name="new_full"),
  Case(lambda x: torch.empty_like(x).fill_(1), MATRIX, name="empty_like"),
  Case(lambda x: x.new_empty_strided((2, 3), (1, 2)).zero_(), MATRIX, name="strided"),
  Case(torch.clone, MATRIX, grad=True),
  Case(torch.tril, MATRIX, -1, grad=True),
  Case(torch.triu, floats(2, 3, 4), 1, grad=True),
  Case(torch.triu, ints(3, 3)),
  Case(torch.vander, ints(4)),
  Case(torch.vander, floats(3), 2, increasing=True),
  Case(lambda x: x.to(torch.bfloat16), MATRIX, grad=True, name="to-bfloat16"),
  Case(lambda x: x.to(torch.int32), floats(4, low=-5, high=5), name="to-int32"),
  Case(lambda x: x.to(torch.bool), ints(4, high=2), name="to-bool"),
  Case(lambda x: x.to(torch.bool), COMPLEX, name="complex-to-bool"),
  Case(lambda x, y: torch.zeros_like(x).copy_(y), MATRIX, ints(3), name="copy_"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_creation(case):
  check(case)


@pytest.mark.parametrize(
  "mode", [contextlib.nullcontext, torchax.default_env, torch.inference_mode]
)
def test_one_hot_takes_the_integers_that_jax_holds(mode):
  """torch's C++ asks for int64, and outside of the environment is asked first."""
  words = torch.tensor([[0, 2], [1, 0]])
  with mode():
    for on_jax in (words.to("jax"), words.to("jax", torch.uint8)):
      for classes in ((), (4,)):
        found = F.one_hot(on_jax, *classes)
        assert found.device.type == "jax" and found.dtype == on_jax.dtype
        assert found.tolist() == F.one_hot(words, *classes).tolist()
  assert F.one_hot(words.to("meta"), 3).shape == (2, 2, 3)


@pytest.mark.parametrize(
  "made, message",
  [
    (lambda: torch.zeros(2), "expects integers"),
    (lambda: torch.zeros(2, dtype=torch.bool), "expects integers"),
    (lambda: torch.zeros(0, dtype=torch.int64), "empty tensor"),
  ],
)
def test_one_hot_refuses_what_has_no_classes(made, message):
  with pytest.raises(RuntimeError):
    F.one_hot(made())
  with pytest.raises(RuntimeError, match=message):
    F.one_hot(made().to("jax"))


@pytest.mark.parametrize("step", [0, -1])
def test_arange_needs_a_step_towards_its_end(step):
  with pytest.raises(RuntimeError, match="step"):
    torch.arange(0, 3, step, device="jax")
