"""Matrix products and distances against CPU torch: values, dtypes, gradients."""

import contextlib
import math
import re

import compile_events
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax import interop
from torchax.ops.jaten.matmul import einsum

bf16 = torch.bfloat16
A = floats(3, 4)
B = floats(4, 5, seed=1)
C = floats(3, 5, seed=2)
BATCH_A = floats(2, 3, 4)
BATCH_B = floats(2, 4, 5, seed=1)
BATCH_C = floats(2, 3, 5, seed=2)
U, V, W = floats(3), floats(4, seed=1), floats(3, seed=2)
NANS = torch.full((3, 5), math.nan)
INT_A = ints(3, 4, low=-4, high=5)
INT_B = ints(4, 5, low=-4, high=5)
COMPLEX = torch.complex(U, W)
POINTS = floats(6, 3, seed=3)
CLOUD = floats(30, 3, seed=4)
CANCELLATION = "squares cancel in the product form"

PRODUCT_CASES = (
  Case(torch.mm, A, B, grad=True),
  Case(torch.mm, A.to(bf16), B.to(bf16)),
  Case(torch.mm, INT_A, INT_B),
  Case(torch.mm, torch.complex(A, A), torch.complex(B, B)),
  Case(torch.bmm, BATCH_A, BATCH_B, grad=True),
  Case(torch.mv, A, V, grad=True),
  Case(torch.dot, U, W, grad=True),
  Case(torch.vdot, U, W, grad=True),
  Case(torch.vdot, COMPLEX, COMPLEX * 1j),
  Case(torch.outer, U, V, grad=True),
  Case(torch.outer, U, INT_A[0]),
  *(
    Case(torch.matmul, *operands, grad=True)
    for operands in ((A, B), (BATCH_A, B), (BATCH_A, BATCH_B), (U, A), (A, V), (U, W))
  ),
  Case(torch.nn.functional.linear, BATCH_A, C[:, :4], U, grad=True),
  Case(torch.nn.functional.linear, A.to(bf16), C[:, :4].to(bf16)),
  Case(torch.nn.functional.bilinear, A, C, floats(2, 4, 5), floats(2), grad=True),
  Case(torch.tensordot, BATCH_A, B, dims=1, grad=True),
  Case(torch.einsum, "bij,jk->bki", BATCH_A, B, grad=True),
  Case(torch.chain_matmul, A, B, C.T, grad=True, atol=2e-5, why="three products"),
)

SUM_CASES = (
  Case(torch.addmm, C, A, B, grad=True),
  Case(torch.addmm, C[0], A, B, beta=0.5, alpha=2, grad=True),
  Case(torch.addmm, NANS, A, B, beta=0),
  Case(torch.addmm, NANS, A, B, beta=0.0),
  Case(torch.addmm, INT_A @ INT_B, INT_A, INT_B, beta=2, alpha=3),
  Case(torch.addmm, C.to(bf16), A.to(bf16), B.to(bf16)),
  Case(torch.addmv, U, A, V, beta=0.5, alpha=2.0, grad=True),
  Case(torch.addbmm, C, BATCH_A, BATCH_B, grad=True),
  Case(torch.addbmm, C, BATCH_A, BATCH_B, beta=0.5, alpha=2),
  Case(torch.baddbmm, BATCH_C, BATCH_A, BATCH_B, grad=True),
  Case(torch.baddbmm, C, BATCH_A, BATCH_B, beta=0.5, alpha=2, grad=True),
  Case(torch.addr, A, U, V, grad=True),
  Case(torch.addr, A, U, V, beta=0.5, alpha=2),
  # In float16 the products are infinite, and the factors off by 2e-4.
  *(
    Case(
      function, *(factor.half() for factor in factors), beta=0.3, alpha=1e-3, name=name
    )
    for function, factors, name in (
      (torch.addmm, (C, A * 300, B * 300), "addmm-float16"),
      (torch.addmv, (U, A * 300, V * 300), "addmv-float16"),
      (torch.baddbmm, (C, BATCH_A * 300, BATCH_B * 300), "baddbmm-float16"),
      (torch.addr, (A, U * 300, V * 300), "addr-float16"),
    )
  ),
)

DISTANCE_CASES = (
  *(
    Case(torch.cdist, floats(2, 4, 3), floats(2, 5, 3, seed=1), p=p, grad=True)
    for p in (0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
  ),
  Case(torch.cdist, floats(2, 4, 3), floats(2, 5, 3, seed=1), p=0.0),
  Case(torch.cdist, POINTS, POINTS + torch.eye(6, 3), p=1.5, grad=True),
  Case(torch.cdist, CLOUD, POINTS, grad=True, rtol=1e-4, atol=1e-4, why=CANCELLATION),
  *(Case(torch.pdist, POINTS, p, grad=True) for p in (0.5, 1.0, 2.0, 3.0, math.inf)),
)

grouped_mm = torch.ops.aten._grouped_mm
bf16 = torch.bfloat16
ROWS = floats(8, 16)
EXPERTS = floats(4, 16, 32, seed=1)
COLUMNS = floats(16, 8, seed=2)
# The second group is empty.
ENDS = torch.tensor([3, 3, 6, 8], dtype=torch.int32)
GROUP_CASES = (
  Case(grouped_mm, ROWS, EXPERTS, ENDS, grad=True, name="rows"),
  Case(grouped_mm, ROWS.to(bf16), EXPERTS.to(bf16), ENDS, name="rows in bfloat16"),
  Case(grouped_mm, EXPERTS.mT, COLUMNS, ENDS, grad=True, name="columns"),
  Case(grouped_mm, ROWS.T, floats(8, 32, seed=3), ENDS, grad=True, name="inner"),
  Case(grouped_mm, EXPERTS, EXPERTS.mT, grad=True, name="batches"),
  Case(torch.nn.functional.grouped_mm, ROWS, EXPERTS, offs=ENDS, name="public name"),
)

CASES = PRODUCT_CASES + SUM_CASES + DISTANCE_CASES + GROUP_CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


ERRORS = (
  (torch.mm, (A, C)),
  (torch.mm, (A, B.double())),
  (torch.mm, (BATCH_A, B)),
  (torch.bmm, (BATCH_A, BATCH_B[:1])),
  (torch.matmul, (A, torch.tensor(2.0))),
  (torch.dot, (U, V)),
  (torch.cdist, (A, C)),
)


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row[0].__name__)
def test_invalid_operands_raise(row):
  function, args = row
  with pytest.raises(RuntimeError):
    function(*args)
  if any(arg.dtype == torch.float64 for arg in args):
    return  # float64 becomes float32 on jax unless x64 is on
  with torchax.default_env(), pytest.raises(RuntimeError):
    function(*(arg.to("jax") for arg in args))


def test_einsum_accepts_numeric_subscripts():
  left, right = jnp.asarray(A.numpy()), jnp.asarray(B.numpy())
  expected = torch.einsum(A, [0, 1], B, [1, 2], [2, 0])
  actual = einsum(left, [0, 1], right, [1, 2], [2, 0])
  np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6)
  implicit = einsum(left, [0, 1], right, [1, 2])
  np.testing.assert_allclose(implicit, (A @ B).numpy(), rtol=1e-5, atol=1e-6)


def test_einsum_accepts_a_list_of_operands_and_an_ellipsis():
  left, right = jnp.asarray(BATCH_A.numpy()), jnp.asarray(B.numpy())
  expected = torch.einsum("...ij,jk", [BATCH_A, B])
  actual = einsum("...ij,jk", [left, right])
  np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6)


# Batches of several dimensions, inside the environment --------------------------------

STACKS = {
  "floats": (torch.float32, {}),
  "bfloat16": (torch.bfloat16, {"rtol": 2e-2, "atol": 2e-2}),  # sums of 4 roundings
  "complex": (torch.complex64, {}),
  "integers": (torch.int32, {}),
}


@pytest.mark.parametrize("name", STACKS)
def test_batched_matmul_and_its_gradients_equal_torch(name):
  dtype, tolerance = STACKS[name]
  left = (torch.arange(24).reshape(2, 3, 2, 2) % 7).to(dtype)
  right = (left + 1).mT.conj()
  learns = dtype.is_floating_point or dtype.is_complex
  found = {}
  for device in ("cpu", "jax"):
    a, b = (t.clone().to(device).requires_grad_(learns) for t in (left, right))
    with torchax.default_env() if device == "jax" else contextlib.nullcontext():
      product = a @ b
      if learns:
        product.abs().square().sum().backward()
    results = [product, a.grad, b.grad] if learns else [product]
    found[device] = [t.detach().cpu() for t in results]
  for ours, theirs in zip(found["jax"], found["cpu"], strict=True):
    torch.testing.assert_close(ours, theirs, **tolerance)


def test_batched_matmul_keeps_batch_dimensions_separate():
  x = torch.ones(2, 3, 4, 4, device="jax")
  with torchax.default_env():
    for product in (torch.matmul, torch.Tensor.__matmul__, torch.Tensor.matmul):
      program = interop.jax_jit(lambda a, f=product: f(a, a)).lower(x).as_text()
      assert "reshape" not in program and "batching_dims = [0, 1]" in program


def test_mismatched_batches_raise_the_error_of_torch():
  with torchax.default_env():
    for shape in ((2, 3, 5, 4), (2, 4, 4, 4), (3, 3, 4, 4)):
      with pytest.raises(RuntimeError):
        torch.ones(2, 3, 4, 4, device="jax") @ torch.ones(*shape, device="jax")


REFUSED_GROUPS = {
  "no offsets": (ROWS, EXPERTS),
  "offsets of batches": (EXPERTS, EXPERTS.mT, ENDS),
  "inner size": (ROWS, EXPERTS.mT, ENDS),
  "number of groups": (ROWS, EXPERTS[:3], ENDS),
  "dtypes": (ROWS, EXPERTS.to(bf16), ENDS),
  "integers": (ROWS.int(), EXPERTS.int(), ENDS),
  "offsets in another dtype": (ROWS, EXPERTS, ENDS.to(torch.int16)),
  "one dimension": (ROWS[0], EXPERTS, ENDS),
  "offsets of two dimensions": (ROWS, EXPERTS, ENDS[None]),
  "batches": (EXPERTS[:3], EXPERTS.mT),
  "bias": (ROWS, EXPERTS, ENDS, floats(4, 32)),
  "wider result": (ROWS.to(bf16), EXPERTS.to(bf16), ENDS, None, torch.float32),
}


@pytest.mark.parametrize("args", REFUSED_GROUPS.values(), ids=REFUSED_GROUPS)
def test_grouped_mm_errors_equal_torch(args):
  with pytest.raises(RuntimeError) as of_torch:
    grouped_mm(*args)
  moved = [arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args]
  expected = re.escape(str(of_torch.value).splitlines()[0])
  with torchax.default_env(), pytest.raises(RuntimeError, match=expected):
    grouped_mm(*moved)


def test_grouped_mm_multiplies_large_float32():
  """torch's meta kernel, whose error large arguments get, accepts only bfloat16."""
  rows, experts = floats(8, 16), floats(4, 16, 2**15)
  found = grouped_mm(rows.to("jax"), experts.to("jax"), ENDS.to("jax"))
  torch.testing.assert_close(found.cpu(), grouped_mm(rows, experts, ENDS))


def test_grouped_mm_compiles_once_for_each_shape():
  experts = EXPERTS.to("jax")
  calls = [(ROWS[:rows].to("jax"), ENDS.clamp(max=rows).to("jax")) for rows in (8, 6)]
  for rows, ends in calls:
    grouped_mm(rows, experts, ends)
  with compile_events.recorded() as events:
    for rows, ends in calls:
      grouped_mm(rows, experts, ends)
  assert not events
