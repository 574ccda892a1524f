"""Arguments of compiled functions: layouts, views, repeated and shared memory."""

import pytest
import torch
from compare import assert_same

from torchax.errors import MutationError
from torchax.interop import jax_jit

A = torch.arange(12.0).reshape(3, 4)


LAYOUTS = {
  "transposed": lambda x: x.t(),
  "columns": lambda x: x[:, 1:],
  "transposed_rows": lambda x: x.t()[1:],
  "every_second": lambda x: x[0, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copy", [torch.Tensor.contiguous, torch.flatten])
def test_copy_of_argument_that_is_not_contiguous_is_a_copy(layout, copy):
  def write(view):
    values = copy(view)
    values.mul_(2)
    view[0].add_(1)
    return values

  expected = A.clone()
  found = expected.to("jax")
  assert_same(jax_jit(write)(LAYOUTS[layout](found)), write(LAYOUTS[layout](expected)))
  assert_same(found, expected)


def test_write_to_expanded_argument_is_refused():
  base = torch.zeros(3, device="jax")
  with pytest.raises(MutationError, match="repeats elements"):
    jax_jit(lambda a: a[1].add_(1))(base.expand(2, 3))
  assert_same(base, torch.zeros(3))


@pytest.mark.parametrize("run", [lambda f: f, jax_jit])
def test_write_to_row_of_view_expanded_under_no_grad(run):
  def write(base):
    with torch.no_grad():
      rows = base[None].expand(2, 3)
    rows[1].add_(1)

  base = torch.zeros(3, device="jax")
  run(write)(base)
  assert_same(base, torch.ones(3))


def test_overlapping_arguments_that_change_are_refused():
  x = A.to("jax")
  change = jax_jit(lambda a, b: (a.add_(1), b * 1)[1])
  with pytest.raises(MutationError, match="views inside"):
    change(x, x[0])
  assert_same(x, A)
  assert_same(jax_jit(lambda a, b: a + b)(x, x[0]), A + A[0])


@pytest.mark.parametrize("view", [lambda x: x[:, 1:], lambda x: x[0, ::2]])
def test_strided_view_of_argument_with_gaps_is_refused(view):
  base = torch.arange(12.0, device="jax").reshape(3, 4)
  with pytest.raises(MutationError, match="gaps in memory"):
    jax_jit(lambda part: part.as_strided((2,), (1,)))(view(base))
  dense = base.t()
  found = jax_jit(lambda part: part.as_strided((2,), (1,)))(dense)
  assert_same(found, A[0, :2])
