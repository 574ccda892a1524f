"""`out=` as on CPU torch: views, other shapes, dtypes of indices."""

import warnings

import pytest
import torch
from compare import assert_close

VALUES = torch.tensor([3.0, 1.0, 2.0])


def _rows(table: dict):
  return pytest.mark.parametrize("row", table.values(), ids=table)


RAMPS = {
  "arange": lambda out: torch.arange(5, out=out),
  "linspace": lambda out: torch.linspace(0, 1, 5, out=out),
  "logspace": lambda out: torch.logspace(0, 1, 5, out=out),
  "sort": lambda out: torch.sort(
    torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]).to(out.device),
    out=(out, torch.empty(0, dtype=torch.int64, device=out.device)),
  ),
  "sum": lambda out: torch.sum(torch.ones(2, 5, device=out.device), 0, out=out),
}
OUTPUTS = {
  "rows": lambda base: base[:2],
  "column": lambda base: base[:, 1],
  "later rows": lambda base: base[1:3],
  "empty": lambda base: base[1:1],
  "transposed": lambda base: base.t()[:2],
}


@_rows(RAMPS)
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_out_view_of_another_shape_is_resized_in_its_base(row, output):
  results = []
  for device in ("cpu", "jax"):
    base = torch.full((4, 4), -1.0).to(device)
    view = output(base)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", UserWarning)
      row(view)
    view[0] = 9.0  # the base shows it
    results.append((view.cpu(), base.cpu()))
  (expected, expected_base), (view, base) = results
  assert_close(view, expected)
  assert_close(base, expected_base)


SAME_SIZE = {
  "arange": lambda out: torch.arange(6, out=out),
  "linspace": lambda out: torch.linspace(0, 1, 6, out=out),
  "logspace": lambda out: torch.logspace(0, 1, 6, out=out),
  "range": lambda out: torch.range(1, 6, out=out),
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@_rows(SAME_SIZE)
@pytest.mark.parametrize("columns", [slice(None, None, 2), slice(0, 2)], ids=str)
def test_ramp_keeps_the_shape_of_an_out_of_its_size(row, columns):
  bases = [torch.zeros(3, 4).to(device) for device in ("cpu", "jax")]
  for base in bases:
    row(base[:, columns])
  assert_close(bases[1].cpu(), bases[0])


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("arguments", [(1, 3), (0.5, 3), (3, 0, -1), (1, 1)])
def test_range_has_its_end(arguments):
  assert_close(torch.range(*arguments, device="jax").cpu(), torch.range(*arguments))


@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("function", [torch.fft.fftfreq, torch.fft.rfftfreq])
def test_frequencies_agree_with_and_without_out(function, n):
  expected = function(n, d=0.25)
  assert_close(function(n, d=0.25, device="jax").cpu(), expected)
  out = torch.empty(0, device="jax")
  assert_close(function(n, d=0.25, out=out).cpu(), expected)


INDICES = {
  "nonzero": lambda x, out: torch.nonzero(x, out=out),
  "argmax": lambda x, out: torch.argmax(x, out=out),
  "argsort": lambda x, out: torch.sort(x, out=(torch.empty_like(x), out)),
  "topk": lambda x, out: torch.topk(x, 2, out=(torch.empty(2, device=x.device), out)),
}


@_rows(INDICES)
def test_out_of_indices_must_be_integers_of_64_bits(row):
  for device in ("cpu", "jax"):
    with pytest.raises(RuntimeError, match="(?i)expected out tensor to have"):
      row(VALUES.to(device), torch.empty(0, device=device))
  row(VALUES.to("jax"), torch.empty(0, dtype=torch.int64, device="jax"))


def test_copy_takes_a_number():
  assert torch.zeros(2, device="jax").copy_(3.0).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("leaf", ["argument", "out"])
@pytest.mark.parametrize(
  "function",
  [torch.matmul, lambda a, b, out: torch.take_along_dim(a, b.long(), 0, out=out)],
  ids=["matmul", "take_along_dim"],
)
def test_out_has_no_gradient(function, leaf):
  for device in ("cpu", "jax"):
    square, ones = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)
    out = torch.zeros(2, 2, device=device)
    (square if leaf == "argument" else out).requires_grad_()
    with pytest.raises(RuntimeError, match="support automatic differentiation"):
      function(square, ones, out=out)
    assert not out.any()
    with torch.no_grad():
      function(square, ones, out=out)
    assert out.all()
