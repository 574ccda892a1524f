"""Error messages: they name the operation, the expected and the received value."""

import pathlib

import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax import checkpoint, interop
from torchax.errors import TracedStateError
from torchax.registry.names import Missing, aten, find
from torchax.registry.real_numbers import REAL


def ones(*shape, dtype=torch.float32):
  return torch.ones(shape, dtype=dtype).to("jax")


def attend(query, key, value, mask=None, **options):
  return F.scaled_dot_product_attention(
    ones(*query), ones(*key), ones(*value), mask and ones(*mask), **options
  )


ATTENTION = {
  "features": (lambda: attend((2, 3, 4), (2, 3, 5), (2, 3, 5)), "last dimension"),
  "positions": (lambda: attend((2, 3, 4), (2, 5, 4), (2, 6, 4)), "positions"),
  "batch": (lambda: attend((2, 3, 4), (3, 3, 4), (3, 3, 4)), "do not broadcast"),
  "heads": (
    lambda: attend((2, 3, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)),
    "do not broadcast",
  ),
  "mask": (
    lambda: attend((2, 3, 4), (2, 3, 4), (2, 3, 4), (5, 5)),
    r"scores, \[2, 3, 3\]",
  ),
  "dropout": (
    lambda: attend((2, 3, 4), (2, 3, 5), (2, 3, 5), dropout_p=0.5),
    "last dimension",
  ),
}


@pytest.mark.parametrize("call, words", ATTENTION.values(), ids=ATTENTION)
def test_attention_names_the_shapes(call, words):
  env = torchax.default_env()
  with env, pytest.raises(RuntimeError, match=rf"attention: .*{words}.* query \["):
    call()


def test_attention_draws_nothing_for_shapes_that_do_not_fit():
  env = torchax.default_env()
  with env:
    torch.rand(1, device="jax")
    before = int(env.rng.state.count)
    with pytest.raises(RuntimeError):
      ATTENTION["dropout"][0]()
    assert int(env.rng.state.count) == before


def test_attention_of_integers_is_refused():
  integers = ones(2, 3, 4, dtype=torch.int32)
  with (
    torchax.default_env(),
    pytest.raises(RuntimeError, match="floating-point.*int32"),
  ):
    F.scaled_dot_product_attention(integers, integers, integers)


LABELS = {
  "nll_loss": lambda: F.nll_loss(ones(2, 3), ones(2)),
  "cross_entropy": lambda: F.cross_entropy(ones(2, 3), ones(2)),
  "multi_margin_loss": lambda: F.multi_margin_loss(ones(2, 3), ones(2)),
  "multilabel_margin_loss": lambda: F.multilabel_margin_loss(ones(2, 3), ones(2, 3)),
  "embedding": lambda: F.embedding(ones(2), ones(2, 3)),
}


@pytest.mark.parametrize("call", LABELS.values(), ids=LABELS)
def test_labels_that_are_floats_are_named(call):
  with pytest.raises(RuntimeError, match=r"aten\..*torch\.float32.*`\.long\(\)`"):
    call()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the environment"])
@pytest.mark.parametrize("end", [float("inf"), float("-inf"), float("nan"), 1e30])
@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_a_range_without_end_is_refused(end, dtype, inside):
  def call():
    torch.arange(0, end, dtype=dtype, device="jax")

  with pytest.raises(RuntimeError, match=r"arange.*(unsupported range|invalid size)"):
    if not inside:
      call()
    with torchax.default_env():
      call()


def test_the_names_of_operations_of_real_numbers_exist():
  names = (name.removeprefix("aten.") for name in REAL)
  assert not [name for name in names if isinstance(find(name, aten, name), Missing)]


COMPLEX = {
  **{
    name: getattr(torch, name)
    for name in (
      *("floor", "ceil", "round", "trunc", "frac", "sign", "erf", "lgamma", "i0"),
      *("max", "median", "argmax", "amax", "sort", "msort", "relu", "digamma"),
      *("aminmax", "nansum", "signbit", "deg2rad", "logit"),
    )
  },
  "remainder": lambda x: x % 2,
  "cummax": lambda x: x.cummax(0),
  "atan2": lambda x: torch.atan2(x, x),
  "softmax": lambda x: x.softmax(0),
  "gelu": F.gelu,
  "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
  "topk": lambda x: x.topk(1),
  "floored quotient": lambda x: x // x,
  "floored quotient by a number": lambda x: x // 2,
  "truncated quotient": lambda x: torch.div(x, x, rounding_mode="trunc"),
}


@pytest.mark.parametrize("call", COMPLEX.values(), ids=COMPLEX)
def test_operator_without_complex_support_raises_with_advice(call):
  numbers = torch.ones(4, dtype=torch.complex64)
  with pytest.raises((RuntimeError, TypeError)):  # the latter since torch 2.15
    call(numbers)
  with pytest.raises(NotImplementedError, match=r"aten\.\w+ .*complex64.*`\.abs\(\)`"):
    call(numbers.to("jax"))


def test_a_condition_of_several_elements_is_named():
  with pytest.raises(TypeError, match=r"condition of cond.*\[3\].*`\.any\(\)`"):
    interop.cond(ones(3) > 0, torch.neg, torch.abs, ones(3))


def _cycle():
  state = {"losses": [0.5]}
  state["losses"].append({"again": state["losses"]})
  return state


def test_a_state_that_contains_itself_is_named_by_its_path(tmp_path: pathlib.Path):
  pytest.importorskip("orbax.checkpoint", reason="an optional dependency")
  words = r"state\['losses'\]\[1\]\['again'\] is state\['losses'\] itself"
  with pytest.raises(ValueError, match=words):
    checkpoint.save_checkpoint(_cycle(), tmp_path, 1)
  assert not list(tmp_path.iterdir())
  twice = [1, 2]
  checkpoint.save_checkpoint({"a": twice, "b": twice}, tmp_path, 2)
  assert checkpoint.load_checkpoint(tmp_path) == {"a": [1, 2], "b": [1, 2]}


def test_negative_repeats_raise_even_with_output_size():
  repeats = torch.tensor([1, -1, 3]).to("jax")
  with pytest.raises(RuntimeError, match="repeats can not be negative"):
    ones(3).repeat_interleave(repeats, output_size=3)
  repeat = interop.jax_jit(lambda x, r: x.repeat_interleave(r, output_size=3))
  assert repeat(ones(3), repeats).isnan().all()


def test_repeats_that_are_traced_numbers_name_static_argnums():
  def function(x, n):
    return x.repeat_interleave(n)

  with pytest.raises(TracedStateError, match="`static_argnums` of `jax_jit`"):
    interop.jax_jit(function)(ones(3), 2)
  assert interop.jax_jit(function, static_argnums=1)(ones(3), 2).shape == (6,)
