"""Reads and writes by index tensors and masks against CPU torch."""

import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

aten = torch.ops.aten

CUBE = floats(3, 4, 5)
ROWS = torch.tensor([0, -1, 1])
GRID = torch.tensor([[2], [0]])
MASK = torch.tensor([True, False, True])
MASK_34 = floats(3, 4, seed=3) > 0
MASK_45 = floats(4, 5, seed=4) > 0
PICKS = torch.tensor([0, 2, 2])
PLACES = ints(2, 4, 4, high=3)
SOURCE = floats(2, 4, 4, seed=5)
SHAPE = "the mask decides the shape"


def read(name, index, *tensors, **kwargs):
  return Case(
    lambda x, *t: x[index(*t)], CUBE, *tensors, name=name, grad=True, **kwargs
  )


def write(name, index, *tensors, accumulate=False):
  """Write consecutive numbers, one for each element that the index reads."""

  def put(x, values, *indices):
    return aten.index_put(x, index(*indices), values, accumulate)

  values = floats(*aten.index(CUBE, index(*tensors)).shape, seed=6)
  return Case(put, CUBE, values, *tensors, name=f"put-{name}", grad=True)


READS = (
  read("first", lambda i: i, ROWS),
  read("last", lambda i: (..., i), ROWS),
  read("neighbours", lambda i, j: (slice(None), j, i), ROWS, GRID),
  read("apart", lambda i, j: (j, slice(1, 3), i), ROWS, GRID),
  read(
    "scalar",
    lambda i: (i, None),
    torch.tensor(2),
    jit=False,
    why="torch asks a 0-d index for its number, to give a view",
  ),
  read("mask", lambda m: m, MASK, jit=False, why=SHAPE),
  read("mask2d", lambda m: m, MASK_34, jit=False, why=SHAPE),
  read("mask-behind", lambda m: (slice(None), m), MASK_45, jit=False, why=SHAPE),
  read("mask-and-index", lambda m, i: (m, i[:2]), MASK, ROWS, jit=False, why=SHAPE),
)
WRITES = (
  write("first", lambda i: [i], ROWS),
  write("neighbours", lambda i, j: [None, j, i], ROWS, GRID),
  write("apart", lambda i, j: [j, None, i], ROWS, GRID),
  write("repeated", lambda i: [i], PICKS, accumulate=True),
  write("mask", lambda m: [m], MASK),
  write("mask2d", lambda m: [m], MASK_34, accumulate=True),
  Case(lambda x, m: x.masked_fill(m, 2.0), CUBE, MASK_45, name="masked_fill"),
  Case(
    lambda x, m, v: x.clone().index_put_((m,), v),
    CUBE,
    MASK,
    torch.tensor(3.0),
    name="put-mask-scalar",
  ),
)
ALONG = (
  Case(torch.index_select, CUBE, -1, PICKS, grad=True),
  Case(torch.index_add, CUBE, 1, PICKS, floats(3, 3, 5), alpha=2, grad=True),
  Case(torch.index_copy, CUBE, 1, ints(1, high=4), floats(3, 1, 5), grad=True),
  Case(torch.index_fill, CUBE, -2, PICKS, 3.5, grad=True),
  Case(torch.index_fill, ints(3, 4), 1, PICKS, torch.tensor(7)),
  *(
    Case(
      aten.index_reduce,
      CUBE,
      1,
      PICKS,
      floats(3, 3, 5),
      how,
      include_self=own,
      name=f"index_reduce-{how}-{own}",
    )
    for how, own in (("prod", True), ("mean", False), ("amax", False), ("amin", True))
  ),
)
SCATTERS = (
  Case(torch.gather, CUBE, 1, PLACES, grad=True),
  Case(torch.gather, floats(3), 0, torch.tensor(2), grad=True),
  Case(torch.take_along_dim, CUBE, PLACES[:1, :1], 2, grad=True),
  Case(torch.scatter_add, CUBE, 1, PLACES, SOURCE, grad=True),
  Case(torch.scatter, CUBE, 1, PLACES[:, :1], SOURCE[:, :1], grad=True),
  Case(torch.scatter, CUBE, -1, PLACES, 2.0, grad=True),
  Case(torch.scatter, CUBE, 1, PLACES[:, :1], SOURCE, name="scatter-part-of-src"),
  Case(aten.scatter.reduce, CUBE, 1, PLACES, SOURCE, reduce="add"),
  Case(torch.scatter, CUBE, 1, PLACES, 2.0, reduce="multiply"),
  *(
    Case(
      torch.scatter_reduce,
      CUBE,
      1,
      PLACES,
      SOURCE,
      how,
      include_self=own,
      grad=True,
      name=f"scatter_reduce-{how}-{own}",
    )
    for how in ("sum", "prod", "mean", "amax", "amin")
    for own in (True, False)
  ),
  Case(torch.scatter_reduce, ints(3, 4), 0, PLACES[0], ints(4, 4, low=-9), "mean"),
)
FLAT = (
  Case(torch.take, CUBE, torch.tensor([[0, -1], [5, 59]]), grad=True),
  Case(torch.put, CUBE, torch.tensor([3, -1]), floats(2), grad=True),
  Case(torch.put, CUBE, torch.tensor([3, 3]), floats(2), accumulate=True),
  Case(torch.masked_select, CUBE, MASK_45, grad=True, jit=False, why=SHAPE),
  Case(torch.masked_scatter, CUBE, MASK_45, floats(60), grad=True),
  Case(torch.nonzero, MASK_34, jit=False, why="the values decide the shape"),
  Case(torch.argwhere, MASK_34, jit=False, why="the values decide the shape"),
  Case(torch.nonzero_static, MASK_34, size=14, fill_value=-7),
  Case(torch.is_nonzero, torch.tensor([2.0]), jit=False, why="it gives a Python bool"),
)
CASES = (*READS, *WRITES, *ALONG, *SCATTERS, *FLAT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_indexing(case):
  check(case)


@pytest.mark.parametrize(
  "function", [lambda x: x[x > 0], torch.nonzero, lambda x: x.masked_select(x > 0)]
)
def test_shape_from_traced_values_raises_with_advice(function):
  with torchax.default_env(), pytest.raises(TracedStateError, match="torch.where"):
    jax_jit(function)(torch.ones(3, device="jax"))


def test_mask_of_another_shape_raises():
  with torchax.default_env(), pytest.raises(IndexError):
    torch.ones(3, 2, device="jax")[torch.ones(2, dtype=torch.bool, device="jax")]


def test_masks_without_true_do_not_broadcast():
  for device in ("cpu", "jax"):
    with torchax.default_env(), pytest.raises(IndexError, match=r"shapes \[0\], \[2\]"):
      torch.ones(2, 3, device=device)[torch.tensor(False, device=device), [0, 1]]


BYTES = {
  "read": lambda x, mask: x[mask],
  "write": lambda x, mask: x.index_put((mask,), x[:2]),
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("device", ("cpu", "jax"))
def test_uint8_masks_warn(name, device):
  mask = torch.tensor([1, 0, 1], dtype=torch.uint8).to(device)
  with torchax.default_env(), pytest.warns(UserWarning, match="dtype torch.uint8"):
    BYTES[name](torch.ones(3, 2, device=device), mask)
