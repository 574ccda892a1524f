"""Concatenation, repetition, diagonals, windows, and copies of views."""

import pytest
import torch
from ops.harness import Case, check, floats, ints

aten = torch.ops.aten

CUBE = floats(2, 3, 4)
OTHER = floats(2, 3, 4, seed=1)
SQUARE = floats(3, 3)
IMAGE = floats(2, 4, 6, 6)
COLUMNS = floats(2, 8, 25)
EMPTY = torch.tensor([])
COMPLEX = torch.complex(floats(3), floats(3, seed=1))


def joined(function, *tensors, name, **kwargs):
  """Return a row whose function takes a list of tensors."""
  return Case(lambda *t: function(list(t), **kwargs), *tensors, grad=True, name=name)


JOINS = (
  joined(torch.cat, CUBE, OTHER, dim=-1, name="cat"),
  joined(torch.cat, CUBE, OTHER.bfloat16(), ints(1, 3, 4), name="cat-promotes"),
  joined(torch.cat, CUBE, EMPTY, OTHER, dim=1, name="cat-skips-empty"),
  joined(torch.stack, CUBE, OTHER, dim=-1, name="stack"),
  Case(torch.block_diag, SQUARE, floats(2), grad=True),
)
REPEATS = (
  Case(lambda x: x.repeat(2, 1, 3, 1), CUBE, grad=True, name="repeat"),
  Case(torch.tile, CUBE, (2, 1), grad=True),
  Case(torch.repeat_interleave, CUBE, 2, 1, grad=True),
  Case(torch.repeat_interleave, CUBE, 2),
  Case(
    torch.repeat_interleave,
    CUBE,
    torch.tensor([1, 2, 0]),
    1,
    grad=True,
    jit=False,
    why="the repeats decide the shape",
  ),
  Case(
    torch.repeat_interleave, CUBE, torch.tensor([1, 2, 0]), 1, output_size=3, grad=True
  ),
  Case(torch.flip, CUBE, (0, -1), grad=True),
  Case(torch.flip, torch.tensor(1.0), (0,)),
  Case(torch.roll, CUBE, 1, grad=True),
  Case(torch.roll, CUBE, (1, -2), (0, 2)),
  Case(torch.rot90, CUBE, 1, (1, 2), grad=True),
  Case(torch.rot90, CUBE, 3),
)
CHANNELS = (
  Case(torch.pixel_shuffle, IMAGE, 2, grad=True),
  Case(torch.pixel_unshuffle, IMAGE, 3, grad=True),
  Case(torch.channel_shuffle, IMAGE, 2, grad=True),
)
WINDOWS = (
  Case(aten.unfold_copy, IMAGE, -1, 3, 2, grad=True),
  Case(lambda x: x.unfold(1, 2, 1), IMAGE, grad=True, name="unfold"),
  Case(aten.im2col, IMAGE, [2, 3], [1, 1], [0, 0], [1, 1], grad=True),
  Case(aten.im2col, IMAGE[0], [2, 2], [2, 1], [1, 2], [2, 1], grad=True),
  Case(aten.col2im, COLUMNS, [6, 6], [2, 2], [1, 1], [0, 0], [1, 1], grad=True),
)
DIAGONALS = (
  Case(torch.diag, SQUARE, 1, grad=True),
  Case(torch.diag, floats(3), -1, grad=True),
  Case(torch.diagflat, SQUARE, 1, grad=True),
  Case(torch.diag_embed, CUBE, -2, grad=True),
  Case(torch.diag_embed, CUBE, 1, 0, -2, grad=True),
  Case(torch.diagonal, CUBE, 1, 1, 2, grad=True),
  Case(aten.diagonal_copy, CUBE, -1, 2, 0, grad=True),
  Case(torch.diagonal_scatter, CUBE, floats(2, 3), 1, 1, 2, grad=True),
)
SLICES = (
  Case(lambda x: x[:, 1:, ::2], CUBE, grad=True, name="slice"),
  Case(lambda x: x[..., -1], CUBE, grad=True, name="select"),
  Case(aten.slice_copy, CUBE, 2, -3, -1, 1, grad=True),
  Case(torch.slice_scatter, CUBE, floats(2, 3, 2), 2, 0, 4, 2, grad=True),
  Case(torch.slice_scatter, CUBE, floats(2, 1, 4), 1, 2, grad=True),
  # XLA on the CPU would update the slice in place while reading it (jaxlib 0.10.2).
  Case(
    lambda x: torch.slice_scatter(d := x.cumsum(0), d[0:8], 0, 1, 9),
    floats(16),
    name="slice_scatter-of-itself",
  ),
  Case(torch.select_scatter, CUBE, floats(2, 3), -1, -2, grad=True),
  Case(aten.select_copy, CUBE, -1, -2, grad=True),
  Case(torch.narrow_copy, CUBE, 1, -2, 2),
  Case(torch.as_strided_copy, CUBE, (2, 3), (1, 2), 3),
  Case(torch.as_strided_scatter, CUBE, floats(2, 3), (2, 3), (1, 2), 3),
)
COPIES = (
  Case(torch.view_copy, CUBE, (6, -1), grad=True),
  Case(lambda x: aten.view_copy(x, torch.int32), CUBE, name="view_copy-dtype"),
  Case(torch.permute_copy, CUBE, (2, -3, 1), grad=True),
  Case(torch.transpose_copy, CUBE, 0, -1, grad=True),
  Case(torch.t_copy, SQUARE, grad=True),
  Case(torch.expand_copy, floats(1, 3), (2, -1, 3), grad=True),
  Case(torch.squeeze_copy, floats(1, 2, 1, 3), grad=True),
  Case(torch.squeeze_copy, floats(1, 2, 1, 3), (0, 1), grad=True),
  Case(torch.unsqueeze_copy, CUBE, -1, grad=True),
  Case(torch.view_as_real_copy, COMPLEX),
  Case(torch.view_as_complex_copy, floats(3, 2)),
  Case(torch.split_copy, CUBE, 3, 2, grad=True),
  Case(torch.split_with_sizes_copy, CUBE, (1, 0, 3), 2, grad=True),
  Case(torch.unbind_copy, CUBE, 1, grad=True),
  Case(torch.movedim, CUBE, 0, 2, grad=True),
  Case(torch.atleast_3d, SQUARE, grad=True),
)
CASES = (*JOINS, *REPEATS, *CHANNELS, *WINDOWS, *DIAGONALS, *SLICES, *COPIES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes(case):
  check(case)


def test_as_strided_raises_outside_of_the_array():
  with pytest.raises(RuntimeError, match="reaches element 6"):
    torch.as_strided_copy(torch.ones(6, device="jax"), (2, 3), (3, 1), 1)


def test_cat_raises_for_scalars():
  scalar = torch.ones((), device="jax")
  with pytest.raises(RuntimeError, match="0-d|zero-dimensional"):
    torch.cat([scalar, scalar])


def test_a_dense_tensor_has_no_sparse_dimensions():
  x = torch.ones(2, 3, device="jax")
  assert (x.sparse_dim(), x.dense_dim()) == (0, 2)
