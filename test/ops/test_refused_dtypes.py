"""Dtypes and numbers that torch refuses; on jax the error has the same type."""

import pytest
import torch
import torch.nn.functional as F

import torchax

COMPLEX = 1 + 1j


def ones(device, dtype=torch.float32, *shape):
  return torch.ones(shape or (3,), dtype=dtype, device=device)


def first(device):
  return torch.tensor([0], device=device)


def out(function, dtype, *shape):
  """Call `function` on ones with an `out=` of another dtype."""
  return lambda d: function(ones(d), out=ones(d, dtype, *shape))


def resize(mode, dtype, dims=2):
  return lambda d: F.interpolate(
    ones(d, dtype, 1, 1, *[4] * dims), scale_factor=2, mode=mode
  )


FACTORS = {
  "addcmul": lambda x: torch.addcmul(x, x, x, value=COMPLEX),
  "addcmul_": lambda x: x.addcmul_(x, x, value=COMPLEX),
  "addcdiv": lambda x: torch.addcdiv(x, x, x, value=COMPLEX),
  "lerp": lambda x: torch.lerp(x, x, COMPLEX),
  "addmv": lambda x: torch.addmv(x[0], x, x[0], alpha=COMPLEX),
  "addmm": lambda x: torch.addmm(x, x, x, beta=COMPLEX),
  "addr": lambda x: torch.addr(x, x[0], x[0], alpha=COMPLEX),
  "baddbmm": lambda x: torch.baddbmm(x, x[None], x[None], beta=COMPLEX),
  "addbmm": lambda x: torch.addbmm(x, x[None], x[None], alpha=COMPLEX),
  "_foreach_addcmul": lambda x: torch._foreach_addcmul([x], [x], [x], [COMPLEX]),
  "_foreach_lerp": lambda x: torch._foreach_lerp([x], [x], COMPLEX),
}

REFUSED = {
  **{
    f"{name} with a complex factor": lambda d, scaled=scaled: scaled(
      ones(d, torch.float32, 3, 3)
    )
    for name, scaled in FACTORS.items()
  },
  "fill_ with a complex number": lambda d: ones(d).fill_(COMPLEX),
  "full_like with a complex number": lambda d: torch.full_like(ones(d), COMPLEX),
  "full of a real dtype": lambda d: torch.full(
    (2,), COMPLEX, dtype=torch.float32, device=d
  ),
  "new_full of integers": lambda d: ones(d, torch.int32).new_full((2,), COMPLEX),
  "scatter of a complex number": lambda d: ones(d).scatter(0, first(d), COMPLEX),
  "scatter with reduce": lambda d: ones(d).scatter(
    0, first(d), COMPLEX, reduce="multiply"
  ),
  "index_fill with a complex number": lambda d: ones(d).index_fill(
    0, first(d), COMPLEX
  ),
  "index_fill with a complex tensor": lambda d: ones(d).index_fill(
    0, first(d), torch.tensor(1 + 0j, device=d)
  ),
  "masked_select with a uint8 mask": lambda d: ones(d).masked_select(
    ones(d, torch.uint8)
  ),
  "neg into complex": out(torch.neg, torch.complex64),
  "floor into another float": out(torch.floor, torch.float16),
  "abs into complex": out(torch.abs, torch.complex64),
  "nonzero into float": out(torch.nonzero, torch.float32, 3, 1),
  "argmax into float": out(lambda x, out: torch.argmax(x, 0, out=out), torch.float32),
  "gather into float16": lambda d: torch.gather(
    ones(d), 0, first(d), out=ones(d, torch.float16, 1)
  ),
  "mm into complex": lambda d: torch.mm(
    ones(d, torch.float32, 2, 2),
    ones(d, torch.float32, 2, 2),
    out=ones(d, torch.complex64, 2, 2),
  ),
  "bucketize into float": lambda d: torch.bucketize(ones(d), ones(d), out=ones(d)),
  "bicubic resize of int8": resize("bicubic", torch.int8),
  "nearest resize of int32": resize("nearest", torch.int32),
  "linear resize of int32": resize("linear", torch.int32, 1),
  "complex of two dtypes": lambda d: torch.complex(ones(d), ones(d, torch.float16)),
  "polar of two dtypes": lambda d: torch.polar(ones(d), ones(d, torch.float16)),
  "unravel_index of floats": lambda d: torch.unravel_index(ones(d), (3, 4)),
  "take_along_dim with int8": lambda d: torch.take_along_dim(
    ones(d), ones(d, torch.int8), 0
  ),
  "ctc_loss with an unknown reduction": lambda d: F.ctc_loss(
    ones(d, torch.float32, 5, 1, 3), first(d)[None], [5], [1], reduction="bad"
  ),
  "dropout1d of four dimensions": lambda d: F.dropout1d(
    ones(d, torch.float32, 1, 2, 3, 4)
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_calls_raise_the_error_type_of_torch(name):
  with pytest.raises(Exception) as expected:
    REFUSED[name]("cpu")
  with torchax.default_env(), pytest.raises(expected.type):
    REFUSED[name]("jax")


ACCEPTED = {
  "fill_ with a complex number that is real": lambda d: ones(d).fill_(2 + 0j),
  "fill_ of bools": lambda d: ones(d, torch.bool).fill_(COMPLEX),
  "fill_ of complex numbers": lambda d: ones(d, torch.complex64).fill_(COMPLEX),
  "masked_fill with a real one": lambda d: ones(d).masked_fill(
    ones(d, torch.bool), 2 + 0j
  ),
  "sqrt into complex": out(torch.sqrt, torch.complex64),
  "add into float16": out(lambda x, out: torch.add(x, x, out=out), torch.float16),
  "sum into complex": out(lambda x, out: torch.sum(x, 0, out=out), torch.complex64),
  "nearest resize of uint8": resize("nearest", torch.uint8),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_valid_calls_equal_torch(name):
  expected = ACCEPTED[name]("cpu")
  with torchax.default_env():
    actual = ACCEPTED[name]("jax")
  torch.testing.assert_close(actual.cpu(), expected)


def test_dropout2d_of_a_matrix_warns_as_on_the_cpu():
  for device in ("cpu", "jax"):
    with torchax.default_env(), pytest.warns(UserWarning, match="dropout2d"):
      result = F.dropout2d(ones(device, torch.float32, 40, 5))
    # dropout2d drops whole channels; here each element is a channel.
    assert set(result.flatten().tolist()) == {0.0, 2.0}


def test_fractional_pooling_accepts_samples_of_a_larger_batch():
  samples = torch.rand(2, 4, 3)
  image = torch.arange(4.0 * 5**3).reshape(4, 5, 5, 5)

  def pool(device):
    return F.fractional_max_pool3d(
      image.to(device), 2, output_ratio=0.5, _random_samples=samples.to(device)
    )

  with torchax.default_env():
    actual = pool("jax")
  torch.testing.assert_close(actual.cpu(), pool("cpu"))
